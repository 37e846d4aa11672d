"""Drivers of a study, by which others tell whether they live."""

import os
import pathlib
import socket


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
    if driver["pids"] != here["pids"] or _started(driver["pid"]) == driver["started"]:
        return False
    try:
        os.kill(driver["pid"], 0)
    except PermissionError:  # another user's, which /proc may hide (hidepid): it may be that one
        return _started(driver["pid"]) is not None
    except ProcessLookupError:
        pass
    return True
