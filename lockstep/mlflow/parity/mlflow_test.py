"""What MlflowWriter logs, looked up at a real MLflow server, before which a proxy loses answers and refuses requests."""

import collections
import contextlib
import json
import math
import os
import random
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request

import pytest
from mlflow_harness import CLEAN, DEADLINE, Proxy, wait_for
from ports import free_port


class Tracking:
    """A tracking server's own account of what it holds."""

    def __init__(self, url):
        self.url = url

    def ask(self, path, body=None, **query):
        url = f"{self.url}/api/2.0/{path}?{urllib.parse.urlencode(query)}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.read()

    def run(self, run_id):
        return json.loads(self.ask("mlflow/runs/get", run_id=run_id))["run"]

    def history(self, run_id, key):
        """[(step, value)] of all that was logged, in the order of steps."""
        found, token = [], ""
        while True:
            answer = json.loads(self.ask("mlflow/metrics/get-history", run_id=run_id, metric_key=key, max_results=10000,
                                         **({"page_token": token} if token else {})))
            found += [(int(metric.get("step", 0)), float(metric["value"])) for metric in answer.get("metrics", [])]
            token = answer.get("next_page_token")
            if not token:
                return sorted(found)

    def runs(self, experiment):
        experiment = json.loads(self.ask("mlflow/experiments/get-by-name", experiment_name=experiment))["experiment"]
        found = json.loads(self.ask("mlflow/runs/search", {"experiment_ids": [experiment["experiment_id"]]}))
        return found.get("runs", [])


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A real `mlflow server` with a database."""
    pytest.importorskip("mlflow", reason="starts its server")
    folder = tmp_path_factory.mktemp("mlflow")
    port = free_port()
    # It has workers for evaluations, seven processes that are not needed here.
    quick = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", port, "--workers", 1,
               "--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--artifacts-destination", folder / "artifacts"]
    with open(folder / "log", "w") as log, subprocess.Popen(
            [str(word) for word in command], cwd=folder, env=CLEAN | quick, stdout=log, stderr=log, start_new_session=True) as process:

        def healthy():
            assert process.poll() is None, (folder / "log").read_text()
            with contextlib.suppress(OSError):
                return urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10).status == 200

        try:
            wait_for("the start of the MLflow server", healthy)
            yield Tracking(f"http://127.0.0.1:{port}")
        finally:
            os.killpg(process.pid, 9)


def as_dict(pairs):
    return {pair["key"]: pair["value"] for pair in pairs}


def test_all_arrives_in_few_requests(server, start, tmp_path):
    artifact = tmp_path / "größe & co.bin"
    artifact.write_bytes(os.urandom(300_000))
    with Proxy(server.url) as proxy:
        driver = start(MLFLOW_TRACKING_URI=proxy.url + "/", MLFLOW_EXPERIMENT_NAME="all", USER="ada")
        driver("open", run_name="first", tags={"team": "vision"}, send_interval=600_000)
        driver("params", params={"lr": 0.1, "one": 1.0, "layers": 3, "nesterov": True, "name": "größer"} | {f"p{i}": i for i in range(150)})
        driver("many", name="train/loss", count=2500)
        driver("metrics", metrics={"a": "nan", "b": "inf", "c": "-inf", "d": 0.1, "e": -0.0}, step=2**40)
        driver("tag", key="phase", value="warm-up")
        driver("artifact", file=str(artifact), folder="deep/er")
        driver("artifact", file=str(artifact))
        # Nothing was sent but the creation of the run, in a request interval of ten minutes; flush() cuts it short.
        driver("flush")
        answer = driver("wait")
        run_id = answer["run_id"]
        assert answer["sent"], driver.stderr()
        driver("finalize")
        paths = collections.Counter(urllib.parse.urlparse(path).path.rsplit("/", 1)[-1] for _, path, _, _ in proxy.requests)
    assert paths["log-batch"] <= 8 and paths["create"] == 2, "an experiment and a run"
    run = server.run(run_id)
    assert run["info"]["run_name"] == "first" and run["info"]["status"] == "FINISHED" and run["info"]["end_time"] >= run["info"]["start_time"]
    params = as_dict(run["data"]["params"])
    assert len(params) == 155 and params["p149"] == "149"
    assert {key: params[key] for key in ("lr", "one", "layers", "nesterov", "name")} == {
        "lr": "0.1", "one": "1.0", "layers": "3", "nesterov": "True", "name": "größer"}
    tags = as_dict(run["data"]["tags"])
    assert tags["team"] == "vision" and tags["phase"] == "warm-up" and tags["mlflow.source.name"] == "mlflow_driver" and tags["mlflow.user"] == "ada"
    assert server.history(run_id, "train/loss") == [(step, step / 2) for step in range(2500)]
    (_, nan), = server.history(run_id, "a")
    assert math.isnan(nan)
    assert [server.history(run_id, key)[0][1] for key in "bcde"] == [sys.float_info.max, -sys.float_info.max, 0.1, 0.0], "MLflow keeps infinities as the largest numbers"
    for folder in ("deep/er/", ""):
        path = urllib.parse.quote(f"{run['info']['artifact_uri'].removeprefix('mlflow-artifacts:/')}/{folder}{artifact.name}")
        assert server.ask(f"mlflow-artifacts/artifacts/{path}") == artifact.read_bytes()
    assert driver.spooled() == [] and not driver.stderr(), driver.stderr()


def test_a_run_is_gone_on_with_and_has_children(server, start):
    driver = start(MLFLOW_TRACKING_URI=server.url)
    driver("open", experiment_name="parents")
    driver("metrics", metrics={"loss": 1}, step=1)
    run_id = driver("wait")["run_id"]
    driver("finalize", status="failed")
    assert server.run(run_id)["info"]["status"] == "FAILED"
    driver("open", run_id=run_id)
    driver("metrics", metrics={"loss": 0.5}, step=2)
    driver("open", writer="child", experiment_name="parents", parent_run_id=run_id)
    driver("flush", writer="child")
    child = driver("wait", writer="child")["run_id"]
    assert driver("wait")["run_id"] == run_id and server.run(run_id)["info"]["status"] == "RUNNING"
    driver("close")
    driver("finalize", writer="child", status="killed")
    assert server.run(run_id)["info"]["status"] == "FINISHED" and server.history(run_id, "loss") == [(1, 1), (2, 0.5)]
    assert as_dict(server.run(child)["data"]["tags"])["mlflow.parentRunId"] == run_id
    assert server.run(child)["info"]["status"] == "KILLED"
    other = start(MLFLOW_TRACKING_URI=server.url, MLFLOW_RUN_ID=child)
    other("open")
    other("metrics", metrics={"loss": 7}, step=1)
    assert other("wait")["run_id"] == child and server.history(child, "loss") == [(1, 7)]


def test_lost_answers_and_errors_leave_everything_once(server, start):
    """A third of the requests is answered; the answers of half are lost after they did their work."""
    chance = random.Random(0)
    created = []

    def choose(number, path):
        if path.endswith("runs/create") and not created:
            created.append(number)
            return "drop"  # now there is a run that the writer does not know of
        return chance.choice(["drop", "drop", "drop", (503, {}), None, None])

    with Proxy(server.url, choose) as proxy:
        driver = start(MLFLOW_TRACKING_URI=proxy.url)
        driver("open", experiment_name="once")
        driver("params", params={"lr": 0.1})
        for _ in range(3):
            driver("many", name="loss", count=400)
            driver("metrics", metrics={"nan": "nan", "inf": "inf"}, step=1)
            wait_for("sending", lambda: driver("wait")["sent"])
        driver("finalize")
        state = driver("state")
    run, = server.runs("once")
    run_id = run["info"]["run_id"]
    assert state["run_id"] == run_id and state["failures"] >= 6
    assert sum(path.endswith("runs/search") for _, path, _, _ in proxy.requests) >= 1
    # Each value three times, for it was logged three times, at different times or in the same millisecond.
    history = server.history(run_id, "loss")
    assert {step for step, _ in history} == set(range(400)) and len(history) <= 1200
    times = [json.loads(body)["metrics"] for _, path, _, body in proxy.requests if path.endswith("log-batch")]
    logged = {(metric["timestamp"], metric["step"]) for metrics in times for metric in metrics if metric["key"] == "loss"}
    assert len(history) == len(logged) > 1000
    assert run["info"]["status"] == "FINISHED" and as_dict(run["data"]["params"]) == {"lr": "0.1"}
    assert driver.spooled() == []
    assert "cannot be written to" in driver.stderr() and "can be written to again" in driver.stderr()


def test_a_server_that_is_away_costs_nothing_and_gets_all_later(server, start):
    driver = start(MLFLOW_TRACKING_URI=f"http://127.0.0.1:{free_port()}")
    driver("open", experiment_name="later")
    driver("many", name="loss", count=5000)
    assert driver("wait")["sent"] is False
    driver("close")
    assert len(driver.spooled()) == 1 and "is in" in driver.stderr()
    # The server comes; what is for another address is left alone.
    assert driver("send_spooled", tracking_uri=server.url) == {"sent": 0, "left": 0}
    path, = (driver.folder / "spool").iterdir()
    line = path.read_text().split("\n")[1]
    moved = line.replace(json.loads(line)["run"]["server"], server.url)
    path.write_text(path.read_text().replace(line, moved))
    # A disk has damaged some lines on the way: they are set apart, and hold up nothing.
    with open(path, "a") as spool:
        spool.write('no JSON\n{"metrics":[["loss"]]}\n{"status":7}\n{"tea":[]}\n')
    assert driver("send_spooled", tracking_uri=server.url) == {"sent": 1, "left": 0}
    run, = server.runs("later")
    assert len(server.history(run["info"]["run_id"], "loss")) == 5000 and run["info"]["status"] == "FINISHED"
    assert driver.spooled() == [f"{run['info']['run_id']}.rejected.jsonl"]
    assert len((driver.folder / "spool" / driver.spooled()[0]).read_text().splitlines()) == 4


def test_a_killed_process_leaves_what_the_next_one_sends(server, start):
    """The server goes away, then the process is killed; another one goes on with the run when the server is back."""
    away = threading.Event()
    with Proxy(server.url, lambda number, path: (500, {}) if away.is_set() else None) as proxy:
        driver = start(MLFLOW_TRACKING_URI=proxy.url)
        driver("open", experiment_name="killed")
        driver("metrics", metrics={"loss": 1}, step=1)
        run_id = driver("wait")["run_id"]
        away.set()
        for step in range(2, 50):
            driver("metrics", metrics={"loss": step}, step=step)
        wait_for("a failure", lambda: driver("state")["failures"] > 0)
        driver.kill()
        assert driver.spooled() == [f"{run_id}.jsonl"]
        away.clear()
        other = start(MLFLOW_TRACKING_URI=proxy.url)
        other("open", run_id=run_id)
        other("metrics", metrics={"loss": 50}, step=50)
        assert other("wait")["sent"]
        other("finalize")
    assert server.history(run_id, "loss") == [(step, step) for step in range(1, 51)]
    assert other.spooled() == []


def test_a_server_that_asks_for_patience_gets_it(server, start):
    with Proxy(server.url, lambda number, path: (429, {"Retry-After": "1"}) if number == 0 else None) as proxy:
        driver = start(MLFLOW_TRACKING_URI=proxy.url)
        begin = time.monotonic()
        driver("open", experiment_name="patience")
        driver("flush")
        wait_for("sending", lambda: driver("wait")["sent"])
        assert time.monotonic() - begin >= 1
        driver("finalize")


def test_what_the_server_refuses_is_set_apart_and_the_rest_arrives(server, start, tmp_path):
    driver = start(MLFLOW_TRACKING_URI=server.url)
    driver("open", experiment_name="refused")
    driver("params", params={"lr": 0.1})
    driver("metrics", metrics={f"m{i}": i for i in range(20)} | {"bad#name": 1, "töne*": 2}, step=1)
    driver("params", params={"lr": 0.2, "momentum": 0.9})
    driver("artifact", file=str(tmp_path / "missing"))
    driver("metrics", metrics={"last": 1}, step=2)
    answer = driver("wait")
    assert answer["sent"], driver.stderr()
    run = server.run(answer["run_id"])
    assert as_dict(run["data"]["params"]) == {"lr": "0.1", "momentum": "0.9"}
    assert {metric["key"] for metric in run["data"]["metrics"]} >= {f"m{i}" for i in range(20)} | {"last"}
    driver("finalize")
    name = f"{answer['run_id']}.rejected.jsonl"
    assert driver.spooled() == [name]
    refused = [json.loads(line) for line in (tmp_path / "spool" / name).read_text().splitlines()]
    assert driver("state")["rejected"] == len(refused)
    assert any("#" in str(line["entry"]) for line in refused) and any("0.2" in str(line["entry"]) for line in refused)
    assert any("cannot read" in line["error"] for line in refused) and driver.stderr().count("the server refuses") == 1


def test_what_comes_during_a_request_waits_for_the_next_batch(server, start):
    """Else, with steps that are shorter than a request, each would be one."""
    with Proxy(server.url, lambda number, path: "hold" if path.endswith("log-batch") else None) as proxy:
        driver = start(MLFLOW_TRACKING_URI=proxy.url)
        driver("open", experiment_name="batches", send_interval=600_000)
        driver("flush")
        assert driver("wait")["sent"], driver.stderr()  # the run is made
        driver("metrics", metrics={"loss": 1}, step=1)
        driver("flush")
        assert proxy.held.wait(DEADLINE)
        driver("metrics", metrics={"loss": 2}, step=2)
        proxy.released.set()
        wait_for("the first batch", lambda: driver("state")["sent"] == 1)
        for step in range(3, 100):
            driver("metrics", metrics={"loss": step}, step=step)
        run_id = driver("wait")["run_id"]
        driver("finalize")
        batches = sum(path.endswith("log-batch") for _, path, _, _ in proxy.requests)
    assert batches == 2 and len(server.history(run_id, "loss")) == 99
