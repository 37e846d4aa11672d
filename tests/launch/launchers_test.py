"""One program starts under every launcher, by hand, and through tcp:// and file://."""

import os
import pathlib
import random
import re
import shutil
import socket
import sys

import pytest
import support


def torchrun(programs, program, *options):
    command = shutil.which("torchrun", path=pathlib.Path(sys.executable).parent)
    if not command:
        pytest.skip("no torchrun beside this Python")
    return [programs.run(command, "--no-python", "--nproc-per-node", 2, programs.find(program), *options)]


def lockstep_run(programs, program, *options):
    return [programs.lockstep_run(2, program, *options)]


def by_hand(programs, program, *options):
    return programs.run_ranks([0, 1], program, *options)


def open_mpi(programs, program, *options):
    command = shutil.which("mpirun.openmpi") or shutil.which("mpirun")
    if not command or not re.search("Open MPI|OpenRTE|PRRTE", programs.run(command, "--version").stdout):
        pytest.skip("Open MPI's mpirun is not installed")
    return [programs.run(command, "--allow-run-as-root", "--oversubscribe", "-n", 2, programs.find(program), *options)]


def mpich(programs, program, *options):
    command = shutil.which("mpiexec.hydra")
    if not command:
        pytest.skip("MPICH's mpiexec.hydra is not installed")
    return [programs.run(command, "-n", 2, programs.find(program), *options)]


def srun(programs, program, *options, nodes="localhost"):
    """Slurm's variables as srun sets them for a step of two tasks on one node."""
    step = {
        "SLURM_JOB_ID": random.randrange(1, 2**31),  # the port is derived from it
        "SLURM_STEP_ID": 0,
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_STEP_NUM_TASKS": 2,
        "SLURM_STEP_TASKS_PER_NODE": 2,
        "SLURM_NTASKS": 8,  # the allocation's, not the step's
        "SLURM_NODEID": 0,
    }
    children = [programs.start(program, *options, SLURM_PROCID=rank, SLURM_LOCALID=rank, **step) for rank in range(2)]
    return [child.finish() for child in children]


def srun_by_name(programs, program, *options):
    return srun(programs, program, *options, nodes=socket.gethostname())


LAUNCHERS = [lockstep_run, torchrun, by_hand, open_mpi, mpich, srun, srun_by_name]


def lines_of(results) -> list:
    """All standard output, without the launcher's prefixes."""
    for result in results:
        assert result.status == 0, result.text
    lines = "".join(result.stdout for result in results).splitlines()
    return sorted(re.sub(r"^\[rank \d+\] ", "", line) for line in lines)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_all_reduce_starts_under(programs, launcher):
    assert lines_of(launcher(programs, "all_reduce")) == [
        "rank 0 has [0, 0]",
        "rank 0 now has [1, 1]",
        "rank 1 has [1, 1]",
        "rank 1 now has [1, 1]",
    ]
    programs.wait_until_gone()


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_one_step_starts_under(programs, launcher):
    lines = lines_of(launcher(programs, "one_step"))
    assert len(lines) == 2, lines
    for rank, line in enumerate(lines):
        assert re.fullmatch(rf"rank {rank} loss: \d+(\.\d+)?", line), lines


def test_a_restart_under_torchrun_meets_anew_in_the_agents_store(programs):
    """The store outlives the workers; what the first attempt left in it must not disturb the second."""
    command = shutil.which("torchrun", path=pathlib.Path(sys.executable).parent)
    if not command:
        pytest.skip("no torchrun beside this Python")
    attempt = '"$0" && test "$TORCHELASTIC_RESTART_COUNT" = 1'
    options = ["--no-python", "--nproc-per-node", 2, "--max-restarts", 1, "--monitor-interval", 0.1]
    done = programs.run(command, *options, "sh", "-c", attempt, programs.find("meeting_driver"))
    assert done.status == 0, done.text
    assert done.stdout.count("has the sum 1\n") >= 2, done.text  # the first attempt may end before it can write


def meet(programs, init_method, world_size, **variables):
    """The driver's ranks, which are told everything by options; returns each one's standard output."""
    options = ["--init-method", init_method, "--world-size", world_size]
    children = [
        programs.start("meeting_driver", *options, "--rank", rank, **variables) for rank in range(world_size)
    ]
    results = [child.finish() for child in children]
    for result in results:
        assert result.status == 0, result.text
    return [re.sub(r" \(pid \d+\)", "", result.stdout) for result in results]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
def test_tcp(programs, host):
    if host == "[::1]" and not os.path.exists("/proc/net/if_inet6"):
        pytest.skip("no IPv6 here")
    outputs = meet(programs, f"tcp://{host}:{support.free_port()}", 3)
    assert outputs == [f"rank {rank} of 3 has the sum 3\n" for rank in range(3)]


def test_file(programs):
    outputs = meet(programs, f"file://{programs.folder}/meeting", 3)
    assert outputs == [f"rank {rank} of 3 has the sum 3\n" for rank in range(3)]


def test_rank_and_world_size_in_the_init_method(programs):
    address = f"tcp://127.0.0.1:{support.free_port()}?world_size=2&rank="
    children = [programs.start("meeting_driver", "--init-method", f"{address}{rank}") for rank in range(2)]
    for rank, child in enumerate(children):
        done = child.finish()
        assert done.status == 0 and f"rank {rank} of 2 " in done.stdout, done.text


def test_an_explicit_tcp_method_wins_over_the_launchers_variables(programs):
    launched = {"RANK": 5, "WORLD_SIZE": 9, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": support.free_port()}
    assert len(meet(programs, f"tcp://127.0.0.1:{support.free_port()}", 2, **launched)) == 2


# The start of PyTorch's tutorials: the program itself sets MASTER_ADDR and MASTER_PORT, and maybe RANK and WORLD_SIZE. No
# launcher's agent listens there.

SUMS = [f"rank {rank} of 2 has the sum 1" for rank in range(2)]


def own_address(host="localhost"):
    """Options with which the driver sets an address of its own. A wait for a store that is not there fails the test."""
    return ["--set", f"MASTER_ADDR={host}", "--set", f"MASTER_PORT={support.free_port()}", "--timeout", 20]


def sums_of(done) -> list:
    return [re.sub(r" \(pid \d+\)", "", line) for line in lines_of([done])]


@pytest.mark.parametrize("numbered", [[], ["--numbered"]], ids=["variables", "rank= and world_size= too"])
def test_spawned_processes_meet_where_they_set_the_address(programs, numbered):
    assert sums_of(programs.run("meeting_driver", "--spawn", 2, *numbered, *own_address())) == SUMS


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.0.0.2"])
def test_under_lockstep_run_a_program_may_set_the_address(programs, host):
    assert sums_of(programs.lockstep_run(2, "meeting_driver", *own_address(host))) == SUMS


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_program_may_set_the_address_under(programs, launcher):
    done = launcher(programs, "meeting_driver", *own_address())
    assert [re.sub(r" \(pid \d+\)", "", line) for line in lines_of(done)] == SUMS


@pytest.mark.parametrize("launcher", [lockstep_run, torchrun])
def test_a_program_may_set_its_rank_too_under(programs, launcher):
    own = 'exec "$0" --set RANK=$LOCAL_RANK --set WORLD_SIZE=$LOCAL_WORLD_SIZE "$@"'
    done = launcher(programs, "sh", "-c", own, programs.find("meeting_driver"), *own_address())
    assert [re.sub(r" \(pid \d+\)", "", line) for line in lines_of(done)] == SUMS


def test_a_script_between_lockstep_run_and_the_program_may_set_the_address(programs):
    script = f'export MASTER_PORT={support.free_port()}; exec "$0" --timeout 20'
    assert sums_of(programs.lockstep_run(2, "sh", "-c", script, programs.find("meeting_driver"))) == SUMS


def test_the_launchers_own_address_under_another_name_is_the_launchers(programs):
    options = ["--set", "MASTER_ADDR=localhost", "--timeout", 20]
    assert sums_of(programs.lockstep_run(2, "meeting_driver", *options)) == SUMS


def test_torchrun_under_lockstep_run_has_its_own_store(programs):
    """What lockstep run said of its store is about another one."""
    command = shutil.which("torchrun", path=pathlib.Path(sys.executable).parent)
    if not command:
        pytest.skip("no torchrun beside this Python")
    inner = [command, "--no-python", "--nproc-per-node", 2, "--master-port", support.free_port()]
    assert sums_of(programs.lockstep_run(1, *inner, programs.find("meeting_driver"), "--timeout", 20)) == SUMS


def test_alone_without_any_environment(programs):
    done = programs.run("meeting_driver", "--rank", 0, "--world-size", 1)
    assert done.status == 0 and "rank 0 of 1 " in done.stdout and done.stderr == "", done.text


def test_with_nothing_set_the_error_shows_the_line_to_type(programs):
    done = programs.run("all_reduce")
    assert done.status == 1 and done.stdout == "", done.text
    assert f"    lockstep run --nproc-per-node 2 {programs.find('all_reduce')}\n" in done.stderr
