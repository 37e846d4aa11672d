#pragma once

#include <cstddef>
#include <string_view>
#include <vector>

#include <ATen/core/ivalue.h>

#include <lockstep/serialization/pickle/machine.h>

namespace lockstep::pickle {

/// Reads the object of a pickle, tensors included. Where storages come from is up to the subclass.
class ObjectReader : public Machine {
 public:
  ObjectReader(std::string_view bytes, std::string_view what)
      : Machine(bytes, what, 0), encoded_budget_(bytes.size()) {}

  /// The object. Called once.
  c10::IValue read();

 protected:
  /// Both push a Slot of kind kStorage, or fail.
  void load_persistent(const Slot& id) override;
  virtual void load_from_bytes(const std::vector<Slot>& arguments);

 private:
  void call(Global function, const std::vector<Slot>& arguments) override;
  void push_complex(const std::vector<Slot>& arguments);
  void push_device(const std::vector<Slot>& arguments);
  void push_encoded(const std::vector<Slot>& arguments);
  void push_with_attributes(const std::vector<Slot>& arguments);
  void push_parameter(const std::vector<Slot>& arguments, size_t count);
  void push_tensor(const std::vector<Slot>& arguments, size_t count);
  void check_properties(const std::vector<Slot>& arguments);
  void set_metadata(const at::Tensor& tensor, const c10::IValue& metadata);
  at::ScalarType new_type(const Slot& slot) const;
  std::vector<int64_t> to_integers(const Slot& slot);

  size_t encoded_budget_;
};

}  // namespace lockstep::pickle
