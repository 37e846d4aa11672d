#include <cmath>
#include <vector>

#include <gtest/gtest.h>

#include <lockstep/train/early_stopping.h>

namespace lockstep::early_stopping_test {
namespace {

TEST(EarlyStopping, WaitsAsLongAsItIsPatient) {
  const auto stops_at = [](const EarlyStoppingOptions& options, const std::vector<double>& values) {
    EarlyStopping stopping(options);
    for (size_t i = 0; i < values.size(); ++i) {
      EarlyStopping resumed(options);
      resumed.load_state_dict(stopping.state_dict());
      const bool stopped = stopping.update(values[i]);
      EXPECT_EQ(resumed.update(values[i]), stopped);
      if (stopped) return static_cast<int>(i);
    }
    return -1;
  };
  EXPECT_EQ(stops_at({.patience = 2}, {3, 2, 2, 1, 1, 1, 0}), 5);
  EXPECT_EQ(stops_at({.min_delta = 0.5, .patience = 2}, {3, 2.6, 2.5, 2.4}), 2)
      << "by exactly min_delta is none";
  EXPECT_EQ(stops_at({.patience = 2, .mode = MetricMode::max}, {1, 2, 1, 3, 3, 3}), 5);
  EXPECT_EQ(stops_at({.patience = 1}, {NAN}), 0);
  EXPECT_EQ(stops_at({.patience = 3}, {1, 2, 2}), -1);
}

}  // namespace
}  // namespace lockstep::early_stopping_test
