"""`lockstep run` over several hosts: its agents make one world, with torchrun's environment, and tell which rank failed."""

import os
import pathlib
import re
import shutil
import signal
import sys

import pytest
from agents import FAST, SECRET, STAY, TELL, Job, wait_until_ended
from hosts import PORT
from ports import free_port

pytestmark = pytest.mark.usefixtures("agents_are_built")


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


OWN_RANK = "RANK=$((2 * GROUP_RANK + LOCAL_RANK)) WORLD_SIZE=3"


@pytest.mark.parametrize("own_place, options", [
    ("", []),
    ("MASTER_ADDR={0} MASTER_PORT={1}", []),
    ("MASTER_ADDR={0} MASTER_PORT={1}", ["--no-tunnel"]),
    ("MASTER_ADDR={0} MASTER_PORT={2}", []),  # the agents' own
    ("MASTER_ADDR={0} MASTER_PORT={2}", ["--no-tunnel"]),
    (f"{OWN_RANK} MASTER_ADDR={{0}} MASTER_PORT={{1}}", []),
    (f"{OWN_RANK} MASTER_ADDR={{0}} MASTER_PORT={{1}}", ["--no-tunnel"]),
])  # fmt: skip
def test_a_collective_runs_over_two_network_namespaces(programs, make_hosts, own_place, options):
    """Also in a program that sets a meeting point of its own, as tutorials do, and its rank."""
    net = make_hosts(2)
    job = Job(programs, 2, port=PORT, host=net.addresses[0])
    script = f"{own_place.format(net.addresses[0], PORT + 1, PORT)} exec {programs.find('all_reduce')}"
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


# Of the launcher's own, or of the moment.
DIFFERS = ("LOCKSTEP_", "TORCHELASTIC_ERROR_FILE", "_=", "SHLVL")


def without(lines, *beginnings):
    return [line for line in lines if not line.startswith(beginnings)]


@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_workers_have_torchruns_environment(programs, make_hosts, backend):
    """All of it without the tunnel, and with it all but where the store is. ROLE_RANK and ROLE_WORLD_SIZE count a role's ranks."""
    torchrun = shutil.which("torchrun", path=pathlib.Path(sys.executable).parent)
    if not torchrun:
        pytest.skip("no torchrun beside this Python")
    net = make_hosts(2)
    place = ["--nnodes", 2, "--nproc-per-node", 2, "--max-restarts", 3, "--rdzv-backend", backend]
    if backend == "static":
        place += ["--master-addr", net.addresses[0], "--master-port", PORT]
    else:
        place += ["--rdzv-endpoint", f"{net.addresses[0]}:{PORT}", "--rdzv-id", "job"]
    run = [programs.find("lockstep"), "run"]
    launchers = {"torchrun": [torchrun, "--no-python"], "no tunnel": [*run, "--no-tunnel"], "tunnel": run}
    seen = {}
    for name, launcher in launchers.items():
        agents = []
        for host in range(2):
            own = ["--node-rank", host, "--local-addr", net.addresses[host], "--role", ("trainer", "reader")[host]]
            own += ["sh", "-c", f'env > "{programs.folder}/{name}_$RANK"']
            agents.append(programs.start(*net.inside(host, *launcher, *place, *own), LOCKSTEP_JOB_SECRET=SECRET))
        done = [agent.finish() for agent in agents]
        assert [result.status for result in done] == [0, 0], done
        for rank in range(4):
            lines = (programs.folder / f"{name}_{rank}").read_text().splitlines()
            seen[name, rank] = sorted(without(lines, *DIFFERS))
    for rank in range(4):
        drawn = ["MASTER_PORT="] if backend == "c10d" else []  # torchrun takes a free port for its workers' store
        assert without(seen["no tunnel", rank], *drawn) == without(seen["torchrun", rank], *drawn)
        place = [line for line in seen["tunnel", rank] if line.startswith("MASTER_")]
        assert place[0] == "MASTER_ADDR=127.0.0.1" and place[1].startswith("MASTER_PORT="), place
        assert without(seen["tunnel", rank], "MASTER_") == without(seen["torchrun", rank], "MASTER_")


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
    why = rf"no coordinator answered in time \(the TLS handshake failed at 127.0.0.1 port {job.port}: do both sides have the same"
    assert re.search(why, stranger.stderr), stranger.text
    second = job.start(1, TELL).finish()
    assert (second.status, first.finish().status) == (0, 0)


def test_a_host_with_another_number_of_hosts_ends_at_once_and_the_others_are_unharmed(programs):
    job = Job(programs, 2)
    first = job.start_coordinator(1, TELL)
    other = Job(programs, "2:3", port=job.port).start(1, TELL).finish()
    why = r"has --nnodes=2:3 where the coordinator has --nnodes=2; give all hosts of a job the same\n"
    assert other.status == 1 and re.search(why, other.stderr), other.text
    second = job.start(1, TELL).finish()
    done = first.finish()
    assert (second.status, done.status) == (0, 0) and re.search(why, done.stderr), done.text


def test_a_short_secret_is_refused_and_none_gets_a_warning(programs):
    done = programs.run("lockstep", "run", "--nnodes", 2, "true", LOCKSTEP_JOB_SECRET="guess")
    assert done.status == 2 and "the job's secret has 5 characters" in done.stderr, done.text
    job = Job(programs, 2)
    agents = [job.start_coordinator(1, TELL, secret=""), job.start(1, TELL, secret="")]
    for done in [agent.finish() for agent in agents]:
        assert done.status == 0 and "WARNING: there is no secret" in done.stderr, done.text


@pytest.mark.parametrize("file, error", [("folder", "Is a directory"), ("large", "has more than 16384 bytes"), ("none", "No such file")])
def test_a_file_that_is_no_secret_is_refused_with_the_reason(programs, file, error):
    (programs.folder / "folder").mkdir()
    (programs.folder / "large").write_text("x" * 16385)
    done = programs.run("lockstep", "run", "--nnodes", 2, "--secret-file", file, "true")
    done.skip_without_openssl()
    assert done.status == 2 and error in done.stderr, done.text


@pytest.mark.parametrize("options", [["--nnodes", 2], ["-H", "host-a,host-b"]], ids=["an agent", "one command"])
@pytest.mark.parametrize("mode", [0o600, 0o640, 0o604, 0o620])
def test_a_secret_that_others_can_read_or_change_gets_one_warning(programs, mode, options):
    key = programs.folder / "the key"
    key.write_text(SECRET)
    key.chmod(mode)
    done = programs.run("lockstep", "run", "--dry-run", *options, "--secret-file", key, "true")
    done.skip_without_openssl()
    assert done.status == 0 and "secret" in done.stdout, done.text
    said = re.findall("^lockstep run: WARNING: the file of the secret, (.*), has mode 0([0-7]+), so .*; chmod 600 (.*)", done.stderr, re.M)
    assert said == ([] if mode == 0o600 else [(str(key), f"{mode:o}", f"'{key}'")]), done.text


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


def test_a_host_that_alone_asks_to_be_started_again_stops_the_others(programs):
    job = Job(programs, 2)
    script = 'trap "exit 75" TERM; test $RANK = 1 && exit 75; sleep 1000 & wait'
    agents = [job.start_coordinator(1, script), job.start(1, script)]
    done = [agent.finish() for agent in agents]
    assert [result.status for result in done] == [75, 75], done
    assert re.search(r"have stopped and ask to be started again; those on \S+ are asked to stop, too\n", done[0].stderr), done[0].text


def test_the_coordinator_says_who_failed_on_another_host_and_why(programs):
    job = Job(programs, 2)
    script = 'test $RANK = 2 || exec sleep 1000; echo "no such data" >&2; exit 7'
    agents = [job.start_coordinator(2, script), job.start(1, script)]
    done = [agent.finish() for agent in agents]
    assert [result.status for result in done] == [1, 1], done
    assert re.search(r"workers on \S+ have failed:\n.*rank 2 \(pid \d+ on \S+\) failed first: exited with status 7", done[0].stderr)
    assert "    no such data\n" in done[0].stderr, done[0].text


def test_the_coordinator_says_where_the_records_of_another_host_are(programs):
    job = Job(programs, 2)
    driver = f"{programs.find('meeting_driver')} --forever"
    script = f"export LOCKSTEP_TEST_HOST=host-$GROUP_RANK; test $RANK = 0 && {{ {driver}; exec sleep 1000; }}; "
    script += f"export LOCKSTEP_FAILPOINTS='announce=error(no such thing)@50'; exec {driver}"
    agents = [job.start_coordinator(1, script), job.start(1, script)]
    done = [agent.finish() for agent in agents]
    if any("needs UCX" in result.stderr for result in done):
        pytest.skip("ranks on several hosts need UCX")
    assert [result.status for result in done] == [1, 1], done
    report = r"workers on (\S+) have failed:\n.*rank 1 \(pid \d+ on \1\) failed first.*\n(?:[ ].*\n)*.*says what to do\n"
    told = re.search(report + r"lockstep run: the ranks' last operations, on \1: lockstep inspect flight (\S+)\n", done[0].stderr)
    assert told and programs.run("lockstep", "inspect", "flight", told[2]).stdout, done[0].text


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


def test_heartbeats_that_come_too_fast_are_refused(programs):
    done = Job(programs, 2, conf="keep_alive_interval=0.005").start(1, STAY).finish()
    assert done.status == 2 and "the heartbeat interval must be 0.01 s or more" in done.stderr, done.text


def test_a_local_address_that_this_host_can_not_have_is_refused_before_any_start(programs):
    done = Job(programs, 2).start(1, STAY, "--local-addr", "nowhere.invalid").finish()
    assert done.status == 2 and "--local-addr is 'nowhere.invalid', which is no address" in done.stderr, done.text
