#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <lockstep/serialization/state_dict.h>

namespace lockstep::lr_scheduler {

/// The members of a scheduler that its state_dict() holds: one list that both writes and reads. It refers to
/// the members, so it lies in the same object, which is not moved.
class StateFields {
 public:
  /// `member`: bool, number, string, or a vector of numbers, whose length a state may not change.
  template <class T>
  void add(const std::string& key, T& member) {
    fields_.push_back({key, [&member] { return to_object(member); },
                       [&member, key](const StateDict& state, const std::string& owner) {
                         auto value = state_value<T>(state, key, owner);
                         check_length(value, member, key, owner);
                         return [&member, value = std::move(value)] { member = value; };
                       }});
  }

  void save(StateDict& state) const {
    for (const Field& field : fields_) state[field.key] = field.save();
  }
  /// Reads all of them, or, when one is missing or wrong, throws c10::ValueError and changes none. Other keys
  /// are left alone.
  void load(const StateDict& state, const std::string& owner) {
    std::vector<std::function<void()>> assignments;
    for (const Field& field : fields_) assignments.push_back(field.load(state, owner));
    for (const auto& assign : assignments) assign();
  }

 private:
  struct Field {
    std::string key;
    std::function<c10::IValue()> save;
    std::function<std::function<void()>(const StateDict&, const std::string& owner)> load;
  };

  template <class T>
  static void check_length(const T& /*value*/, const T& /*member*/, const std::string& /*key*/,
                           const std::string& /*owner*/) {}
  template <class T>
  static void check_length(const std::vector<T>& value, const std::vector<T>& member, const std::string& key,
                           const std::string& owner) {
    TORCH_CHECK_VALUE(value.size() == member.size(), owner, "::load_state_dict: the state has ", value.size(),
                      " values of '", key, "', this scheduler has ", member.size(),
                      "; construct it as the one that wrote the state");
  }

  std::vector<Field> fields_;
};

}  // namespace lockstep::lr_scheduler
