#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace lockstep::profiler::internal {

struct Span {
  int64_t begin = 0;
  int64_t end = 0;
  bool operator==(const Span&) const = default;
};

/// A set of moments, as spans that are sorted and don't touch. A value.
class Cover {
 public:
  Cover() = default;
  /// It covers the spans, which may be in any order and overlap, and gaps of less than `join` between two of them.
  explicit Cover(std::vector<Span> spans, int64_t join = 0) {
    std::sort(spans.begin(), spans.end(), [](const Span& a, const Span& b) { return a.begin < b.begin; });
    for (const Span& span : spans) {
      if (span.begin >= span.end) continue;
      if (!spans_.empty() && span.begin <= spans_.back().end + join) {
        spans_.back().end = std::max(spans_.back().end, span.end);
      } else {
        spans_.push_back(span);
      }
    }
  }

  const std::vector<Span>& spans() const { return spans_; }
  int64_t length() const {
    int64_t sum = 0;
    for (const Span& span : spans_) sum += span.end - span.begin;
    return sum;
  }
  /// What of it lies in a span.
  Cover within(const Span& bounds) const {
    Cover part;
    auto span = std::partition_point(spans_.begin(), spans_.end(),
                                     [&](const Span& one) { return one.end <= bounds.begin; });
    for (; span != spans_.end() && span->begin < bounds.end; ++span) {
      part.spans_.push_back({std::max(span->begin, bounds.begin), std::min(span->end, bounds.end)});
    }
    return part;
  }

  friend Cover operator&(const Cover& a, const Cover& b) {
    Cover both;
    for (size_t i = 0, j = 0; i < a.spans_.size() && j < b.spans_.size();) {
      const Span span{std::max(a.spans_[i].begin, b.spans_[j].begin),
                      std::min(a.spans_[i].end, b.spans_[j].end)};
      if (span.begin < span.end) both.spans_.push_back(span);
      a.spans_[i].end < b.spans_[j].end ? ++i : ++j;
    }
    return both;
  }
  friend Cover operator-(const Cover& a, const Cover& b) {
    Cover rest;
    size_t j = 0;
    for (Span span : a.spans_) {
      while (j < b.spans_.size() && b.spans_[j].end <= span.begin) ++j;
      for (size_t k = j; k < b.spans_.size() && b.spans_[k].begin < span.end; ++k) {
        if (span.begin < b.spans_[k].begin) rest.spans_.push_back({span.begin, b.spans_[k].begin});
        span.begin = std::max(span.begin, b.spans_[k].end);
      }
      if (span.begin < span.end) rest.spans_.push_back(span);
    }
    return rest;
  }
  friend Cover operator|(const Cover& a, const Cover& b) {
    std::vector<Span> all = a.spans_;
    all.insert(all.end(), b.spans_.begin(), b.spans_.end());
    return Cover(std::move(all));
  }

 private:
  std::vector<Span> spans_;
};

}  // namespace lockstep::profiler::internal
