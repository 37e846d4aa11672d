"""`lockstep top` before jobs that run: whatever has started them, in its table and as JSON, in a terminal and out of one."""

import contextlib
import fcntl
import json
import os
import pathlib
import pty
import re
import select
import signal
import socket
import struct
import subprocess
import termios
import time

import pytest
from agents import Job
from ports import free_port
from support import HANG, unshare

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
OK, NO_JOB, MISUSE = 0, 1, 2
FOREVER = 1_000_000
GIB = 1 << 30


def trainer(small_data, folder):
    """The Trainer, which tells its step and its loss."""
    return "trainer", "--data", small_data, "--run", folder / "run", "--epochs", FOREVER, "--batch-size", 48


def plain_loop(small_data):
    """A loop of DataLoader, DistributedDataParallel and nothing else."""
    return "fashion_mnist", "--data", small_data, "--epochs", FOREVER, "--batch-size", 48


def look(programs, job, *options, **variables):
    done = programs.run("lockstep", "top", job, "--json", *options, **variables)
    return json.loads(done.stdout) if done.status == OK and done.stdout else None


def ranks_of(report):
    return {rank["rank"]: rank for host in report["hosts"] for rank in host["ranks"]} if report else {}


def look_until(programs, job, holds, **variables):
    """The first report that does."""
    deadline = time.monotonic() + HANG
    report = None
    while time.monotonic() < deadline:
        report = look(programs, job, **variables)
        with contextlib.suppress(KeyError):
            if report and holds(report):
                return report
    raise AssertionError(f"none in {HANG} s; the last one: {report}")


def trains(ranks):
    """All ranks are there, have made some steps, and were there before, so that rates are known."""
    return lambda report: len(ranks_of(report)) == ranks and all(
        rank["step"] > 2 and "cpu_percent" in rank for rank in ranks_of(report).values()
    )


def takes_samples(ranks):
    return lambda report: trains(ranks)(report) and all(rank["samples_per_second"] > 0 for rank in ranks_of(report).values())


def test_a_job_of_the_trainer_tells_step_loss_and_samples(programs, small_data, tmp_path):
    job = programs.start("lockstep", "run", "-n", 2, "--rdzv-id", f"night-{os.getpid()}", *trainer(small_data, tmp_path))
    first = look_until(programs, job.pid, takes_samples(2))
    assert first["job"] == f"night-{os.getpid()}" and first["world_size"] == 2 and first["samples_per_second"] > 0
    assert first["program"].split()[0].endswith("/trainer")
    host, = first["hosts"]
    assert host["cores"] >= 1 and 0 < host["memory_used"] <= host["memory_total"] and 0 <= host["cpu_percent"] <= 100
    assert host["received_per_second"] >= 0 and host["sent_per_second"] >= 0 and isinstance(host["cards"], list)
    for rank in host["ranks"]:
        assert 0 < rank["loss"] < 10 and rank["step_seconds"] > 0
        assert rank["phase"] in ("data", "forward", "backward", "waiting", "optimizer") and not rank["stopped"]
        assert rank["cpu_percent"] >= 0 and 1 << 20 < rank["memory"] < 64 * GIB
        assert os.readlink(f"/proc/{rank['pid']}/exe").endswith("/trainer")
    later = look_until(programs, first["job"], lambda report: ranks_of(report)[0]["step"] > ranks_of(first)[0]["step"])
    assert ranks_of(later)[0]["pid"] == ranks_of(first)[0]["pid"]


def test_a_loop_without_the_trainer_started_by_hand_tells_steps_and_phases(programs, small_data):
    place = {"WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    ranks = [programs.start(*plain_loop(small_data), RANK=rank, **place) for rank in range(2)]
    report = look_until(programs, ranks[1].pid, takes_samples(2))
    found = ranks_of(report)
    assert [found[rank]["pid"] for rank in range(2)] == [child.pid for child in ranks]
    assert all("loss" not in rank and rank["phase"] for rank in found.values())
    assert report["job"] == str(ranks[0].pid), "it has no other name"


def test_who_waits_for_a_rank_that_is_stopped(programs, small_data):
    job = programs.start("lockstep", "run", "-n", 3, *plain_loop(small_data))
    stopped = ranks_of(look_until(programs, job.pid, trains(3)))[1]["pid"]
    os.kill(stopped, signal.SIGSTOP)
    # A thread of theirs may wait while the one that trains is still in backward.
    waits = lambda rank: rank["held_up_by"] == 1 and rank["phase"] == "waiting" and rank["phase_seconds"] > 0  # noqa: E731
    found = ranks_of(look_until(programs, job.pid, lambda report: all(waits(ranks_of(report)[rank]) for rank in (0, 2))))
    assert found[1]["stopped"] and "held_up_by" not in found[1]
    table = programs.run("lockstep", "top", job.pid, "--once").stdout
    rows = {int(row.split()[0]): row for row in table.splitlines() if re.match(r" *\d+  ", row)}
    assert "rank 1 (stopped)" in rows[0] and "rank 1 (stopped)" in rows[2] and " stopped " in rows[1], table
    os.kill(stopped, signal.SIGCONT)
    look_until(programs, job.pid, lambda report: "held_up_by" not in ranks_of(report)[0])


def test_all_hosts_are_seen_from_each(programs, small_data):
    job = Job(programs, 2)
    program = " ".join(str(programs.find(word)) for word in plain_loop(small_data))
    script = f"LOCKSTEP_HEARTBEAT_TIMEOUT_SEC=600 LOCKSTEP_TEST_HOST=host-$GROUP_RANK exec {program}"
    agents = [job.start_coordinator(2, script), job.start(1, script)]
    look_until(programs, agents[0].pid, lambda report: len(ranks_of(report)) == 3 or agents[0].count("needs UCX", "stderr"))
    if agents[0].count("needs UCX", "stderr"):
        pytest.skip("ranks on several hosts need UCX")
    for agent in agents:
        report = look_until(programs, agent.pid, trains(3))
        assert [(host["host"], [rank["rank"] for rank in host["ranks"]]) for host in report["hosts"]] == [
            ("host-0", [0, 1]),
            ("host-1", [2]),
        ]
        assert report["job"] == "job" and all(rank["cpu_percent"] >= 0 for rank in ranks_of(report).values())
    far = ranks_of(report)[2]["pid"]
    os.kill(far, signal.SIGSTOP)
    waits = lambda report: ranks_of(report)[2]["stopped"] and ranks_of(report)[0]["held_up_by"] == 2  # noqa: E731
    look_until(programs, agents[0].pid, waits)
    os.kill(far, signal.SIGCONT)


def test_an_agent_that_waits_for_others_has_no_ranks(programs):
    agent = Job(programs, 2).start(1, "true")
    agent.wait_for("1 host of at least 2", "stderr")
    report = look_until(programs, agent.pid, lambda report: report["hosts"])
    assert report["job"] == "job" and report["world_size"] == 0 and report["hosts"][0]["ranks"] == []


def test_a_job_between_two_generations_restarts(programs):
    """Of workers that have no groups, so that no ranks are seen: one is killed, and the other one does not end when it is asked to."""
    job = Job(programs, 2)
    options = "--max-restarts", 1, "--grace-period", 1000
    agents = [job.start_coordinator(1, "trap '' TERM; echo runs in $$; exec sleep 1000", *options)]
    agents.append(job.start(1, "echo runs in $$; exec sleep 1000", *options))
    stays, ends = (int(agent.wait_for(r"runs in (\d+)")[1]) for agent in agents)

    def runs(generation):
        return lambda report: [(host["generation"], host["idles"]) for host in report["hosts"]] == [(generation, False)] * 2

    assert "restarting" not in look_until(programs, agents[0].pid, runs(1))
    os.kill(ends, signal.SIGKILL)
    for agent in agents:
        report = look_until(programs, agent.pid, lambda report: report["restarting"] == 2)
        assert ranks_of(report) == {} and report["world_size"] == 0
    os.kill(stays, signal.SIGKILL)
    assert "restarting" not in look_until(programs, agents[1].pid, runs(2))


def agent_socket(pid):
    """The address at which an agent of this pid namespace is heard."""
    return f"\0lockstep-agent-{os.stat('/proc/self/ns/pid').st_ino}-{pid}"


def greeting(version, release):
    """What an agent and a `lockstep top` of any release tell each other first."""
    return b"lockstep" + struct.pack("<I20s", version, release)


def test_releases_that_differ_say_so_on_both_sides(programs):
    lockstep = programs.find("lockstep")
    agent = Job(programs, 2).start(1, "true")
    agent.wait_for("1 host of at least 2", "stderr")
    with socket.socket(socket.AF_UNIX) as top:
        top.connect(agent_socket(agent.pid))
        top.settimeout(HANG)
        top.sendall(greeting(999, b"9.9.9"))
        got = b"".join(iter(lambda: top.recv(4096), b""))
    own, = struct.unpack("<8xI20x", got)
    assert got.startswith(b"lockstep") and own != 999
    agent.wait_for(rf"top` of Lockstep 9.9.9 \(messages of version 999\) can't watch.* {re.escape(str(lockstep))} top {agent.pid}\n", "stderr")

    with socket.socket(socket.AF_UNIX) as other:  # this process is an agent of another release
        other.bind(agent_socket(os.getpid()))
        other.listen()
        top = programs.start("lockstep", "top", os.getpid())
        other.settimeout(HANG)
        greeted = b""
        while not greeted:  # another test's has looked which agents there are
            watch, _ = other.accept()
            watch.settimeout(HANG)
            greeted = watch.recv(32)
        with watch:
            watch.sendall(greeting(999, b"9.9.9") + b"what it does not know")
            done = top.finish()
    program = os.readlink("/proc/self/exe")
    assert done.status == NO_JOB, done.text
    assert f"process {os.getpid()}, is of Lockstep 9.9.9 (messages of version 999)" in done.stderr, done.text
    assert f"use the program that has started the job: {program} top {os.getpid()}\n" in done.stderr, done.text


def test_several_jobs_are_named_and_one_is_chosen(programs, small_data):
    names = [f"a-{os.getpid()}", f"b-{os.getpid()}"]
    jobs = [programs.start("lockstep", "run", "-n", 1, "--rdzv-id", name, *plain_loop(small_data)) for name in names]
    pids = [look_until(programs, job.pid, trains(1))["hosts"][0]["ranks"][0]["pid"] for job in jobs]
    done = programs.run("lockstep", "top")
    assert done.status == MISUSE and "several jobs run here" in done.stderr and done.stdout == "", done.text
    for name, pid in zip(names, pids):
        assert f"{name}: 1 rank here, the first is process {pid}, " in done.stderr, done.text
    assert look(programs, names[1])["hosts"][0]["ranks"][0]["pid"] == pids[1]
    done = programs.run("lockstep", "top", "no-such-job")
    assert done.status == MISUSE and "no job 'no-such-job' of this user runs here" in done.stderr, done.text


def test_jobs_whose_processes_have_the_same_numbers_in_their_containers(programs, small_data):
    place = {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1"}
    command = [*unshare("--kill-child"), *plain_loop(small_data)]
    jobs = [programs.start(*command, **place, MASTER_PORT=free_port()) for _ in range(2)]
    ranks = [look_until(programs, job.pid, trains(1))["hosts"][0]["ranks"] for job in jobs]
    assert [len(of_job) for of_job in ranks] == [1, 1] and ranks[0][0]["pid"] != ranks[1][0]["pid"], ranks


def test_agents_whose_processes_have_the_same_numbers_in_their_containers(programs, small_data):
    """Containers that share the host's network, and with it the names of the agents' sockets."""
    names = [f"a-{os.getpid()}", f"b-{os.getpid()}"]
    run = [*unshare("--kill-child"), "lockstep", "run", "-n", 1, "--max-restarts", 1]
    jobs = [programs.start(*run, "--rdzv-id", name, *plain_loop(small_data)) for name in names]
    for job, name in zip(jobs, names):
        report = look_until(programs, job.pid, lambda report: trains(1)(report) and report["hosts"][0]["generation"] == 1)
        assert report["job"] == name


def test_without_a_job_it_says_so(programs):
    """In namespaces of its own, for other tests may run jobs here."""
    done = programs.run(*unshare("--net"), programs.find("lockstep"), "top")
    assert done.status == NO_JOB and done.stdout == "" and "no job of this user runs on this host" in done.stderr, done.text


def test_the_documents_picture_shows_a_table():
    """As one of a job looks today; drawn by scripts/plot-table."""
    import xml.etree.ElementTree

    picture = xml.etree.ElementTree.parse(REPOSITORY / "docs" / "images" / "top.svg")
    lines = [text.text for text in picture.iter("{http://www.w3.org/2000/svg}text")]
    heads = lines[3].split("  ")
    table = subprocess.run(
        [REPOSITORY / "scripts" / "plot-table", "/dev/stdout"], input="a  <b>\n\nrank  1\n", capture_output=True, text=True
    )
    assert table.returncode == 0, table.stderr
    drawn = xml.etree.ElementTree.fromstring(table.stdout)
    assert [text.text for text in drawn.iter("{http://www.w3.org/2000/svg}text")] == ["a  <b>", "rank  1"]
    source = (REPOSITORY / "lockstep" / "monitor" / "job_table.cc").read_text()
    assert all(f'"{head.strip()}"' in source for head in heads if head.strip()), heads


class Terminal:
    """`lockstep top` in a terminal of 24 rows, and what it has written."""

    def __init__(self, programs, *options, **variables):
        self.pid, self.master = pty.fork()
        if self.pid == 0:
            program = programs.find("lockstep")
            os.execve(program, [program, "top", *map(str, options)], programs.environment(**variables))
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
        self.modes = termios.tcgetattr(self.master)
        self.text = ""

    def read_until(self, pattern, count=1):
        deadline = time.monotonic() + HANG
        while len(re.findall(pattern, self.text)) < count:
            assert time.monotonic() < deadline, self.text
            if not select.select([self.master], [], [], 1)[0]:
                continue
            try:
                self.text += os.read(self.master, 65536).decode()
            except OSError:  # it has ended
                break
        assert len(re.findall(pattern, self.text)) >= count, self.text

    def finish(self):
        with contextlib.suppress(OSError):  # it has ended
            while select.select([self.master], [], [], HANG)[0]:
                self.text += os.read(self.master, 65536).decode()
            os.kill(self.pid, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        os.close(self.master)
        return status


def test_in_a_terminal_it_goes_on_until_ctrl_c_or_the_jobs_end(programs, small_data):
    job = programs.start("lockstep", "run", "-n", 2, *plain_loop(small_data))
    look_until(programs, job.pid, trains(2))
    for kind in ("xterm-256color", "dumb"):
        terminal = Terminal(programs, job.pid, "--interval", 0.2, TERM=kind)
        terminal.read_until("samples/s: ", count=3)
        assert termios.tcgetattr(terminal.master) == terminal.modes
        os.write(terminal.master, b"\x03")
        assert terminal.finish() == OK, terminal.text
        assert "\033[?" not in terminal.text, "no mode is changed, so none is left behind"
        moves = set(re.findall(r"\033\[[0-9;]*[A-Za-z]", terminal.text))
        assert moves == (set() if kind == "dumb" else {"\033[H", "\033[2J", "\033[K", "\033[J"})
        shown = re.sub(r"\033\[[0-9;]*[A-Za-z]", "", terminal.text)
        assert max(map(len, shown.splitlines())) <= 100 and "lockstep top: the job has ended" not in shown
    terminal = Terminal(programs, job.pid, "--interval", 0.2, TERM="xterm")
    terminal.read_until("samples/s: ", count=2)
    job.kill(signal.SIGTERM)
    job.finish()
    terminal.read_until("lockstep top: the job has ended")
    assert terminal.finish() == OK, terminal.text


NVML = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
/* Two cards: on the first one the processes that FAKE_NVML names, "PID:BYTES PID:BYTES …", the second one tells little. */
typedef struct { unsigned gpu, memory; } Utilization;
typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; } Process;
int nvmlInit_v2(void) { return getenv("FAKE_NVML_BROKEN") ? 9 : 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned* count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** device) { *device = (char*)0 + index + 1; return 0; }
int nvmlDeviceGetName(void* device, char* name, unsigned room) {
  return snprintf(name, room, "Card %d", (int)((char*)device - (char*)0) - 1) < (int)room ? 0 : 7;
}
int nvmlDeviceGetUtilizationRates(void* device, Utilization* rates) {
  if (device != (char*)0 + 1) return 3;
  rates->gpu = 97; rates->memory = 40;
  return 0;
}
int nvmlDeviceGetMemoryInfo(void* device, Memory* memory) {
  memory->total = 80ULL << 30; memory->used = (device == (char*)0 + 1) ? 5ULL << 30 : 0; memory->free = memory->total - memory->used;
  return 0;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void* device, unsigned* count, Process* processes) {
  unsigned room = *count, found = 0;
  const char* text = getenv("FAKE_NVML");
  if (device != (char*)0 + 1) { *count = 0; return 0; }
  for (int read = 0; text != NULL; text += read) {
    unsigned pid; unsigned long long used;
    if (sscanf(text, " %u:%llu%n", &pid, &used, &read) != 2) break;
    if (found < room) { memset(&processes[found], 0, sizeof(Process)); processes[found].pid = pid; processes[found].used = used; }
    ++found;
  }
  *count = found;
  return found > room ? 7 : 0;
}
"""


def test_cards_and_who_else_is_on_them(programs, small_data, tmp_path):
    (tmp_path / "nvml.c").write_text(NVML)
    library = tmp_path / "libnvidia-ml.so.1"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, tmp_path / "nvml.c"], check=True)
    job = programs.start("lockstep", "run", "-n", 2, *plain_loop(small_data))
    first, second = (rank["pid"] for _, rank in sorted(ranks_of(look_until(programs, job.pid, trains(2))).items()))
    not_told = (1 << 64) - 1
    other = os.getpid()
    many = " ".join(f"{pid}:1" for pid in range(4_000_000, 4_000_100))  # more than are asked for at first
    on_card = f"{first}:{2 * GIB} {other}:{3 * GIB} {second}:{not_told} {many}"
    path = f"{tmp_path}:{os.environ.get('LD_LIBRARY_PATH', '')}"
    report = look(programs, job.pid, LD_LIBRARY_PATH=path, FAKE_NVML=on_card)
    cards = report["hosts"][0]["cards"]
    assert [card["name"] for card in cards] == ["Card 0", "Card 1"]
    assert cards[0]["used_percent"] == 97 and "used_percent" not in cards[1], "it does not tell"
    assert (cards[0]["memory_used"], cards[0]["memory_total"]) == (5 * GIB, 80 * GIB)
    assert len(cards[0]["others"]) == 101 and cards[1]["others"] == []
    stranger, = (process for process in cards[0]["others"] if process["pid"] == other)
    user = subprocess.run(["id", "-un"], capture_output=True, text=True).stdout.strip()
    assert stranger["user"] == user and stranger["memory"] == 3 * GIB and stranger["name"].startswith(("py", "pytest"))
    found = ranks_of(report)
    assert found[0]["cards"] == [0] and found[0]["card_memory"] == 2 * GIB
    assert found[1]["cards"] == [0] and "card_memory" not in found[1]
    table = programs.run(
        "lockstep", "top", job.pid, LD_LIBRARY_PATH=path, FAKE_NVML=f"{first}:{2 * GIB} {other}:{3 * GIB}"
    ).stdout
    assert f"gpu 0 Card 0: 97 %, 5.0 GiB of 80.0 GiB; not of this job: {stranger['name']} (pid {other} of {user}) 3.0 GiB" in table
    assert "0: 2.0 GiB" in table
    broken = look(programs, job.pid, LD_LIBRARY_PATH=path, FAKE_NVML_BROKEN=1)
    assert broken["hosts"][0]["cards"] == [] and len(ranks_of(broken)) == 2
