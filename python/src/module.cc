// lockstep._C: the engine for torch.distributed in Python. What it is for stands in python/lockstep.
#include <chrono>
#include <memory>
#include <pybind11/chrono.h>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/utils/pybind.h>

#include <lockstep/base/errors.h>
#include <lockstep/collectives/backend/arena_allocation.h>
#include <lockstep/collectives/backend/lockstep_backend.h>
#include <lockstep/collectives/groups/open_backend.h>
#include <lockstep/collectives/host_compression.h>
#include <lockstep/flight/recorder.h>
#include <lockstep/rendezvous/torch_store.h>
#include <lockstep/transport/host/memory/forked_memory.h>

#include "call_places.h"
#include "gloo_stand_in.h"
#include "interrupts.h"

namespace lockstep::python {
namespace {

/// An intrusive_ptr that gives the GIL away while it destroys what it holds: a backend's end may wait for a
/// thread that runs Python code. torch has the same for its own backends (distributed/c10d/init.cpp).
template <class T>
class NoGilPointer {
 public:
  explicit NoGilPointer(T* pointer) : pointer_(c10::intrusive_ptr<T>::unsafe_steal_from_new(pointer)) {}
  NoGilPointer(c10::intrusive_ptr<T> pointer) : pointer_(std::move(pointer)) {}
  NoGilPointer(const NoGilPointer&) = default;
  NoGilPointer(NoGilPointer&&) = default;
  NoGilPointer& operator=(const NoGilPointer&) = delete;
  NoGilPointer& operator=(NoGilPointer&&) = default;
  ~NoGilPointer() {
    if (!pointer_) return;
    if (PyGILState_Check() == 0) {
      pointer_.reset();
      return;
    }
    const py::gil_scoped_release no_gil;
    pointer_.reset();
  }
  T* get() const { return pointer_.get(); }

 private:
  c10::intrusive_ptr<T> pointer_;
};

}  // namespace
}  // namespace lockstep::python

PYBIND11_DECLARE_HOLDER_TYPE(T, lockstep::python::NoGilPointer<T>, true);

namespace lockstep::python {
namespace {

/// DistTimeoutError as an exception of Python, below torch.distributed's DistBackendError.
void register_errors(py::module_& module) {
  const py::object base = py::module_::import("torch.distributed").attr("DistBackendError");
  static py::handle timeout_error;
  timeout_error = PyErr_NewExceptionWithDoc(
      "lockstep.DistTimeoutError",
      "An operation did not finish within its timeout; the message names the ranks that are late.",
      base.ptr(), nullptr);
  TORCH_CHECK(timeout_error, "lockstep.DistTimeoutError can't be made");
  module.attr("DistTimeoutError") = timeout_error;
  py::register_exception_translator([](std::exception_ptr error) {
    try {
      if (error) std::rethrow_exception(error);
    } catch (const DistTimeoutError& timeout) {
      PyErr_SetString(timeout_error.ptr(), timeout.what_without_backtrace());
    }
  });
}

/// `with ArenaAllocation(backend) as allocation: …`
class ArenaAllocationScope {
 public:
  explicit ArenaAllocationScope(c10::intrusive_ptr<LockstepBackend> backend) : backend_(std::move(backend)) {}
  void enter() {
    allocation_ = std::make_unique<ArenaAllocation>(backend_->channel().transport().shared_arena());
  }
  void exit() {
    bytes_ = allocation_->bytes();
    allocation_ = nullptr;
  }
  size_t bytes() const { return allocation_ ? allocation_->bytes() : bytes_; }

 private:
  c10::intrusive_ptr<LockstepBackend> backend_;
  std::unique_ptr<ArenaAllocation> allocation_;
  size_t bytes_ = 0;
};

HostCompression compression_of(const std::string& name) {
  for (const auto each : {HostCompression::kNone, HostCompression::kBf16, HostCompression::kInt8}) {
    if (name == to_string(each)) return each;
  }
  throw py::value_error(c10::str("between_hosts is \"", name, "\"; it takes \"none\", \"bf16\" or \"int8\""));
}

/// The BetweenHosts that this thread has entered. Python may leave them in another order, or on another thread.
std::vector<std::unique_ptr<BetweenHosts>>& entered_between_hosts() {
  thread_local std::vector<std::unique_ptr<BetweenHosts>> entered;
  return entered;
}

void enter_between_hosts(const std::string& compression, std::shared_ptr<ErrorFeedback> feedback) {
  auto scope = std::make_unique<BetweenHosts>(compression_of(compression), std::move(feedback));
  entered_between_hosts().push_back(std::move(scope));
}

void leave_between_hosts() {
  auto& entered = entered_between_hosts();
  if (entered.empty()) throw std::runtime_error("between_hosts() was entered on another thread");
  entered.pop_back();
}

c10::intrusive_ptr<LockstepBackend> join(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                         std::chrono::milliseconds timeout, const std::string& group_name,
                                         std::vector<int> global_ranks, const std::string& between_hosts,
                                         bool stands_in_for_gloo) {
  auto backend = open_backend(store, rank, size,
                              {.group_name = group_name,
                               .timeout = timeout,
                               .global_ranks = std::move(global_ranks),
                               .between_hosts = compression_of(between_hosts),
                               .make_subclass = stands_in_for_gloo ? &GlooStandIn::make : nullptr});
  flight::watch_signal();
  return backend;
}

void close_all(bool by_exception) {
  close_all_backends(by_exception);
  flight::unwatch_signal();
}

}  // namespace
}  // namespace lockstep::python

PYBIND11_MODULE(_C, module) {
  using namespace lockstep::python;
  using lockstep::ErrorFeedback;
  using lockstep::LockstepBackend;
  py::module_::import("torch.distributed");  // registers Backend and Store
  register_errors(module);
  watch_signals();
  watch_call_places();

  py::class_<LockstepBackend, NoGilPointer<LockstepBackend>, c10d::Backend> backend(
      module, "ProcessGroupLockstep",
      "The engine behind one process group, as group._get_backend(torch.device(\"cpu\")) gives it.");
  using Options = LockstepBackend::GroupOptions;
  py::class_<Options, c10::intrusive_ptr<Options>, c10d::Backend::Options>(
      backend, "Options", "What a group is made with: pg_options of init_process_group() and new_group().")
      .def(py::init([](const std::string& between_hosts) {
             auto options = c10::make_intrusive<Options>("lockstep");
             options->between_hosts = compression_of(between_hosts);
             return options;
           }),
           py::arg("between_hosts") = "none")
      .def_property_readonly(
          "between_hosts", [](const Options& options) { return lockstep::to_string(options.between_hosts); },
          "How large reductions travel between hosts, on all ranks the same: \"none\", \"bf16\" or "
          "\"int8\".");
  // What ProcessGroupGloo has, too; torch.distributed asks for them where the engine stands in for it.
  backend.def_property_readonly("options", &LockstepBackend::getBackendOptions)
      .def("_set_default_timeout", &LockstepBackend::setTimeout, py::arg("timeout"));
  py::class_<GlooStandIn, NoGilPointer<GlooStandIn>, LockstepBackend>(
      module, "ProcessGroupGloo", "The engine in Gloo's place: see lockstep.replace_gloo().");

  module.def("open_backend", &join, py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("timeout"),
             py::arg("group_name"), py::arg("global_ranks"), py::arg("between_hosts"),
             py::arg("stands_in_for_gloo"), py::call_guard<py::gil_scoped_release>(),
             "Joins `size` ranks, which meet in `store`, to a group; see "
             "lockstep/collectives/groups/open_backend.h.");
  module.def("serve_tcp_store", &lockstep::torch_store::serve_tcp, py::arg("host"), py::arg("port"),
             py::arg("world_size"), py::arg("use_libuv"), py::arg("timeout"),
             py::call_guard<py::gil_scoped_release>(), "See lockstep/rendezvous/torch_store.h.");
  module.def("join_tcp_store", &lockstep::torch_store::join_tcp, py::arg("host"), py::arg("port"),
             py::arg("who"), py::arg("rank"), py::arg("timeout"), py::call_guard<py::gil_scoped_release>(),
             "See lockstep/rendezvous/torch_store.h.");
  module.def("open_file_store", &lockstep::torch_store::open_file, py::arg("path"), py::arg("world_size"),
             py::arg("timeout"), py::call_guard<py::gil_scoped_release>(),
             "See lockstep/rendezvous/torch_store.h.");
  module.def("close_all_backends", &close_all, py::arg("by_exception"),
             py::call_guard<py::gil_scoped_release>(),
             "Ends all groups that are still open, without waiting for peers; aborts them when an exception "
             "ends the program.");
  module.def("install_forked_memory_handler", &lockstep::transport::install_forked_memory_handler,
             "In a forked child: see lockstep/transport/host/memory/forked_memory.h.");

  py::class_<ErrorFeedback, std::shared_ptr<ErrorFeedback>>(
      module, "ErrorFeedback",
      "What rounding to 8 bits has lost of one tensor that is reduced again and again: see between_hosts().")
      .def(py::init<>());
  module.def("enter_between_hosts", &enter_between_hosts, py::arg("compression"), py::arg("feedback"),
             "For the reductions that this thread starts from now on.");
  module.def("leave_between_hosts", &leave_between_hosts, "What was before the last enter_between_hosts().");

  py::class_<ArenaAllocationScope>(
      module, "ArenaAllocation",
      "A context manager: CPU tensors that this thread makes in it lie in the backend's shared memory.")
      .def(py::init<c10::intrusive_ptr<LockstepBackend>>(), py::arg("backend"))
      .def(
          "__enter__",
          [](ArenaAllocationScope& self) -> ArenaAllocationScope& {
            self.enter();
            return self;
          },
          py::return_value_policy::reference)
      .def("__exit__", [](ArenaAllocationScope& self, const py::args&) { self.exit(); })
      .def_property_readonly("bytes", &ArenaAllocationScope::bytes, "What was placed there so far.");
}
