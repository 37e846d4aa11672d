#include <cstring>
#include <future>
#include <memory>
#include <thread>
#include <utility>

#include <torch/csrc/cuda/nccl.h>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include <lockstep/base/exception_text.h>
#include <lockstep/base/log.h>
#include <lockstep/cuda/nccl_backend.h>
#include <lockstep/cuda/operation_records.h>
#include <lockstep/flight/recorder.h>

namespace lockstep {
namespace {

using c10d::ProcessGroupNCCL;
using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

/// torch's options hold NCCL's configuration by value, and that grows from version to version.
void check_headers() {
  const uint64_t version = torch::cuda::nccl::version();
  const auto major = version >> 32;
  const auto minor = (version >> 16) & 0xffff;
  TORCH_CHECK(major == NCCL_MAJOR && minor == NCCL_MINOR, "Lockstep was compiled with the headers of NCCL ",
              NCCL_MAJOR, ".", NCCL_MINOR, ", but torch with those of NCCL ", major, ".", minor,
              "; build Lockstep again with the NCCL headers that belong to this torch");
}

/// For NCCL's configuration, which keeps the pointer and has no owner. A few bytes for each group.
const char* forever(const std::string& text) {
  return ::strdup(text.c_str());
}

c10::intrusive_ptr<ProcessGroupNCCL::Options> torch_options(const NcclGroup& group) {
  const NcclOptions& from = group.options;
  TORCH_CHECK_VALUE(!from.cga_cluster_size || (*from.cga_cluster_size >= 0 && *from.cga_cluster_size <= 8),
                    "NcclOptions::cga_cluster_size is ", from.cga_cluster_size.value_or(0),
                    "; it must be 0 to 8");
  TORCH_CHECK_VALUE(!from.min_ctas || !from.max_ctas || *from.min_ctas <= *from.max_ctas,
                    "NcclOptions::min_ctas (", from.min_ctas.value_or(0), ") is more than max_ctas (",
                    from.max_ctas.value_or(0), ")");
  auto options = ProcessGroupNCCL::Options::create(from.is_high_priority_stream);
  options->timeout = group.timeout;
  options->group_name = group.name;
  options->group_desc = group.description;
  options->global_ranks_in_group.assign(group.global_ranks.begin(), group.global_ranks.end());
  ncclConfig_t& config = options->config;
  if (from.blocking) config.blocking = *from.blocking ? 1 : 0;
  if (from.cga_cluster_size) config.cgaClusterSize = *from.cga_cluster_size;
  if (from.min_ctas) config.minCTAs = *from.min_ctas;
  if (from.max_ctas) config.maxCTAs = *from.max_ctas;
  if (from.net_name) config.netName = forever(*from.net_name);
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 0)
  if (from.traffic_class) config.trafficClass = *from.traffic_class;
  if (from.comm_name) config.commName = forever(*from.comm_name);
#endif
  return options;
}

/// NCCL's own flight record, as torch's tools read it (torchfrtrace --prefix nccl_trace_rank_ DIR). In a
/// thread of its own, for it asks CUDA, which may hang when a peer does.
std::shared_future<void> write_nccl_trace(int global_rank) {
  auto done = std::make_shared<std::promise<void>>();
  std::shared_future<void> written = done->get_future().share();
  std::thread([global_rank, done] {
    try {
      const std::string trace = c10d::dump_nccl_trace(
          /*includeCollectives=*/true, /*includeStackTraces=*/false, /*onlyActive=*/false);
      const std::string path = flight::write_beside("nccl_trace_rank_" + std::to_string(global_rank), trace);
      if (!path.empty()) {
        LOCKSTEP_LOG(kInfo) << "NCCL's flight record written to " << path;
      }
    } catch (const std::exception& error) {
      LOCKSTEP_LOG(kWarning) << "NCCL's flight record can't be written: " << text_of(error);
    }
    done->set_value();
  }).detach();
  return written;
}

/// ProcessGroupNCCL, which does everything; each operation is recorded on its way. Its works are NCCL's own.
class NcclBackend final : public ProcessGroupNCCL {
 public:
  NcclBackend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, const NcclGroup& group)
      : ProcessGroupNCCL(store, rank, size, torch_options(group)),
        global_rank_(group.global_ranks.at(static_cast<size_t>(rank))),
        records_(std::make_shared<const flight::ObservedGroup>(
                     flight::ObservedGroup{group.name + " (nccl)", group.global_ranks, rank}),
                 // With blocking wait there is no watchdog to tell.
                 /*watched=*/!c10d::getCvarBool(c10d::TORCH_NCCL_BLOCKING_WAIT, false),
                 [rank = global_rank_](const char*) { write_nccl_trace(rank); }) {}

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return record("all_reduce", tensors, tensors, options,
                  [&] { return ProcessGroupNCCL::allreduce(tensors, options); });
  }
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return record("all_reduce", tensors, tensors, options,
                  [&] { return ProcessGroupNCCL::allreduce_sparse(tensors, options); });
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return record("all_reduce_coalesced", tensors, tensors, options,
                  [&] { return ProcessGroupNCCL::allreduce_coalesced(tensors, options); });
  }
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return record("broadcast", tensors, tensors, options,
                  [&] { return ProcessGroupNCCL::broadcast(tensors, options); });
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return record("reduce", tensors, tensors, options,
                  [&] { return ProcessGroupNCCL::reduce(tensors, options); });
  }
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options) override {
    return record("all_gather", inputs, first_of(outputs), options,
                  [&] { return ProcessGroupNCCL::allgather(outputs, inputs, options); });
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override {
    return record("all_gather_into_tensor", {input}, {output}, options,
                  [&] { return ProcessGroupNCCL::_allgather_base(output, input, options); });
  }
  WorkPtr allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& options) override {
    return record("all_gather_coalesced", inputs, first_of(outputs), options,
                  [&] { return ProcessGroupNCCL::allgather_coalesced(outputs, inputs, options); });
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override {
    return record("all_gather_into_tensor_coalesced", inputs, outputs, options, [&] {
      return ProcessGroupNCCL::allgather_into_tensor_coalesced(outputs, inputs, options);
    });
  }
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override {
    return record("reduce_scatter", first_of(inputs), outputs, options,
                  [&] { return ProcessGroupNCCL::reduce_scatter(outputs, inputs, options); });
  }
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override {
    return record("reduce_scatter_tensor", {input}, {output}, options,
                  [&] { return ProcessGroupNCCL::_reduce_scatter_base(output, input, options); });
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override {
    return record("reduce_scatter_tensor_coalesced", inputs, outputs, options, [&] {
      return ProcessGroupNCCL::reduce_scatter_tensor_coalesced(outputs, inputs, options);
    });
  }
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) override {
    return record("all_to_all_single", {input}, {output}, options, [&] {
      return ProcessGroupNCCL::alltoall_base(output, input, output_splits, input_splits, options);
    });
  }
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    return record("all_to_all", inputs, outputs, options,
                  [&] { return ProcessGroupNCCL::alltoall(outputs, inputs, options); });
  }
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs,
                 const c10d::GatherOptions& options) override {
    return record("gather", inputs, first_of(outputs), options,
                  [&] { return ProcessGroupNCCL::gather(outputs, inputs, options); });
  }
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                  const c10d::ScatterOptions& options) override {
    return record("scatter", first_of(inputs), outputs, options,
                  [&] { return ProcessGroupNCCL::scatter(outputs, inputs, options); });
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    return record("barrier", {}, {}, options, [&] { return ProcessGroupNCCL::barrier(options); });
  }
  WorkPtr send(Tensors& tensors, int to, int tag) override {
    return message("send", tensors, to, tag, [&] { return ProcessGroupNCCL::send(tensors, to, tag); });
  }
  WorkPtr recv(Tensors& tensors, int from, int tag) override {
    return message("recv", tensors, from, tag, [&] { return ProcessGroupNCCL::recv(tensors, from, tag); });
  }
  WorkPtr recvAnysource(Tensors& /*tensors*/, int /*tag*/) override {
    TORCH_CHECK_VALUE(false,
                      "recv: NCCL can't receive from any source; name the source, or receive into a "
                      "CPU tensor, which goes over \"lockstep\"");
  }

  void startCoalescing() override {
    // Some of its own operations are made of several, and begin a batch themselves.
    if (inside_ == 0) records_.begin_batch();
    ProcessGroupNCCL::startCoalescing();
  }
  WorkPtr endCoalescing() override {
    if (inside_ > 0) return ProcessGroupNCCL::endCoalescing();
    return records_.end_batch([&] { return ProcessGroupNCCL::endCoalescing(); });
  }

  void abort() override {
    flight::dump("abort");
    const auto written = write_nccl_trace(global_rank_);
    ProcessGroupNCCL::abort();  // waits for the communicators' end, but no longer than the group's timeout
    records_.fail_all();
    written.wait_for(std::chrono::seconds(5));
  }
  void shutdown() override {
    ProcessGroupNCCL::shutdown();
    records_.poll();
  }

 private:
  static Tensors first_of(const std::vector<Tensors>& lists) {
    return lists.empty() ? Tensors{} : lists.front();
  }

  template <class Options>
  WorkPtr record(const char* kind, const Tensors& inputs, const Tensors& outputs, const Options& options,
                 const std::function<WorkPtr()>& start) {
    flight::ObservedOperation operation;
    operation.kind = kind;
    operation.inputs = &inputs;
    operation.outputs = &outputs;
    operation.timeout = timeout_or_default(options.timeout);
    operation.asynchronous = options.asyncOp;
    if constexpr (requires { options.rootRank; }) operation.peer = static_cast<int>(options.rootRank);
    if constexpr (requires { options.reduceOp; }) operation.detail = name_of(options.reduceOp);
    return run(std::move(operation), start);
  }

  WorkPtr message(const char* kind, const Tensors& tensors, int peer, int tag,
                  const std::function<WorkPtr()>& start) {
    flight::ObservedOperation operation;
    operation.kind = kind;
    operation.point_to_point = true;
    operation.peer = peer;
    operation.tag = tag;
    (std::strcmp(kind, "send") == 0 ? operation.inputs : operation.outputs) = &tensors;
    operation.timeout = timeout_or_default(c10d::kUnsetTimeout);
    operation.asynchronous = true;
    return run(std::move(operation), start);
  }

  WorkPtr run(flight::ObservedOperation operation, const std::function<WorkPtr()>& start) {
    struct Inside {
      Inside() { ++inside_; }
      ~Inside() { --inside_; }
    };
    return records_.run(std::move(operation), [&] {
      const Inside inside;
      return start();
    });
  }

  std::chrono::milliseconds timeout_or_default(std::chrono::milliseconds timeout) {
    return timeout == c10d::kUnsetTimeout ? getOptions()->timeout : timeout;
  }

  static std::string name_of(const c10d::ReduceOp& op) {
    switch (op.op_) {
      case c10d::ReduceOp::SUM:
        return "SUM";
      case c10d::ReduceOp::AVG:
        return "AVG";
      case c10d::ReduceOp::PRODUCT:
        return "PRODUCT";
      case c10d::ReduceOp::MIN:
        return "MIN";
      case c10d::ReduceOp::MAX:
        return "MAX";
      case c10d::ReduceOp::PREMUL_SUM:
        return "PREMUL_SUM";
      default:
        return {};
    }
  }

  static thread_local int inside_;  // operations of this thread that have not returned
  const int global_rank_;
  OperationRecords records_;
};

thread_local int NcclBackend::inside_ = 0;

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_nccl_backend(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                                    int size, const NcclGroup& group) {
  check_headers();
  return c10::make_intrusive<NcclBackend>(store, rank, size, group);
}

}  // namespace lockstep
