#include "interrupts.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <torch/csrc/utils/pybind.h>

#include <lockstep/base/process/interrupt.h>

namespace lockstep::python {
namespace {

/// What a signal handler raised. pybind11 gives it to Python as it is; the engine knows it as an
/// Interruption.
class RaisedBySignal final : public py::error_already_set, public Interruption {};

bool is_main_thread() {
  return ::syscall(SYS_gettid) == ::getpid();
}

void run_signal_handlers() {
  // Python runs handlers in its main thread only. After Py_Finalize has begun no thread may ask for the GIL.
  if (!is_main_thread() || Py_IsInitialized() == 0) return;
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw RaisedBySignal();
}

}  // namespace

void watch_signals() {
  set_interrupt_check(&run_signal_handlers);
}

}  // namespace lockstep::python
