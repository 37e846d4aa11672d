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
        self._uri, self._parent, self._runs, self._silent_until = uri, None, {}, None
        if uri is None:
            return
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
        try:
            from mlflow import MlflowClient
        except ModuleNotFoundError:
            raise Misuse(f"--mlflow needs MLflow, which {sys.executable} does not have; do: pip install mlflow") from None
        self._client = MlflowClient(tracking_uri=uri)

    def _try(self, function, *arguments, **named):
        from mlflow.exceptions import MlflowException

        if self._silent_until is not None and time.monotonic() < self._silent_until:
            return
        try:
            function(*arguments, **named)
        except (MlflowException, OSError) as error:
            if self._silent_until is None:
                print(f"lockstep sweep: warning: MLflow at {self._uri} fails, and trials are not all logged: {error}",
                      file=sys.stderr)
            self._silent_until = time.monotonic() + self.PAUSE

    def begin(self, trial):
        """Makes its run. The variables by which the program's own MLflow writer goes on in that run."""
        if self._uri is not None:
            self._try(self._begin, trial)
        run = self._runs.get(trial.number)
        return {"MLFLOW_RUN_ID": run, "MLFLOW_TRACKING_URI": self._uri} if run else {}

    def _begin(self, trial):
        if self._parent is None:
            self._open(trial.study)
        run = self._client.create_run(self._experiment, run_name=f"trial {trial.number}",
                                      tags={"mlflow.parentRunId": self._parent}).info.run_id
        self._runs[trial.number] = run
        for name, value in trial.params.items():
            self._client.log_param(run, name, value)

    def _open(self, study):
        """Makes the study's run, or goes on with it."""
        name = study.study_name
        known = self._client.get_experiment_by_name(name)
        self._experiment = known.experiment_id if known else self._client.create_experiment(name)
        parent = study.user_attrs.get("mlflow_run")
        if parent is None:
            parent = self._client.create_run(self._experiment, run_name=name).info.run_id
            study.set_user_attr("mlflow_run", parent)
        else:
            self._client.update_run(parent, status="RUNNING")
        self._parent = parent

    def report(self, trial, metric, value, step):
        if trial.number in self._runs:
            self._try(self._client.log_metric, self._runs[trial.number], metric, value, step=step)

    def end(self, trial, result):
        if trial.number in self._runs:
            ended = {"complete": "FINISHED", "pruned": "KILLED", "again": "KILLED"}.get(result, "FAILED")
            self._try(self._client.set_terminated, self._runs[trial.number], ended)

    def finish(self, study):
        """Ends the study's run, unless another driver still has trials."""
        if self._parent is not None and not study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            self._try(self._client.set_terminated, self._parent)
