"""The study: where it is kept, and the trials as this driver and others begin and end them."""

import contextlib
import json
import os
import pathlib
import re
import sys
import time
import warnings

import optuna
import sqlalchemy
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from lockstep_sweep import host, keeper
from lockstep_sweep.options import SQLITE, Misuse, begun, contains, keep, scalar

optuna.logging.set_verbosity(optuna.logging.ERROR)
warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
SAMPLERS = {"tpe": "TPESampler", "random": "RandomSampler"}
PRUNERS = {"none": "NopPruner", "median": "MedianPruner", "hyperband": "HyperbandPruner", "halving": "SuccessiveHalvingPruner"}
MOMENT = 60  # seconds, in which a driver that does not share this one's lock has surely said that a trial is its own


class _Journal(JournalFileBackend):
    """Without fsync, which Optuna does for every word, and which takes up to 200 ms where others write: the kernel keeps what
    a killed driver has written, and when the host crashes, its running trials are lost anyway."""

    def append_logs(self, logs):
        with self._lock, open(self._file_path, "a+b") as file:
            _cut_half_line(file)
            file.write("".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs).encode())


def _cut_half_line(file):
    """What a full disk, or a driver killed while it wrote, has left at a journal's end; Optuna reads nothing beyond it."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - 1))
    if file.read() not in (b"", b"\n"):
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)


class Place:
    """Where a study is kept, and the lock between its drivers: beside a journal's or SQLite's file, whatever their TMPDIR, user
    or container; of a database on a server it holds for those of this user on this host."""

    def __init__(self, options):
        self.storage = options.storage or str(options.folder / "study.journal")
        self.name = options.name or options.folder.name
        self._is_journal = "://" not in self.storage
        sqlite = SQLITE.match(self.storage)
        file = self.storage if self._is_journal else sqlite and sqlite[2]
        self.locks_all = bool(file)
        self.lock = keeper.Lock(f"{file}.drivers" if file else keeper.private_folder() / "sweeps")

    def open(self):
        if self._is_journal:
            # Optuna's own lock is a file that a killed driver leaves behind; it is then waited for, for 30 s.
            return optuna.storages.JournalStorage(_Journal(self.storage, lock_obj=self.lock))
        # SQLite's file may be locked for a while; a server may have ended an idle connection, or been started again.
        how = {"connect_args": {"timeout": 60}} if SQLITE.match(self.storage) else {"pool_pre_ping": True}
        for left in (2, 1, 0):
            try:
                return optuna.storages.RDBStorage(self.storage, engine_kwargs=how)
            except sqlalchemy.exc.DBAPIError as error:  # also where a driver on another host makes the same tables just now
                if left == 0:
                    raise Misuse(f"--storage {self}: {error.orig}") from error
                time.sleep(1)
            except Exception as error:  # of any database's module
                raise Misuse(f"--storage {self}: {error.__cause__ or error}") from error

    def __str__(self):
        return re.sub(r"(://[^:/@]*):[^/@]*@", r"\1:***@", self.storage)  # without its password


def load(place):
    """The study, or None where there is none."""
    if "://" not in place.storage and not os.path.exists(place.storage):
        return None
    try:
        return optuna.load_study(study_name=place.name, storage=place.open())
    except KeyError:
        return None


def begin_or_join(options):
    """The trials of the study that the options ask for; it is made, or is one that has been asked for the same."""
    sampler = _make_sampler(options)
    pruner = _made(optuna.pruners, PRUNERS, options.pruner, "--pruner")
    place = Place(options)
    wanted = {"parameters": dict(options.param), "metric": options.metric, "direction": options.direction,
              "program": options.program}  # what a study may not change its mind about
    options.folder.mkdir(parents=True, exist_ok=True)
    with place.lock:
        study, is_first = load(place), False
        if study is None:
            if any(options.folder.glob("trials/*")):
                raise Misuse(f"{options.folder}/trials holds the trials of another study, whose files trials of this one would "
                             "find; take another --folder")
            keep(options)  # before there is a study: `resume` goes on with one that is cut off here
            study, is_first = _create(place, options.direction)
        if not is_first:
            sampler.reseed_rng()  # the seed's numbers are the first driver's
        known = _asked(study, wait=not is_first and not place.locks_all)
        if known not in (None, wanted):
            other = ", ".join(key for key in wanted if wanted[key] != known[key])
            raise Misuse(f"the sweep '{place.name}', which is in {place} already, differs in {other}; take another --folder or --name")
        keep(options)
        if known is None:
            _prepare(study, options)
            study.set_user_attr("asked", wanted)
    study.sampler, study.pruner = sampler, pruner
    return Trials(study, place, options)


def _create(place, direction):
    """The study, and whether this driver has made it. One on another host, which has another lock, may just have done so."""
    try:
        return optuna.create_study(study_name=place.name, storage=place.open(), direction=direction), True
    except optuna.exceptions.DuplicatedStudyError:
        return load(place), False


def _asked(study, wait):
    """What the study was begun for; None where its first driver ended before it said so. With `wait` it may yet say so."""
    deadline = time.monotonic() + (MOMENT if wait else 0)
    while (asked := study.user_attrs.get("asked")) is None and time.monotonic() < deadline:
        time.sleep(0.1)
    return asked


def _prepare(study, options):
    """Adds the trials that are known or wanted before the first. One that is cut off is called again."""
    done = [trial.user_attrs.get("origin") for trial in study.get_trials(deepcopy=False)]
    for older in options.warm_start:
        _, there = begun(pathlib.Path(older).absolute())
        source = load(Place(there))
        if source is None:
            raise Misuse(f"--warm-start {older}: its study is gone")
        if (there.metric, there.direction) != (options.metric, options.direction):
            raise Misuse(f"--warm-start {older}: its trials are judged by another metric: {there.direction} {there.metric}")
        skipped = 0
        for trial in source.get_trials(states=(TrialState.COMPLETE, TrialState.PRUNED)):
            origin = f"{there.folder} {trial.number}"
            if not _fits(trial, options.space):
                skipped += 1
            elif origin not in done:
                trial.user_attrs, trial.system_attrs = {"origin": origin}, {}
                study.add_trial(trial)
        if skipped:
            print(f"lockstep sweep: --warm-start {older}: {skipped} trials are left out, for their parameters have other names, "
                  "forms or ranges", file=sys.stderr)
    for index, values in enumerate(options.enqueue):
        if f"enqueued {index}" not in done:
            study.enqueue_trial(values, user_attrs={"origin": f"enqueued {index}"})


def _fits(trial, space):
    """Whether a sweep of that space could have asked for a trial's parameters; Optuna refuses a study of mixed forms."""
    if set(trial.params) != set(space):
        return False
    try:
        for name, form in space.items():
            optuna.distributions.check_distribution_compatibility(trial.distributions[name], form)
    except ValueError:
        return False
    return all(contains(form, trial.params[name]) for name, form in space.items())


# ---- How it is searched


class _Grid(optuna.samplers.GridSampler):
    def after_trial(self, study, trial, state, values):
        """Does not stop study.optimize(), which does not run."""


def _make_sampler(options):
    if options.grid:
        return _Grid(options.grid, seed=options.seed)
    def make():
        return _made(optuna.samplers, SAMPLERS, options.sampler, "--sampler", seed=options.seed)
    if options.sampler.partition(":")[0] not in SAMPLERS:
        _try(make(), options)
    return make()


def _try(sampler, options):
    """Some say only when they are asked which package they lack, or which parameters they can't do."""
    study = optuna.create_study(sampler=sampler, direction=options.direction)
    try:
        for value in (0.0, 1.0):
            study.tell(study.ask(options.space), value)
    except Exception as error:  # of any sampler's
        raise Misuse(f"--sampler {options.sampler}: {error}") from error


def _made(module, kinds, text, option, **given):
    """The object that "median:n_warmup_steps=1" stands for."""
    kind, _, rest = text.partition(":")
    pairs = [entry.partition("=") for entry in rest.split(",") if entry]
    maker = getattr(module, kinds.get(kind, kind), None)
    if maker is None:
        known = [*kinds, "grid"] if kinds is SAMPLERS else kinds
        raise Misuse(f"{option} '{kind}' is none of {', '.join(known)}, and no class of {module.__name__}")
    try:
        return maker(**given, **{name: scalar(value) for name, _, value in pairs})
    except (TypeError, ValueError, ImportError) as error:
        raise Misuse(f"{option} {text}: {error}") from error


# ---- The trials


def own_trials(study):
    """Those that count: begun by a driver, and not run again as another one."""
    trials = study.get_trials(deepcopy=False)
    replaced = {trial.user_attrs.get("retry_of") for trial in trials}
    return [trial for trial in trials if "driver" in trial.user_attrs and trial.number not in replaced]


class Trials:
    """Begins and ends the trials of a study, so that none is lost or doubled whenever a driver is killed.

    - A trial is begun, and marked with its driver, under the lock.
    - One that is to be run again, by policy or because its driver has ended, gets a successor with its parameters and the
      mark "retry_of", and is then told as failed. Who finds it between the two tells it as failed; so it has one successor.
    - Each host cares for the trials of its own drivers.
    """

    def __init__(self, study, place, options):
        self.study, self._lock, self._space, self._most = study, place.lock, options.space, options.trials
        self._locks_all, self._undriven = place.locks_all, {}  # {trial's number: when this driver first saw it so}
        self._me = host.this_driver()

    def begin(self):
        """The next one with its parameters, or None where all are begun."""
        with self._lock:
            for trial in self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
                if self._is_left(trial):
                    self._run_again(trial.number, trial.user_attrs.get("retries", 0))
            if self.all_begun():
                return None
            trial = self.study.ask(self._space)
            trial.set_user_attr("driver", self._me)
            return trial

    def all_begun(self):
        return len(own_trials(self.study)) >= self._most

    def end(self, trial, state, value=None, **attributes):
        """Tells how it ended."""
        for name, content in attributes.items():
            trial.set_user_attr(name, content)
        self.study.tell(trial, value, state)

    def end_and_run_again(self, trial, retries, **attributes):
        with self._lock, contextlib.suppress(optuna.exceptions.UpdateFinishedTrialError):
            for name, content in attributes.items():
                trial.set_user_attr(name, content)
            self._run_again(trial.number, retries)

    def _run_again(self, number, retries):
        trials = self.study.get_trials(deepcopy=False)
        if trials[number].state != TrialState.RUNNING:
            return  # another driver has told how it ended
        if all(trial.user_attrs.get("retry_of") != number for trial in trials):
            marks = trials[number].system_attrs
            # A trial cut off in ask() lacks parameters; what it has of a grid's point gives its successor the rest.
            kept = {name: marks[name] for name in ("search_space", "grid_id") if name in marks}
            values = {**marks.get("fixed_params", {}), **trials[number].params}
            if values:
                kept["fixed_params"] = values  # even {} would keep a grid's sampler from choosing a point
            self.study.add_trial(optuna.trial.create_trial(
                state=TrialState.WAITING, system_attrs=kept, user_attrs={"retry_of": number, "retries": retries}))
        self.study.tell(number, state=TrialState.FAIL)

    def _is_left(self, trial):
        """Whether its driver has ended."""
        driver = trial.user_attrs.get("driver")
        if driver is not None:
            return host.has_ended(driver)
        # Its driver ended before it said so, or has another lock and is just about to say so. Hosts' clocks differ.
        now = time.monotonic()
        return self._locks_all or now - self._undriven.setdefault(trial.number, now) > MOMENT
