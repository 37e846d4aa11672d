// Tables of actions by property: for all sizes, also those that PyTorch refuses. parity/ compares them with PyTorch's.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <utility>

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <lockstep/parallel/pipeline/schedule.h>
#include <lockstep/parallel/pipeline/schedule_times.h>
#include <lockstep/testing/message_of.h>

namespace lockstep::schedule_test {
namespace {

using testing::message_of;
using Type = ComputationType;
constexpr PipelineSchedule kAll[] = {PipelineSchedule::kGPipe, PipelineSchedule::k1F1B,
                                     PipelineSchedule::kInterleaved1F1B,
                                     PipelineSchedule::kInterleavedZeroBubble};

bool is_interleaved(PipelineSchedule schedule) {
  return schedule == PipelineSchedule::kInterleaved1F1B ||
         schedule == PipelineSchedule::kInterleavedZeroBubble;
}

/// Whether the schedule takes this number of micro-batches; PyTorch's rule.
bool takes(PipelineSchedule schedule, const PipelineShape& shape) {
  return !is_interleaved(schedule) ||
         shape.micro_batches % std::max<int64_t>(1, shape.micro_batches / shape.ranks) == 0;
}

template <class Check>
void for_all_shapes(PipelineSchedule schedule, const Check& check) {
  for (int64_t ranks = 1; ranks <= 6; ++ranks) {
    for (int64_t stages = 1; stages <= (is_interleaved(schedule) ? 3 : 1); ++stages) {
      for (int64_t micro_batches = 1; micro_batches <= 14; ++micro_batches) {
        const PipelineShape shape{ranks, stages, micro_batches};
        if (!takes(schedule, shape)) continue;
        SCOPED_TRACE(to_string(schedule) + ", ranks " + std::to_string(ranks) + ", stages " +
                     std::to_string(stages) + ", micro-batches " + std::to_string(micro_batches));
        check(shape, pipeline_table(schedule, shape));
      }
    }
  }
}

TEST(PipelineTable, HasEachActionOnceOnTheRankOfItsStage) {
  for (const auto schedule : kAll) {
    for_all_shapes(schedule, [&](const PipelineShape& shape, const PipelineTable& table) {
      ASSERT_EQ(static_cast<int64_t>(table.size()), shape.ranks);
      std::multiset<std::tuple<int64_t, Type, int64_t>> seen;
      for (size_t rank = 0; rank < table.size(); ++rank) {
        for (const auto& action : table[rank]) {
          if (!action) continue;
          EXPECT_EQ(rank_of_stage(action->stage, shape.ranks), static_cast<int64_t>(rank));
          seen.insert({action->stage, action->type, action->micro_batch});
        }
      }
      std::multiset<std::tuple<int64_t, Type, int64_t>> all;
      const bool splits = schedule == PipelineSchedule::kInterleavedZeroBubble;
      for (int64_t stage = 0; stage < shape.ranks * shape.stages_per_rank; ++stage) {
        for (int64_t m = 0; m < shape.micro_batches; ++m) {
          all.insert({stage, Type::kForward, m});
          all.insert({stage, splits ? Type::kBackwardInput : Type::kFullBackward, m});
          if (splits) all.insert({stage, Type::kBackwardWeight, m});
        }
      }
      EXPECT_EQ(seen, all);
    });
  }
}

TEST(PipelineTable, CanBeRunToItsEnd) {
  for (const auto schedule : kAll) {
    for_all_shapes(schedule, [&](const PipelineShape& shape, const PipelineTable& table) {
      const auto times = pipeline_times(table);
      // Each rank has this much to do, and the first micro-batch must go through all ranks before and after it.
      const auto work = static_cast<double>(3 * shape.stages_per_rank * shape.micro_batches);
      EXPECT_GE(times.end, work);
      EXPECT_NEAR(times.bubble, 1 - work / times.end, 1e-12);
    });
  }
}

TEST(PipelineTable, BackwardsOfAStageComeInTheOrderOfItsForwards) {  // gradients are added up in one order
  for (const auto schedule : kAll) {
    for_all_shapes(schedule, [&](const PipelineShape&, const PipelineTable& table) {
      for (const auto& row : table) {
        std::map<std::pair<int64_t, Type>, int64_t> next;
        for (const auto& action : row) {
          if (!action) continue;
          EXPECT_EQ(action->micro_batch, (next[{action->stage, action->type}]++));
        }
      }
    });
  }
}

TEST(PipelineTable, BoundsActivations) {
  for (const auto schedule : kAll) {
    for_all_shapes(schedule, [&](const PipelineShape& shape, const PipelineTable& table) {
      const auto [ranks, stages, micro_batches] = shape;
      const int64_t all = stages * micro_batches;
      const int64_t round = micro_batches / std::max<int64_t>(1, micro_batches / ranks);
      for (int64_t rank = 0; rank < ranks; ++rank) {
        const int64_t following = ranks - 1 - rank;
        int64_t bound = all;  // GPipe
        if (schedule == PipelineSchedule::k1F1B) bound = following + 1;
        if (schedule == PipelineSchedule::kInterleaved1F1B) bound = (stages - 1) * round + 2 * following + 1;
        // The weights' backward comes up to `rank` micro-batches late.
        if (schedule == PipelineSchedule::kInterleavedZeroBubble)
          bound = (stages - 1) * round + following + rank + 1;
        EXPECT_EQ(peak_activations(table, rank), std::min(bound, all)) << "rank " << rank;
      }
    });
  }
}

TEST(PipelineTable, HasTheBubbleOfTheory) {
  const std::pair<int64_t, int64_t> sizes[] = {{2, 4}, {4, 8}, {4, 3}, {3, 12}};
  for (const auto& [ranks, micro_batches] : sizes) {
    const auto bubble = [&](PipelineSchedule schedule, int64_t stages) {
      return pipeline_times(pipeline_table(schedule, {ranks, stages, micro_batches})).bubble;
    };
    const double lost = static_cast<double>(ranks - 1);
    EXPECT_NEAR(bubble(PipelineSchedule::kGPipe, 1), lost / (static_cast<double>(micro_batches) + lost),
                1e-12);
    EXPECT_NEAR(bubble(PipelineSchedule::k1F1B, 1), lost / (static_cast<double>(micro_batches) + lost),
                1e-12);
    if (micro_batches < ranks) continue;
    EXPECT_LT(bubble(PipelineSchedule::kInterleaved1F1B, 2), bubble(PipelineSchedule::k1F1B, 1));
    EXPECT_LT(bubble(PipelineSchedule::kInterleavedZeroBubble, 1), bubble(PipelineSchedule::k1F1B, 1));
  }
  EXPECT_EQ(pipeline_times(pipeline_table(PipelineSchedule::kGPipe, {1, 1, 5})).bubble, 0);
}

TEST(PipelineTable, RefusesShapesThatItHasNoTableFor) {
  const auto refused = [](PipelineSchedule schedule, const PipelineShape& shape) {
    return message_of<c10::ValueError>([&] { pipeline_table(schedule, shape); });
  };
  EXPECT_NE(refused(PipelineSchedule::kGPipe, {0, 1, 1}).find("0 ranks"), std::string::npos);
  EXPECT_NE(refused(PipelineSchedule::k1F1B, {2, 1, 0}).find("0 micro-batches"), std::string::npos);
  EXPECT_NE(refused(PipelineSchedule::k1F1B, {2, 2, 4}).find("Interleaved1F1B"), std::string::npos);
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  for (const PipelineShape& shape : {PipelineShape{3, 1, kMost}, {kMost, 1, 3}, {3, kMost, 3}}) {
    const auto message = refused(PipelineSchedule::kInterleaved1F1B, shape);
    EXPECT_NE(message.find("at most"), std::string::npos) << message;
  }
  for (const PipelineShape& shape : {PipelineShape{3, 1, 1 << 23}, {1 << 14, 1, 8}, {1 << 24, 1 << 24, 1}}) {
    const auto message = refused(PipelineSchedule::kInterleaved1F1B, shape);
    EXPECT_NE(message.find("too large for a table"), std::string::npos) << message;
  }
  const auto message = refused(PipelineSchedule::kInterleaved1F1B, {4, 2, 9});
  EXPECT_NE(message.find("9 micro-batches"), std::string::npos) << message;
  EXPECT_NE(message.find("give 8 or 10"), std::string::npos) << message;
}

TEST(PipelineTimes, NameWhatCanNotRun) {
  PipelineTable table(2);
  table[0] = {PipelineAction{0, Type::kFullBackward, 0}, PipelineAction{0, Type::kForward, 0}};
  table[1] = {PipelineAction{1, Type::kForward, 0}, PipelineAction{1, Type::kFullBackward, 0}};
  const auto message = message_of<c10::ValueError>([&] { pipeline_times(table); });
  EXPECT_NE(message.find("rank 0 comes to 0B0, which needs 0F0"), std::string::npos) << message;
}

TEST(PipelineSchedule, HasTorchsNames) {
  for (const auto schedule : kAll) EXPECT_EQ(parse_pipeline_schedule(to_string(schedule)), schedule);
  EXPECT_EQ(parse_pipeline_schedule("interleaved1f1b"), PipelineSchedule::kInterleaved1F1B);
  const auto message = message_of<c10::ValueError>([] { parse_pipeline_schedule("2F2B"); });
  EXPECT_NE(message.find("'2F2B'; there are GPipe, 1F1B, Interleaved1F1B, InterleavedZeroBubble"),
            std::string::npos);
}

}  // namespace
}  // namespace lockstep::schedule_test
