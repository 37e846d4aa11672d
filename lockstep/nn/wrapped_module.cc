#include <c10/core/GradMode.h>

#include <lockstep/nn/wrapped_module.h>

namespace lockstep {
namespace internal {
namespace {

/// See mirror_script_module().
class ScriptMirror final : public torch::nn::Module {
 public:
  explicit ScriptMirror(torch::jit::Module script)
      : torch::nn::Module("ScriptModule"), script_(std::move(script)) {
    for (const auto& item : script_.named_parameters(/*recurse=*/false)) {
      register_parameter(item.name, item.value, item.value.requires_grad());
    }
    for (const auto& item : script_.named_buffers(/*recurse=*/false)) register_buffer(item.name, item.value);
    for (const auto& item : script_.named_children()) {
      register_module(item.name, std::make_shared<ScriptMirror>(item.value));
    }
  }

  void train(bool on) override {
    torch::nn::Module::train(on);
    script_.train(on);
  }
  bool is_training() const noexcept override { return script_.is_training(); }

 private:
  torch::jit::Module script_;
};

template <class List>
std::vector<NamedTensor> listed(const List& tensors) {
  std::vector<NamedTensor> answer;
  for (const auto& item : tensors) {
    if (item.value.defined()) answer.emplace_back(item.name, item.value);
  }
  return answer;
}

}  // namespace

std::vector<NamedTensor> named_tensors(const torch::OrderedDict<std::string, at::Tensor>& tensors) {
  std::vector<NamedTensor> answer;
  answer.reserve(tensors.size());
  for (const auto& item : tensors) answer.emplace_back(item.key(), item.value());
  return answer;
}

std::shared_ptr<torch::nn::Module> mirror_script_module(const torch::jit::Module& module) {
  return std::make_shared<ScriptMirror>(module);
}

}  // namespace internal

using Script = WrappedModule<torch::jit::Module>;

bool Script::is_empty(const Handle& handle) {
  try {
    handle._ivalue();  // the only question that an empty one answers, by throwing
    return false;
  } catch (const c10::Error&) {
    return true;
  }
}

std::vector<NamedTensor> Script::named_parameters(const Handle& handle) {
  return internal::listed(handle.named_parameters());
}

std::vector<NamedTensor> Script::named_buffers(const Handle& handle) {
  return internal::listed(handle.named_buffers());
}

c10::IValue Script::forward(const Handle& handle, std::vector<c10::IValue> arguments) {
  Handle same = handle;  // its forward is not const
  return same(std::move(arguments));
}

c10::IValue Script::forward(const Handle& handle, std::vector<c10::IValue> arguments,
                            const torch::jit::Kwargs& keywords) {
  return handle.get_method("forward")(std::move(arguments), keywords);
}

void Script::train(const Handle& handle, bool on) {
  Handle same = handle;
  same.train(on);
}

Script::Handle Script::clone(const Handle& handle, const std::optional<at::Device>& device) {
  const c10::AutoGradMode no_grad(false);  // or the copies of parameters would not be leaves
  auto copy = handle.deepcopy();           // with a device it keeps the very tensors that lie there already
  if (device) copy.to(*device);
  const auto originals = named_parameters(handle);
  const auto copies = named_parameters(copy);
  for (size_t i = 0; i < originals.size(); ++i) {
    copies[i].second.set_requires_grad(originals[i].second.requires_grad());
  }
  return copy;
}

}  // namespace lockstep
