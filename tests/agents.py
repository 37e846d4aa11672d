"""Agents of `lockstep run` over several hosts, for tests."""

import pathlib
import time

from ports import free_port
from support import HANG, wait_for_end

SECRET = "0123456789abcdef" * 4
TELL = "echo rank $RANK of $WORLD_SIZE, $LOCAL_RANK of $LOCAL_WORLD_SIZE, host $GROUP_RANK of $GROUP_WORLD_SIZE,"
TELL += ' start $TORCHELASTIC_RESTART_COUNT "$LOCKSTEP_JOB_SECRET"'
STAY = TELL + " in process $$; exec sleep 1000"


class Shells:
    """Workers that stay."""

    program = STAY
    servers = 0  # see server_of()

    @staticmethod
    def said(rank, world):
        """The line of one that runs, and its pid."""
        return rf"rank {rank} of {world},[^\n]*in process (\d+)\n"


class ForkedProgram:
    """The same of a program that is linked with Lockstep, where the agent may start it again."""

    program = ["process_probe", "stay"]
    servers = 1

    @staticmethod
    def said(rank, world):
        mark = rf"\[rank {rank}\] " if world > 1 else ""
        return rf"(?<![^\n]){mark}(\d+) forked\n"


# Losses are noticed soon, and a machine that is busy for a second loses no host.
FAST = "keep_alive_interval=0.2,lease=3,lost_after=4.5,last_call_timeout=0,join_timeout=60,rejoin_timeout=30"


class Job:
    """Agents of one job; the first one that starts is the coordinator."""

    def __init__(self, programs, nnodes, port=None, host="127.0.0.1", conf=FAST):
        self.programs = programs
        self.port = port or free_port()
        self.options = ["--nnodes", nnodes, "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{host}:{self.port}"]
        self.options += ["--rdzv-id", "job", "--rdzv-conf", conf]

    def start(self, nproc, program, *options, inside=(), secret=SECRET):
        """The program is a script of sh, or the words of a command."""
        command = ["sh", "-c", program] if isinstance(program, str) else program
        words = ["run", *self.options, "-n", nproc, *options, *command]
        return self.programs.start(*inside, self.programs.find("lockstep"), *words, LOCKSTEP_JOB_SECRET=secret)

    def start_coordinator(self, nproc, program, *options, **place):
        agent = self.start(nproc, program, *options, **place)
        agent.wait_for("(is|are) here|generation 1 starts", "stderr")
        return agent


def wait_until_ended(pid):
    assert wait_for_end(pid, time.monotonic() + HANG), f"process {pid} runs on"


def so_often(pattern, times):
    """The pattern so many times in a text; its groups are those of the last one."""
    return f"(?s)(?:{pattern}.*?){{{times}}}"


def children_of(pid):
    """All of them, whichever thread has started them, by name."""
    pids = [int(child) for task in pathlib.Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()]
    return {pid: pathlib.Path(f"/proc/{pid}/comm").read_text().strip() for pid in pids}


def server_of(launcher):
    """The pid of the process from which it forks its workers, in a list, or none."""
    return [pid for pid, name in children_of(launcher.pid).items() if name == "lockstep-fork"]
