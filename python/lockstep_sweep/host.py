"""What the drivers of one user on one host share: locks that end with their process, which of them live, and cores.

This is the one place that knows that all trials of a driver run on its host.
"""

import fcntl
import os
import pathlib
import socket
import stat
import tempfile


def private_folder():
    """lockstep-UID below TMPDIR or /tmp, as the library's own; only this user can enter it."""
    folder = pathlib.Path(tempfile.gettempdir()) / f"lockstep-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise OSError(f"{folder} is not a folder of this user's alone; remove it, or set TMPDIR")
    return folder


class Lock:
    """Between processes; the one that has it may take it again. The kernel releases it however the process ends. Who may write
    the folder's other files may take it, too."""

    def __init__(self, path):
        self._path, self._fd, self._depth = path, None, 0

    def acquire(self, wait=True):
        """Whether it is taken now; without `wait` it may be another's."""
        if self._depth == 0:
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                os.close(self._fd)
                return False
        self._depth += 1
        return True

    def release(self):
        self._depth -= 1
        if self._depth == 0:
            os.close(self._fd)

    def __enter__(self):
        self.acquire()

    def __exit__(self, *error):
        self.release()


def claim_cores(usable, count):
    """{core: its lock} of `count` cores that no sweep of this user computes on; None where there are fewer."""
    taken = {}
    for core in usable:
        lock = Lock(private_folder() / f"core-{core}")
        if len(taken) < count and lock.acquire(wait=False):
            taken[core] = lock
    if len(taken) == count:
        return taken
    release_cores(taken)
    return None


def release_cores(taken):
    for lock in taken.values():
        lock.release()


def this_driver():
    """Names this process in a study, for other drivers."""
    machine = pathlib.Path("/etc/machine-id")  # hosts of one name are told apart by it; a container may lack it
    return {"host": socket.gethostname(), "machine": machine.read_text().strip() if machine.exists() else "",
            "boot": pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            "pids": os.stat("/proc/self/ns/pid").st_ino, "pid": os.getpid(), "started": _started(os.getpid())}


def _started(pid):
    """When a process was started, in the kernel's ticks; None where it has ended."""
    try:
        fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def has_ended(driver):
    """Whether that one has. False, too, where this process cannot tell: on another host, or in another container."""
    here = this_driver()
    if (driver["host"], driver["machine"]) != (here["host"], here["machine"]):
        return False
    if driver["boot"] != here["boot"]:
        return True
    return driver["pids"] == here["pids"] and _started(driver["pid"]) != driver["started"]
