"""What the driver needs of Linux to leave no process behind."""

import contextlib
import ctypes
import os
import select
import signal
import time

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
TRACEBACK_SIGNAL = signal.SIGUSR2  # ranks answer it with the stacks of their threads (faulthandler)
TRACEBACK_SECONDS = 5  # at most, for one process
QUIET_SECONDS = 0.2  # without output, after which a process is taken to have written all


def _prctl(option, value):
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({option}): {os.strerror(error)}")


def become_subreaper():
    """From now on orphans among this process's descendants become its children, so that it can end them all."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent, number=signal.SIGKILL):
    """This process gets the signal when its parent, whose process id is given, ends."""
    _prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it ended before the call above
        os.kill(os.getpid(), number)


def threads():
    """The number of this process's threads, Python's and others."""
    return len(os.listdir("/proc/self/task"))


def descendants(root):
    """The process ids of all processes below this one, the nearest first."""
    children = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        with contextlib.suppress(OSError):  # ended meanwhile
            with open(f"/proc/{entry}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(entry))
    found, begin = [root], 0
    while begin < len(found):
        found += children.get(found[begin], ())
        begin += 1
    return found[1:]


def signal_all(pids, number):
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def show_tracebacks(root, output):
    """Lets the processes below root write their stacks, one after the other, to the file whose descriptor this is."""
    for pid in descendants(root):
        if not handles(pid, TRACEBACK_SIGNAL):
            continue
        before = size = os.fstat(output).st_size
        signal_all([pid], TRACEBACK_SIGNAL)
        end = quiet = time.monotonic() + TRACEBACK_SECONDS
        while time.monotonic() < min(end, quiet):
            time.sleep(QUIET_SECONDS / 10)
            if os.fstat(output).st_size != size:
                size, quiet = os.fstat(output).st_size, time.monotonic() + QUIET_SECONDS
        if size > before:
            os.write(output, f"\n(above: the threads of process {pid})\n\n".encode())


def handles(pid, number):
    """Whether the process has a handler for the signal, which would end it otherwise."""
    with contextlib.suppress(OSError):
        with open(f"/proc/{pid}/status") as file:
            for line in file:
                if line.startswith("SigCgt:"):
                    return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def kill_descendants():
    """Ends and reaps everything below this process, which must be a subreaper."""
    while True:
        signal_all(descendants(os.getpid()), signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def wait_for_exit(pid, seconds):
    """The exit status of a child (minus the signal's number if one ended it), or None if it outlived the seconds."""
    handle = os.pidfd_open(pid)
    try:
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        if not poll.poll(max(0, seconds) * 1000):
            return None
    finally:
        os.close(handle)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
