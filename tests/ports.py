"""Ports for tests: several test programs run at once, and the kernel gives free ports to all programs."""

import fcntl
import os
import pathlib
import random
import socket
import tempfile

LOWEST = 20000


def free_port() -> int:
    """A free TCP port of this machine, which no other call gets, in any test program, until this process ends.

    It lies below the range that the kernel takes ports from, for sockets that connect or are bound to port 0: no other
    program gets it by chance between this call and its use.
    """
    end = int(pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    folder = pathlib.Path(tempfile.gettempdir()) / f"lockstep-ports-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    candidates = range(LOWEST, end)
    # The system's randomness: a test may have seeded the other, and ports of the last run are in TIME_WAIT.
    for port in random.SystemRandom().sample(candidates, len(candidates)):
        lock = os.open(folder / str(port), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # held until this process ends: `lock` stays open
            for host in ("127.0.0.1", "0.0.0.0"):
                with socket.socket() as probe:
                    probe.bind((host, port))
            return port
        except OSError:
            os.close(lock)
    raise RuntimeError(f"no port from {LOWEST} to {end - 1} is free; see /proc/sys/net/ipv4/ip_local_port_range")
