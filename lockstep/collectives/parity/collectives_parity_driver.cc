// Makes the calls that gloo_parity_test.py asks for and writes what came of them, so that they can be
// compared with PyTorch's and Gloo's.
//
//     lockstep run --nproc-per-node N collectives_parity_driver JOBS OUTPUT private|shared
//
// JOBS: pickled by torch.save, as gloo_parity_cases.py describes it. OUTPUT: rank r writes {"blob": its
// memory after all cases, "errors": a text for each case, empty when it succeeded, "returned": numbers} to
// OUTPUT.r. The last argument says where the tensors lie: in private memory or in empty_shared()'s.
#include <map>

#include <torch/torch.h>

#include <lockstep/base/errors.h>
#include <lockstep/collectives/functional.h>
#include <lockstep/collectives/process_group.h>
#include <lockstep/collectives/testing/pickle_file.h>
#include <lockstep/testing/driver.h>

namespace collectives_parity_driver {
namespace {

using lockstep::ProcessGroup;
using lockstep::testing::at_key;

bool flag(const c10::IValue& dictionary, const std::string& key) {
  const auto entries = dictionary.toGenericDict();
  return entries.contains(c10::IValue(key)) && entries.at(c10::IValue(key)).toBool();
}

int64_t number(const c10::IValue& dictionary, const std::string& key, int64_t fallback = 0) {
  const auto entries = dictionary.toGenericDict();
  return entries.contains(c10::IValue(key)) ? entries.at(c10::IValue(key)).toInt() : fallback;
}

bool contains(const c10::IValue& dictionary, const std::string& key, const std::string& text) {
  for (const c10::IValue& item : at_key(dictionary, key).toListRef()) {
    if (item.toStringRef() == text) return true;
  }
  return false;
}

std::vector<int64_t> numbers(const c10::IValue& dictionary, const std::string& key) {
  std::vector<int64_t> result;
  const auto entries = dictionary.toGenericDict();
  if (!entries.contains(c10::IValue(key))) return result;
  for (const c10::IValue& item : entries.at(c10::IValue(key)).toListRef()) result.push_back(item.toInt());
  return result;
}

at::ScalarType scalar_type(const std::string& name) {
  static const std::map<std::string, at::ScalarType> kTypes = {{"float32", at::kFloat},
                                                               {"float64", at::kDouble},
                                                               {"float16", at::kHalf},
                                                               {"bfloat16", at::kBFloat16},
                                                               {"int8", at::kChar},
                                                               {"uint8", at::kByte},
                                                               {"int16", at::kShort},
                                                               {"int32", at::kInt},
                                                               {"int64", at::kLong},
                                                               {"bool", at::kBool},
                                                               {"complex64", at::kComplexFloat},
                                                               {"complex128", at::kComplexDouble},
                                                               {"uint16", at::kUInt16},
                                                               {"uint32", at::kUInt32},
                                                               {"uint64", at::kUInt64},
                                                               {"float8_e4m3fn", at::kFloat8_e4m3fn},
                                                               {"float8_e5m2", at::kFloat8_e5m2}};
  return kTypes.at(name);
}

/// The tensor of a description, in the blob's memory.
at::Tensor view(const at::Tensor& blob, const c10::IValue& description) {
  const int64_t at = number(description, "at");
  const auto part = blob.slice(0, at, at + number(description, "bytes"))
                        .view(scalar_type(at_key(description, "dtype").toStringRef()));
  const auto strided = part.as_strided(numbers(description, "size"), numbers(description, "stride"),
                                       part.storage_offset() + number(description, "offset"));
  const std::string& lazy = at_key(description, "lazy").toStringRef();
  if (lazy == "negative") return at::_neg_view(strided);
  return lazy == "conj" ? strided.conj() : strided;
}

std::vector<at::Tensor> views(const at::Tensor& blob, const c10::IValue& call, const std::string& key) {
  std::vector<at::Tensor> result;
  for (const c10::IValue& item : at_key(call, key).toListRef()) result.push_back(view(blob, item));
  return result;
}

lockstep::ReduceOp reduce_op(const c10::IValue& job) {
  using Op = c10d::ReduceOp;
  static const std::map<std::string, Op::RedOpType> kOps = {
      {"SUM", Op::SUM}, {"AVG", Op::AVG},   {"PRODUCT", Op::PRODUCT}, {"MIN", Op::MIN},
      {"MAX", Op::MAX}, {"BAND", Op::BAND}, {"BOR", Op::BOR},         {"BXOR", Op::BXOR}};
  const std::string& name = at_key(job, "reduce").toStringRef();
  return name == "PREMUL_SUM" ? lockstep::premul_sum(at_key(job, "factor").toDouble()) : Op(kOps.at(name));
}

/// One rank's part of a case.
struct Call {
  std::string op;
  lockstep::ReduceOp reduce;
  c10::IValue options;
  std::vector<at::Tensor> inputs;
  std::vector<at::Tensor> outputs;
  int root;
  std::chrono::milliseconds timeout;
  ProcessGroup group;
};

/// send, recv, isend, irecv in order, then waits for all. Returns the sources of receives.
std::vector<int64_t> run_steps(const Call& call) {
  std::vector<at::Tensor> tensors = call.inputs;
  tensors.insert(tensors.end(), call.outputs.begin(), call.outputs.end());
  std::vector<int64_t> returned;
  std::vector<lockstep::Work> works;
  for (const c10::IValue& step : at_key(call.options, "steps").toListRef()) {
    const std::string& kind = at_key(step, "kind").toStringRef();
    const at::Tensor& tensor = tensors.at(static_cast<size_t>(number(step, "tensor")));
    const int peer = static_cast<int>(number(step, "peer"));
    const int tag = static_cast<int>(number(step, "tag"));
    const auto source = peer < 0 ? std::optional<int>() : peer;
    if (kind == "send") {
      lockstep::send(tensor, peer, call.group, tag);
    } else if (kind == "recv") {
      returned.push_back(lockstep::recv(tensor, source, call.group, tag));
    } else if (kind == "isend") {
      works.push_back(lockstep::isend(tensor, peer, call.group, tag));
    } else {
      const auto work = lockstep::irecv(tensor, source, call.group, tag);
      if (!flag(step, "wait")) {
        works.push_back(work);
        continue;
      }
      work->wait();
      returned.push_back(source ? peer : work->sourceRank());
    }
  }
  for (const auto& work : works) work->wait();
  return returned;
}

void sparse_all_reduce(const Call& call) {
  auto sparse = at::sparse_coo_tensor(call.inputs.at(0), call.inputs.at(1), call.outputs.at(0).sizes());
  lockstep::all_reduce(sparse, call.reduce, call.group);
  call.outputs[0].copy_(sparse.to_dense());
}

/// The outputs in lists of `count`.
std::vector<std::vector<at::Tensor>> in_lists_of(size_t count, const std::vector<at::Tensor>& outputs) {
  std::vector<std::vector<at::Tensor>> lists;
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (i % count == 0) lists.emplace_back();
    lists.back().push_back(outputs[i]);
  }
  return lists;
}

using Operations = std::map<std::string, void (*)(const Call&)>;

const Operations& operations() {
  using C = const Call&;
  static const Operations kOperations = {
      {"broadcast", [](C c) { lockstep::broadcast(c.inputs.at(0), c.root, c.group); }},
      {"all_reduce", [](C c) { lockstep::all_reduce(c.inputs.at(0), c.reduce, c.group); }},
      {"all_reduce_coalesced", [](C c) { lockstep::all_reduce_coalesced(c.inputs, c.reduce, c.group); }},
      {"reduce", [](C c) { lockstep::reduce(c.inputs.at(0), c.root, c.reduce, c.group); }},
      {"all_gather", [](C c) { lockstep::all_gather(c.outputs, c.inputs.at(0), c.group); }},
      {"all_gather_into_tensor",
       [](C c) { lockstep::all_gather_into_tensor(c.outputs.at(0), c.inputs.at(0), c.group); }},
      {"all_gather_coalesced",
       [](C c) {
         lockstep::all_gather_coalesced(in_lists_of(c.inputs.size(), c.outputs), c.inputs, c.group);
       }},
      {"all_gather_into_tensor_coalesced",
       [](C c) { lockstep::all_gather_into_tensor_coalesced(c.outputs, c.inputs, c.group); }},
      {"gather", [](C c) { lockstep::gather(c.inputs.at(0), c.outputs, c.root, c.group); }},
      {"scatter", [](C c) { lockstep::scatter(c.outputs.at(0), c.inputs, c.root, c.group); }},
      {"reduce_scatter", [](C c) { lockstep::reduce_scatter(c.outputs.at(0), c.inputs, c.reduce, c.group); }},
      {"reduce_scatter_tensor",
       [](C c) { lockstep::reduce_scatter_tensor(c.outputs.at(0), c.inputs.at(0), c.reduce, c.group); }},
      {"reduce_scatter_tensor_coalesced",
       [](C c) { lockstep::reduce_scatter_tensor_coalesced(c.outputs, c.inputs, c.reduce, c.group); }},
      {"all_to_all", [](C c) { lockstep::all_to_all(c.outputs, c.inputs, c.group); }},
      {"all_to_all_single",
       [](C c) {
         lockstep::all_to_all_single(c.outputs.at(0), c.inputs.at(0), numbers(c.options, "output_splits"),
                                     numbers(c.options, "input_splits"), c.group);
       }},
      {"sparse_all_reduce", sparse_all_reduce},
      {"barrier", [](C c) { lockstep::barrier(c.group); }},
      {"monitored_barrier",
       [](C c) { lockstep::monitored_barrier(c.group, c.timeout, flag(c.options, "wait_all_ranks")); }},
  };
  return kOperations;
}

struct Outcome {
  std::string error;
  std::vector<int64_t> returned;
};

/// Makes a call; an exception becomes "TYPE: TEXT".
Outcome outcome(const Call& call) {
  const auto failed = [](const char* type, const c10::Error& error) {
    return Outcome{std::string(type) + ": " + error.what_without_backtrace(), {}};
  };
  try {
    if (call.op == "p2p") return {"", run_steps(call)};
    operations().at(call.op)(call);
    return {};
  } catch (const c10::ValueError& error) {
    return failed("ValueError", error);
  } catch (const lockstep::DistTimeoutError& error) {
    return failed("DistTimeoutError", error);
  } catch (const c10::DistBackendError& error) {
    return failed("DistBackendError", error);
  } catch (const c10::DistError& error) {
    return failed("DistError", error);
  } catch (const c10::Error& error) {
    return failed("RuntimeError", error);
  } catch (const std::exception& error) {
    return {std::string("std::exception: ") + error.what(), {}};
  }
}

/// The group of the next case: the last one's as long as nothing failed in it.
class Groups {
 public:
  ProcessGroup next(bool misuse, std::chrono::milliseconds timeout) {
    if (!good_ || misuse) {
      if (group_) lockstep::destroy_process_group(group_);
      group_ = lockstep::new_group({}, timeout);
    }
    return group_;
  }

  /// Meets the other ranks and remembers whether all succeeded.
  void done(bool misuse, bool failed) {
    const auto failures = torch::full({1}, failed ? 1 : 0, torch::kInt);
    lockstep::all_reduce(failures);
    good_ = !misuse && failures.item<int>() == 0;
  }

 private:
  ProcessGroup group_;
  bool good_ = false;
};

/// The rank's blob, in private or in shared memory.
at::Tensor placed(const at::Tensor& blob, const std::string& memory) {
  TORCH_CHECK(memory == "private" || memory == "shared", "memory is private or shared, not ", memory);
  if (memory == "private") return blob;
  const auto shared = lockstep::empty_shared(blob.sizes(), blob.options());
  shared.copy_(blob);
  return shared;
}

/// Makes this rank's part of a case.
Outcome make_call(const c10::IValue& job, const at::Tensor& blob, Groups& groups) {
  const auto mine = at_key(job, "ranks").toListRef()[static_cast<size_t>(lockstep::get_rank())];
  const std::chrono::milliseconds timeout(number(job, "timeout_ms"));
  const bool misuse = flag(job, "misuse");
  const auto group = groups.next(misuse, timeout);
  Outcome result;
  if (!flag(mine, "absent")) {
    result = outcome({at_key(job, "op").toStringRef(), reduce_op(job), mine, views(blob, mine, "inputs"),
                      views(blob, mine, "outputs"), static_cast<int>(number(mine, "root")), timeout, group});
  }
  groups.done(misuse, !result.error.empty());
  return result;
}

void run(const std::string& jobs_path, const std::string& output, const std::string& memory) {
  const int rank = lockstep::get_rank();
  const auto jobs = lockstep::testing::read_pickle(jobs_path);
  const auto blob = placed(at_key(jobs, "blobs").toListRef()[static_cast<size_t>(rank)].toTensor(), memory);
  c10::List<std::string> errors;
  c10::List<std::vector<int64_t>> returned;
  Groups groups;
  for (const c10::IValue& job : at_key(jobs, "cases").toListRef()) {
    const bool leave_out = contains(job, "leave_out", memory);
    const auto result = leave_out ? Outcome{"left out", {}} : make_call(job, blob, groups);
    errors.push_back(result.error);
    returned.push_back(result.returned);
  }
  c10::impl::GenericDict results(c10::StringType::get(), c10::AnyType::get());
  results.insert("blob", blob.clone());
  results.insert("errors", errors);
  results.insert("returned", returned);
  lockstep::testing::write_pickle(output + "." + std::to_string(rank), results);
}

}  // namespace

LOCKSTEP_DRIVER(collectives_parity_driver) {
  TORCH_CHECK(argc == 4, "usage: collectives_parity_driver JOBS OUTPUT private|shared");
  const auto world = lockstep::init_process_group();
  run(argv[1], argv[2], argv[3]);
  return 0;
}

}  // namespace collectives_parity_driver
