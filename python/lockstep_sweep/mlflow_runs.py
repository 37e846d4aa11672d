"""A sweep's trials as runs of an MLflow server."""

import os
import sys
import time

from optuna.trial import TrialState

from lockstep_sweep.options import Misuse


class MlflowRuns:
    """Trials as runs under one parent; nothing without --mlflow. A server that is away stops no sweep: it is warned once, and
    asked again after a minute, for each question may take some seconds."""

    PAUSE = 60

    def __init__(self, uri):
        self._uri, self._warned, self._silent_until, self._runs, self._experiment = uri, False, 0.0, {}, None
        if self._uri is None:
            return
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        try:
            from mlflow import MlflowClient
        except ModuleNotFoundError:
            raise Misuse(f"--mlflow needs MLflow, which {sys.executable} does not have; do: pip install mlflow") from None
        self._client = MlflowClient(tracking_uri=self._uri)

    def open(self, asked):
        """Makes the study's run, or goes on with it."""
        self._study = asked
        if self._uri is not None:
            self._try(self._open)

    def _open(self):
        name = self._study.study_name
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else self._client.create_experiment(name)
        self._parent = self._study.user_attrs.get("mlflow_run")
        if self._parent is None:
            self._parent = self._client.create_run(experiment, run_name=name).info.run_id
            self._study.set_user_attr("mlflow_run", self._parent)
        else:
            self._client.update_run(self._parent, status="RUNNING")
        self._experiment = experiment

    def _try(self, function, *arguments):
        from mlflow.exceptions import MlflowException

        if time.monotonic() < self._silent_until:
            return
        try:
            function(*arguments)
        except (MlflowException, OSError) as error:
            self._silent_until = time.monotonic() + self.PAUSE
            if not self._warned:
                print(f"lockstep sweep: warning: MLflow at {self._uri} fails, and trials are not all logged: {error}",
                      file=sys.stderr)
            self._warned = True

    def begin(self, trial):
        """Makes its run. The variables by which the program's own MLflow writer goes on in that run."""
        if self._uri is None:
            return {}
        if self._experiment is None:
            self._try(self._open)
        if self._experiment is not None:
            self._try(self._begin, trial)
        run = self._runs.get(trial.number)
        return {"MLFLOW_RUN_ID": run, "MLFLOW_TRACKING_URI": self._uri} if run else {}

    def _begin(self, trial):
        run = self._client.create_run(self._experiment, run_name=f"trial {trial.number}",
                                      tags={"mlflow.parentRunId": self._parent}).info.run_id
        self._runs[trial.number] = run
        for name, value in trial.params.items():
            self._client.log_param(run, name, value)

    def report(self, trial, metric, value, step):
        if trial.number in self._runs:
            self._try(lambda: self._client.log_metric(self._runs[trial.number], metric, value, step=step))

    def end(self, trial, result):
        if trial.number in self._runs:
            ended = {"complete": "FINISHED", "pruned": "KILLED", "again": "KILLED"}.get(result, "FAILED")
            self._try(lambda: self._client.set_terminated(self._runs[trial.number], ended))

    def finish(self):
        """Ends the study's run, unless another driver still has trials."""
        if self._experiment is not None and not self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            self._try(lambda: self._client.set_terminated(self._parent))
