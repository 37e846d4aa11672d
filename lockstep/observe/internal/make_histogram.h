#pragma once

#include <optional>

#include <lockstep/observe/internal/summary_messages.h>
#include <lockstep/observe/summary_writer.h>

namespace lockstep::observe::internal {

/// torch/utils/tensorboard/summary.py's make_histogram(): numpy.histogram()'s counts, without the empty bins
/// at both ends. Throws as SummaryWriter::add_histogram() says.
Histogram make_histogram(const at::Tensor& values, const SummaryWriter::Bins& bins,
                         std::optional<int64_t> max_bins);

}  // namespace lockstep::observe::internal
