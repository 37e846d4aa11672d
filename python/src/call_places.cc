#include "call_places.h"

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <utility>

#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/utils/pythoncapi_compat.h>

#include <lockstep/collectives/backend/lockstep_backend.h>

namespace lockstep::python {
namespace {

/// Lines that are remembered. A program that makes code without end, such as a notebook, looks further ones up each time.
constexpr size_t kMaxKnownPlaces = 4096;

/// What is known of the program's code. The GIL guards it. Never destroyed, because flight records point to the names.
struct KnownCode {
  std::string folders[2];  // of torch and of this package, whose calls are not the user's
  std::set<std::string> names;
  /// By code and instruction: finding the line takes longer, the longer the function is.
  std::map<std::pair<PyCodeObject*, int>, flight::CodePlace> places;
};
KnownCode* known_code = nullptr;

/// A package's folder, with the slash at its end.
std::string folder_of(const char* package) {
  const auto file = py::module_::import(package).attr("__file__").cast<std::string>();
  return file.substr(0, file.rfind('/') + 1);
}

/// Whether the calling thread, whose state it is, runs Python code. Only this thread changes that, so no GIL is needed.
bool runs_python(const PyThreadState* thread) {
#if PY_VERSION_HEX >= 0x030d0000
  return thread->current_frame != nullptr;
#elif PY_VERSION_HEX >= 0x030b0000
  return thread->cframe->current_frame != nullptr;
#else
  return thread->frame != nullptr;
#endif
}

/// Empty for a name that is no UTF-8.
const char* utf8_of(PyObject* name) {
  const char* text = PyUnicode_AsUTF8(name);
  if (text == nullptr) PyErr_Clear();
  return text == nullptr ? "" : text;
}

bool is_users(PyCodeObject* code) {
  const std::string_view file = utf8_of(code->co_filename);
  return std::none_of(std::begin(known_code->folders), std::end(known_code->folders),
                      [&](const std::string& folder) { return file.starts_with(folder); });
}

flight::CodePlace place_in(PyCodeObject* code, int instruction) {
  auto& places = known_code->places;
  const auto found = places.find({code, instruction});
  if (found != places.end()) return found->second;
  flight::CodePlace place;
  place.file = known_code->names.emplace(utf8_of(code->co_filename)).first->c_str();
  place.function = known_code->names.emplace(utf8_of(code->co_name)).first->c_str();
  place.line = static_cast<uint32_t>(std::max(PyCode_Addr2Line(code, instruction), 0));
  if (places.size() < kMaxKnownPlaces) {
    Py_INCREF(reinterpret_cast<PyObject*>(code));  // no other code may come to its address
    places.emplace(std::pair(code, instruction), place);
  }
  return place;
}

/// What CallSite asks. No lock of the engine is held, so that a holder of the GIL may want any of them meanwhile.
flight::CodePlace find_place() {
  // After Py_Finalize has begun no thread may ask for the GIL, or look at its state, which is being freed.
  if (Py_IsInitialized() == 0) return {};
  const PyThreadState* thread = PyGILState_GetThisThreadState();
  if (thread == nullptr || !runs_python(thread)) return {};
  const py::gil_scoped_acquire gil;
  const py::error_scope pending;  // what is raised here is not the caller's
  auto frame = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(PyEval_GetFrame()));
  while (frame) {
    auto* const here = reinterpret_cast<PyFrameObject*>(frame.ptr());
    const auto owned = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetCode(here)));
    auto* const code = reinterpret_cast<PyCodeObject*>(owned.ptr());
    if (is_users(code)) return place_in(code, PyFrame_GetLasti(here));
    frame = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetBack(here)));
  }
  return {};
}

}  // namespace

void watch_call_places() {
  if (known_code == nullptr) known_code = new KnownCode{{folder_of("torch"), folder_of("lockstep")}, {}, {}};
  CallSite::set_finder(&find_place);
}

}  // namespace lockstep::python
