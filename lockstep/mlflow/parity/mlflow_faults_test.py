"""What MlflowWriter does when a server is slow, broken or hostile, or is not to be asked at all."""

import contextlib
import datetime
import ipaddress
import json
import pathlib
import socket
import ssl
import threading
import time

import pytest
from mlflow_harness import DEADLINE, Proxy, wait_for


class RunServer(Proxy):
    """A server that answers each request with a run."""

    def forward(self, method, path, headers, body):
        return 200, b'{"run": {"info": {"run_id": "abc"}}}'


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


def test_other_calls_return_while_finalize_waits(start):
    with RunServer(fault=lambda number, path: "hold") as server:
        driver = start(MLFLOW_TRACKING_URI=server.url)
        driver("open", timeout=DEADLINE * 1000, close_timeout=DEADLINE * 1000)
        driver("metrics", metrics={"loss": 1}, step=1)
        assert server.held.wait(DEADLINE)
        spool_file = pathlib.Path(driver("state")["spool_file"])
        driver("begin_to_finalize")
        wait_for("the end of the run", lambda: "FINISHED" in spool_file.read_text())
        assert driver("state")["spool_file"] == str(spool_file)
        with pytest.raises(AssertionError, match="has ended by finalize"):
            driver("metrics", metrics={"loss": 1}, step=2)
        assert "could not be sent" not in driver.stderr(), "finalize() has given up, and these calls have waited for that"
        server.released.set()
        driver("await_finalize")
        assert driver.spooled() == []


def test_a_trace_shows_what_is_sent(start, tmp_path):
    """LOCKSTEP_PROFILE records the step in which all is sent."""

    with RunServer() as server:
        driver = start(MLFLOW_TRACKING_URI=server.url, LOCKSTEP_PROFILE=f"wait:0,warmup:0,active:1,dir={tmp_path / 'traces'}")
        driver("open")
        driver("step")
        driver("metrics", metrics={"loss": 1}, step=1)
        assert driver("wait")["sent"], driver.stderr()
        driver("step")
    (trace,) = [json.loads(path.read_text())["traceEvents"] for path in (tmp_path / "traces").iterdir()]
    (row,) = {event["tid"] for event in trace if event["name"] == "metrics: send to MLflow"}
    names = [event["args"]["name"] for event in trace if event["name"] == "thread_name" and event["tid"] == row]
    assert len(names) == 1 and "(lockstep-mlflow)" in names[0], names


def test_a_refusal_that_is_interrupted_is_noted_once(start, tmp_path):
    """The server refuses a batch and its first half, goes away, and comes back to refuse that again."""
    batches = []

    def answer(number, path):
        if not path.endswith("log-batch"):
            return None
        batches.append(number)
        return (503, {}) if len(batches) == 3 else (400, {})

    with RunServer(fault=answer) as proxy:
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
