"""What the tests of MlflowWriter share: the program that logs, and a server that fails as it is told."""

import contextlib
import http.server
import json
import os
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request

import pytest

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
