"""What MlflowWriter logs, looked up at a real MLflow server; and what it does when the server is away, slow or broken."""

import collections
import contextlib
import datetime
import http.server
import ipaddress
import json
import math
import os
import random
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request

import pytest
from ports import free_port

DEADLINE = 180
VARIABLES = ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID", "MLFLOW_RUN_ID", "MLFLOW_TRACKING_TOKEN",
             "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "RANK", "WORLD_SIZE", "http_proxy", "https_proxy", "HTTPS_PROXY",
             "all_proxy", "ALL_PROXY")
CLEAN = {key: value for key, value in os.environ.items() if key not in VARIABLES}


def wait_for(what, check):
    """The first true value of check(), asked until the deadline."""
    end = time.monotonic() + DEADLINE
    while time.monotonic() < end:
        if value := check():
            return value
        time.sleep(0.02)
    pytest.fail(f"{what} did not happen within {DEADLINE} s")


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


class Proxy:
    """Stands before a server, or instead of one, and does to each request what `fault` tells: a function of the
    number of the request, the path, that returns None (pass it on), "drop" (pass it on, and lose the answer), "hold" (as
    None, but answer after release()), or (status, headers)."""

    def __init__(self, target=None, fault=lambda number, path: None):
        self.target, self.fault = target, fault
        self.requests, self.released, self.held = [], threading.Event(), threading.Event()
        lock, proxy = threading.Lock(), self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def answer(self):
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                with lock:
                    number = len(proxy.requests)
                    proxy.requests.append((self.command, self.path, dict(self.headers), body))
                fault = proxy.fault(number, self.path)
                if isinstance(fault, tuple):
                    return self.reply(fault[0], b"the proxy says no", fault[1])
                status, text = proxy.forward(self.command, self.path, self.headers, body)
                if fault == "hold":
                    proxy.held.set()
                    proxy.released.wait(DEADLINE)
                if fault == "drop":
                    self.close_connection = True
                    return self.connection.shutdown(socket.SHUT_RDWR)
                self.reply(status, text, {})

            def reply(self, status, body, headers):
                with contextlib.suppress(OSError):  # the writer has gone
                    self.send_response(status)
                    for key, value in headers.items():
                        self.send_header(key, value)
                    self.send_header("Content-Length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body)

            do_GET = do_POST = do_PUT = answer

        class Server(http.server.ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_):
                pass

        self.server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def forward(self, method, path, headers, body):
        if not self.target:
            return 404, b"{}"
        request = urllib.request.Request(self.target + path, body or None, {"Content-Type": headers.get("Content-Type", "")}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.released.set()
        self.server.shutdown()
        self.server.server_close()


class Driver:
    """mlflow_driver: driver("metrics", metrics=…, step=…) is a call of the writer."""

    def __init__(self, program, folder, **environment):
        self.process = subprocess.Popen([program], cwd=folder, env=CLEAN | environment, text=True, stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, stderr=open(folder / "stderr", "a"))
        self.folder = folder

    def __call__(self, do, **command):
        self.process.stdin.write(json.dumps({"do": do, "spool_directory": str(self.folder / "spool"), **command}) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        assert "error" not in answer, answer
        return answer

    def kill(self):
        self.process.kill()
        self.process.wait()

    def stderr(self):
        return (self.folder / "stderr").read_text()

    def spooled(self):
        folder = self.folder / "spool"
        return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


@pytest.fixture
def start(bin_dir, tmp_path):
    """start(**environment): a driver; its files are in tmp_path."""
    program = bin_dir / "mlflow_driver"
    if not program.exists():
        pytest.skip("Lockstep::mlflow was not built, for want of libcurl")
    drivers = []

    def begin(**environment):
        drivers.append(Driver(program, tmp_path, **environment))
        return drivers[-1]

    yield begin
    for driver in drivers:
        driver.process.stdin.close()
        driver.kill()


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


def test_a_slow_server_does_not_slow_the_training(start):
    """All calls return, flush() too, while the server sits on the first request; it answers only afterwards."""
    with Proxy(fault=lambda number, path: "hold") as proxy:
        driver = start(MLFLOW_TRACKING_URI=proxy.url)
        driver("open", close_timeout=100)
        driver("flush")
        assert proxy.held.wait(DEADLINE)
        driver("many", name="loss", count=5000)
        driver("artifact", file="/nowhere")
        driver("flush")
        driver("finalize")
        assert not proxy.released.is_set() and len(proxy.requests) == 1
        assert len(driver.spooled()) == 1


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


def test_a_refusal_that_is_interrupted_is_noted_once(start, tmp_path):
    """The server refuses a batch and its first half, goes away, and comes back to refuse that again."""
    batches = []

    def answer(number, path):
        if not path.endswith("log-batch"):
            return None
        batches.append(number)
        return (503, {}) if len(batches) == 3 else (400, {})

    class Server(Proxy):
        def forward(self, method, path, headers, body):
            return 200, b'{"run": {"info": {"run_id": "abc"}}}'

    with Server(fault=answer) as proxy:
        driver = start(MLFLOW_TRACKING_URI=proxy.url)
        driver("open")
        driver("params", params={"a": 1, "b": 2})
        wait_for("sending", lambda: driver("wait")["sent"])
        assert driver("state")["rejected"] == 2
        driver("finalize")
    lines = (tmp_path / "spool/abc.rejected.jsonl").read_text().splitlines()
    assert [json.loads(line)["entry"]["params"][0] for line in lines] == ["a", "b"] and len(batches) == 6


@pytest.mark.parametrize("status, text", [
    (503, b"Endpoint disabled due to the mlflow server running with `--no-serve-artifacts`."), (403, b"no"), (404, b"no")])
def test_a_server_that_takes_no_artifacts_holds_nothing_up(start, tmp_path, status, text):
    class Server(Proxy):
        def forward(self, method, path, headers, body):
            if method == "PUT":
                return status, text
            return 200, b'{"run": {"info": {"run_id": "abc", "artifact_uri": "mlflow-artifacts:/0/abc"}}}'

    (tmp_path / "model").write_text("weights")
    with Server() as proxy:
        driver = start(MLFLOW_TRACKING_URI=proxy.url)
        driver("open")
        driver("artifact", file=str(tmp_path / "model"))
        driver("metrics", metrics={"loss": 1}, step=1)
        assert driver("wait")["sent"], driver.stderr()
        driver("finalize")
        assert driver("state")["rejected"] == 1 and driver.spooled() == ["abc.rejected.jsonl"]
        assert [method for method, *_ in proxy.requests].count("PUT") == 1


def test_a_run_id_from_the_server_leads_nowhere_else(start, tmp_path):
    class Server(Proxy):
        def forward(self, method, path, headers, body):
            return 200, b'{"run": {"info": {"run_id": "../evil/x"}}}'

    (tmp_path / "evil").mkdir()
    with Server() as proxy:
        driver = start(MLFLOW_TRACKING_URI=proxy.url)
        driver("open", close_timeout=100)
        driver("metrics", metrics={"loss": 1}, step=1)
        assert driver("wait")["sent"] is False
        driver("finalize")
        assert "'../evil/x' is no run id of MLflow" in driver.stderr()
        assert len(driver.spooled()) == 1 and not any((tmp_path / "evil").iterdir())


@pytest.mark.parametrize("uri", ["file://{}/elsewhere", "{}/abc/../elsewhere", "mlflow-artifacts:/0/abc/../../../../api"])
def test_artifacts_go_only_into_a_folder_of_the_run(start, tmp_path, uri):
    class Server(Proxy):
        def forward(self, method, path, headers, body):
            info = {"run_id": "abc", "artifact_uri": uri.format(tmp_path)}
            return 200, json.dumps({"run": {"info": info}}).encode()

    (tmp_path / "model").write_text("weights")
    with Server() as proxy:
        driver = start(MLFLOW_TRACKING_URI=proxy.url)
        driver("open")
        driver("artifact", file=str(tmp_path / "model"))
        assert driver("wait")["sent"], driver.stderr()
        driver("finalize")
        assert driver("state")["rejected"] == 1 and "which is no folder of the run abc" in driver.stderr()
        assert not (tmp_path / "elsewhere").exists() and all(method != "PUT" for method, *_ in proxy.requests)


def test_artifacts_are_copied_into_a_folder_of_the_run(start, tmp_path):
    class Server(Proxy):
        def forward(self, method, path, headers, body):
            info = {"run_id": "abc", "artifact_uri": f"file://{tmp_path}/store/0/abc/artifacts"}
            return 200, json.dumps({"run": {"info": info}}).encode()

    (tmp_path / "model").write_text("weights")
    with Server() as proxy:
        driver = start(MLFLOW_TRACKING_URI=proxy.url)
        driver("open")
        driver("artifact", file=str(tmp_path / "model"), folder="best")
        assert driver("wait")["sent"], driver.stderr()
        driver("finalize")
    assert (tmp_path / "store/0/abc/artifacts/best/model").read_text() == "weights"


@pytest.mark.parametrize("body, said", [
    (b'{"message": "\\u001b[2J\\nroot: all is well"}', "status 503: ?[2J?root: all is well"),
    (b" " * (5 << 20), "the answer has more than 4 MiB"),
], ids=["escape sequences", "length"])
def test_what_a_server_says_does_no_harm(start, body, said):
    class Server(Proxy):
        def forward(self, method, path, headers, body_of_request):
            return 503, body

    with Server() as proxy:
        driver = start(MLFLOW_TRACKING_URI=proxy.url)
        driver("open", close_timeout=100)
        driver("metrics", metrics={"loss": 1}, step=1)
        assert driver("wait")["sent"] is False
        driver("finalize")
        assert said in driver.stderr() and "\x1b" not in driver.stderr()


def test_an_answer_that_trickles_is_given_up(start):
    ended = threading.Event()

    def serve(listener):
        while not ended.is_set():
            with contextlib.suppress(OSError), listener.accept()[0] as connection:
                connection.recv(65536)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
                while not ended.wait(0.05):
                    connection.sendall(b" ")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.1)
        server = threading.Thread(target=serve, args=(listener,))
        server.start()
        try:
            driver = start(MLFLOW_TRACKING_URI=f"http://127.0.0.1:{listener.getsockname()[1]}")
            # The first request asks for the experiment's id, by GET.
            driver("open", experiment_name="trickle", timeout=500, close_timeout=100)
            driver("tag", key="a", value="b")
            driver("flush")
            deadline = time.monotonic() + 60
            while driver("state")["failures"] == 0:
                assert time.monotonic() < deadline, "the request had no end"
            driver("finalize")
        finally:
            ended.set()
            server.join()


@pytest.mark.parametrize("variables, header", [
    ({"MLFLOW_TRACKING_TOKEN": "s3cret"}, "Bearer s3cret"),
    ({"MLFLOW_TRACKING_USERNAME": "ada", "MLFLOW_TRACKING_PASSWORD": "pass"}, "Basic YWRhOnBhc3M="),
])
def test_credentials_are_shown_and_a_refusal_loses_nothing(start, variables, header):
    with Proxy(fault=lambda number, path: (401, {})) as proxy:
        driver = start(MLFLOW_TRACKING_URI=proxy.url, **variables)
        driver("open", close_timeout=1000)
        driver("metrics", metrics={"loss": 1}, step=1)
        assert driver("wait")["sent"] is False
        driver("finalize")
        assert proxy.requests[0][2]["Authorization"] == header
        assert len(driver.spooled()) == 1 and "status 401" in driver.stderr()
        assert "s3cret" not in driver.stderr() and not any("s3cret" in path.read_text() for path in (driver.folder / "spool").iterdir())


def test_only_rank_zero_logs(start):
    with Proxy() as proxy:
        driver = start(MLFLOW_TRACKING_URI=proxy.url, RANK="1", WORLD_SIZE="2", LOCAL_RANK="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
        driver("open")
        driver("params", params={"lr": 0.1})
        driver("metrics", metrics={"loss": 1}, step=1)
        driver("flush")
        driver("close")
        assert not proxy.requests and driver.spooled() == []


def test_certificates_are_verified(start, tmp_path):
    x509 = pytest.importorskip("cryptography.x509")
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.timezone.utc)
    certificate = (x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key()).serial_number(1)
                   .not_valid_before(now - datetime.timedelta(days=1)).not_valid_after(now + datetime.timedelta(days=1))
                   .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
                   .sign(key, hashes.SHA256()))
    pem = tmp_path / "server.pem"
    pem.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
                    + certificate.public_bytes(serialization.Encoding.PEM))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem)
    proxy = Proxy(fault=lambda number, path: (401, {}))
    proxy.server.socket = context.wrap_socket(proxy.server.socket, server_side=True)
    with proxy:
        uri = proxy.url.replace("http:", "https:")
        for variables, reached in (({}, False), ({"MLFLOW_TRACKING_SERVER_CERT_PATH": str(pem)}, True), ({"MLFLOW_TRACKING_INSECURE_TLS": "true"}, True)):
            proxy.requests.clear()
            driver = start(MLFLOW_TRACKING_URI=uri, **variables)
            driver("open", close_timeout=1000)
            driver("flush")
            assert driver("wait")["sent"] is False
            assert bool(proxy.requests) == reached, (variables, driver.stderr())
