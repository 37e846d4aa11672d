"""Optuna's own loop: starts a program for each trial, as the suite `sweep` does under `lockstep sweep`, and nothing else.

usage: python_sweep.py JOURNAL TRIALS PROGRAM…

Goes on with the study in that file. The program gets two parameters as its last words, and prints "loss: VALUE".
"""

import subprocess
import sys

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

optuna.logging.set_verbosity(optuna.logging.ERROR)


def objective(trial):
    parameters = trial.suggest_float("lr", 1e-5, 1, log=True), trial.suggest_int("hidden", 16, 512, log=True)
    done = subprocess.run([*sys.argv[3:], *map(str, parameters)], stdout=subprocess.PIPE, text=True, check=True)
    return float(done.stdout.rpartition("loss: ")[2])


study = optuna.create_study(study_name="sweep", storage=JournalStorage(JournalFileBackend(sys.argv[1])), load_if_exists=True,
                            sampler=optuna.samplers.TPESampler(seed=1))
study.optimize(objective, n_trials=int(sys.argv[2]))
