"""Drives a sweep: asks Optuna, starts jobs, reports to it what they report, and tells it how they end."""

import signal

from optuna.trial import TrialState

from lockstep_sweep import keeper, mlflow_runs, show, study
from lockstep_sweep.job import Job
from lockstep_sweep.slots import Slots

TICK = 0.1  # seconds between looks at what running jobs have written
TWICE = 0.05  # within which the first signal, sent again, counts for one, as with lockstep run: timeout(1) sends its twice


class Driver:
    """One process; several may drive a study. Use run() once."""

    def __init__(self, options, launcher):
        self._options, self._launcher = options, launcher
        self._slots = Slots(options, launcher)
        self._runs = mlflow_runs.MlflowRuns(options.mlflow)
        self._trials = study.begin_or_join(options)
        self._progress = show.Progress(self._trials.study, options)
        self._running, self._failures, self._signals, self._all_begun = [], 0, [], False

    def run(self):
        """Until all trials have begun and this driver's have ended, or a signal or failures end it. Returns the exit status."""
        ending = {number for number in keeper.ENDING if signal.getsignal(number) != signal.SIG_IGN}  # under nohup, say
        signal.pthread_sigmask(signal.SIG_BLOCK, {*ending, signal.SIGCHLD})
        try:
            self._begin_trials()
            while self._running or self._may_begin():
                self._take_signal(ending)
                self._follow_jobs()
                self._begin_trials()
                self._progress.show(len(self._running))
        except (KeyboardInterrupt, SystemExit) as error:  # while it waited for the study's lock, which another process keeps
            self._leave(ending, signal.SIGINT if isinstance(error, KeyboardInterrupt) else error.code - 128)
            raise
        if self._failures >= self._options.max_failures:
            self._progress.say(f"lockstep sweep: trials that failed in a row: {self._failures} (--max-failures)")
        self._runs.finish(self._trials.study)
        succeeded = self._progress.finish()
        if self._signals:
            return 128 + self._signals[0]
        return 0 if succeeded and self._all_begun else 1

    def _take_signal(self, ending):
        received = signal.sigtimedwait({*ending, signal.SIGCHLD}, TICK)
        if received is not None and received.si_signo in ending:
            self._note_signal(received.si_signo)

    def _note_signal(self, number):
        if self._signals and number == signal.SIGHUP:
            return  # a closed terminal: its shell and the kernel send one each
        self._signals.append(number)
        self._progress.say_once("lockstep sweep: ends its jobs; a second Ctrl-C or signal kills them")
        if len(self._signals) == 1:
            signal.sigtimedwait({number}, TWICE)

    def _leave(self, ending, number):
        """Ends its jobs without a word to the study. Drivers that find their trials left run them again."""
        self._note_signal(number)
        while self._running:
            self._stop_jobs()
            self._running = [job for job in self._running if not job.ended()]
            self._take_signal(ending)

    def _stop_jobs(self):
        for job in self._running:
            if self._signals:
                job.stop()
            if len(self._signals) > 1:
                job.kill()

    def _may_begin(self):
        return (not self._all_begun and not self._signals and self._failures < self._options.max_failures
                and self._slots.at_once > 0)

    def _begin_trials(self):
        for name, why in self._slots.lost().items():
            self._progress.say_once(f"lockstep sweep: {name} is lost, and gets no more trials: {why}")
        while self._may_begin() and len(self._running) < self._slots.at_once:
            place = self._slots.take()
            if place is None:
                self._all_begun = self._trials.all_begun()
                self._progress.say_once("lockstep sweep: waits for cores or cards that another sweep computes on")
                return
            trial = self._trials.begin()
            if trial is None:
                for share in place:
                    share.release()
                self._all_begun = True
                return
            self._running.append(Job(self._options, self._launcher, trial, place, self._runs.begin(trial)))
            self._progress.begun(trial)

    def _follow_jobs(self):
        self._stop_jobs()
        for job in list(self._running):
            ended = job.ended()
            self._report(job, ended)
            if ended:
                self._running.remove(job)
                self._end(job)

    def _report(self, job, ended):
        """Also after its end: whether it is pruned does not depend on how fast this driver reads."""
        for step, value in job.new_reports(ended):
            if job.pruned or step in job.reported:
                continue
            job.reported[step] = value
            job.trial.report(value, step)
            self._runs.report(job.trial, self._options.metric, value, step)
            if job.trial.should_prune():
                job.pruned = True
                if not ended:
                    job.stop()

    def _end(self, job):
        self._all_begun = False  # this one may be run again, and so may one of a driver that has ended
        result, value, note, attributes = "complete", job.value(), "", {"metrics": job.metrics}
        failure = job.failure()
        retries = job.trial.user_attrs.get("retries", 0)
        if job.pruned:
            self._failures = 0
            result, note = "pruned", f"pruned at step {max(job.reported)}"
            self._trials.end(job.trial, TrialState.PRUNED, **attributes)
        elif job.stopped and not job.succeeded():  # lockstep run ends with 0 only where the signal came too late
            result, value, note = "again", None, "ended with the sweep; resume runs it again"
            self._trials.end_and_run_again(job.trial, retries, **attributes)
        elif failure is None:
            self._failures = 0
            self._trials.end(job.trial, TrialState.COMPLETE, value, **attributes)
        elif job.out_of_memory():
            # A result, which samplers learn from: without reports the worst, and never better than a complete one.
            self._failures = 0
            result, value, note = "pruned", None, "out of memory"
            self._trials.end(job.trial, TrialState.PRUNED, out_of_memory=True, **attributes)
        elif retries < self._options.retries:
            result, value, note = "again", None, f"runs again: {failure}"
            self._trials.end_and_run_again(job.trial, retries + 1, failure=failure, **attributes)
        else:
            self._failures += 1
            result, value, note = "failed", None, f"failed: {failure}"
            self._trials.end(job.trial, TrialState.FAIL, failure=failure, **attributes)
        self._runs.end(job.trial, result)
        self._progress.ended(job.trial, result, value, note)
