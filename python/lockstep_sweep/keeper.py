"""Keeps the cores and cards of a host, which all sweeps of this user there share out.

The driver also sends this file to the other hosts of --host, where it runs by itself (slots.py).
"""

import fcntl
import json
import os
import pathlib
import re
import signal
import stat
import sys
import tempfile

DEVICES = "/dev"
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # what ends a driver


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
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not wait:
                    os.close(self._fd)
                    return False
                self._wait()
        self._depth += 1
        return True

    def _wait(self):
        """A process that is stopped may keep the lock for ever. So signals that end a driver, which it blocks to wait for them,
        have their handlers meanwhile; what these raise, leaves the lock to others."""
        former = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        try:
            try:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
                fcntl.flock(self._fd, fcntl.LOCK_EX)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, former)
        except BaseException:
            os.close(self._fd)
            raise

    def release(self):
        self._depth -= 1
        if self._depth == 0:
            os.close(self._fd)

    def __enter__(self):
        self.acquire()

    def __exit__(self, *error):
        self.release()


def visible_cards(variable):
    """Names of this host's NVIDIA cards that CUDA_VISIBLE_DEVICES offers where it has this value; None: all there are."""
    numbers = [str(number) for number, _ in enumerate(pathlib.Path(DEVICES).glob("nvidia[0-9]*"))]
    if variable is None or not numbers:
        return numbers
    names = []
    for name in map(str.strip, variable.split(",")):  # as CUDA reads it: what is no card ends the list, and none may come twice
        if name not in numbers and not name.startswith(("GPU-", "MIG-")):
            break
        names.append(name)
    return names if len(set(names)) == len(names) else []


def place_of_locks():
    """Names the folder of this host's locks. It is the same for two hosts' names only where these lead to one machine."""
    folder = private_folder()
    found = folder.stat()
    boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{folder} {found.st_dev}:{found.st_ino} {boot}"


class Keeper:
    """Of this host's cores and cards. What it has claimed is free again when this process ends, however it ends."""

    lost = ""  # why it is, as that of another host may be

    def __init__(self, visible):
        """`visible`: the value of CUDA_VISIBLE_DEVICES that counts; None: that of this process."""
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") if visible is None else visible
        self.units = {"core": sorted(os.sched_getaffinity(0)), "card": visible_cards(visible)}
        self.place = place_of_locks()
        self._taken = {}

    def claim(self, counts):
        """So many units of each kind, {"core": [0, 1], "card": []}, that no sweep of this user has; {} where there are fewer."""
        found = {kind: self._take(kind, count) for kind, count in counts.items()}
        if all(len(found[kind]) == count for kind, count in counts.items()):
            return found
        self.release(found)
        return {}

    def _take(self, kind, count):
        taken = []
        for unit in self.units[kind]:
            if len(taken) == count:
                break
            lock = Lock(private_folder() / re.sub(r"[^\w-]", "_", f"{kind}-{unit}"))
            if (kind, unit) not in self._taken and lock.acquire(wait=False):
                self._taken[kind, unit] = lock
                taken.append(unit)
        return taken

    def release(self, units):
        for kind, names in units.items():
            for name in names:
                self._taken.pop((kind, name)).release()


def serve(visible):
    """Answers by standard output what the driver asks by standard input, until that ends."""
    keeper = Keeper(visible)
    print(json.dumps({**keeper.units, "place": keeper.place}), flush=True)
    for line in sys.stdin:
        what, given = json.loads(line)
        if what == "claim":
            print(json.dumps(keeper.claim(given)), flush=True)
        else:
            keeper.release(given)
