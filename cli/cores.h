#pragma once

#include <string>
#include <vector>

namespace lockstep::cli {

/// --cpu-list: lets this process, and all that it starts, compute on these cores alone ("0-3,8"). Throws c10::ValueError that names
/// the option.
void stay_on_cores(const std::string& list);

/// --numa-binding, by torchrun's names: the cores of each local rank, near the card of that index. Throws c10::ValueError that names
/// the option where there is no driver or card, or no core that may be used.
std::vector<std::vector<int>> cores_near_cards(const std::string& binding, int nprocs);

/// The names that cores_near_cards() takes.
std::vector<std::string> numa_bindings();

}  // namespace lockstep::cli
