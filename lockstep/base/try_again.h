#pragma once

namespace lockstep {

/// EX_TEMPFAIL: the exit status of workers that were stopped and ask for another start of the whole job (RobustLoop).
inline constexpr int kTryAgain = 75;

}  // namespace lockstep
