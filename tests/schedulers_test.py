"""mpirun and Slurm start a program, or lockstep run, on two hosts: these find each other by what they tell, and reduce over
the cable."""

import os
import pathlib
import re
import shutil
import time

import pytest
from hosts import PORT

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
JOB_FILE = pathlib.Path(__file__).resolve().parents[1] / "docs" / "jobs" / "slurm.sbatch"
REQUEUE_SECONDS = 120


def require(program, package) -> str:
    """The program's path; skips the test where there is none. Daemons are not in every user's PATH."""
    path = shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin")
    if not path:
        pytest.skip(f"{program} is not installed (Debian: {package})")
    return path


def check_sums(done):
    """That of the example all_reduce: four ranks, two on each host."""
    if "needs UCX" in done.stderr:
        pytest.skip("ranks on several hosts need UCX")
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


SECRET = {"LOCKSTEP_JOB_SECRET": "0123456789abcdef" * 4}


def check_roles(done, source):
    """Of two agents with two ranks each, which took their roles from a scheduler."""
    if "built without OpenSSL" in done.stderr:
        pytest.skip("lockstep was built without OpenSSL")
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


@pytest.fixture
def slurm(programs, make_hosts):
    """A cluster of two hosts; answers the words that begin one of Slurm's commands."""
    daemons = {name: require(name, name) for name in ("slurmctld", "slurmd")}
    require("srun", "slurm-client")
    net = make_hosts(2)
    folder = programs.folder
    (folder / "state").mkdir()
    configuration = folder / "slurm.conf"
    configuration.write_text(SLURM.format(names=net.names, addresses=net.addresses, folder=folder))
    (folder / "cgroup.conf").write_text(CGROUP)
    control = programs.start(*net.inside(0, daemons["slurmctld"], "-D", "-i", "-f", configuration))
    for host, name in enumerate(net.names):
        programs.start(*net.inside(host, daemons["slurmd"], "-D", "-N", name, "-f", configuration))
    control.wait_for("Running as primary controller", stream="stderr")
    return lambda command: net.inside(0, "env", f"SLURM_CONF={configuration}", command)


def test_slurm_starts_a_program_on_two_hosts(programs, slurm):
    done = programs.run(*slurm("srun"), "-N", 2, "--ntasks-per-node", 2, programs.find("all_reduce"), LOCKSTEP_LOG="info")
    check_sums(done)
    where = r"all 4 ranks are there, started by srun, on 2 hosts: host-a \(ranks 0 and 1\), host-b \(ranks 2 and 3\)"
    assert re.search(where, done.stderr), done.text


def test_agents_under_slurm_know_their_hosts(programs, slurm):
    agent = [programs.find("lockstep"), "run", "-n", 2, "--no-prefix", programs.find("all_reduce")]
    check_roles(programs.run(*slurm("srun"), "-N", 2, "--ntasks-per-node", 1, *agent, **SECRET), "Slurm")


def wait_until(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_job_that_slurm_requeues_ends_with_the_weights_of_an_undisturbed_one(programs, slurm):
    """The job file of the documentation: stopped by a signal all processes end with 75, and Slurm starts the job again."""
    train = programs.folder / "train"
    options = '--checkpoints "${RUN:-run}" --samples 120 --epochs 4 --step-milliseconds 20'
    train.write_text(f"#!/bin/sh\nexec {programs.find('resume')} {options}\n")
    train.chmod(0o755)
    (programs.folder / "key").write_text("0123456789abcdef" * 4)
    agent = [programs.find("lockstep"), "run", "-n", 2, "--secret-file", "key", "./train"]
    done = programs.run(*slurm("srun"), "-N", 2, "--ntasks-per-node", 1, *agent, RUN="undisturbed")
    if "built without OpenSSL" in done.stderr or "needs UCX" in done.stderr:
        pytest.skip("lockstep was built without OpenSSL, or there is no UCX")
    assert done.status == 0, done.text
    weights = re.search("weights: [0-9a-f]{16}", done.stdout)[0]

    path = f"{pathlib.Path(programs.find('lockstep')).parent}:{os.environ['PATH']}"
    job = programs.run(*slurm("sbatch"), "--parsable", JOB_FILE, PATH=path)
    assert job.status == 0, job.text
    number, output = job.stdout.strip(), programs.folder / f"slurm-{job.stdout.strip()}.out"
    wait_until(lambda: list((programs.folder / "run").glob("step-*")), 60)
    programs.run(*slurm("scancel"), "--signal=TERM", number)

    def has_ended():
        # Slurm waits for two minutes before it starts a job again, unless it is told to do so now.
        programs.run(*slurm("scontrol"), "update", f"JobId={number}", "StartTime=now")
        return "weights: " in output.read_text()

    wait_until(has_ended, REQUEUE_SECONDS)
    text = output.read_text()
    assert "the status is 75" in text and weights in text, text
    assert "each sample once in each epoch: yes" in text, text
