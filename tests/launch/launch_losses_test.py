"""`lockstep run` over several hosts: hosts, agents and cables that are lost, come back or come late, and strangers."""

import collections
import contextlib
import os
import pathlib
import random
import re
import select
import signal
import socket

import pytest
from agents import FAST, STAY, TELL, ForkedProgram, Job, Shells, server_of, so_often, wait_until_ended
from hosts import PORT
from ports import free_port
from support import HANG

pytestmark = pytest.mark.usefixtures("agents_are_built")


def read_fifo(path):
    """Its next line; fails the test when none comes."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        assert select.select([descriptor], [], [], HANG)[0], f"nothing comes at {path}"
        return os.read(descriptor, 1000).decode()
    finally:
        os.close(descriptor)


def test_what_is_left_of_an_old_generation_neither_joins_nor_saves(programs):
    """A process that left its worker's process group, and so was not ended with it."""
    for name in ("ready", "go", "done"):
        os.mkfifo(programs.folder / name)
    driver = programs.find("meeting_driver")
    # It leaves the cgroup of the workers, too, where they have one of their own.
    (own,) = re.findall(r"^0::(.*)", pathlib.Path("/proc/self/cgroup").read_text(), re.M) or [""]
    homes = " ".join(f"{place}{own}/cgroup.procs" for place in ("/sys/fs/cgroup", "/sys/fs/cgroup/unified"))
    leave = f"for home in {homes}; do test -w $home && echo $$ > $home; done"
    late = f"{leave}; echo > ready; read line < go; {driver} > joining 2>&1; {driver} --save saved > saving 2>&1; echo > done"
    script = "test $RANK = 0 || exit 0; test $TORCHELASTIC_RESTART_COUNT = 1 && { echo > go; read line < done; exit; }; "
    script += f"setsid sh -c '{late}' > left_over 2>&1 & read line < ready; exit 7"
    done = programs.run("lockstep", "run", "-n", 2, "--max-restarts", 1, "sh", "-c", script)
    assert done.status == 0, done.text
    refusal = "this process is of generation 1 of the job's processes, and lockstep run has started generation 2 since"
    joining, saving = ((programs.folder / name).read_text() for name in ("joining", "saving"))
    assert refusal in joining, joining
    assert f"saved is not saved: {refusal}" in saving, saving
    assert not (programs.folder / "saved").exists()


def test_a_host_that_was_stopped_saves_nothing_once_the_others_may_have_gone_on(programs):
    """Its worker runs again before its agent and the guardian do, which would end it."""
    for name in ("go", "done"):
        os.mkfifo(programs.folder / name)
    job = Job(programs, "1:2")
    first = job.start_coordinator(1, STAY)
    saver = f"{programs.find('meeting_driver')} --save saved > saving 2>&1"
    second = job.start(1, f"{TELL}; read line < go; {saver}; echo > done; exec sleep 1000")
    generation = int(second.wait_for(r"rank 1 of 2.*start (\d+)")[1]) + 1
    guardian = next(pid for pid in programs.survivors() if is_guardian_of(second.pid, pid))
    os.kill(guardian, signal.SIGSTOP)
    second.kill(signal.SIGSTOP)
    first.wait_for(rf"rank 0 of 1.*start {generation}")
    (programs.folder / "go").write_text("\n")
    read_fifo(programs.folder / "done")
    saving = (programs.folder / "saving").read_text()
    assert f"saved is not saved: this process is of generation {generation} " in saving, saving
    assert f"the other hosts may run generation {generation + 1} or a later one" in saving, saving
    assert not (programs.folder / "saved").exists()
    os.kill(guardian, signal.SIGCONT)
    second.kill(signal.SIGCONT)
    second.wait_for(f"rank 1 of 2.*start {generation + 1}")


def is_guardian_of(agent, pid):
    with contextlib.suppress(OSError):
        status = pathlib.Path(f"/proc/{pid}/status").read_text()
        return "Name:\tlockstep-guard\n" in status and f"\nPPid:\t{agent}\n" in status
    return False


def test_processes_of_different_generations_do_not_join_each_other(programs):
    """They meet all the same, at an address that the program itself names."""
    address = f"tcp://127.0.0.1:{free_port()}"
    place = {"TORCHELASTIC_RUN_ID": "job", "LOCKSTEP_AGENT_STORE": "127.0.0.1:1/job"}
    ranks = [
        programs.start("meeting_driver", "--init-method", address, "--rank", rank, "--world-size", 2,
                       **place, TORCHELASTIC_RESTART_COUNT=rank, LOCKSTEP_TEST_HOST=f"host-{rank}")
        for rank in range(2)
    ]  # fmt: skip
    done = [rank.finish() for rank in ranks]
    if any("needs UCX" in result.stderr for result in done):
        pytest.skip("ranks on several hosts need UCX")
    refusal = r"rank 0 \(pid \d+ on \S+\) is of generation 1 of the job's processes, and rank 1 \(.*\) of generation 2: "
    for result in done:
        assert result.status == 1 and re.search(refusal, result.stderr), result.text


def test_an_agent_says_at_once_that_no_coordinator_answers_and_ends_by_a_signal(programs):
    agent = Job(programs, 2, conf=FAST + ",is_host=0").start(1, STAY)
    agent.wait_for("can't reach the coordinator, and tries again: Connection refused", "stderr")
    agent.kill(signal.SIGINT)
    assert agent.finish().status == 130


@pytest.mark.parametrize("place", [[], ["--node-rank", 0]], ids=["", "its own"])
def test_an_agent_waits_for_its_coordinators_name(programs, place):
    agent = Job(programs, 2, host="coordinator.invalid").start(1, STAY, *place)
    agent.wait_for("can't find the coordinator's host, and tries again: the name 'coordinator.invalid'", "stderr")
    agent.kill(signal.SIGTERM)
    assert agent.finish().status == 143


def test_a_signal_ends_a_coordinator_that_waits_for_hosts(programs):
    agent = Job(programs, 2).start_coordinator(1, STAY)
    agent.kill(signal.SIGINT)
    assert agent.finish().status == 130


def test_a_second_signal_ends_an_agent_whose_workers_have_ended_by_the_first(programs):
    """Otherwise it waits for the coordinator to know, which says nothing here until the lease is over."""
    job = Job(programs, "1:2", conf=FAST.replace("lease=3,lost_after=4.5", "lease=300,lost_after=400"))
    first = job.start_coordinator(1, STAY)
    second = job.start(1, STAY)
    second.wait_for("rank 1 of 2")
    first.kill(signal.SIGSTOP)
    second.kill(signal.SIGTERM)
    second.wait_for("ended by SIGTERM", "stderr")
    second.kill(signal.SIGINT)  # another SIGTERM might come so soon that it counts for the same
    assert second.finish().status == 130
    first.kill()
    programs.wait_until_gone()


def worker_and_server(agent, workers, rank, world):
    """The pids of its worker, once that says so, and of the process from which that was forked, if it was."""
    worker = int(agent.wait_for(workers.said(rank, world))[1])
    servers = server_of(agent)
    assert len(servers) == workers.servers
    return [worker, *servers]


WORKERS = pytest.mark.parametrize("workers", [Shells, ForkedProgram])


@WORKERS
def test_the_others_go_on_when_an_agent_is_killed(programs, workers):
    job = Job(programs, "1:2")
    first = job.start_coordinator(1, workers.program)
    second = job.start(1, workers.program)
    processes = worker_and_server(second, workers, 1, 2)
    before = first.count(workers.said(0, 1))
    second.kill()
    for process in processes:
        wait_until_ended(process)
    first.wait_for(so_often(workers.said(0, 1), before + 1))
    first.kill(signal.SIGINT)
    assert first.finish().status == 130
    programs.wait_until_gone()


@pytest.mark.long
@pytest.mark.parametrize("attempt", range(5))
@WORKERS
def test_killed_agents_leave_no_worker_and_the_rest_go_on(programs, workers, attempt):
    """A hundred of them in all. In few rounds of a job: the coordinator takes a host in later with each time that it was lost."""
    hosts, rounds = 10, 2
    job = Job(programs, f"1:{hosts + 1}")
    first = job.start_coordinator(1, workers.program)
    for _ in range(rounds):
        agents = [job.start(1, workers.program) for _ in range(hosts)]
        processes = [pid for agent in agents for pid in worker_and_server(agent, workers, "[0-9]+", hosts + 1)]
        before = first.count(workers.said(0, 1))
        for agent in agents:
            agent.kill()
        for process in processes:
            wait_until_ended(process)
        first.wait_for(so_often(workers.said(0, 1), before + 1))
    first.kill(signal.SIGTERM)
    assert first.finish().status == 143
    programs.wait_until_gone()


@pytest.mark.long
@pytest.mark.parametrize("program, options, said", [
    (TELL, [], "rank {rank} of 2, "),
    (["all_reduce"], ["--max-restarts", 1], "rank {rank} now has [1, 1]\n"),  # by processes that are forked
], ids=["sh", "all_reduce"])  # fmt: skip
def test_a_hundred_jobs_in_a_row_meet_at_one_port_and_leave_nothing(programs, program, options, said):
    port = free_port()
    before = {folder: set(os.listdir(folder)) for folder in ("/dev/shm", programs.folder)}
    for _ in range(100):
        job = Job(programs, 2, port=port)
        agents = [job.start(1, program, *options) for _ in range(2)]
        done = [agent.finish() for agent in agents]
        assert [result.status for result in done] == [0, 0], done
        text = "".join(result.stdout for result in done)
        for rank in range(2):
            assert text.count(f"[rank {rank}] " + said.format(rank=rank)) == 1, text
    programs.wait_until_gone()
    for folder, files in before.items():
        assert not [name for name in set(os.listdir(folder)) - files if "lockstep" in name], folder


class Strangers:
    """Connections to a port that say nothing of use, as many at a time as a process may have open."""

    MOST = 1000

    def __init__(self, port):
        self.port = port
        self.open = collections.deque()
        self.random = random.Random(1)

    def connect(self, kind):
        if len(self.open) >= self.MOST:
            self.open.popleft().close()
        stranger = socket.create_connection(("127.0.0.1", self.port), HANG)
        stranger.setblocking(False)
        self.open.append(stranger)
        if kind == "bytes":
            self.say(stranger, self.random.randbytes(self.random.randint(1, 3000)))
        elif kind == "record":  # as one of TLS begins
            self.say(stranger, b"\x16\x03\x01" + self.random.randbytes(self.random.randint(0, 600)))
        elif kind == "half":
            stranger.shutdown(socket.SHUT_WR)

    def drip(self):
        """A byte of each of some."""
        for stranger in self.random.sample(list(self.open), min(50, len(self.open))):
            self.say(stranger, b"\x16")

    @staticmethod
    def say(stranger, data):
        with contextlib.suppress(OSError):  # it is closed by now, or its buffer is full
            stranger.send(data)


def resources(pid):
    """(open descriptors, resident bytes) of a process."""
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    return len(os.listdir(f"/proc/{pid}/fd")), int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) << 10


@pytest.mark.long
def test_ten_thousand_strangers_leave_a_job_unharmed(programs):
    """Silent, slow and half-closed connections, bytes at random, and agents with another secret."""
    job = Job(programs, 2)
    script = f"exec {programs.find('meeting_driver')} --timeout 600 --until-end"
    agents = [job.start_coordinator(1, script), job.start(1, script)]
    for rank, agent in enumerate(agents):
        agent.wait_for(rf"rank {rank} of 2 \(pid \d+\) has the sum 1")
    descriptors, memory = resources(agents[0].pid)
    impatient = Job(programs, 2, port=job.port, conf=FAST.replace("join_timeout=60", "join_timeout=5"))
    wrong = [impatient.start(1, TELL, secret="x" * 64) for _ in range(3)]
    strangers = Strangers(job.port)
    for number in range(10_000):
        strangers.connect(("silent", "bytes", "record", "half")[number % 4])
        if number % 100 == 0:
            strangers.drip()
            now = resources(agents[0].pid)
            # 256 that have not said what they are for, and what is closed at the next turn.
            assert now[0] < descriptors + 350 and now[1] < memory + (64 << 20), (descriptors, memory, now)
    for agent in wrong:
        done = agent.finish()
        assert done.status == 1 and not done.stdout, done.text
    done = [agent.finish() for agent in agents]
    assert [result.status for result in done] == [0, 0], done
    for result in done:
        assert result.stdout.count("all sums were right") == 1, result.text
    assert re.findall("generation \\d+ starts", done[0].stderr) == ["generation 1 starts"], done[0].text
    programs.wait_until_gone()


def test_all_end_when_the_coordinator_is_killed(programs):
    job = Job(programs, "1:2")
    first = job.start_coordinator(1, STAY)
    second = job.start(1, STAY)
    second.wait_for("rank 1 of 2")
    first.kill()
    done = second.finish()
    assert done.status == 1 and "the coordinator has ended, and with it the job" in done.stderr, done.text
    programs.wait_until_gone()


def test_a_late_host_joins(programs):
    job = Job(programs, "1:2")
    first = job.start(1, STAY)
    first.wait_for("rank 0 of 1")
    second = job.start(1, STAY)
    second.wait_for("rank 1 of 2.*start 1")
    first.wait_for("rank 0 of 2.*start 1")
    first.kill(signal.SIGTERM)
    assert (first.finish().status, second.finish().status) == (143, 143)


def test_a_late_host_says_too_and_each_once_that_it_sets_the_number_of_threads(programs):
    job = Job(programs, "1:2")
    unset = "env", "-u", "OMP_NUM_THREADS"
    first = job.start(2, STAY, inside=unset)
    first.wait_for("rank 0 of 2.*start 0")
    second = job.start(2, STAY, inside=unset)
    second.wait_for("rank 2 of 4.*start 1")
    first.wait_for("rank 0 of 4.*start 1")
    first.kill(signal.SIGTERM)
    for done in (first.finish(), second.finish()):
        assert done.stderr.count("OMP_NUM_THREADS is not set; each of the 2 processes") == 1, done.text


@WORKERS
def test_the_workers_of_an_agent_that_is_stopped_end_and_it_comes_back(programs, workers):
    job = Job(programs, "1:2")
    first = job.start_coordinator(1, workers.program)
    second = job.start(1, workers.program)
    worker = int(second.wait_for(workers.said(1, 2))[1])
    before = first.count(workers.said(0, 1))
    second.kill(signal.SIGSTOP)
    first.wait_for(so_often(workers.said(0, 1), before + 1))
    wait_until_ended(worker)
    second.kill(signal.SIGCONT)
    second.wait_for(so_often(workers.said(1, 2), 2))
    first.kill(signal.SIGTERM)
    assert (first.finish().status, second.finish().status) == (143, 143)
    programs.wait_until_gone()


def test_an_agent_that_is_stopped_until_its_workers_end_has_not_failed(programs):
    job = Job(programs, "1:2")
    first = job.start_coordinator(1, STAY)
    second = job.start(1, STAY)
    worker = int(second.wait_for(r"rank 1 of 2.*in process (\d+)")[1])
    second.kill(signal.SIGSTOP)
    wait_until_ended(worker)  # by their guardian
    second.kill(signal.SIGCONT)
    second.wait_for(r"rank 1 of 2.*start [2-9]")
    first.kill(signal.SIGTERM)
    ended = second.finish()
    assert (first.finish().status, ended.status) == (143, 143)
    assert "failed first" not in ended.stderr


def test_a_host_that_is_cut_off_ends_its_workers_and_comes_back(programs, make_hosts):
    net = make_hosts(2)
    job = Job(programs, "1:2", port=PORT, host=net.addresses[0])
    first = job.start_coordinator(1, STAY, inside=net.inside(0))
    second = job.start(1, STAY, inside=net.inside(1))
    worker = int(second.wait_for(r"rank 1 of 2.*in process (\d+)")[1])
    net.cut(1)
    first.wait_for("rank 0 of 1.*start [2-9]")
    second.wait_for("no word from the coordinator", "stderr")
    wait_until_ended(worker)
    net.heal(1)
    second.wait_for(r"rank 1 of 2.*start [2-9]")
    first.kill(signal.SIGTERM)
    assert (first.finish().status, second.finish().status) == (143, 143)


def test_all_end_when_the_coordinators_host_is_cut_off_for_good(programs, make_hosts):
    net = make_hosts(3)
    job = Job(programs, "2:3", port=PORT, host=net.addresses[0], conf=FAST.replace("rejoin_timeout=30", "rejoin_timeout=3"))
    first = job.start_coordinator(1, STAY, inside=net.inside(0))
    others = [job.start(1, STAY, inside=net.inside(host)) for host in (1, 2)]
    for agent in others:
        agent.wait_for("rank [12] of 3")
    net.cut(0)
    for agent in others:
        done = agent.finish()
        assert done.status == 1 and "no word from it; its host or the network to it is down" in done.stderr, done.text
    done = first.finish()
    assert done.status == 1 and "1 host of at least 2 is here: host-a, 3 s after the others were lost" in done.stderr, done.text
    programs.wait_until_gone()
