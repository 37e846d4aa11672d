#pragma once

/// All learning-rate schedulers.

#include <lockstep/optim/lr_scheduler/composed.h>
#include <lockstep/optim/lr_scheduler/cosine.h>
#include <lockstep/optim/lr_scheduler/cyclic.h>
#include <lockstep/optim/lr_scheduler/decay.h>
#include <lockstep/optim/lr_scheduler/reduce_lr_on_plateau.h>
#include <lockstep/optim/lr_scheduler/scheduler.h>
