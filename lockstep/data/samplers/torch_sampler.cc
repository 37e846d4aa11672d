#include <algorithm>
#include <utility>

#include <ATen/core/Tensor.h>
#include <ATen/ops/tensor.h>
#include <c10/util/Exception.h>
#include <torch/serialize/archive.h>

#include <lockstep/data/samplers/torch_sampler.h>

namespace lockstep::data {

TorchSampler::TorchSampler(std::shared_ptr<lockstep::data::Sampler> sampler) : sampler_(std::move(sampler)) {
  TORCH_CHECK_VALUE(sampler_ != nullptr, "TorchSampler: there is no sampler (null)");
}

void TorchSampler::reset(std::optional<size_t> new_size) {
  TORCH_CHECK_VALUE(!new_size, "TorchSampler: cannot be reset to size ", *new_size,
                    "; make a new sampler of that size, and a TorchSampler over it");
  if (std::exchange(loaded_, false)) return;
  indices_ = sampler_->indices();
  index_ = 0;
}

std::optional<std::vector<size_t>> TorchSampler::next(size_t batch_size) {
  TORCH_CHECK_VALUE(batch_size > 0, "TorchSampler: batch_size is 0, it should be at least 1");
  loaded_ = false;
  if (!indices_) reset();
  const size_t count = std::min(batch_size, indices_->size() - index_);
  if (count == 0) return std::nullopt;
  const auto first = indices_->begin() + static_cast<std::ptrdiff_t>(index_);
  index_ += count;
  return std::vector<size_t>(first, first + static_cast<std::ptrdiff_t>(count));
}

void TorchSampler::save(torch::serialize::OutputArchive& archive) const {
  archive.write("index", at::tensor(static_cast<int64_t>(index_)), /*is_buffer=*/true);
  archive.write("indices", at::tensor(indices_.value_or(std::vector<int64_t>()), at::kLong),
                /*is_buffer=*/true);
  archive.write("started", at::tensor(static_cast<int64_t>(indices_.has_value())), /*is_buffer=*/true);
}

void TorchSampler::load(torch::serialize::InputArchive& archive) {
  at::Tensor index, indices, started;
  archive.read("index", index, /*is_buffer=*/true);
  archive.read("indices", indices, /*is_buffer=*/true);
  archive.read("started", started, /*is_buffer=*/true);
  indices = indices.contiguous();
  const int64_t place = index.item<int64_t>();
  TORCH_CHECK_VALUE(indices.scalar_type() == at::kLong && place >= 0 && place <= indices.numel(),
                    "TorchSampler: the archive holds place ", place, " in an epoch of ", indices.numel(),
                    " indices of type ", indices.scalar_type(), "; it was not saved by a TorchSampler");
  loaded_ = started.item<int64_t>() != 0;
  indices_.reset();
  if (loaded_) {
    const int64_t* first = indices.const_data_ptr<int64_t>();
    indices_.emplace(first, first + indices.numel());
  }
  index_ = static_cast<size_t>(place);
}

}  // namespace lockstep::data
