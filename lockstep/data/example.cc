#include <ATen/ops/stack.h>

#include <lockstep/data/example.h>

namespace lockstep::data {

at::Tensor DefaultCollate::operator()(const std::vector<at::Tensor>& samples) const {
  return at::stack(samples);
}

Example DefaultCollate::operator()(const std::vector<Example>& samples) const {
  std::vector<at::Tensor> data;
  std::vector<at::Tensor> targets;
  data.reserve(samples.size());
  targets.reserve(samples.size());
  for (const Example& sample : samples) {
    data.push_back(sample.data);
    targets.push_back(sample.target);
  }
  return {at::stack(data), at::stack(targets)};
}

}  // namespace lockstep::data
