"""Where a measurement was made."""

import importlib.metadata
import os
import pathlib
import platform
import subprocess

ROOT = pathlib.Path(__file__).resolve().parents[2]
CGROUP = pathlib.Path("/sys/fs/cgroup")  # in a container: its own


def describe():
    return {"cpu": cpu_model(), "cores": len(os.sched_getaffinity(0)), "memory_gib": memory_gib(),
            "kernel": platform.release(), "load_at_start": os.getloadavg()[0], "python": platform.python_version(),
            "torch": torch_version(), "mpi": first_line("mpirun", "--version"), "commit": commit()}


def cpu_model():
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def memory_gib():
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)


def available_memory():
    """Bytes that can be taken without swapping: what the kernel says, or less where a container's limit is near."""
    for line in pathlib.Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) << 10
    try:
        limit, used = ((CGROUP / name).read_text().strip() for name in ("memory.max", "memory.current"))
        return available if limit == "max" else max(0, min(available, int(limit) - int(used)))
    except OSError:  # no cgroup of version 2, or its root, which has no limit
        return available


def torch_version():
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None


def commit():
    """The commit, with a + where files differ from it; None outside of git."""
    name = first_line("git", "-C", str(ROOT), "rev-parse", "HEAD")
    if name is None:
        return None
    return name + ("+" if first_line("git", "-C", str(ROOT), "status", "--porcelain") else "")


def first_line(*command):
    try:
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return output.partition("\n")[0] or None
