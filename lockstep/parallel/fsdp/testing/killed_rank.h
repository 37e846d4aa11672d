#pragma once

#include <gmock/gmock.h>
#include <string>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/base/failpoint.h>
#include <lockstep/parallel/fsdp/fully_sharded_data_parallel.h>
#include <lockstep/parallel/fsdp/testing/training.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/multi_rank.h>

namespace lockstep::fsdp_test {

/// A job of which one rank is killed.
struct KilledRank {
  int ranks = 2;
  int victim = 1;
  int hosts = 1;
  int last_operation = 1;  // of its third step and later ones, counted from 1
  int every = 1;           // of these operations one in so many
  bool gathers = false;    // whether the model has to
  std::string where = {};  // what its name is followed by, as a regular expression
};

/// Kills the victim at each operation, in a job of its own; the error of every other rank has to name it.
inline void expect_a_killed_rank_is_named(const KilledRank& job, FullyShardedDataParallelOptions options) {
  options.auto_wrap_policy = fsdp::size_based_auto_wrap_policy(20);
  for (int operation = 1; operation <= job.last_operation; operation += job.every) {
    const std::string death = "announce=kill(9)@" + std::to_string(operation);
    SCOPED_TRACE(death);
    testing::run_survivors(
        job.ranks, {job.victim},
        [&](int rank) {
          auto world = init_process_group();
          Net net = make_net(/*has_lstm=*/!options.device_id);
          FullyShardedDataParallel model(net, options);
          EXPECT_EQ(model.gathers(), job.gathers);
          const auto optimizer = model.make_optimizer<optim::AdamW>(optim::AdamWOptions(0.01));
          const auto text = testing::message_of<c10::Error>([&] {
            for (int step = 0;; ++step) {
              if (rank == job.victim && step == 2) failpoint::configure(death);
              optimizer->zero_grad();
              loss_of(model(batch(step, job.ranks, rank))).backward();
              optimizer->step();
            }
          });
          EXPECT_THAT(text, ::testing::ContainsRegex("rank " + std::to_string(job.victim) + " \\(pid [0-9]+" +
                                                     job.where + "\\) (was )?killed by signal 9"));
        },
        {.hosts = job.hosts});
  }
}

}  // namespace lockstep::fsdp_test
