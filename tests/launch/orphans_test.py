"""`lockstep run` as process 1 of a container: what other processes leave behind is its child, and it alone can reap it."""

import contextlib
import os
import pathlib
import signal
import time

import pytest
from agents import STAY, Job
from support import HANG, unshare

# The shell's child becomes that of the program which takes the shell's place, and which knows nothing of it.
WITH_ORPHAN = 'sleep 0 & exec "$@"'


def as_process_1():
    """The words before a command that is process 1 and has an orphan."""
    if not pathlib.Path("/proc/thread-self/children").exists():
        pytest.skip("this kernel does not tell the children of a process")
    return [*unshare("--kill-child"), "sh", "-c", WITH_ORPHAN, "sh"]


def children_of(pid):
    return [int(child) for child in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def name_of(pid):
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return pathlib.Path(f"/proc/{pid}/comm").read_text().strip()
    return None


def wait_until_reaped(pid):
    deadline = time.monotonic() + HANG
    while "sleep" in map(name_of, children_of(pid)):
        assert time.monotonic() < deadline, "an orphan was not reaped"
        time.sleep(0.02)


def test_an_agent_that_waits_for_other_hosts_reaps_orphans(programs):
    agent = Job(programs, 2).start_coordinator(1, STAY, inside=as_process_1())
    [process_1] = children_of(agent.pid)
    wait_until_reaped(process_1)
    agent.kill(signal.SIGKILL)


def test_an_agent_that_looks_for_its_coordinators_name_reaps_orphans(programs):
    agent = Job(programs, 2, host="coordinator.invalid").start(1, STAY, inside=as_process_1())
    agent.wait_for("can't find the coordinator's host", "stderr")
    [process_1] = children_of(agent.pid)
    wait_until_reaped(process_1)
    agent.kill(signal.SIGKILL)


def test_the_command_of_all_hosts_reaps_orphans_and_waits_for_its_shells(programs):
    shell = programs.folder / "shell"
    shell.write_text("#!/bin/sh\necho up\nread -r line\nwhile [ ! -e go ] && read -r line; do :; done\n")
    shell.chmod(0o700)
    words = [programs.find("lockstep"), "run", "--rsh", shell, "-H", "a,b", "true"]
    job = programs.start(*as_process_1(), *words)
    job.wait_for("up\n(.*\n)*.*up\n")
    [process_1] = children_of(job.pid)
    wait_until_reaped(process_1)
    (programs.folder / "go").touch()
    assert job.finish().status == 0


def wait_for_process(name):
    deadline = time.monotonic() + HANG
    while True:
        for folder in pathlib.Path("/proc").glob("[0-9]*"):
            if name_of(folder.name) == name:
                return int(folder.name)
        assert time.monotonic() < deadline, f"no process is called {name}"
        time.sleep(0.02)


def test_a_launcher_whose_output_is_not_read_reaps_what_its_workers_have_left(programs):
    for name in ("never", "go", "output"):
        os.mkfifo(programs.folder / name)
    left = programs.folder / f"left{os.getpid()}"
    left.write_text("#!/bin/sh\nread -r line < never\n")
    left.chmod(0o700)
    output = os.open(programs.folder / "output", os.O_RDONLY | os.O_NONBLOCK)
    worker = f"./{left.name} > /dev/null 2>&1 & read -r line < go; head -c 200000 /dev/zero"
    words = [programs.find("lockstep"), "run", "-n", "1", "sh", "-c", worker]
    job = programs.start(*as_process_1(), "sh", "-c", 'exec "$@" > output', "sh", *words)
    process_left = wait_for_process(left.name)
    (programs.folder / "go").write_text("\n")
    # The worker ends, what it has left is killed, and the launcher waits for its reader.
    deadline = time.monotonic() + HANG
    while pathlib.Path(f"/proc/{process_left}").exists():
        assert time.monotonic() < deadline, "an orphan was not reaped"
        time.sleep(0.02)
    assert job.process.poll() is None, "it has not waited for its reader"
    os.close(output)
    assert job.finish().status == 0
