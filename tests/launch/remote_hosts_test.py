"""`lockstep run -H`: one command starts the agents of all hosts by a remote shell. Hosts are network namespaces, and the shell is a
script that enters them."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest
from agents import wait_until_ended
from support import HANG

SECRET = "0123456789abcdef" * 4
TELL = "echo rank $RANK of $WORLD_SIZE, $LOCAL_RANK of $LOCAL_WORLD_SIZE on $(hostname)"
STAY = TELL + "; exec sleep 1000"


class Cluster:
    """Two hosts, and a shell that gives what it starts none of the caller's environment, as ssh."""

    def __init__(self, programs, net):
        self.programs, self.net = programs, net
        self.shell = programs.folder / "shell"
        self.shell.write_text(
            f'#!/bin/sh\nenv -i PATH="$PATH" LOCKSTEP_TEST_MARK="$LOCKSTEP_TEST_MARK" {net.remote_shell()} "$@"\nexit $?\n'
        )
        self.shell.chmod(0o700)

    def start(self, hosts, *words, **variables):
        """On the first host."""
        command = [self.programs.find("lockstep"), "run", "--rsh", self.shell, "-H", hosts, *words]
        return self.programs.start(*self.net.inside(0, *command), **variables)

    def run(self, *words, **variables):
        return self.start(*words, **variables).finish()

    def shell_of(self, host):
        """The pid of the shell that leads there."""
        for pid in self.programs.survivors():
            words = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if str(self.shell).encode() in words[:2] and host.encode() in words:
                return pid
        raise AssertionError(f"no shell leads to {host}")

    def agent_of(self, number):
        """The pids of this host's agent and of what it has forked, in their order."""
        word = f"--node-rank={number}".encode()
        words = {pid: pathlib.Path(f"/proc/{pid}/cmdline") for pid in self.programs.survivors()}
        return sorted(pid for pid, file in words.items() if file.exists() and word in file.read_bytes().split(b"\0"))

    def wait_until_finished(self, number):
        """Until the workers of this host have ended, and their guardian with them; the pid of its agent."""
        deadline = time.monotonic() + HANG
        while len(found := self.agent_of(number)) != 1:
            assert time.monotonic() < deadline, found
            time.sleep(0.02)
        return found[0]


@pytest.fixture
def cluster(programs, make_hosts):
    done = programs.run("lockstep", "run", "--dry-run", "-H", "a,b", "true")
    done.skip_without_openssl()
    return Cluster(programs, make_hosts(2))


def test_scaling_over_hosts_fills_them_in_their_order(programs, cluster):
    says = "echo rank $RANK on $(hostname); [ $RANK != 0 ] || echo LOCKSTEP_SCALING $((90 * WORLD_SIZE + 10)) images/s"
    command = [programs.find("lockstep"), "scaling", "--rsh", cluster.shell, "-H", "host-a:2,host-b:1", "--json", "out.json"]
    done = programs.run(*cluster.net.inside(0, *command, "--", "sh", "-c", says))
    assert done.status == 0, done.text
    report = json.loads((programs.folder / "out.json").read_text())
    assert (report["hosts"], report["throughput_from"], report["unit"]) == ("host-a:2,host-b:1", "program", "images/s")
    numbers = ("ranks", "hosts", "throughput")
    assert [[each[name] for name in numbers] for each in report["results"]] == [[1, 1, 100], [2, 1, 190], [3, 2, 280]]
    rows = [line.split() for line in done.stdout.splitlines() if not line.startswith("#")]
    assert [row[:2] for row in rows] == [["1", "1"], ["2", "1"], ["3", "2"]], done.text
    assert "[rank 1] rank 1 on host-a" in done.stderr and "rank 2 on host-b" in done.stderr, done.text


def test_scaling_measures_the_barrier_between_hosts(programs, cluster):
    cluster.run("host-a,host-b", programs.find("all_reduce")).skip_without_ucx()
    command = [programs.find("lockstep"), "scaling", "--rsh", cluster.shell, "-H", "host-a,host-b", "--json", "-", "true"]
    done = programs.run(*cluster.net.inside(0, *command))
    assert done.status == 0, done.text
    one, two = json.loads(done.stdout)["results"]
    assert one["barrier_us"] is None and two["barrier_us"] > 0, done.text


def test_scaling_ends_with_the_job_that_fails(programs, cluster):
    command = [programs.find("lockstep"), "scaling", "--no-barrier", "--rsh", cluster.shell, "-H"]
    failing = programs.run(*cluster.net.inside(0, *command, "host-a,host-b", "--", "sh", "-c", "exit $RANK"))
    assert failing.status == 1 and "the program failed with 2 ranks" in failing.stderr, failing.text
    assert len([line for line in failing.stdout.splitlines() if not line.startswith("#")]) == 1, failing.text
    too_many = programs.run(*command, "host-a,host-b", "--ranks", "1,3", "true")
    assert too_many.status == 2 and "the hosts of -H have 2 slots" in too_many.stderr, too_many.text


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_scaling_ends_the_ranks_of_all_hosts(programs, cluster, number):
    command = [programs.find("lockstep"), "scaling", "--no-barrier", "--rsh", cluster.shell, "-H", "host-a,host-b"]
    waits = "[ $WORLD_SIZE = 1 ] || { echo rank $RANK waits; exec sleep 1000; }"
    child = programs.start(*cluster.net.inside(0, *command, "sh", "-c", waits))
    child.wait_for("rank 0 waits", "stderr")
    child.wait_for("rank 1 waits", "stderr")
    child.kill(number)
    done = child.finish()
    assert done.status == 128 + number, done.text
    assert [line.split()[0] for line in done.stdout.splitlines() if not line.startswith("#")] == ["1"], done.text
    programs.wait_until_gone()


def test_one_command_runs_a_job_on_two_hosts(programs, cluster):
    done = cluster.run("host-a:2,host-b:1", programs.find("all_reduce"))
    done.skip_without_ucx()
    assert done.status == 0, done.text
    sums = sorted(line for line in done.stdout.splitlines() if "now has" in line)
    assert sums == [f"[rank {rank}] rank {rank} now has [3, 3]" for rank in range(3)], done.text
    assert "WARNING" not in done.stderr, "a secret is made"
    programs.wait_until_gone()


@pytest.mark.parametrize("port", [4000, 4001])
def test_a_program_may_set_its_place(programs, cluster, port):
    """At the port at which the agents meet, and at another one, where rank 0 serves a store."""
    place = f"RANK=$((2 * GROUP_RANK + LOCAL_RANK)) WORLD_SIZE=3 MASTER_ADDR=host-a MASTER_PORT={port}"
    script = f"{place} exec {programs.find('all_reduce')}"
    done = cluster.run("host-a:2,host-b:1", "--master-port", 4000, "--no-prefix", "sh", "-c", script)
    done.skip_without_ucx()
    assert done.status == 0, done.text
    sums = sorted(line for line in done.stdout.splitlines() if "now has" in line)
    assert sums == [f"rank {rank} now has [3, 3]" for rank in range(3)], done.text


def test_hosts_are_filled_in_their_order_and_get_variables_and_options(programs, cluster):
    script = f'{TELL} has "$NAME", $UCX_LOG_LEVEL, $GIVEN, "<$OWN>", "<$LOCKSTEP_JOB_SECRET>" in $PWD for $TORCHELASTIC_RUN_ID'
    variables = {"NAME": "a 'b'", "UCX_LOG_LEVEL": "error", "OWN": "no"}
    options = ["-n", 2, "-x", "NAME", "-x", "GIVEN=it is", "--rdzv-id", "the job", "--no-prefix"]
    done = cluster.run("host-b:1,host-a:4", *options, "sh", "-c", script, **variables)
    assert done.status == 0, done.text
    assert sorted(done.stdout.splitlines()) == [
        f"rank {rank} of 2, 0 of 1 on {host} has a 'b', error, it is, <{own}>, <> in {programs.folder} for the job"
        for rank, host, own in ((0, "host-b", ""), (1, "host-a", "no"))
    ], done.text


def test_each_host_has_its_own_cores(programs, cluster):
    cores = sorted(os.sched_getaffinity(0))
    lists = [str(cores[0]), ",".join(map(str, cores))]
    script = "echo $(hostname) on $(python3 -c 'import os; print(*sorted(os.sched_getaffinity(0)), sep=\",\")')"
    done = cluster.run("host-a,host-b", "--cpu-list", ";".join(lists), "--no-prefix", "sh", "-c", script)
    assert sorted(done.stdout.splitlines()) == [f"host-a on {lists[0]}", f"host-b on {lists[1]}"], done.text


@pytest.mark.parametrize("hosts, lists", [("host-a:2,host-b:1", ";3"), ("host-a:2,host-b:1", "5,6;"), ("host-b:2", "")])
def test_each_host_has_its_own_cards_or_none(programs, cluster, hosts, lists):
    script = 'echo "$(hostname) <${CUDA_VISIBLE_DEVICES-all}> of $WORLD_SIZE"'
    done = cluster.run(hosts, "--gpu-list", lists, "--no-prefix", "sh", "-c", script, CUDA_VISIBLE_DEVICES="9")
    assert done.status == 0, done.text
    places = [place.split(":") for place in hosts.split(",")]
    world = sum(int(slots) for _, slots in places)
    expected = [f"{host} <{cards}> of {world}" for (host, slots), cards in zip(places, lists.split(";")) for _ in range(int(slots))]
    assert sorted(done.stdout.splitlines()) == sorted(expected), done.text


def test_the_secret_stands_on_no_command_line(programs, cluster):
    job = cluster.start("host-a,host-b", "sh", "-c", STAY, LOCKSTEP_JOB_SECRET=SECRET)
    job.wait_for("rank 0 of 2"), job.wait_for("rank 1 of 2")
    pids = programs.survivors()
    assert len(pids) >= 6
    for pid in pids:
        assert SECRET.encode() not in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
    job.kill(signal.SIGTERM)
    assert job.finish().status == 143


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_signals_end_all_hosts(programs, cluster, number):
    job = cluster.start("host-a,host-b", "sh", "-c", STAY)
    job.wait_for("rank 0 of 2"), job.wait_for("rank 1 of 2")
    job.kill(number)
    done = job.finish()
    assert done.status == (-9 if number == signal.SIGKILL else 128 + number), done.text
    programs.wait_until_gone()


def test_a_job_is_recorded_on_demand_on_all_hosts(programs, cluster):
    cluster.run("host-a,host-b", programs.find("all_reduce")).skip_without_ucx()
    job = cluster.start("host-a,host-b", "-x", "LOCKSTEP_LOG=info", programs.find("accumulation"), "--updates", 10**9)
    job.wait_for("(?s)(joined 2 ranks.*){2}", "stderr")
    job.kill(signal.SIGUSR2)
    job.wait_for("(?s)(the trace is written.*){2}", "stderr")
    job.kill(signal.SIGTERM)
    assert job.finish().status == 143
    traces = [json.loads(path.read_text()) for path in (programs.folder / "log" / "profiler").iterdir()]
    found = {trace["distributedInfo"]["rank"]: trace["lockstep"]["host"] for trace in traces}
    assert len(traces) == 2 and found == {0: "host-a", 1: "host-b"}
    programs.wait_until_gone()


def test_agents_that_all_ask_for_another_start_ask_for_it_together_also_after_a_signal(programs, cluster):
    job = cluster.start("host-a,host-b", "sh", "-c", f"trap 'exit 75' TERM; {TELL}; sleep 1000 & wait $!")
    job.wait_for("rank 0 of 2"), job.wait_for("rank 1 of 2")
    job.kill(signal.SIGTERM)
    assert job.finish().status == 75
    programs.wait_until_gone()


def test_a_second_signal_kills(programs, cluster):
    # A signal that comes while the shell starts a process may miss that process, and the shell's trap waits for its end: so
    # those sleeps are short. The one in the background ignores SIGINT, and is to be killed, too.
    script = f"trap 'echo told' INT; sleep 1000 & {TELL}; while :; do sleep 0.05; done"
    job = cluster.start("host-a,host-b", "sh", "-c", script)
    job.wait_for("rank 0 of 2"), job.wait_for("rank 1 of 2")
    job.kill(signal.SIGINT)
    job.wait_for("rank 0. told"), job.wait_for("rank 1. told")
    job.kill(signal.SIGTERM)  # another SIGINT might come so soon that it counts for the same
    assert job.finish().status == 130
    programs.wait_until_gone()


def test_the_loss_of_a_shell_ends_all_hosts(programs, cluster):
    job = cluster.start("host-a,host-b", "sh", "-c", STAY)
    job.wait_for("rank 0 of 2"), job.wait_for("rank 1 of 2")
    os.kill(cluster.shell_of("host-b"), signal.SIGKILL)
    done = job.finish()
    assert done.status == 1, done.text
    assert "host-b can't be reached, its remote shell was lost, or its agent was killed: the shell was killed by signal 9 (SIGKILL)" in done.stderr, done.text
    programs.wait_until_gone()


def test_the_end_of_an_agent_that_is_killed_is_the_cause(programs, cluster):
    """And not that of a rank on another host, which follows from it."""
    cluster.run("host-a,host-b", programs.find("all_reduce")).skip_without_ucx()
    job = cluster.start("host-a,host-b", "--grace-period", 1000, programs.find("meeting_driver"), "--forever")
    job.wait_for("rank 0 of 2"), job.wait_for("rank 1 of 2")
    os.kill(cluster.agent_of(1)[0], signal.SIGKILL)
    done = job.finish()
    assert done.status == 1 and "failed first" not in done.stderr, done.text
    cause = r"host-b: the agent was killed by signal 9 \(SIGKILL\), as its shell says, which exited with status 137; started as: "
    assert len(re.findall(f"^lockstep run: {cause}", done.stderr, re.M)) == 1, done.text
    programs.wait_until_gone()


def test_a_signal_to_a_host_that_has_finished_lets_the_others_go_on(programs, cluster):
    job = cluster.start("host-a,host-b", "sh", "-c", f"{TELL}; test $RANK = 1 || while ! [ -e go ]; do sleep 0.05; done")
    job.wait_for("rank 1 of 2")
    agent = cluster.wait_until_finished(1)
    os.kill(agent, signal.SIGTERM)
    wait_until_ended(agent)
    (programs.folder / "go").touch()
    done = job.finish()
    assert done.status == 0 and "all workers have ended with status 0" in done.stderr, done.text
    programs.wait_until_gone()


def test_a_folder_that_a_host_has_not_ends_all_with_its_shells_words(programs, cluster):
    there = programs.folder / "there" / "run"
    there.mkdir(parents=True)
    cluster.net.run(1, "mount", "-t", "tmpfs", "none", there.parent)
    shell = programs.folder / "shell_at_home"  # as ssh, which starts there
    shell.write_text(f'#!/bin/sh\ncd / && exec {cluster.shell} "$@"\n')
    shell.chmod(0o700)
    command = ["env", "-C", there, programs.find("lockstep"), "run", "--rsh", shell, "-H", "host-a,host-b"]
    done = programs.start(*cluster.net.inside(0, *command, "--grace-period", 1000, "sh", "-c", STAY)).finish()
    assert done.status == 1, done.text
    assert "host-b: the agent could not be started: its shell exited with status 126; started as: " in done.stderr, done.text
    assert re.search(rf"    .*cd: .*{there}", done.stderr), done.text
    programs.wait_until_gone()


def test_a_shell_that_fails_by_a_status_of_its_own_ends_all(programs, cluster):
    shell = programs.folder / "shell_that_fails"
    shell.write_text("#!/bin/sh\nexit 125\n")
    shell.chmod(0o700)
    command = [programs.find("lockstep"), "run", "--rsh", shell, "-H", "host-a,host-b", "--grace-period", 1000]
    done = programs.start(*cluster.net.inside(0, *command, "sh", "-c", STAY)).finish()
    assert done.status == 1 and re.search("host-b can't be reached, .*: the shell exited with status 125;", done.stderr), done.text
    programs.wait_until_gone()


def test_a_coordinator_that_can_not_listen_ends_all_hosts_at_once(programs, cluster):
    taken = "import socket; s = socket.create_server(('host-a', 4000)); print('taken', flush=True); input()"
    other = programs.start(*cluster.net.inside(0, sys.executable, "-c", taken))
    other.wait_for("taken")
    # Without an end of the others' the command would wait for the grace period.
    done = cluster.run("host-a,host-b", "--master-port", 4000, "--grace-period", 1000, "sh", "-c", STAY)
    assert done.status == 1 and "can't listen at host-a:4000: Address already in use" in done.stderr, done.text
    other.finish()
    programs.wait_until_gone()


def test_a_taken_port_is_not_looked_for_at_another_address(programs, cluster):
    """Others look for the coordinator at the address that is named, where another program has the port."""
    assert programs.run(*cluster.net.inside(0, "ip", "address", "add", "10.99.0.1/32", "dev", "lo")).status == 0
    taken = "import socket; s = socket.create_server(('10.99.0.1', 4000)); print('taken', flush=True); input()"
    other = programs.start(*cluster.net.inside(0, sys.executable, "-c", taken))
    other.wait_for("taken")
    place = ["--nnodes", 2, "--node-rank", 0, "--master-addr", "10.99.0.1", "--master-port", 4000]
    done = programs.start(*cluster.net.inside(0, "lockstep", "run", *place, "true")).finish()
    assert done.status == 1 and "can't listen at 10.99.0.1:4000: Address already in use" in done.stderr, done.text
    other.finish()


def test_agents_end_when_the_command_that_started_them_says_nothing_any_more(programs):
    instructions = {"secret": "", "variables": [], "most_silence": 10, "end_time": 1000}
    agent = programs.start("lockstep", "run", "--started-by-shell", "--standalone", "sh", "-c", "echo up; exec sleep 1000")
    agent.process.stdin.write(json.dumps(instructions) + "\n")
    agent.process.stdin.flush()
    agent.wait_for("up")
    agent.wait_for("lockstep run -H that started this agent has not been heard of for 10 s", "stderr")
    assert agent.process.wait(HANG) == 143
    programs.wait_until_gone()


def test_an_agent_that_waits_for_a_reader_ends_all_the_same(programs):
    """Its connection is cut: what it writes goes nowhere, and it is not told."""
    instructions = {"secret": "", "variables": [], "most_silence": 10, "end_time": 1}
    command = [programs.find("lockstep"), "run", "--started-by-shell", "--standalone", "sh", "-c", "exec yes"]
    reads, writes = os.pipe()
    with (open(reads, "rb"), open(writes, "wb") as output,
          subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, env=programs.environment(), cwd=programs.folder) as agent):
        try:
            agent.stdin.write(json.dumps(instructions).encode() + b"\n")
            agent.stdin.flush()
            assert agent.wait(HANG) == 1
        finally:
            agent.kill()
    programs.wait_until_gone()


def test_the_command_says_to_its_agents_that_it_lives(programs):
    shell = programs.folder / "shell"
    shell.write_text('#!/bin/sh\nread -r first\nread -r word && echo "then <$word>"\n')
    shell.chmod(0o700)
    done = programs.run("lockstep", "run", "--rsh", shell, "-H", "a", "true")
    assert done.status == 0 and done.stdout == "then <>\n", done.text


def test_a_host_that_can_not_be_reached_is_named_with_the_shells_words(programs, cluster):
    done = cluster.run("host-a,host-z", "sh", "-c", STAY)
    assert done.status == 1, done.text
    assert re.search(r"host-z can't be reached, .*: the shell exited with status 255; started as: .*/shell host-z ", done.stderr), done.text
    assert "    no host host-z\n" in done.stderr, done.text
    programs.wait_until_gone()


def test_a_program_that_a_host_has_not_ends_all(programs, cluster):
    (programs.folder / "there").mkdir()
    script = programs.folder / "there" / "train"
    script.write_text(f"#!/bin/sh\n{STAY}\n")
    script.chmod(0o700)
    job = cluster.start("host-a,host-b", script, OMP_NUM_THREADS=1)
    job.wait_for("rank 1 of 2")
    job.kill(signal.SIGINT)
    assert job.finish().status == 130
    done = cluster.run("host-a,host-b", "./missing")
    assert done.status == 2 and "can't start './missing'" in done.stderr, done.text
    assert "nothing could be started on host-" in done.stderr, done.text
    programs.wait_until_gone()


def test_a_failure_ends_all_hosts_with_its_report(programs, cluster):
    done = cluster.run("host-a,host-b", "sh", "-c", 'test $RANK = 0 || { echo "no such data" >&2; exit 7; }; exec sleep 1000')
    assert done.status == 1, done.text
    for once in (r"rank 1 \(pid \d+ on host-b\) failed first: exited with status 7", r"workers on host-b \(node rank 1\) have failed"):
        assert len(re.findall(once, done.stderr)) == 1, done.text
    programs.wait_until_gone()


def test_all_hosts_start_again(programs, cluster):
    script = f"{TELL}, start $TORCHELASTIC_RESTART_COUNT; test $TORCHELASTIC_RESTART_COUNT = 1"
    done = cluster.run("host-a,host-b", "--max-restarts", 1, "--no-prefix", "sh", "-c", script)
    assert done.status == 0, done.text
    assert "rank 1 of 2, 0 of 1 on host-b, start 1" in done.stdout.splitlines(), done.text


@pytest.mark.parametrize("hosts", [["-H", "host-a:2,me@host-b:1"], ["-H", "host-a:2", "--host=me@host-b:1"]], ids=["one", "two"])
def test_a_dry_run_shows_what_each_host_would_run(programs, hosts):
    options = ["--dry-run", "--rsh", "ssh -p 22", *hosts, "--master-port", 4000, "--log-dir", "a b"]
    done = programs.run("lockstep", "run", *options, "./train", "--name", "x y", LOCKSTEP_JOB_SECRET=SECRET, UCX_TLS="tcp")
    done.skip_without_openssl()
    assert done.status == 0, done.text
    lockstep = programs.find("lockstep")
    common = f"{os.path.realpath(lockstep)} run '--log-dir=a b' --started-by-shell --master-addr=host-a --master-port=4000 --nnodes=2"
    first, second, rest = done.stdout.splitlines()
    agent = f"{common} --node-rank=0 --nproc-per-node=2 ./train --name 'x y'"
    assert first == f"host-a, 2 processes: ssh -p 22 host-a 'cd {programs.folder} || exit 126; exec {agent}'".replace(
        agent, agent.replace("'", "'\\''")), done.text
    assert second.startswith("me@host-b, 1 process: ssh -p 22 me@host-b 'cd "), done.text
    assert rest.startswith("by standard input: the secret ") and " UCX_TLS" in rest, done.text
    assert SECRET not in done.text


def test_variables_that_say_the_default_contradict_no_hosts(programs):
    done = programs.run("lockstep", "run", "--dry-run", "-H", "a,b", "true", LOCKSTEP_JOB_SECRET=SECRET, PET_STANDALONE=0, PET_NNODES=1)
    done.skip_without_openssl()
    assert done.status == 0 and "a, 1 process: " in done.stdout, done.text


@pytest.mark.parametrize(
    "words, error",
    [
        (["-H", "a:2,b:0"], "-H has 'b:0'"),
        (["-H", ""], "-H names no host"),
        (["--host="], "-H names no host"),
        (["-H", "a,b", "--cpu-list", "0"], "--cpu-list has 1 lists, and -H has 2 hosts"),
        (["-H", "a,b", "--gpu-list", ""], "--gpu-list has 1 lists, and -H has 2 hosts"),
        (["-H", "a:2,b:2", "-n", "5"], "-n is 5, and the hosts of -H have 4 slots"),
        (["-H", "a,b", "--nnodes", "2"], "-H and --nnodes contradict each other"),
        (["-H", "localhost,b"], "the other hosts of -H can't find the first one by the name localhost"),
        (["-H", "a,b", "-x", "NOT_THERE"], "-x NOT_THERE: this variable is not set"),
        (["--started-by-shell"], "is for lockstep run -H alone"),
    ],
)
def test_wrong_options_start_nothing(programs, words, error):
    done = programs.run("lockstep", "run", *words, "true")
    done.skip_without_openssl()
    assert done.status == 2 and error in done.stderr, done.text
