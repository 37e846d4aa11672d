#pragma once

/// Averages of weights: EMA, SWA, and what belongs to them.

#include <lockstep/optim/averaged_model.h>
#include <lockstep/optim/lr_scheduler/swalr.h>
#include <lockstep/optim/update_bn.h>
