"""`lockstep run` in a terminal that is stopped (Ctrl-S) or that is not read."""

import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import termios
import threading
import time

import pytest
from agents import Job, wait_until_ended
from support import HANG


class Terminal:
    """What its programs write stays in it until read_on()."""

    def __init__(self, stopped):
        self.master, self.slave = pty.openpty()
        self.name = os.ttyname(self.slave)
        self.text = b""
        if stopped:
            termios.tcflow(self.slave, termios.TCOOFF)

    def inside(self):
        """Words in front of a command whose output goes here."""
        return "sh", "-c", f'exec "$@" > {self.name} 2>&1', "sh"

    def wait_until_full(self):
        """Until nothing more comes into it for half a second, and something has."""
        deadline, before, since = time.monotonic() + HANG, 0, time.monotonic()
        while not before or time.monotonic() - since < 0.5:
            assert time.monotonic() < deadline
            now = struct.unpack("i", fcntl.ioctl(self.master, termios.FIONREAD, bytes(4)))[0]
            if now != before:
                before, since = now, time.monotonic()
            time.sleep(0.05)

    def read_on(self):
        """Lets output pass again, and reads it in the background until close()."""
        termios.tcflow(self.slave, termios.TCOON)
        self.reader = threading.Thread(target=self._read)
        self.reader.start()

    def _read(self):
        with contextlib.suppress(OSError):  # no program has it open any more
            while select.select([self.master], [], [], HANG)[0]:
                self.text += os.read(self.master, 65536)

    def close(self):
        """What has come."""
        os.close(self.slave)
        self.reader.join()
        os.close(self.master)
        return self.text.decode()


def pids_of(programs, count):
    deadline = time.monotonic() + HANG
    while True:
        pids = [int(file.read_text()) for file in programs.folder.glob("pid.?") if file.read_text().endswith("\n")]
        if len(pids) == count:
            return pids
        assert time.monotonic() < deadline, pids
        time.sleep(0.02)


@pytest.mark.parametrize("stopped", [True, False], ids=["stopped", "not read"])
def test_a_signal_ends_the_job(programs, stopped):
    terminal = Terminal(stopped)
    tell = "trap '' TERM; echo $$ > pid.$RANK.new; mv pid.$RANK.new pid.$RANK; yes"
    job = programs.start(*terminal.inside(), programs.find("lockstep"), "run", "-n", 2, "--grace-period", 1, "sh", "-c", tell)
    pids = pids_of(programs, 2)
    if not stopped:
        terminal.wait_until_full()
    job.kill(signal.SIGTERM)
    for pid in pids:
        wait_until_ended(pid)
    assert job.finish().status == 128 + signal.SIGTERM
    programs.wait_until_gone()
    terminal.read_on()
    terminal.close()


def test_what_the_workers_wrote_waits_for_the_reader(programs):
    terminal = Terminal(stopped=True)
    job = programs.start(*terminal.inside(), programs.find("lockstep"), "run", "-n", 2, "sh", "-c", "seq 1 300; echo $$ > pid.$RANK")
    for pid in pids_of(programs, 2):
        wait_until_ended(pid)
    terminal.read_on()
    assert job.finish().status == 0
    lines = terminal.close().splitlines()
    for rank in range(2):
        mark = f"[rank {rank}] "
        assert [line[len(mark) :] for line in lines if line.startswith(mark)] == list(map(str, range(1, 301)))


def test_no_temporary_folder_is_there_while_it_waits_for_the_reader(programs):
    """A launcher that is killed then has no guardian any more, which would remove it."""
    terminal = Terminal(stopped=True)
    job = programs.start(*terminal.inside(), programs.find("lockstep"), "run", "sh", "-c", "echo done; echo $$ > pid.$RANK")
    [pid] = pids_of(programs, 1)
    wait_until_ended(pid)
    deadline = time.monotonic() + HANG
    while list(programs.folder.glob("lockstep_*")):
        assert time.monotonic() < deadline, "the folder is still there"
        time.sleep(0.02)
    assert job.process.poll() is None
    terminal.read_on()
    assert job.finish().status == 0
    assert "done" in terminal.close()


def test_it_keeps_nothing_from_the_other_hosts(programs):
    terminal = Terminal(stopped=True)
    job = Job(programs, 2)
    coordinator = job.start_coordinator(1, "echo done")
    agent = job.start(1, "echo done", inside=terminal.inside())
    assert coordinator.finish().status == 0
    terminal.read_on()
    assert agent.finish().status == 0
    assert "[rank 1] done" in terminal.close()


def test_a_line_of_the_log_does_not_keep_it_from_a_signal(programs):
    terminal = Terminal(stopped=True)
    job = programs.start(*terminal.inside(), programs.find("lockstep"), "run", "sh", "-c", "echo $$ > pid.0; sleep 1000")
    [pid] = pids_of(programs, 1)
    job.kill(signal.SIGUSR2)  # no process has a handler for it, of which it warns
    job.kill(signal.SIGTERM)
    wait_until_ended(pid)
    assert job.finish().status == 128 + signal.SIGTERM
    programs.wait_until_gone()
    terminal.read_on()
    terminal.close()
