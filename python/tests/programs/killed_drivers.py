"""A driver of a sweep, without its jobs, that is killed at each of its writes into the study, and what the next one makes of it.

usage: killed_drivers.py FOLDER (journal | sqlite | grid) (before | after)

grid is a journal's study whose sampler is a grid of four points.

Prints a line of JSON for each: the trials as [number, state, parameters, user attributes].
"""

import json
import os
import pathlib
import signal
import sys

from lockstep_sweep import options, study
from optuna.storages import JournalStorage, _CachedStorage
from optuna.trial import TrialState

WRITES = ("create_new_trial", "set_trial_param", "set_trial_state_values", "set_trial_user_attr", "set_trial_system_attr",
          "set_study_user_attr", "create_new_study")  # fmt: skip
SEARCHES = {
    "tpe": ["--param", "lr=log:1e-5:1", "--param", "batch=choice:32,64", "--enqueue", "lr=0.5"],
    "grid": ["--param", "lr=choice:0.5,0.6,0.7,0.8", "--param", "batch=choice:32", "--sampler", "grid"],
}


def kill_at(write, moment):
    """This process ends before or after its write of that number."""
    left = [write]

    def counted(function):
        def call(*words, **named):
            left[0] -= 1
            if left[0] == 0 and moment == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            answer = function(*words, **named)
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return answer
        return call

    for storage in (JournalStorage, _CachedStorage):  # the latter is what a study has of a database
        for name in WRITES:
            setattr(storage, name, counted(getattr(storage, name)))


def asked(folder, kind):
    place = ["--storage", f"sqlite:///{folder}/study.db"] if kind == "sqlite" else []
    search = SEARCHES.get(kind, SEARCHES["tpe"])
    return options.parse([*search, "--metric", "loss", "--trials", "4", "--retries", "1", "--folder", str(folder), *place, "--",
                          "true"])


def drive(folder, kind):
    """One driver's life: the second trial fails, and is run again by policy."""
    trials = study.begin_or_join(asked(folder, kind))
    while (trial := trials.begin()) is not None:
        if trial.number == 1 and not trial.user_attrs.get("retries"):
            trials.end_and_run_again(trial, 1, failure="as planned")
        else:
            trials.end(trial, TrialState.COMPLETE, trial.params["lr"])


def in_a_process(function, *words):
    """Whether it came to its end."""
    pid = os.fork()
    if pid == 0:
        function(*words)
        os._exit(0)
    return os.waitpid(pid, 0)[1] == 0


def killed_life(folder, kind, write, moment):
    kill_at(write, moment)
    drive(folder, kind)


def main():
    base, kind, moment = pathlib.Path(sys.argv[1]), *sys.argv[2:]
    write, whole = 0, False
    while not whole:
        write += 1
        folder = base / str(write)
        whole = in_a_process(killed_life, folder, kind, write, moment)
        if not in_a_process(drive, folder, kind):
            sys.exit(f"the driver after one that was killed {moment} its write {write} did not end well")
        trials = study.load(study.Place(asked(folder, kind))).trials
        print(json.dumps([[trial.number, trial.state.name, trial.params, trial.user_attrs] for trial in trials]))


if __name__ == "__main__":
    main()
