#include <algorithm>
#include <cstring>
#include <numeric>
#include <sstream>

#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/from_blob.h>

#include <lockstep/collectives/testing/guarded_tensor.h>

namespace lockstep::testing {
namespace {

constexpr int kPattern = 0x5A;
constexpr int64_t kMostGuards = 70;  // elements: beyond a vector and a cache line

/// Strides of dense memory in which `order` names the dimensions from the outermost to the innermost.
std::vector<int64_t> dense_strides(at::IntArrayRef sizes, const std::vector<size_t>& order) {
  std::vector<int64_t> strides(sizes.size(), 1);
  int64_t stride = 1;
  for (auto dim = order.rbegin(); dim != order.rend(); ++dim) {
    strides[*dim] = stride;
    stride *= std::max<int64_t>(sizes[*dim], 1);
  }
  return strides;
}

/// Leaves memory between the elements (inner), or between the rows.
void open_gaps(std::vector<int64_t>& strides, bool inner) {
  for (size_t dim = 0; dim < strides.size(); ++dim) {
    if (inner) {
      strides[dim] *= 2;
    } else if (dim + 1 < strides.size()) {
      strides[dim] += strides[dim] / std::max<int64_t>(strides[strides.size() - 2], 1) * 3;
    }
  }
}

/// Strides of a layout drawn at random: contiguous, with gaps, transposed or channels last.
std::vector<int64_t> random_strides(at::IntArrayRef sizes, bool contiguous, Random& random) {
  std::vector<size_t> order(sizes.size());
  std::iota(order.begin(), order.end(), 0);
  const int64_t kind = contiguous ? 0 : draw(random, 0, 7);
  if (kind == 1) std::reverse(order.begin(), order.end());
  if (kind == 2 && sizes.size() == 4) order = {0, 2, 3, 1};
  auto strides = dense_strides(sizes, order);
  if (kind == 3 || kind == 4) open_gaps(strides, kind == 3);
  return strides;
}

/// Elements from the first to one past the last.
int64_t extent(at::IntArrayRef sizes, const std::vector<int64_t>& strides) {
  int64_t last = 0;
  for (size_t dim = 0; dim < strides.size(); ++dim) {
    if (sizes[dim] == 0) return 0;
    last += (sizes[dim] - 1) * strides[dim];
  }
  return last + 1;
}

}  // namespace

int64_t draw(Random& random, int64_t low, int64_t high) {
  return low + static_cast<int64_t>(random() % static_cast<uint64_t>(high - low + 1));
}

GuardedTensor::GuardedTensor(const Slot& slot, Random& local, const SharedMemory& shared, c10::Device device)
    : slot_(slot) {
  const at::Tensor& example = slot.initial.defined() ? slot.initial : slot.expected;
  if (example.is_sparse()) {
    tensor_ = slot.initial.clone().to(device);
    return;
  }
  const auto strides = random_strides(example.sizes(), slot.contiguous, local);
  const int64_t front = draw(local, 0, kMostGuards);
  const int64_t numel = front + extent(example.sizes(), strides) + draw(local, 1, kMostGuards);
  buffer_ = draw(local, 0, 1) == 0 ? shared(numel, example.scalar_type())
                                   : at::empty({numel}, example.scalar_type());
  // bool has no other values than these.
  const int pattern = example.scalar_type() == at::kBool ? 1 : kPattern;
  std::memset(buffer_.mutable_data_ptr(), pattern, buffer_.nbytes());
  tensor_ = at::as_strided(buffer_, example.sizes(), strides, front);
  if (slot.initial.defined()) tensor_.copy_(slot.initial);
  before_.resize(buffer_.nbytes());
  std::memcpy(before_.data(), buffer_.const_data_ptr(), before_.size());
  if (device.is_cpu()) return;
  buffer_ = buffer_.to(device);
  tensor_ = at::as_strided(buffer_, example.sizes(), strides, front);
}

at::Tensor GuardedTensor::host_buffer() const {
  return buffer_.cpu();
}

bool GuardedTensor::changed() const {
  if (!buffer_.defined()) {
    return !at::equal(slot_.initial._indices(), tensor_._indices().cpu()) ||
           !at::equal(slot_.initial._values(), tensor_._values().cpu());
  }
  return std::memcmp(before_.data(), host_buffer().const_data_ptr(), before_.size()) != 0;
}

at::Tensor GuardedTensor::elements_of(std::vector<std::byte>& bytes) const {
  const at::Tensor whole = at::from_blob(bytes.data(), buffer_.sizes(), buffer_.options().device(at::kCPU));
  return at::as_strided(whole, tensor_.sizes(), tensor_.strides(), tensor_.storage_offset());
}

std::string GuardedTensor::problem_after_failure() const {
  if (!slot_.expected.defined()) return changed() ? "was written, and must stay as it was" : "";
  if (!buffer_.defined()) return "";
  // A copy, for a peer that is late may still write results.
  const at::Tensor host = host_buffer();
  const auto* data = static_cast<const std::byte*>(host.const_data_ptr());
  std::vector<std::byte> now(data, data + before_.size());
  std::vector<std::byte> before = before_;
  elements_of(now).copy_(elements_of(before));
  return now == before ? "" : "has memory beside it that was written";
}

std::string GuardedTensor::problem() const {
  if (!buffer_.defined()) return sparse_problem();
  if (!slot_.expected.defined()) return changed() ? "was written, and must stay as it was" : "";
  // What must be there now: the expected elements, and around them what was there before.
  std::vector<std::byte> right = before_;
  elements_of(right).copy_(slot_.expected);
  const at::Tensor host = host_buffer();
  const auto* now = static_cast<const std::byte*>(host.const_data_ptr());
  if (std::memcmp(right.data(), now, right.size()) == 0) return "";

  size_t at = 0;
  while (right[at] == now[at]) ++at;
  std::ostringstream text;
  if (at::equal(tensor_.cpu(), slot_.expected)) {
    text << "has the right values (or zeros of the wrong sign), but memory beside them was written: ";
  } else {
    text << "has wrong values: ";
  }
  text << "the first wrong byte is " << at << " of " << right.size() << ", the tensor begins at "
       << tensor_.storage_offset() * tensor_.element_size() << ", strides " << tensor_.strides() << ", on "
       << tensor_.device();
  if (tensor_.numel() <= 8) text << "; is\n" << tensor_.cpu() << "\nexpected\n" << slot_.expected;
  return text.str();
}

std::string GuardedTensor::sparse_problem() const {
  if (!slot_.expected.defined()) return changed() ? "was written, and must stay as it was" : "";
  if (!tensor_.is_coalesced()) return "is not coalesced";
  if (!at::equal(tensor_.indices().cpu(), slot_.expected.indices())) return "has wrong indices";
  if (!at::equal(tensor_.values().cpu(), slot_.expected.values())) return "has wrong values";
  return "";
}

}  // namespace lockstep::testing
