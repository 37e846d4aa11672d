"""Workers that the kernel kills for want of memory, in a cgroup with a limit, and cgroups of the workers' own."""

import contextlib
import os
import pathlib
import re
import shlex
import signal
import sys
import tempfile
import time

import pytest
from support import HANG, wait_for_end

MEBIBYTE = 1 << 20
LIMIT = 400 * MEBIBYTE
TAKE = f"{sys.executable} -c 'taken = {4 * LIMIT} * bytes([1])'"


def cgroup_folder(kind, *words):
    """That of this process: of version 2, or of version 1's controller of memory; None where it is not mounted."""
    for line in pathlib.Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, (name, _, options, *_) = (part.split() for part in line.partition(" - "))
        if name != kind or not set(words) <= set(options.split(",")):
            continue
        for entry in pathlib.Path("/proc/self/cgroup").read_text().splitlines():
            number, controllers, path = entry.split(":", 2)
            if (number == "0") == (kind == "cgroup2") and set(words) <= set(controllers.split(",")):
                root, point = fields[3], fields[4]
                inside = path[len(root) :] if path.startswith(root) and root != "/" else path
                return pathlib.Path(point + inside)
    return None


@contextlib.contextmanager
def new_cgroup(parent):
    """A folder below, without processes at the end."""
    try:
        folder = pathlib.Path(tempfile.mkdtemp(prefix="lockstep_test_", dir=parent))
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error}")
    try:
        yield folder
    finally:
        deadline = time.monotonic() + HANG
        while True:
            try:
                folder.rmdir()
                break
            except OSError:
                assert time.monotonic() < deadline, (folder / "cgroup.procs").read_text()


@pytest.fixture
def limited():
    """Words that start a program with LIMIT bytes of memory for it and what it starts."""
    places = {
        "memory.limit_in_bytes": cgroup_folder("cgroup", "memory"),
        "memory.max": cgroup_folder("cgroup2"),
    }
    for name, parent in places.items():
        if not parent or not parent.is_dir():
            continue
        with new_cgroup(parent) as folder:
            if not (folder / name).exists():
                continue  # this controller is with the other version, or with none
            try:
                (folder / name).write_text(str(LIMIT))
                for swap, most in (("memory.swap.max", 0), ("memory.memsw.limit_in_bytes", LIMIT)):
                    if (folder / swap).exists():
                        (folder / swap).write_text(str(most))
            except OSError as error:
                pytest.skip(f"memory can't be limited here: {error}")
            yield ["sh", "-c", f'echo $$ > {folder}/cgroup.procs && exec "$@"', "sh"]
            return
    pytest.skip("there is no controller of memory here")


CAUSE = r"rank 1 \(pid \d+\) failed first: killed by signal 9 \(SIGKILL\), by the kernel, for want of memory\n"
REMEDY = "  what helps: smaller batches, fewer ranks on this host, or a higher limit on the job's memory\n"


@pytest.mark.parametrize("log", ["log", "no log"])
def test_want_of_memory_is_named_as_the_cause(programs, limited, log):
    """By the kernel's log, and without it, as in a container, by the cgroup's counter."""
    script = f"test $RANK = 1 && exec {TAKE}; exec sleep 1000"
    run = [*limited, programs.find("lockstep"), "run", "-n", 2, "sh", "-c", script]
    if log == "no log":
        run = ["unshare", "--mount", "sh", "-c", 'mount --bind /dev/null /dev/kmsg && exec "$@"', "sh", *run]
    done = programs.run(*run)
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"/dev/kmsg can't be hidden: {done.stderr}")
    assert done.status == 1, done.text
    shown = r"  (the kernel's log: .*Killed process|the kernel's log: oom-kill:|/\S+ counts a process that the kernel has killed).*\n"
    found = re.search(CAUSE + shown + REMEDY, done.stderr)
    assert found, done.text
    assert log == "log" or "counts a process" in found[1], done.text
    programs.wait_until_gone()


def test_for_a_sweep_it_is_a_result(programs, limited):
    pytest.importorskip("optuna")
    pytest.importorskip("lockstep_sweep", reason="there is no Python module in this build")
    words = ["--param", "x=int:0:9", "--metric", "loss", "--trials", 1, "--", *shlex.split(TAKE)]
    command = [*limited, programs.find("lockstep"), "sweep", *words]
    done = programs.run(*command, LOCKSTEP_SWEEP_PYTHON=sys.executable)
    assert "trial 0: out of memory" in done.stdout, done.text


def test_another_kill_is_none_for_want_of_memory(programs):
    done = programs.run("lockstep", "run", "-n", 2, "sh", "-c", "test $RANK = 1 && kill -9 $$; exec sleep 1000")
    assert done.status == 1 and re.search(r"rank 1 \(pid \d+\) failed first: killed by signal 9 \(SIGKILL\)\n", done.stderr), done.text
    assert "memory" not in done.stderr, done.text


@pytest.fixture
def cgroup_of():
    """Answers the cgroup of version 2 of a process; skips where a launcher may make none."""
    parent = cgroup_folder("cgroup2")
    if not parent or not parent.is_dir():
        pytest.skip("there is no cgroup of version 2 here")
    with new_cgroup(parent) as folder:
        if not os.access(folder / "cgroup.kill", os.W_OK):
            pytest.skip("this kernel can't kill a cgroup")

    def find(pid):
        (path,) = re.findall(r"^0::(.*)$", pathlib.Path(f"/proc/{pid}/cgroup").read_text(), re.M)
        return parent / pathlib.Path(path).name

    return find


@pytest.mark.parametrize("end", ["of the worker", "of the launcher"])
def test_what_has_left_its_process_group_ends_too(programs, cgroup_of, end):
    script = "setsid sh -c 'echo in process $$; exec sleep 1000 > /dev/null 2>&1' & read line; exit 3"
    agent = programs.start("lockstep", "run", "sh", "-c", script)
    left = int(agent.wait_for(r"in process (\d+)")[1])
    cgroup = cgroup_of(left)
    assert str(left) in (cgroup / "cgroup.procs").read_text().split()
    if end == "of the launcher":
        agent.kill(signal.SIGKILL)
        assert wait_for_end(left, time.monotonic() + HANG), f"process {left} runs on"
    else:
        assert agent.finish().status == 1
    programs.wait_until_gone()
    assert not cgroup.exists()


def test_without_cgroups_the_working_folder_is_none(programs):
    (programs.folder / "cgroup.procs").touch()  # as if it were one
    hide = ["unshare", "--mount", "sh", "-c", 'umount --recursive --lazy /sys/fs/cgroup && exec "$@"', "sh"]
    done = programs.run(*hide, programs.find("lockstep"), "run", "true")
    if "unshare" in done.stderr or "umount" in done.stderr:
        pytest.skip(f"cgroups can't be hidden: {done.stderr}")
    assert done.status == 0, done.text
