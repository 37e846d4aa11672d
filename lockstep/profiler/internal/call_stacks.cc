#include <algorithm>
#include <array>
#include <map>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <utility>

#include <c10/util/hash.h>
#include <torch/csrc/profiler/unwind/unwind.h>
#include <torch/csrc/utils/cpp_stacktraces.h>

#include <lockstep/base/log.h>
#include <lockstep/profiler/internal/call_stacks.h>
#include <lockstep/profiler/internal/current_log.h>

namespace lockstep::profiler::internal {
namespace {

CurrentLog<CallStacks::Log> current_stack_log;

std::unique_ptr<at::ObserverContext> note_call(const at::RecordFunction& function) {
  CallStacks::Place place{.name = function.name(), .frames = torch::unwind::unwind(), .hash = 0};
  for (const void* const frame : place.frames) {
    place.hash = c10::hash_combine(place.hash, reinterpret_cast<size_t>(frame));
  }
  current_stack_log.use([&](CallStacks::Log& log) {
    log.calls.push_back({&*log.places.insert(std::move(place)).first, at::RecordFunction::currentThreadId()});
  });
  return nullptr;
}

/// What a reader looks for are the calls of the program, and not how torch gets from one of them to the operator.
bool is_of_the_program(const torch::unwind::Frame& frame) {
  constexpr std::array<std::string_view, 8> kOthers = {"at::",
                                                       "c10::",
                                                       "torch::",
                                                       "std::",
                                                       "__libc_",
                                                       "_start",
                                                       "lockstep::profiler::",
                                                       "lockstep::Profiler::"};
  constexpr std::string_view kAnonymous = "(anonymous namespace)::";
  std::string name = frame.funcname;
  for (size_t at = name.find(kAnonymous); at != std::string::npos; at = name.find(kAnonymous, at)) {
    name.erase(at, kAnonymous.size());
  }
  name.resize(std::min(name.find_first_of("<("), name.size()));
  name.erase(0, name.rfind(' ') + 1);  // a template's name has its result in front
  return !name.empty() && name != "??" &&
         std::none_of(kOthers.begin(), kOthers.end(),
                      [&](std::string_view other) { return name.starts_with(other); });
}

std::string frame_text(const torch::unwind::Frame& frame) {
  if (frame.filename.empty() || frame.filename == "??") return frame.funcname;
  return frame.filename + "(" + std::to_string(frame.lineno) + "): " + frame.funcname;
}

/// The texts of those frames that are of the program. Each is looked up once, and all together, for that takes long.
std::unordered_map<void*, std::string> program_frames(const CallStacks::Log& log) {
  std::unordered_map<void*, std::string> texts;
  for (const CallStacks::Place& place : log.places) {
    for (void* const frame : place.frames) texts.try_emplace(frame);
  }
  std::vector<void*> frames;
  for (const auto& [frame, text] : texts) frames.push_back(frame);
  const auto symbols = torch::unwind::symbolize(frames, torch::get_symbolize_mode());
  for (size_t i = 0; i < frames.size(); ++i) {
    if (is_of_the_program(symbols.at(i))) {
      texts.at(frames[i]) = frame_text(symbols[i]);
    } else {
      texts.erase(frames[i]);
    }
  }
  return texts;
}

}  // namespace

CallStacks::CallStacks() : log_(std::make_shared<Log>()) {
  // The first look at a stack reads the libraries' tables, for milliseconds, which no operator shall be charged with.
  (void)torch::unwind::unwind();
  current_stack_log.set(log_);
  handle_ = at::addThreadLocalCallback(at::RecordFunctionCallback(note_call));
}

void CallStacks::end() {
  if (handle_ == at::INVALID_CALLBACK_HANDLE) return;
  at::removeCallback(std::exchange(handle_, at::INVALID_CALLBACK_HANDLE));
  current_stack_log.set(nullptr);
}

void CallStacks::give_to(std::vector<FunctionEvent>& events) const {
  if (log_->calls.empty()) return;
  const auto texts = program_frames(*log_);
  // The n-th call of a name in a thread is its n-th event.
  std::map<std::pair<std::string, uint64_t>, std::pair<std::vector<size_t>, std::vector<FunctionEvent*>>>
      by_name;
  for (size_t i = 0; i < log_->calls.size(); ++i) {
    by_name[{log_->calls[i].place->name, log_->calls[i].thread}].first.push_back(i);
  }
  for (FunctionEvent& event : events) {
    const auto found = by_name.find({event.name, event.thread});
    if (found != by_name.end()) found->second.second.push_back(&event);
  }
  size_t without_stack = 0;
  std::string example;
  for (auto& [key, pair] : by_name) {
    auto& [calls, of_name] = pair;
    if (of_name.empty()) continue;
    if (calls.size() != of_name.size()) {  // one of both has missed some: which, is not known
      without_stack += of_name.size();
      example = "'" + key.first + "', which has " + std::to_string(of_name.size()) + " events and " +
                std::to_string(calls.size()) + " stacks in a thread";
      continue;
    }
    std::stable_sort(of_name.begin(), of_name.end(), [](const FunctionEvent* a, const FunctionEvent* b) {
      return std::make_tuple(a->start_ns, -a->end_ns) < std::make_tuple(b->start_ns, -b->end_ns);
    });
    for (size_t i = 0; i < calls.size(); ++i) {
      for (void* const frame : log_->calls[calls[i]].place->frames) {
        if (const auto text = texts.find(frame); text != texts.end())
          of_name[i]->stack.push_back(text->second);
      }
    }
  }
  if (without_stack > 0) {
    LOCKSTEP_LOG(kWarning) << "Profiler: " << without_stack << " events of the cycle are without their call "
                           << "stacks, for which is whose is not known; they are of " << example;
  }
}

}  // namespace lockstep::profiler::internal
