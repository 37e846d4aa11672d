#include <algorithm>
#include <map>
#include <numeric>
#include <optional>
#include <sstream>
#include <utility>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/equal.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>
#include <c10/core/StreamGuard.h>

#include <lockstep/base/text/counted.h>
#include <lockstep/device/accelerator.h>
#include <lockstep/device/existing_device.h>
#include <lockstep/device/generator_state.h>
#include <lockstep/device/streams.h>
#include <lockstep/nn/activation_checkpoint.h>
#include <lockstep/parallel/pipeline/balance.h>
#include <lockstep/parallel/pipeline/internal/pipe_core.h>
#include <lockstep/parallel/pipeline/internal/pipe_value.h>

namespace lockstep::pipeline::internal {
namespace {

using torch::nn::AnyModule;
using torch::nn::AnyValue;

void check_balance(const std::vector<int64_t>& balance, size_t layers, size_t devices) {
  std::vector<std::string> faults;
  const int64_t sum = std::accumulate(balance.begin(), balance.end(), int64_t{0});
  if (std::any_of(balance.begin(), balance.end(), [](int64_t count) { return count < 1; })) {
    faults.emplace_back("has a number below 1");
  }
  if (sum != static_cast<int64_t>(layers)) {
    faults.push_back("adds up to " + std::to_string(sum) + ", but the module has " +
                     counted(layers, "layer"));
  }
  if (balance.size() > devices) {
    faults.push_back("makes " + counted(balance.size(), "partition") + ", but there " +
                     (devices == 1 ? "is " : "are ") + counted(devices, "device"));
  }
  if (faults.empty()) return;
  std::ostringstream text;
  text << "Pipe: the balance " << at::IntArrayRef(balance) << ' ';
  for (size_t i = 0; i < faults.size(); ++i) text << (i == 0 ? "" : "; and it ") << faults[i];
  const auto partitions =
      static_cast<int64_t>(std::min({std::max<size_t>(balance.size(), 1), devices, layers}));
  text << ". It has the number of layers of each partition, and each partition takes a device (one may be "
          "named several "
          "times): "
       << at::IntArrayRef(balance_cost(std::vector<double>(layers, 1.0), partitions)) << " would go on "
       << counted(partitions, "device");
  C10_THROW_ERROR(ValueError, text.str());
}

std::vector<at::Device> checked_devices(std::vector<at::Device> devices, size_t partitions) {
  if (devices.empty()) {
    if (const auto type = accelerator(); type && accelerator_count() > 0) {
      for (int i = 0; i < accelerator_count(); ++i) {
        devices.emplace_back(*type, static_cast<at::DeviceIndex>(i));
      }
    } else {
      devices.assign(std::max<size_t>(partitions, 1), at::Device(at::kCPU));
    }
  }
  for (auto& device : devices) {
    TORCH_CHECK_VALUE(device.type() == devices[0].type(), "Pipe: devices holds ", devices[0].str(), " and ",
                      device.str(), "; all must be of one type");
    device = existing_device(device, "Pipe");
  }
  return devices;
}

/// Whether a tensor of one partition may be in another one, too.
enum class Sharing { kOnOneDevice, kNever };

/// For each tensor where it was first.
using FirstPlaces = std::map<const at::TensorImpl*, size_t>;

void check_sharing(const std::vector<at::Tensor>& tensors, size_t partition,
                   const std::vector<PipePlace>& places, Sharing sharing, FirstPlaces& first) {
  for (const auto& tensor : tensors) {
    const size_t other = first.emplace(tensor.unsafeGetTensorImpl(), partition).first->second;
    if (other == partition) continue;
    TORCH_CHECK_VALUE(sharing == Sharing::kOnOneDevice && places[other].device == places[partition].device,
                      "Pipe: a ", sharing == Sharing::kNever ? "buffer" : "parameter", " of shape ",
                      tensor.sizes(), " is in ", places[other].name, " and in ", places[partition].name,
                      ": put the layers that share it into one partition",
                      sharing == Sharing::kNever ? "" : ", or both partitions on one device");
  }
}

/// Calls the layers one after the other.
AnyValue run_layers(std::vector<AnyModule>& layers, const PipeCore::Enter& enter,
                    const std::vector<at::Tensor>& tensors) {
  AnyValue value = enter(layers[0], tensors);
  for (size_t i = 1; i < layers.size(); ++i) value = layers[i].any_forward(std::move(value));
  return value;
}

}  // namespace

PipeCore::PipeCore(const torch::nn::Sequential& module, const std::vector<int64_t>& balance,
                   PipeOptions options)
    : options_(std::move(options)) {
  TORCH_CHECK_VALUE(!module.is_empty() && !module->is_empty(), "Pipe: the module has no layers");
  TORCH_CHECK_VALUE(options_.chunks >= 1, "Pipe: chunks is ", options_.chunks, "; it is at least 1");
  options_.devices = checked_devices(std::move(options_.devices), balance.size());
  check_balance(balance, module->size(), options_.devices.size());
  options_.devices.resize(balance.size(), at::Device(at::kCPU));
  auto layer = module->begin();
  FirstPlaces parameters, buffers;
  for (size_t p = 0; p < balance.size(); ++p) {
    const int64_t first = layer - module->begin(), count = balance[p];
    places_.push_back({options_.devices[p],
                       "partition " + std::to_string(p) + " (layers " + std::to_string(first) + " to " +
                           std::to_string(first + count - 1) + ") on " + options_.devices[p].str()});
    partitions_.emplace_back(layer, layer + count);
    layer += count;
    for (const auto& each : partitions_.back()) {
      check_sharing(each.ptr()->parameters(), p, places_, Sharing::kOnOneDevice, parameters);
      check_sharing(each.ptr()->buffers(), p, places_, Sharing::kNever, buffers);
    }
  }
  for (size_t p = 0; p < balance.size(); ++p) {
    for (const auto& each : partitions_[p]) each.ptr()->to(places_[p].device);
  }
  threads_ = std::make_shared<ThreadTeam>(static_cast<int>(balance.size()), "lockstep-pipe");
}

PipeRun PipeCore::forward(const Enter& enter, const std::vector<at::Tensor>& tensors) {
  check_places();
  auto inputs = split(tensors);
  const size_t micro_batches = inputs.size(), partitions = partitions_.size();
  PipeRun run;
  if (c10::GradMode::is_enabled()) run.graph = new_graph(inputs);
  PipeGraph* graph = run.graph.get();
  PipeMailboxes<Parcel> boxes(micro_batches, partitions);
  for (size_t m = 0; m < micro_batches; ++m) boxes.put({m, 0}, {enter, std::move(inputs[m])});
  std::vector<std::optional<AnyValue>> outputs(micro_batches);
  std::vector<c10::Stream> streams;  // the caller's current ones, which the threads take over
  for (const auto& place : places_) {
    if (const auto stream = current_stream(place.device)) streams.push_back(*stream);
  }
  const bool checkpoints = graph != nullptr && options_.checkpoint != PipeCheckpoint::kNever;
  const auto generators = checkpoints ? shared_generators() : std::vector<at::Tensor>();

  const auto work = [&](int thread) {
    const auto p = static_cast<size_t>(thread);
    size_t m = 0;
    try {
      const c10::OptionalDeviceGuard device(places_[p].device);  // throws where a device has failed
      const c10::MultiStreamGuard guard(streams);
      for (; m < micro_batches; ++m) {
        auto parcel = boxes.take({m, p});
        if (!parcel) return;
        auto value = compute({m, p}, *std::move(parcel), micro_batches, graph);
        if (p + 1 < partitions) {
          boxes.put({m, p + 1}, parcel_of(std::move(value), {m, p}, graph));
        } else {
          outputs[m].emplace(std::move(value));
        }
      }
    } catch (...) {
      boxes.fail({m, p});
    }
  };
  threads_->run(static_cast<int>(partitions), work, [](int) { return std::string(); });
  boxes.throw_failure([&](PipeCellId cell) { return "in " + name_of(cell, places_, micro_batches); });
  if (checkpoints) {
    const auto now = shared_generators();
    const bool same = std::equal(now.begin(), now.end(), generators.begin(), generators.end(),
                                 [](const auto& a, const auto& b) { return at::equal(a, b); });
    TORCH_CHECK(same,
                "Pipe: random numbers were drawn while partitions that share a generator computed at once, "
                "as by dropout "
                "on the CPU. Which partition draws first is open, so backward could not draw the same ones "
                "again: set "
                "checkpoint to kNever, or give each partition a device of its own");
  }
  for (auto& output : outputs) run.outputs.push_back(*std::move(output));
  return run;
}

std::vector<at::Tensor> PipeCore::gather(const PipeRun& run, std::vector<std::vector<at::Tensor>> outputs) {
  for (const auto& of_micro_batch : outputs) {
    TORCH_CHECK(of_micro_batch.size() == outputs[0].size(), "Pipe: the last layer returned ",
                of_micro_batch.size(), " tensors for one micro-batch, and ", outputs[0].size(),
                " for the first");
    for (const auto& tensor : of_micro_batch) {
      TORCH_CHECK(tensor.dim() > 0,
                  "Pipe: the last layer returned a tensor without dimensions; outputs are put together "
                  "along their first one, so compute the loss of the pipe's output");
    }
  }
  if (run.graph) outputs = join_cells(run.graph, std::move(outputs));
  std::vector<at::Tensor> gathered;
  for (size_t i = 0; i < outputs[0].size(); ++i) {
    std::vector<at::Tensor> parts;
    for (const auto& of_micro_batch : outputs) parts.push_back(of_micro_batch[i]);
    gathered.push_back(at::cat(parts));
  }
  return gathered;
}

/// By micro-batch, on the first device.
std::vector<std::vector<at::Tensor>> PipeCore::split(const std::vector<at::Tensor>& tensors) const {
  TORCH_CHECK_VALUE(!tensors.empty(), "Pipe splits the tensors among the arguments, but there is none");
  std::vector<std::vector<at::Tensor>> micro_batches;
  for (const auto& tensor : tensors) {
    TORCH_CHECK_VALUE(tensor.dim() > 0,
                      "Pipe splits every tensor among the arguments along its first dimension, but "
                      "one has no dimensions; pass a number instead, or expand it to the batch");
    TORCH_CHECK_VALUE(
        tensor.size(0) == tensors[0].size(0),
        "Pipe splits every tensor among the arguments along its first dimension, but one has the "
        "shape ",
        tensors[0].sizes(), " and one ", tensor.sizes(), "; give all the same size there");
    const auto chunks = tensor.chunk(tensor.size(0) == 0 ? 1 : options_.chunks);
    micro_batches.resize(chunks.size());
    for (size_t m = 0; m < chunks.size(); ++m) {
      micro_batches[m].push_back(moved_to(chunks[m], places_[0].device));
    }
  }
  return micro_batches;
}

c10::intrusive_ptr<PipeGraph> PipeCore::new_graph(
    const std::vector<std::vector<at::Tensor>>& micro_batches) const {
  auto graph = c10::make_intrusive<PipeGraph>();
  graph->micro_batches = micro_batches.size();
  graph->cells.assign(micro_batches.size(), std::vector<PipeCell>(partitions_.size()));
  graph->places = places_;
  graph->threads = threads_;
  graph->parameters_of_partition.resize(partitions_.size());
  for (const auto& of_micro_batch : micro_batches) {
    for (const auto& tensor : of_micro_batch) {
      if (tensor.requires_grad()) graph->node_inputs.push_back(tensor);
    }
  }
  std::map<const at::TensorImpl*, size_t> numbers;
  for (size_t p = 0; p < partitions_.size(); ++p) {
    auto& own = graph->parameters_of_partition[p];
    for (const auto& layer : partitions_[p]) {
      for (const auto& parameter : layer.ptr()->parameters()) {
        if (!parameter.requires_grad()) continue;
        const auto [found, is_new] = numbers.emplace(parameter.unsafeGetTensorImpl(), numbers.size());
        if (is_new) {
          graph->parameters.push_back(edge_of(parameter));
          graph->node_inputs.push_back(parameter);
          graph->is_shared.push_back(false);
        } else if (std::find(own.begin(), own.end(), found->second) == own.end()) {
          graph->is_shared[found->second] = true;
        } else {
          continue;
        }
        own.push_back(found->second);
      }
    }
  }
  return graph;
}

AnyValue PipeCore::compute(PipeCellId id, Parcel parcel, size_t micro_batches, PipeGraph* graph) {
  auto& layers = partitions_[id.partition];
  if (graph == nullptr) return run_layers(layers, parcel.enter, parcel.tensors);
  auto& edges = graph->cells[id.micro_batch][id.partition].inputs;
  edges.resize(parcel.tensors.size());
  for (size_t i = 0; i < edges.size(); ++i) parcel.tensors[i] = cut(parcel.tensors[i], edges[i]);
  const bool keeps =
      options_.checkpoint == PipeCheckpoint::kNever ||
      (options_.checkpoint == PipeCheckpoint::kExceptLast && id.micro_batch + 1 == micro_batches);
  if (keeps) return run_layers(layers, parcel.enter, parcel.tensors);
  // On the CPU putting the generator back would change what other partitions draw; forward() sees to it that
  // none does.
  const bool own_generators = partitions_.size() == 1 || !places_[0].device.is_cpu();
  return activation_checkpoint(
      {.preserve_rng_state = own_generators},
      [own = layers, enter = parcel.enter](std::vector<at::Tensor> tensors) mutable {
        for (auto& tensor : tensors) tensor = tensor.clone();  // for the first layer may work in place
        return run_layers(own, enter, tensors);
      },
      parcel.tensors);
}

/// For the next partition.
PipeCore::Parcel PipeCore::parcel_of(AnyValue value, PipeCellId id, PipeGraph* graph) const {
  Parcel parcel{.enter = {}, .tensors = tensors_of(value)};
  set_tensors(value, std::vector<at::Tensor>(parcel.tensors.size(), lockstep::internal::placeholder()));
  for (auto& tensor : parcel.tensors) {
    if (graph != nullptr) graph->cells[id.micro_batch][id.partition].outputs.push_back(edge_of(tensor));
    tensor = moved_to(tensor, places_[id.partition + 1].device);
  }
  parcel.enter = [form = std::move(value)](AnyModule& layer, const std::vector<at::Tensor>& tensors) {
    AnyValue copy = form;
    set_tensors(copy, tensors);
    return layer.any_forward(std::move(copy));
  };
  return parcel;
}

/// to() may have moved the layers since.
void PipeCore::check_places() const {
  for (size_t p = 0; p < partitions_.size(); ++p) {
    for (const auto& layer : partitions_[p]) {
      for (const auto& parameter : layer.ptr()->named_parameters()) {
        TORCH_CHECK(parameter->device() == places_[p].device, "Pipe: '", parameter.key(), "' of a layer in ",
                    places_[p].name, " was moved to ", parameter->device(),
                    " since Pipe was made; make a new Pipe after to()");
      }
    }
  }
}

/// The states of the random generators from which several partitions draw.
std::vector<at::Tensor> PipeCore::shared_generators() const {
  std::vector<at::Tensor> states;
  if (partitions_.size() == 1) return states;
  states.push_back(generator_state(at::detail::getDefaultCPUGenerator()));
  if (places_[0].device.is_cpu()) return states;
  const auto generators = accelerator_generators();
  for (size_t i = 0; i < generators.size(); ++i) {
    const auto partitions = std::count_if(places_.begin(), places_.end(), [&](const auto& place) {
      return static_cast<size_t>(place.device.index()) == i;
    });
    if (partitions > 1) states.push_back(generator_state(generators[i]));
  }
  return states;
}

}  // namespace lockstep::pipeline::internal
