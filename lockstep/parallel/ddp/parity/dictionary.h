#pragma once

#include <string>
#include <vector>

#include <torch/torch.h>

namespace parity {

/// A dictionary with text for keys, as Python pickled it: it knows no types of its values, so the reader says
/// them. Throws c10::Error, or std::out_of_range, for a key that is not there.
class Dictionary {
 public:
  explicit Dictionary(const c10::IValue& value) : entries_(value.toGenericDict()) {}

  bool has(const std::string& key) const { return entries_.contains(c10::IValue(key)); }
  c10::IValue at(const std::string& key) const { return entries_.at(c10::IValue(key)); }

  std::string text(const std::string& key) const { return at(key).toStringRef(); }
  bool flag(const std::string& key) const { return at(key).toBool(); }
  int64_t integer(const std::string& key) const { return at(key).toInt(); }
  double number(const std::string& key) const { return at(key).toScalar().toDouble(); }
  at::Tensor tensor(const std::string& key) const { return at(key).toTensor(); }
  Dictionary dictionary(const std::string& key) const { return Dictionary(at(key)); }
  std::vector<std::string> texts(const std::string& key) const {
    std::vector<std::string> answer;
    for (const c10::IValue& value : at(key).toListRef()) answer.push_back(value.toStringRef());
    return answer;
  }
  std::vector<double> numbers(const std::string& key) const {
    std::vector<double> answer;
    for (const c10::IValue& value : at(key).toListRef()) answer.push_back(value.toScalar().toDouble());
    return answer;
  }

 private:
  c10::impl::GenericDict entries_;
};

}  // namespace parity
