// Answers schedule_parity_test.py: for each line "SCHEDULE RANKS STAGES_PER_RANK MICRO_BATCHES" of its input the table, a line
// a rank, each action as torch writes it and "-" for an idle step; and an empty line.
#include <iostream>
#include <string>

#include <c10/util/Exception.h>

#include <lockstep/parallel/pipeline/schedule.h>
#include <lockstep/testing/driver.h>

LOCKSTEP_DRIVER(schedule_parity_driver) {
  std::string name;
  lockstep::PipelineShape shape;
  try {
    while (std::cin >> name >> shape.ranks >> shape.stages_per_rank >> shape.micro_batches) {
      for (const auto& row : lockstep::pipeline_table(lockstep::parse_pipeline_schedule(name), shape)) {
        for (const auto& action : row) std::cout << (action ? to_string(*action) : "-") << ' ';
        std::cout << '\n';
      }
      std::cout << '\n';
    }
  } catch (const c10::ValueError& error) {
    std::cerr << error.what_without_backtrace() << '\n';
    return 1;
  }
  return 0;
}
