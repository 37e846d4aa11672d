"""`lockstep run` over several hosts: agents on one machine, and on two whose cable is cut."""

import collections
import contextlib
import os
import pathlib
import random
import re
import select
import shutil
import signal
import socket
import sys
import time

import pytest
from hosts import PORT
from ports import free_port
from support import HANG, wait_for_end

SECRET = "0123456789abcdef" * 4
TELL = "echo rank $RANK of $WORLD_SIZE, $LOCAL_RANK of $LOCAL_WORLD_SIZE, host $GROUP_RANK of $GROUP_WORLD_SIZE,"
TELL += ' start $TORCHELASTIC_RESTART_COUNT "$LOCKSTEP_JOB_SECRET"'
STAY = TELL + " in process $$; exec sleep 1000"
# Losses are noticed soon, and a machine that is busy for a second loses no host.
FAST = "keep_alive_interval=0.2,lease=3,lost_after=4.5,last_call_timeout=0,join_timeout=60,rejoin_timeout=30"


class Job:
    """Agents of one job; the first one that starts is the coordinator."""

    def __init__(self, programs, nnodes, port=None, host="127.0.0.1", conf=FAST):
        self.programs = programs
        self.port = port or free_port()
        self.options = ["--nnodes", nnodes, "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{host}:{self.port}"]
        self.options += ["--rdzv-id", "job", "--rdzv-conf", conf]

    def start(self, nproc, script, *options, inside=(), secret=SECRET):
        words = ["run", *self.options, "-n", nproc, *options, "sh", "-c", script]
        return self.programs.start(*inside, self.programs.find("lockstep"), *words, LOCKSTEP_JOB_SECRET=secret)

    def start_coordinator(self, nproc, script, *options, **place):
        agent = self.start(nproc, script, *options, **place)
        agent.wait_for("are here|generation 1 starts", "stderr")
        return agent


def wait_until_ended(pid):
    assert wait_for_end(pid, time.monotonic() + HANG), f"worker {pid} runs on"


@pytest.fixture(autouse=True)
def agents_are_built(programs):
    done = programs.run("lockstep", "run", "--nnodes", 2, "--rdzv-backend", "c10d", "true")
    assert done.status == 2, done.text
    if "built without OpenSSL" in done.stderr:
        pytest.skip("lockstep was built without OpenSSL")


def test_two_hosts_of_unequal_size_run_one_world(programs):
    job = Job(programs, 2)
    agents = [job.start_coordinator(2, TELL), job.start(1, TELL)]
    done = [agent.finish() for agent in agents]
    assert [result.status for result in done] == [0, 0], done
    assert sorted(done[0].stdout.splitlines()) == [
        f"[rank {rank}] rank {rank} of 3, {rank} of 2, host 0 of 2, start 0 " for rank in range(2)
    ]
    assert done[1].stdout == "[rank 2] rank 2 of 3, 0 of 1, host 1 of 2, start 0 \n"
    programs.wait_until_gone()


SUMS = "rank 0 now has [3, 3]", "rank 1 now has [3, 3]", "rank 2 now has [3, 3]"


@pytest.mark.parametrize("hosts", ["one", "two"])
def test_a_collective_runs_over_two_agents(programs, hosts):
    """In shared memory, and over a wire between pretended hosts."""
    job = Job(programs, 2)
    pretend = "LOCKSTEP_TEST_HOST=host-$GROUP_RANK" if hosts == "two" else ""
    script = f"{pretend} exec {programs.find('all_reduce')}"
    agents = [job.start_coordinator(2, script), job.start(1, script)]
    check_sums([agent.finish() for agent in agents])


@pytest.mark.parametrize("own_store, options", [
    ("", []),
    ("MASTER_ADDR={0} MASTER_PORT={1}", []),
    ("MASTER_ADDR={0} MASTER_PORT={1}", ["--no-tunnel"]),
])  # fmt: skip
def test_a_collective_runs_over_two_network_namespaces(programs, make_hosts, own_store, options):
    """Also in a program that sets a meeting point of its own, as tutorials do."""
    net = make_hosts(2)
    job = Job(programs, 2, port=PORT, host=net.addresses[0])
    script = f"{own_store.format(net.addresses[0], PORT + 1)} exec {programs.find('all_reduce')}"
    first = job.start_coordinator(2, script, *options, inside=net.inside(0))
    agents = [first, job.start(1, script, *options, inside=net.inside(1))]
    check_sums([agent.finish() for agent in agents])


def check_sums(done):
    if any("needs UCX" in result.stderr for result in done):
        pytest.skip("ranks on several hosts need UCX")
    assert [result.status for result in done] == [0, 0], done
    for rank, line in enumerate(SUMS):
        assert f"[rank {rank}] {line}\n" in done[rank // 2].stdout, done


def test_python_meets_by_the_tunnel(programs, make_hosts):
    net = make_hosts(2)
    job = Job(programs, 2, port=PORT, host=net.addresses[0])
    program = programs.folder / "gloo.py"
    program.write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "tensor = torch.full((2,), dist.get_rank())\n"
        "dist.all_reduce(tensor)\n"
        "print(f'rank {dist.get_rank()} now has {tensor.tolist()}')\n"
        # Gloo's threads may still drop their references to tensors while the interpreter ends, and Python ends a thread
        # that asks for its lock then by std::terminate.
        "dist.destroy_process_group()\n"
    )
    script = f"exec {sys.executable} {program}"
    agents = [job.start_coordinator(2, script, inside=net.inside(0)), job.start(1, script, inside=net.inside(1))]
    check_sums([agent.finish() for agent in agents])


def test_without_the_tunnel_the_store_is_at_the_coordinators_address(programs, make_hosts):
    """Of the coordinator's choice alone, and at the port of the agents."""
    net = make_hosts(2)
    job = Job(programs, 2, port=PORT, host=net.addresses[0])
    script = f"echo meets at $MASTER_ADDR:$MASTER_PORT; exec {programs.find('all_reduce')}"
    agents = [
        job.start_coordinator(2, script, "--no-tunnel", inside=net.inside(0)),
        job.start(1, script, inside=net.inside(1)),
    ]
    done = [agent.finish() for agent in agents]
    check_sums(done)
    for rank in range(3):
        assert f"[rank {rank}] meets at {net.addresses[0]}:{PORT}\n" in done[rank // 2].stdout, done


# Of the launcher's own, or of the moment. TORCHELASTIC_SIGNALS_TO_HANDLE is what torchrun tells its own agent, in that
# process's environment; workers inherit it and have no use for it.
DIFFERS = ("LOCKSTEP_", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_SIGNALS_TO_HANDLE", "_=", "SHLVL")


def test_workers_have_torchruns_environment(programs, make_hosts):
    torchrun = shutil.which("torchrun", path=pathlib.Path(sys.executable).parent)
    if not torchrun:
        pytest.skip("no torchrun beside this Python")
    net = make_hosts(2)
    place = ["--nnodes", 2, "--nproc-per-node", 2, "--max-restarts", 3, "--role", "trainer"]
    place += ["--rdzv-backend", "static", "--master-addr", net.addresses[0], "--master-port", PORT]
    launchers = {"torchrun": [torchrun, "--no-python"], "lockstep": [programs.find("lockstep"), "run", "--no-tunnel"]}
    seen = {}
    for name, launcher in launchers.items():
        agents = []
        for host in range(2):
            own = ["--node-rank", host, "--local-addr", net.addresses[host]]
            own += ["sh", "-c", f"env > {programs.folder}/{name}_$RANK"]
            agents.append(programs.start(*net.inside(host, *launcher, *place, *own), LOCKSTEP_JOB_SECRET=SECRET))
        done = [agent.finish() for agent in agents]
        assert [result.status for result in done] == [0, 0], done
        for rank in range(4):
            lines = (programs.folder / f"{name}_{rank}").read_text().splitlines()
            seen[name, rank] = sorted(line for line in lines if not line.startswith(DIFFERS))
    for rank in range(4):
        assert seen["lockstep", rank] == seen["torchrun", rank]


@pytest.mark.parametrize("master", ["127.0.0.1", "[::1]"])
def test_static_hosts_have_the_ranks_that_they_ask_for(programs, master):
    interfaces = pathlib.Path("/proc/net/if_inet6")
    if master == "[::1]" and not (interfaces.exists() and f"{1:032x}" in interfaces.read_text()):
        pytest.skip("there is no ::1 here")
    port = free_port()
    places = [["--nnodes", 2, "--node-rank", rank, "--master-addr", master, "--master-port", port] for rank in (1, 0)]
    agents = [
        programs.start("lockstep", "run", *place, "-n", 1, "sh", "-c", TELL, LOCKSTEP_JOB_SECRET=SECRET)
        for place in places
    ]
    done = [agent.finish() for agent in agents]
    assert [result.status for result in done] == [0, 0], done
    for rank, result in zip((1, 0), done):
        assert result.stdout.startswith(f"[rank {rank}] rank {rank} of 2, 0 of 1, host {rank} of 2"), done


def test_a_host_with_another_secret_is_none(programs):
    job = Job(programs, 2)
    first = job.start_coordinator(1, TELL)
    impatient = FAST.replace("join_timeout=60", "join_timeout=1")
    stranger = Job(programs, 2, port=job.port, conf=impatient).start(1, TELL, secret="x" * 64).finish()
    assert stranger.status == 1, stranger.text
    assert "no coordinator answered in time (the TLS handshake failed: do both sides have the same secret" in stranger.stderr
    second = job.start(1, TELL).finish()
    assert (second.status, first.finish().status) == (0, 0)


def test_a_short_secret_is_refused_and_none_gets_a_warning(programs):
    done = programs.run("lockstep", "run", "--nnodes", 2, "true", LOCKSTEP_JOB_SECRET="guess")
    assert done.status == 2 and "the job's secret has 5 characters" in done.stderr, done.text
    job = Job(programs, 2)
    agents = [job.start_coordinator(1, TELL, secret=""), job.start(1, TELL, secret="")]
    for done in [agent.finish() for agent in agents]:
        assert done.status == 0 and "WARNING: there is no secret" in done.stderr, done.text


def test_all_hosts_start_again_after_a_failure_and_count_alike(programs):
    job = Job(programs, 2)
    os.mkfifo(programs.folder / "told")  # rank 1 fails once rank 0 has told
    script = TELL + "; test $TORCHELASTIC_RESTART_COUNT = 1 && exit; test $RANK = 0 || { read line < ./told; exit 7; }"
    script += "; echo > ./told; exec sleep 1000"
    agents = [job.start_coordinator(1, script, "--max-restarts", 1), job.start(1, script, "--max-restarts", 1)]
    done = [agent.finish() for agent in agents]
    assert [result.status for result in done] == [0, 0], done
    for rank, result in enumerate(done):
        starts = [f"[rank {rank}] rank {rank} of 2, 0 of 1, host {rank} of 2, start {n} " for n in (0, 1)]
        assert result.stdout.splitlines() == starts, result.text
    assert "restart 1 of 1" in done[0].stderr, done[0].text


def test_a_failure_without_restarts_ends_all_hosts(programs):
    job = Job(programs, 2)
    script = "test $RANK = 1 && exit 7; exec sleep 1000"
    agents = [job.start_coordinator(1, script), job.start(1, script)]
    done = [agent.finish() for agent in agents]
    assert [result.status for result in done] == [1, 1], done
    assert "failed first: exited with status 7" in done[1].stderr, done[1].text
    assert "workers on" in done[0].stderr, done[0].text
    programs.wait_until_gone()


def test_the_coordinator_says_who_failed_on_another_host_and_why(programs):
    job = Job(programs, 2)
    script = 'test $RANK = 2 || exec sleep 1000; echo "no such data" >&2; exit 7'
    agents = [job.start_coordinator(2, script), job.start(1, script)]
    done = [agent.finish() for agent in agents]
    assert [result.status for result in done] == [1, 1], done
    assert re.search(r"workers on \S+ have failed:\n.*rank 2 \(pid \d+\) failed first: exited with status 7", done[0].stderr)
    assert "    no such data\n" in done[0].stderr, done[0].text


def test_the_cause_is_found_across_hosts(programs):
    """Rank 0 fails because of rank 1 on another host, whose process stays until it is ended."""
    job = Job(programs, 2)
    driver = f"{programs.find('meeting_driver')} --forever --fail-last 1"
    script = f"export LOCKSTEP_TEST_HOST=host-$GROUP_RANK; test $RANK = 0 && exec {driver}; {driver}; exec sleep 1000"
    agents = [job.start_coordinator(1, script), job.start(1, script)]
    done = [agent.finish() for agent in agents]
    if any("needs UCX" in result.stderr for result in done):
        pytest.skip("ranks on several hosts need UCX")
    assert [result.status for result in done] == [1, 1], done
    for result in done:
        assert re.search(r"workers on \S+ have failed because of rank 1 on \S+, as their errors say", result.stderr), result.text


def test_a_rank_of_another_host_that_does_something_else_is_named_while_the_others_wait(programs):
    job = Job(programs, 2)
    driver = f"{programs.find('meeting_driver')} --timeout 600 --forever"
    script = "export LOCKSTEP_HEARTBEAT_TIMEOUT_SEC=2 LOCKSTEP_TEST_HOST=host-$GROUP_RANK; "
    script += f"test $RANK = 2 && export LOCKSTEP_FAILPOINTS='announce=delay(600000)@5'; exec {driver}"
    first, second = job.start_coordinator(2, script), job.start(1, script)
    waiting = "(ranks 0 and 1 have|rank [01] has)"  # where one of them has been slow to say so, the other
    waits = rf"lockstep run: {waiting} waited for rank 2 \(pid \d+ on host-1\) for \d+ s, since "
    first.wait_for(f"{waits}|needs UCX", "stderr")
    if first.count("needs UCX", "stderr"):
        pytest.skip("ranks on several hosts need UCX")
    for agent in (first, second):
        agent.kill(signal.SIGKILL)
    programs.wait_until_gone()


def test_one_host_starts_its_ranks_again(programs):
    script = TELL + "; test $TORCHELASTIC_RESTART_COUNT = 2"
    done = programs.run("lockstep", "run", "--max-restarts", 2, "sh", "-c", script)
    assert done.status == 0, done.text
    assert done.stdout.count("rank 0 of 1") == 3, done.text


def test_one_host_that_is_stopped_keeps_its_workers(programs):
    options = ["--max-restarts", 1, "--rdzv-conf", "keep_alive_interval=0.1,lease=0.5,lost_after=1.5"]
    script = "echo start $TORCHELASTIC_RESTART_COUNT in process $$; sleep 3; echo done"
    agent = programs.start("lockstep", "run", *options, "sh", "-c", script)
    worker = int(agent.wait_for(r"start 0 in process (\d+)")[1])
    agent.kill(signal.SIGSTOP)
    wait_until_ended(worker)
    agent.kill(signal.SIGCONT)
    done = agent.finish()
    assert done.status == 0 and re.fullmatch(r"start 0 in process \d+\ndone\n", done.stdout), done.text


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


def test_an_agent_waits_for_its_coordinators_name(programs):
    agent = Job(programs, 2, host="coordinator.invalid").start(1, STAY)
    agent.wait_for("can't find the coordinator's host, and tries again: the name 'coordinator.invalid'", "stderr")
    agent.kill(signal.SIGTERM)
    assert agent.finish().status == 143


def test_a_signal_ends_a_coordinator_that_waits_for_hosts(programs):
    agent = Job(programs, 2).start_coordinator(1, STAY)
    agent.kill(signal.SIGINT)
    assert agent.finish().status == 130


def test_the_others_go_on_when_an_agent_is_killed(programs):
    job = Job(programs, "1:2")
    first = job.start_coordinator(1, STAY)
    second = job.start(1, STAY)
    worker = int(second.wait_for(r"rank 1 of 2.*in process (\d+)")[1])
    second.kill()
    wait_until_ended(worker)
    first.wait_for("rank 0 of 1.*start [2-9]")
    first.kill(signal.SIGINT)
    assert first.finish().status == 130
    programs.wait_until_gone()


@pytest.mark.long
def test_killed_agents_leave_no_worker_and_the_rest_go_on(programs):
    """A hundred of them."""
    hosts, rounds = 5, 20
    job = Job(programs, f"1:{hosts + 1}")
    first = job.start_coordinator(1, STAY)
    alone = r"rank 0 of 1,[^\n]*in process"
    for _ in range(rounds):
        agents = [job.start(1, STAY) for _ in range(hosts)]
        workers = [int(agent.wait_for(rf"rank [1-5] of {hosts + 1}.*in process (\d+)")[1]) for agent in agents]
        before = first.count(alone)
        for agent in agents:
            agent.kill()
        for worker in workers:
            wait_until_ended(worker)
        first.wait_for(rf"(?s)(?:{alone}.*?){{{before + 1}}}")
    first.kill(signal.SIGTERM)
    assert first.finish().status == 143
    programs.wait_until_gone()


@pytest.mark.long
def test_a_hundred_jobs_in_a_row_meet_at_one_port_and_leave_nothing(programs):
    port = free_port()
    before = {folder: set(os.listdir(folder)) for folder in ("/dev/shm", programs.folder)}
    for _ in range(100):
        job = Job(programs, 2, port=port)
        agents = [job.start(1, TELL), job.start(1, TELL)]
        done = [agent.finish() for agent in agents]
        assert [result.status for result in done] == [0, 0], done
        lines = sorted("".join(result.stdout for result in done).splitlines())
        assert len(lines) == 2 and all(f"rank {rank} of 2, " in line for rank, line in enumerate(lines)), lines
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


def test_the_workers_of_an_agent_that_is_stopped_end_and_it_comes_back(programs):
    job = Job(programs, "1:2")
    first = job.start_coordinator(1, STAY)
    second = job.start(1, STAY)
    worker = int(second.wait_for(r"rank 1 of 2.*in process (\d+)")[1])
    second.kill(signal.SIGSTOP)
    first.wait_for("rank 0 of 1.*start [2-9]")
    wait_until_ended(worker)
    second.kill(signal.SIGCONT)
    second.wait_for(r"rank 1 of 2.*start [2-9]")
    first.kill(signal.SIGTERM)
    assert (first.finish().status, second.finish().status) == (143, 143)


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
    assert (first.finish().status, second.finish().status) == (143, 143)


def test_a_host_that_is_cut_off_ends_its_workers_and_comes_back(programs, make_hosts):
    net = make_hosts(2)
    job = Job(programs, "1:2", port=PORT, host=net.addresses[0])
    first = job.start_coordinator(1, STAY, inside=net.inside(0))
    second = job.start(1, STAY, inside=net.inside(1))
    second.wait_for("rank 1 of 2")
    net.cut(1)
    first.wait_for("rank 0 of 1.*start [2-9]")
    second.wait_for("no word from the coordinator", "stderr")
    net.heal(1)
    second.wait_for(r"rank 1 of 2.*start [2-9]")
    first.kill(signal.SIGTERM)
    assert (first.finish().status, second.finish().status) == (143, 143)
