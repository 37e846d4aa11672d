"""free_port() of test programs that run at the same time."""

import pathlib
import socket
import subprocess
import sys

import ports

TESTS = pathlib.Path(__file__).resolve().parent


def test_two_programs_get_different_ports_below_those_of_the_kernel():
    # So many of some thousands that programs without reservations would most likely choose a common one.
    own = [ports.free_port() for _ in range(200)]
    command = [sys.executable, "-B", "-c", "import ports; print(*[ports.free_port() for _ in range(200)])"]
    other = subprocess.run(command, cwd=TESTS, stdout=subprocess.PIPE, text=True, check=True).stdout
    assert len({*own, *map(int, other.split())}) == 400
    with socket.socket() as kernels:
        kernels.bind(("127.0.0.1", 0))
        assert max(own) < kernels.getsockname()[1]
