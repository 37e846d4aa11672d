#pragma once

#include <optional>

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include <lockstep/base/tensor_tree.h>

namespace torch::autograd {
struct AutogradContext;
}

/// Mixed precision as a scope: torch/amp/autocast_mode.py. All functions concern the calling thread.
namespace lockstep {

struct AutocastOptions {
  /// What the operations that gain from it compute in. Empty: as get_autocast_dtype() says, which is bfloat16
  /// on CPUs and float16 on CUDA devices unless an enclosing scope has another.
  std::optional<c10::ScalarType> dtype = {};
  bool enabled = true;  ///< false: operations run as they are written, also inside of an enabled scope
  /// Whether a parameter is cast once and kept until the outermost scope ends. Empty: as around; true there.
  std::optional<bool> cache_enabled = {};
};

/// What autocast() returns: its end restores what was before, and the end of the outermost one drops the
/// casted parameters. Ends in the thread that made it, in reverse order.
class [[nodiscard]] Autocast {
 public:
  explicit Autocast(c10::DeviceType device_type, const AutocastOptions& options = {});
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;
  ~Autocast();

 private:
  c10::DeviceType device_type_;
  bool enabled_before_;
  c10::ScalarType dtype_before_;
  bool cache_enabled_before_;
};

/// While the answer lives, operations on this kind of device run in the dtype that suits each of them: matrix
/// products and convolutions in `dtype`, reductions and losses in float32, others in what they get.
///
///     {
///       auto guard = lockstep::autocast(at::kCPU, {.dtype = at::kBFloat16});
///       loss = loss_of(model(batch.data), batch.target);
///     }
///     loss.backward();   // outside: each operation's backward runs in the dtype that its forward had
///
/// Scopes nest. The state belongs to the thread: DataParallel's replicas and autograd's threads take it over
/// from their caller, a std::thread of yours needs a scope of its own.
///
/// Throws c10::Error for a kind of device that has no autocast. A dtype that the CPU's autocast does not
/// support, and CUDA without a CUDA device, disable the scope with a warning, as in torch (once per process);
/// a CUDA device without bfloat16 is an error.
inline Autocast autocast(c10::DeviceType device_type, const AutocastOptions& options = {}) {
  return Autocast(device_type, options);
}

/// Whether there is an autocast for this kind of device.
bool is_autocast_available(c10::DeviceType device_type);
/// Whether this thread is in an enabled scope.
bool is_autocast_enabled(c10::DeviceType device_type);
/// The dtype of this thread's enabled scopes, or of the next one that names none.
c10::ScalarType get_autocast_dtype(c10::DeviceType device_type);

/// For functions with a backward() of their own: its operations run as those of forward() did.
///
///     struct Product : torch::autograd::Function<Product> {
///       static at::Tensor forward(AutogradContext* context, at::Tensor a, at::Tensor b) {
///         auto guard = lockstep::custom_fwd(context, at::kCPU);
///         context->save_for_backward({a, b});
///         return a.mm(b);
///       }
///       static variable_list backward(AutogradContext* context, variable_list gradients) {
///         auto guard = lockstep::custom_bwd(context, at::kCPU);
///         …
///       }
///     };
///
/// custom_fwd() notes the state of now in `context`, which custom_bwd() restores. Its other form is for
/// functions that need a certain dtype: in an enabled scope it casts `inputs` (tensors, or what
/// tensor_tree.h can search; floating-point ones but float64, of this kind of device), and disables
/// autocast while the answer lives. Outside of one it does nothing.
Autocast custom_fwd(torch::autograd::AutogradContext* context, c10::DeviceType device_type);
Autocast custom_bwd(torch::autograd::AutogradContext* context, c10::DeviceType device_type);

namespace internal {
Autocast custom_fwd_without_autocast(torch::autograd::AutogradContext* context, c10::DeviceType device_type);
at::Tensor cast_eligible(const at::Tensor& tensor, c10::DeviceType device_type, c10::ScalarType dtype);
}  // namespace internal

template <class... Inputs>
Autocast custom_fwd(torch::autograd::AutogradContext* context, c10::DeviceType device_type,
                    c10::ScalarType cast_inputs, Inputs&... inputs) {
  if (is_autocast_enabled(device_type)) {
    const auto cast = [&](at::Tensor& tensor) {
      tensor = internal::cast_eligible(tensor, device_type, cast_inputs);
    };
    (for_each_owned_tensor(inputs, cast), ...);
  }
  return internal::custom_fwd_without_autocast(context, device_type);
}

}  // namespace lockstep
