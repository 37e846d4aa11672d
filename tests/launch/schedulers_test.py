"""mpirun, Slurm and torchrun start a program, or lockstep run, on two hosts: these find each other by what they tell, and reduce
over the cable."""

import dataclasses
import os
import pathlib
import re
import shutil
import sys
import time

import pytest
from hosts import PORT, kill, network_namespace

SLURM = """\
ClusterName=lockstep
SlurmctldHost={names[0]}({addresses[0]})
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdSpoolDir={folder}/spool.%n
SlurmdParameters=config_overrides
SlurmdTimeout={lost_after}
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
MpiDefault=none
ReturnToService=2
NodeName={names[0]} NodeAddr={addresses[0]} CPUs=2
NodeName={names[1]} NodeAddr={addresses[1]} CPUs=2
PartitionName=all Nodes=ALL Default=YES
"""
CGROUP = "CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n"  # with cgroup/v2 slurmd wants systemd
JOBS = pathlib.Path(__file__).resolve().parents[2] / "docs" / "jobs"
REQUEUE_SECONDS = 120
LOST_AFTER = 15  # seconds without a word of slurmd


def require(program, package) -> str:
    """The program's path; skips the test where there is none. Daemons are not in every user's PATH."""
    path = shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin")
    if not path:
        pytest.skip(f"{program} is not installed (Debian: {package})")
    return path


def check_sums(done):
    """That of the example all_reduce: four ranks, two on each host."""
    done.skip_without_ucx()
    assert done.status == 0, done.text
    sums = [line for line in done.stdout.splitlines() if "now has" in line]
    assert sorted(sums) == [f"rank {rank} now has [6, 6]" for rank in range(4)], done.text


def test_mpirun_starts_a_program_on_two_hosts(programs, make_hosts):
    mpirun = require("mpirun.openmpi", "openmpi-bin")
    net = make_hosts(2)
    options = ["--allow-run-as-root", "--bind-to", "none", "--mca", "plm_rsh_agent", net.remote_shell()]
    place = ["-n", 4, "--host", ",".join(f"{name}:2" for name in net.names)]
    meeting = ["-x", f"MASTER_ADDR={net.names[0]}", "-x", f"MASTER_PORT={PORT}"]
    command = [mpirun, *options, *place, *meeting, programs.find("all_reduce")]
    done = programs.run(*net.inside(0, *command), LOCKSTEP_LOG="info")
    check_sums(done)
    where = r"all 4 ranks are there, started by mpirun, on 2 hosts: host-a \(ranks 0 and 1\), host-b \(ranks 2 and 3\)"
    assert re.search(where, done.stderr), done.text
    programs.wait_until_gone()


def sets_its_place(programs, net, rank, size):
    """A program that sets all four variables itself, as tutorials do: rank and size from these of the scheduler's."""
    place = f"RANK=${rank} WORLD_SIZE=${size} MASTER_ADDR={net.names[0]} MASTER_PORT={PORT}"
    return ["sh", "-c", f"{place} exec {programs.find('all_reduce')}"]


def test_under_mpirun_a_program_on_two_hosts_may_set_its_place(programs, make_hosts):
    mpirun = require("mpirun.openmpi", "openmpi-bin")
    net = make_hosts(2)
    options = ["--allow-run-as-root", "--bind-to", "none", "--mca", "plm_rsh_agent", net.remote_shell()]
    place = ["-n", 4, "--host", ",".join(f"{name}:2" for name in net.names)]
    program = sets_its_place(programs, net, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    check_sums(programs.run(*net.inside(0, mpirun, *options, *place, *program)))


@pytest.mark.parametrize("backend, port", [("static", PORT), ("static", PORT + 1), ("c10d", PORT + 1)])
def test_under_torchrun_a_program_on_two_hosts_may_set_its_place(programs, make_hosts, backend, port):
    """At the port of torchrun's store, and at another one, where rank 0 serves a store."""
    torchrun = shutil.which("torchrun", path=pathlib.Path(sys.executable).parent)
    if not torchrun:
        pytest.skip("no torchrun beside this Python")
    net = make_hosts(2)
    options = ["--no-python", "--nnodes", 2, "--nproc-per-node", 2, "--rdzv-backend", backend]
    options += ["--rdzv-endpoint", f"{net.addresses[0]}:{PORT}", "--rdzv-id", "job"]
    place = "--set RANK=$((2 * GROUP_RANK + LOCAL_RANK)) --set WORLD_SIZE=4"
    place += f" --set MASTER_ADDR={net.addresses[0]} --set MASTER_PORT={port}"
    program = ["sh", "-c", f"exec {programs.find('meeting_driver')} {place} --timeout 20"]
    agents = []
    for host in range(2):
        own = ["--node-rank", host, "--local-addr", net.addresses[host]]
        agents.append(programs.start(*net.inside(host, torchrun, *options, *own, *program)))
    done = [agent.finish() for agent in agents]
    for host, result in enumerate(done):
        result.skip_without_ucx()
        assert result.status == 0, result.text
        for rank in (2 * host, 2 * host + 1):
            assert re.search(rf"^rank {rank} of 4 \(pid \d+\) has the sum 6$", result.stdout, re.M), result.text


SECRET = {"LOCKSTEP_JOB_SECRET": "0123456789abcdef" * 4}


def check_roles(done, source):
    """Of two agents with two ranks each, which took their roles from a scheduler."""
    done.skip_without_openssl()
    check_sums(done)
    lines = [line for line in done.stderr.splitlines() if f"by {source}" in line]
    assert len(lines) == 2, done.text
    for host in range(2):
        assert any(f"--nnodes 2 --node-rank {host} " in line for line in lines), done.text


def test_agents_under_mpirun_know_their_hosts(programs, make_hosts):
    mpirun = require("mpirun.openmpi", "openmpi-bin")
    net = make_hosts(2)
    options = ["--allow-run-as-root", "--bind-to", "none", "--mca", "plm_rsh_agent", net.remote_shell()]
    options += ["-x", "LOCKSTEP_JOB_SECRET", "-n", 2, "--map-by", "ppr:1:node", "--host", ",".join(net.names)]
    agent = [programs.find("lockstep"), "run", "--master-addr", net.names[0], "-n", 2, "--no-prefix"]
    done = programs.run(*net.inside(0, mpirun, *options, *agent, programs.find("all_reduce")), **SECRET)
    check_roles(done, "Open MPI")
    programs.wait_until_gone()


def test_the_job_file_of_open_mpi_starts_a_program_on_two_hosts(programs, make_hosts):
    mpirun = require("mpirun.openmpi", "openmpi-bin")
    net = make_hosts(2)
    commands = programs.folder / "commands"
    commands.mkdir()
    (commands / "mpirun").symlink_to(mpirun)
    (programs.folder / "hosts").write_text("".join(f"{name} slots=2\n" for name in net.names))
    (programs.folder / "key").write_text(SECRET["LOCKSTEP_JOB_SECRET"])
    (programs.folder / "train").symlink_to(programs.find("all_reduce"))
    root = {"OMPI_ALLOW_RUN_AS_ROOT": 1, "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": 1}
    path = f"{commands}:{pathlib.Path(programs.find('lockstep')).parent}:{os.environ['PATH']}"
    job = [*net.inside(0, "sh", JOBS / "open_mpi.sh")]
    done = programs.run(*job, PATH=path, OMPI_MCA_plm_rsh_agent=net.remote_shell(), **root)
    done = dataclasses.replace(done, stdout=re.sub(r"^\[rank \d\] ", "", done.stdout, flags=re.M))
    check_roles(done, "Open MPI")
    programs.wait_until_gone()


class Cluster:
    """Slurm on two hosts. Answers the words that begin one of its commands."""

    def __init__(self, programs, net):
        self.programs, self.net = programs, net
        self.daemons = {name: require(name, name) for name in ("slurmctld", "slurmd")}
        folder = programs.folder
        (folder / "state").mkdir()
        self.configuration = folder / "slurm.conf"
        place = {"names": net.names, "addresses": net.addresses, "folder": folder, "lost_after": LOST_AFTER}
        self.configuration.write_text(SLURM.format(**place))
        (folder / "cgroup.conf").write_text(CGROUP)
        control = programs.start(*net.inside(0, self.daemons["slurmctld"], "-D", "-i", "-f", self.configuration))
        for host in range(2):
            self.start_host(host)
        control.wait_for("Running as primary controller", stream="stderr")

    def __call__(self, command):
        return self.net.inside(0, "env", f"SLURM_CONF={self.configuration}", command)

    def start_host(self, host):
        words = [self.daemons["slurmd"], "-D", "-N", self.net.names[host], "-f", self.configuration]
        self.programs.start(*self.net.inside(host, *words))

    def requeue_at(self, status):
        """Batch scripts that end so are started again."""
        self.configuration.write_text(self.configuration.read_text() + f"RequeueExit={status}\n")
        assert self.programs.run(*self("scontrol"), "reconfigure").status == 0

    def kill_host(self, host):
        """As a loss of power does: no connection is closed."""
        self.net.cut(host)
        own = network_namespace(self.net.pids()[host])
        while pids := [pid for pid in self.net.processes() if network_namespace(pid) == own]:
            for pid in pids:
                kill(pid, time.monotonic() + REQUEUE_SECONDS)


@pytest.fixture
def slurm(programs, make_hosts):
    require("srun", "slurm-client")
    return Cluster(programs, make_hosts(2))


def test_slurm_starts_a_program_on_two_hosts(programs, slurm):
    done = programs.run(*slurm("srun"), "-N", 2, "--ntasks-per-node", 2, programs.find("all_reduce"), LOCKSTEP_LOG="info")
    check_sums(done)
    where = r"all 4 ranks are there, started by srun, on 2 hosts: host-a \(ranks 0 and 1\), host-b \(ranks 2 and 3\)"
    assert re.search(where, done.stderr), done.text


def test_under_slurm_a_program_on_two_hosts_may_set_its_place(programs, slurm):
    program = sets_its_place(programs, slurm.net, "SLURM_PROCID", "SLURM_NTASKS")
    check_sums(programs.run(*slurm("srun"), "-N", 2, "--ntasks-per-node", 2, *program))


def test_agents_under_slurm_know_their_hosts(programs, slurm):
    agent = [programs.find("lockstep"), "run", "-n", 2, "--no-prefix", programs.find("all_reduce")]
    check_roles(programs.run(*slurm("srun"), "-N", 2, "--ntasks-per-node", 1, *agent, **SECRET), "Slurm")


def wait_until(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


# The number of tasks on each host, and what each of them is.
JOB_FILES = {
    "slurm.sbatch": (1, ["lockstep", "run", "-n", 2, "--secret-file", "key", "./train"]),
    "slurm_srun.sbatch": (2, ["./train"]),
}


@pytest.mark.parametrize("file, loss", [
    ("slurm.sbatch", "a signal"),
    pytest.param("slurm.sbatch", "a host", marks=pytest.mark.long),
    ("slurm_srun.sbatch", "a signal"),
    pytest.param("slurm_srun.sbatch", "a signal, and RequeueExit", marks=pytest.mark.long),
    pytest.param("slurm_srun.sbatch", "a host", marks=pytest.mark.long),
])  # fmt: skip
def test_a_job_that_slurm_requeues_ends_with_the_weights_of_an_undisturbed_one(programs, slurm, file, loss):
    """The job files of the documentation: stopped by a signal all processes end with 75, and Slurm starts the job again; it
    does so, too, when a host is lost, and the job waits until there is one in its place."""
    train = programs.folder / "train"
    options = '--checkpoints "${RUN:-run}" --samples 120 --epochs 4 --step-milliseconds 20'
    train.write_text(f"#!/bin/sh\nexec {programs.find('resume')} {options}\n")
    train.chmod(0o755)
    (programs.folder / "key").write_text("0123456789abcdef" * 4)
    tasks, words = JOB_FILES[file]
    step = ["-N", 2, "--ntasks-per-node", tasks, *map(programs.find, words)]
    done = programs.run(*slurm("srun"), *step, RUN="undisturbed")
    if "built without OpenSSL" in done.stderr or "needs UCX" in done.stderr:
        pytest.skip("lockstep was built without OpenSSL, or there is no UCX")
    assert done.status == 0, done.text
    weights = re.search("weights: [0-9a-f]{16}", done.stdout)[0]

    script = (JOBS / file).read_text()
    if "RequeueExit" in loss:
        script = re.sub("^if .*scontrol requeue.*\n", "", script, flags=re.M)
        slurm.requeue_at(75)
    (programs.folder / file).write_text(script)
    path = f"{pathlib.Path(programs.find('lockstep')).parent}:{os.environ['PATH']}"
    job = programs.run(*slurm("sbatch"), "--parsable", file, PATH=path)
    assert job.status == 0, job.text
    number, output = job.stdout.strip(), programs.folder / f"slurm-{job.stdout.strip()}.out"

    def state():
        return programs.run(*slurm("squeue"), "--noheader", "--states=all", "--format=%T", f"--jobs={number}").stdout.strip()

    wait_until(lambda: list((programs.folder / "run").glob("step-*")), 60)
    if loss == "a host":
        # Then come the two minutes after which Slurm starts a job again. They are needed: what its daemons still tell of the first
        # start is else counted against the second, whose srun then finds one host in its allocation of two.
        slurm.kill_host(1)
        wait_until(lambda: state() == "PENDING", REQUEUE_SECONDS)
        slurm.net.heal(1)
        slurm.start_host(1)
    else:
        programs.run(*slurm("scancel"), "--signal=TERM", number)
        wait_until(lambda: state() == "PENDING", 60)
        time.sleep(2)  # Slurm's daemons refuse a start in the second in which they have ended the one before
        assert programs.run(*slurm("scontrol"), "update", f"JobId={number}", "StartTime=now").status == 0

    def has_ended():
        return "weights: " in output.read_text() and state() not in ("RUNNING", "COMPLETING")

    wait_until(has_ended, 2 * REQUEUE_SECONDS)
    text = output.read_text()
    assert weights in text and ("the status is 75" in text) == (loss != "a host"), text
    assert "each sample once in each epoch: yes" in text, text
    assert state() == "COMPLETED", text
