"""Cores of a host, which all sweeps of this user there share out.

The driver also sends this file to the other hosts of --host, where it runs by itself (slots.py).
"""

import fcntl
import os
import pathlib
import stat
import sys
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


class Cores:
    """Those that this process may use. What it has claimed is free again when it ends, however it ends."""

    lost = False  # as those of another host may be

    def __init__(self):
        self.usable, self._taken = sorted(os.sched_getaffinity(0)), {}

    def claim(self, count):
        """`count` cores that no sweep of this user computes on; none where there are fewer."""
        taken = {}
        for core in self.usable:
            lock = Lock(private_folder() / f"core-{core}")
            if len(taken) < count and lock.acquire(wait=False):
                taken[core] = lock
        self._taken.update(taken)
        if len(taken) < count:
            self.release(taken)
            return []
        return list(taken)

    def release(self, cores):
        for core in list(cores):
            self._taken.pop(core).release()


def serve():
    """Answers by standard output what the driver asks by standard input, until that ends."""
    cores = Cores()
    print(*cores.usable, flush=True)
    for line in sys.stdin:
        what, *numbers = line.split()
        if what == "claim":
            print(*cores.claim(int(numbers[0])), flush=True)
        else:
            cores.release(map(int, numbers))
