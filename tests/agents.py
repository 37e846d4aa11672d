"""Agents of `lockstep run` over several hosts, for tests."""

import time

from ports import free_port
from support import HANG, wait_for_end

SECRET = "0123456789abcdef" * 4
TELL = "echo rank $RANK of $WORLD_SIZE, $LOCAL_RANK of $LOCAL_WORLD_SIZE, host $GROUP_RANK of $GROUP_WORLD_SIZE,"
TELL += ' start $TORCHELASTIC_RESTART_COUNT "$LOCKSTEP_JOB_SECRET"'
STAY = TELL + " in process $$; exec sleep 1000"
# Losses are noticed soon, and a machine that is busy for a second loses no host.
FAST = "keep_alive_interval=0.2,lease=3,lost_after=4.5,last_call_timeout=0,join_timeout=60,rejoin_timeout=30"


class Job:
    """Agents of one job; the first one that starts is the coordinator."""

    def __init__(self, programs, nnodes, port=None, host="127.0.0.1", conf=FAST):
        self.programs = programs
        self.port = port or free_port()
        self.options = ["--nnodes", nnodes, "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{host}:{self.port}"]
        self.options += ["--rdzv-id", "job", "--rdzv-conf", conf]

    def start(self, nproc, script, *options, inside=(), secret=SECRET):
        words = ["run", *self.options, "-n", nproc, *options, "sh", "-c", script]
        return self.programs.start(*inside, self.programs.find("lockstep"), *words, LOCKSTEP_JOB_SECRET=secret)

    def start_coordinator(self, nproc, script, *options, **place):
        agent = self.start(nproc, script, *options, **place)
        agent.wait_for("are here|generation 1 starts", "stderr")
        return agent


def wait_until_ended(pid):
    assert wait_for_end(pid, time.monotonic() + HANG), f"worker {pid} runs on"
