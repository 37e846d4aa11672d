"""A rank that dies, a rank that stops, Ctrl-C, a launcher that is killed: all are told, all end, nothing is left."""

import os
import pathlib
import re
import shutil
import signal
import time

import pytest
import support

# Arms a failpoint in one rank only; no core files.
ARM = 'ulimit -c 0; if [ "$RANK" = "$VICTIM" ]; then export LOCKSTEP_FAILPOINTS="$FAILPOINT"; fi; exec "$@"'
ENDLESS = ["--epochs", 1000000, "--batch-size", 64]
SEE = re.escape("See: docs/troubleshooting.md, which says what messages mean and what to do\n")


def training(programs, data):
    return ["sh", "-c", ARM, "sh", programs.find("fashion_mnist"), "--data", data, *ENDLESS]


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize(
    "action, how",
    [
        ("kill(9)", r"killed by signal 9 \(SIGKILL\)"),
        ("kill(11)", r"killed by signal 11 \(SIGSEGV\)"),
        ("exit(3)", r"exited with status 3"),
    ],
)
def test_a_rank_that_ends_inside_training_is_named_everywhere(programs, small_data, victim, action, how):
    variables = {"VICTIM": victim, "FAILPOINT": f"reduce={action}@5"}
    done = programs.lockstep_run(2, *training(programs, small_data), **variables)
    assert done.status == 1, done.text
    report = re.search(rf"^lockstep run: rank {victim} \(pid (\d+)\) failed first: {how}$", done.stderr, re.M)
    assert report, done.text
    # The survivor's own error says the same: which rank, which process, in which operation, and how it ended.
    other = 1 - victim
    error = rf"^\[rank {other}\] .*all_reduce \(sequence \d+, .*on rank {other} .*: rank {victim} \(pid {report[1]}\) {how}"
    assert re.search(error, done.stderr, re.M), done.text
    programs.wait_until_gone()


def test_the_survivors_of_four_all_name_the_dead_rank(programs):
    variables = {"VICTIM": 2, "FAILPOINT": "announce=kill(9)@20"}
    driver = [programs.find("meeting_driver"), "--forever"]
    done = programs.lockstep_run(4, "sh", "-c", ARM, "sh", *driver, **variables)
    assert done.status == 1, done.text
    dead = re.search(r"^lockstep run: rank 2 \(pid (\d+)\) failed first: killed by signal 9", done.stderr, re.M)
    assert dead, done.text
    for rank in (0, 1, 3):
        error = rf"^\[rank {rank}\] .*all_reduce \(sequence \d+.*: rank 2 \(pid {dead[1]}\) killed by signal 9 \(SIGKILL\)"
        assert re.search(error, done.stderr, re.M), done.text
    programs.wait_until_gone()


def test_the_rank_that_failed_first_is_named_though_its_process_ends_last(programs):
    """As under Python, where an interpreter ends long after its exception: its victims' processes are faster."""
    done = programs.lockstep_run(3, "meeting_driver", "--forever", "--fail-last", 1)
    assert done.status == 1, done.text
    report = done.stderr[done.stderr.index("lockstep run: ") :]
    assert re.match(r"lockstep run: rank 1 \(pid \d+\) failed first: exited with status 1\n", report), done.text
    assert "    meeting_driver: no such data\n" in report, done.text
    assert "\nlockstep run: docs/troubleshooting.md#what-lockstep-run-reports says what to do\n" in report, done.text
    for rank in (0, 2):
        assert re.search(rf"^lockstep run: then rank {rank} \(pid \d+\) exited with status 1(, \d+ ms later)?$", report, re.M), done.text


def test_spawn_passes_the_first_failure_on_though_its_process_ends_last(programs):
    done = programs.run("meeting_driver", "--spawn", 3, "--forever", "--fail-last", 1)
    assert done.status == 1, done.text
    assert "-- Process 1 terminated with the following error:\nc10::Error: no such data\n" in done.stderr, done.text


@pytest.mark.parametrize("how", ["exits early", "returns from main"])
def test_a_rank_that_ends_well_before_the_others_is_named(programs, how):
    if how == "exits early":
        command = ["sh", "-c", ARM, "sh", programs.find("meeting_driver"), "--forever"]
        variables = {"VICTIM": 1, "FAILPOINT": "announce=exit(0)@5"}
    else:
        one_sum = 'if [ "$RANK" = 1 ]; then exec "$0"; fi; exec "$0" --forever'
        command, variables = ["sh", "-c", one_sum, programs.find("meeting_driver")], {}
    done = programs.lockstep_run(2, *command, **variables)
    assert done.status == 1, done.text
    report = done.stderr[done.stderr.index("lockstep run: ") :]
    cause = r"lockstep run: rank 1 \(pid \d+\) ended before the others: exited with status 0, .*"
    assert re.match(cause + r"unequal numbers of batches: see join\(\)\n", report), done.text
    assert re.search(r"^lockstep run: then rank 0 \(pid \d+\) exited with status 1", report, re.M), done.text
    if how == "returns from main":
        error = r"^\[rank 0\] .*rank 1 \(pid \d+\) (has left the group|left the job) .*unequal numbers of batches: see join\(\)"
        assert re.search(error, done.stderr, re.M), done.text


def start_training(programs, data):
    """A launcher whose ranks are in the midst of training."""
    launcher = programs.start("lockstep", "run", "--nproc-per-node", 2, *training(programs, data))
    launcher.wait_for(r"\[rank 0\] epoch 2: ")
    assert len(programs.survivors()) >= 3  # so that looking for them finds them
    return launcher


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_launcher_ends_everything(programs, small_data, number):
    launcher = start_training(programs, small_data)
    launcher.kill(number)
    done = launcher.finish()
    assert done.status == 128 + number, done.text
    assert f"lockstep run: ended by {number.name}\n" in done.stderr, done.text
    assert "failed first" not in done.stderr, done.text  # no rank is blamed
    programs.wait_until_gone()


def test_nothing_outlives_a_launcher_that_is_killed(programs, small_data):
    launcher = start_training(programs, small_data)
    assert list(programs.folder.glob("lockstep_*"))  # for the ranks' errors
    launcher.kill()
    programs.wait_until_gone()
    assert launcher.finish().status == -signal.SIGKILL
    assert not list(programs.folder.glob("lockstep_*"))


def test_a_launcher_ends_with_the_parent_that_it_was_told_of(programs):
    """`lockstep sweep` tells it."""
    script = f"{programs.find('lockstep')} run --parent-pid $$ -n 2 sh -c 'echo is here; exec sleep 1000' & wait"
    parent = programs.start("sh", "-c", script)
    parent.wait_for("is here")
    parent.kill()
    programs.wait_until_gone()
    done = programs.run("lockstep", "run", "--parent-pid", os.getppid(), "touch", "started")
    assert done.status == 1 and not (programs.folder / "started").exists(), "that one is not its parent any more"
    assert f"process {os.getppid()} of --parent-pid has ended, or is not the one that" in done.stderr, done.text


def start_pair(programs, *options):
    """Two ranks by hand, without a launcher, that sum for ever."""
    place = {"WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": support.free_port()}
    children = [programs.start("meeting_driver", "--forever", *options, RANK=rank, **place) for rank in range(2)]
    for child in children:
        child.wait_for("has the sum 1")
    return children


@pytest.mark.parametrize("victim", [0, 1])
def test_without_a_launcher_a_dead_rank_is_named_too(programs, victim):
    children = start_pair(programs)
    children[victim].kill()
    done = children[1 - victim].finish()
    assert done.status == 1, done.text
    # Its parent, which is this test, has not asked yet how it ended.
    end = rf"rank {victim} \(pid {children[victim].pid}\) killed by signal 9 \(SIGKILL\)"
    assert re.search(rf"all_reduce \(sequence \d+, .*on rank {1 - victim} .*: {end}", done.stderr), done.text
    assert children[victim].finish().status == -signal.SIGKILL


def test_without_a_launcher_a_rank_that_ends_unseen_is_named_with_its_status(programs):
    """As by os._exit(5): no handler of the process runs."""
    place = {"WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": support.free_port()}
    other = programs.start("meeting_driver", "--forever", RANK=0, **place)
    victim = programs.start("meeting_driver", "--forever", RANK=1, LOCKSTEP_FAILPOINTS="announce=exit(5)@5", **place)
    done = other.finish()
    assert re.search(rf"rank 1 \(pid {victim.pid}\) exited with status 5", done.stderr), done.text
    assert victim.finish().status == 5


def test_records_are_told_once_and_after_the_cause(programs):
    variables = {"VICTIM": 1, "FAILPOINT": "announce=error(no such thing)@5"}
    driver = [programs.find("meeting_driver"), "--forever"]
    done = programs.lockstep_run(2, "sh", "-c", ARM, "sh", *driver, **variables)
    assert done.status == 1 and "flight record" not in done.stderr, done.text
    (told,) = re.findall(r"^lockstep run: the ranks' last operations: lockstep inspect flight (\S+)$", done.stderr, re.M)
    assert done.stderr.index("rank 1 (pid") < done.stderr.index("the ranks' last operations"), done.text
    assert programs.run("lockstep", "inspect", "flight", told).stdout, told


def test_an_error_before_the_first_operation_leaves_no_record(programs, tmp_path):
    done = programs.lockstep_run(2, "fashion_mnist", "--data", tmp_path / "nothing")
    assert done.status == 1 and "no Fashion-MNIST" in done.stderr, done.text
    assert "flight" not in done.stderr, done.text
    assert not list(tmp_path.glob("lockstep-*/flight-*")), done.text


def test_a_stopped_rank_is_named_at_the_timeout(programs):
    children = start_pair(programs, "--timeout", 5)
    children[1].kill(signal.SIGSTOP)
    done = children[0].finish()
    assert done.status == 1, done.text
    late = rf"timed out after 5 s waiting for rank 1 \(pid {children[1].pid}\)"
    assert re.search(rf"all_reduce \(sequence \d+, .*{late}", done.stderr), done.text
    # Awake again, it finds that the group has failed, and why.
    children[1].kill(signal.SIGCONT)
    done = children[1].finish()
    assert done.status == 1, done.text
    assert re.search(rf"rank 0 \(pid {children[0].pid}\) timed out", done.stderr), done.text


SINCE = r"for \d+ s, since \d\d:\d\d:\d\d"


def test_a_rank_that_is_stopped_is_named_while_the_others_wait(programs):
    options = ["--timeout", 600, "--forever"]
    agent = programs.start("lockstep", "run", "-n", 3, "meeting_driver", *options, LOCKSTEP_HEARTBEAT_TIMEOUT_SEC=1)
    victim = int(agent.wait_for(r"rank 2 of 3 \(pid (\d+)\)")[1])
    agent.wait_for(r"rank [01] of 3 (?s:.*)rank [01] of 3")
    os.kill(victim, signal.SIGSTOP)
    name = rf"rank 2 \(pid {victim} on \S+\)"
    stopped = rf"it is stopped \(by .*\); kill -CONT {victim} continues it\n"
    waiting = "(ranks 0 and 1 have|rank [01] has)"  # where one of them has been slow to say so, the other
    agent.wait_for(f"lockstep run: {waiting} waited for {name} {SINCE}; {stopped}", "stderr")
    agent.wait_for(f"lockstep run: {name} has been stopped {SINCE}", "stderr")
    os.kill(victim, signal.SIGCONT)
    agent.wait_for(f"lockstep run: {name} is waited for no more\n", "stderr")
    agent.wait_for(f"lockstep run: {name} goes on\n", "stderr")
    agent.kill(signal.SIGINT)
    assert agent.finish().status == 130


def test_a_rank_that_does_something_else_is_named_while_another_waits(programs):
    late = "test $RANK = 1 && export LOCKSTEP_FAILPOINTS='announce=delay(600000)@5'"
    script = f"{late}; exec {programs.find('meeting_driver')} --timeout 600 --forever"
    agent = programs.start("lockstep", "run", "-n", 2, "sh", "-c", script, LOCKSTEP_HEARTBEAT_TIMEOUT_SEC=1)
    agent.wait_for(rf"lockstep run: rank 0 has waited for rank 1 \(pid \d+ on \S+\) {SINCE}\n", "stderr")
    agent.kill(signal.SIGKILL)
    programs.wait_until_gone()


def test_a_rank_that_fails_before_the_group_is_there_ends_the_others(programs):
    """Ranks that wait at the rendezvous must not wait for its timeout."""
    early = 'if [ "$RANK" = 1 ]; then echo no data here >&2; exit 7; fi; exec "$0"'
    done = programs.lockstep_run(2, "sh", "-c", early, programs.find("meeting_driver"))
    assert done.status == 1, done.text
    assert re.search(r"rank 1 \(pid \d+\) failed first: exited with status 7\n", done.stderr), done.text
    assert "its last lines on standard error:\n    no data here\n" in done.stderr, done.text
    programs.wait_until_gone()


# Before the first rank starts


def wait_until_caught(child, number):
    """Returns once the process has a handler for the signal."""
    deadline = time.monotonic() + support.HANG
    while time.monotonic() < deadline:
        assert child.process.poll() is None, "it has ended"
        status = pathlib.Path(f"/proc/{child.pid}/status").read_text()
        if int(re.search(r"^SigCgt:\s*(\w+)$", status, re.M)[1], 16) >> (number - 1) & 1:
            return
        os.sched_yield()
    pytest.fail(f"it has no handler for signal {number} after {support.HANG} s")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_launchers_store_starts_ends_it(programs, number):
    launcher = programs.start("lockstep", "run", "echo", "started", LOCKSTEP_FAILPOINTS="start_store=delay(600000)")
    wait_until_caught(launcher, number)
    launcher.kill(number)
    done = launcher.finish()
    assert done.status == 128 + number, done.text
    assert (done.stdout, done.stderr) == ("", f"lockstep run: ended by {number.name}\n"), done.text
    programs.wait_until_gone()


ALONE = [shutil.which("unshare") or "unshare", "--user", "--map-root-user", "--net"]  # a network of its own


def test_a_signal_while_a_firewall_drops_the_launchers_packets_ends_it(programs):
    drop = 'ip link set lo up && tc qdisc add dev lo root blackhole && exec "$@"'
    command = [*ALONE, "sh", "-c", drop, "sh"]
    if programs.run("sh", "-c", '"$@" true', "sh", *command).status != 0:
        pytest.skip("no network namespaces, ip or tc here")
    launcher = programs.start(*command, "lockstep", "run", "echo", "started")
    wait_until_caught(launcher, signal.SIGTERM)
    launcher.kill(signal.SIGTERM)
    done = launcher.finish()
    assert done.status == 128 + signal.SIGTERM, done.text
    assert (done.stdout, done.stderr) == ("", "lockstep run: ended by SIGTERM\n"), done.text
    programs.wait_until_gone()


@support.takes_hangups
def test_a_terminal_that_closes_signals_twice_and_takes_no_grace_period(programs):
    script = "trap 'echo told' HUP; echo up; while ! [ -e go ]; do sleep 0.05; done; echo saved"
    launcher = programs.start("lockstep", "run", "sh", "-c", script)
    launcher.wait_for("up")
    launcher.kill(signal.SIGHUP)
    launcher.wait_for("told")
    launcher.kill(signal.SIGHUP)
    launcher.kill(signal.SIGUSR2)  # it takes the signals in the order of their numbers
    launcher.wait_for("SIGUSR2: no process has a handler for it", "stderr")
    (programs.folder / "go").touch()
    done = launcher.finish()
    assert done.status == 128 + signal.SIGHUP and "saved" in done.stdout, done.text
    programs.wait_until_gone()


def test_lines_are_whole_where_no_terminal_shows_them(programs):
    # The first rank's line is finished when the other has written one, and an idle line would have been shown to a person.
    script = ("await() { while ! [ -e $1 ]; do sleep 0.05; done; }\n"
              "if [ $RANK = 0 ]; then printf 'loss: 8.765'; touch begun; await other; echo 43e-05\n"
              "else await begun; sleep 0.5; echo other; touch other; fi")
    done = programs.run("lockstep", "run", "-n", "2", "sh", "-c", script)
    assert sorted(done.stdout.splitlines()) == ["[rank 0] loss: 8.76543e-05", "[rank 1] other"], done.text


def test_a_loopback_interface_that_is_down_is_said_in_one_line(programs):
    if programs.run("sh", "-c", '"$@" true', "sh", *ALONE).status != 0:
        pytest.skip("no network namespaces here")
    done = programs.run(*ALONE, programs.find("lockstep"), "run", "echo", "started")
    assert done.status == 1 and done.stdout == "", done.text
    assert re.fullmatch(r"lockstep: error: can't connect to 127\.0\.0\.1, .*the loopback interface is down.*\n" + SEE, done.stderr)


@pytest.mark.parametrize("closed", ["1>&-", "2>&-", "0<&- 1>&- 2>&-"])
def test_closed_standard_streams_are_no_reason_to_wait(programs, closed):
    """A pipe of the launcher's that got the number of one would be taken for it, by the workers too."""
    launch = f'exec "$0" run --nproc-per-node 2 sh -c "echo output; echo error >&2; read line; true" {closed}'
    done = programs.run("sh", "-c", launch, programs.find("lockstep"))
    assert done.status == 0, done.text
    assert sorted(done.stdout.splitlines()) == ([] if "1>" in closed else ["[rank 0] output", "[rank 1] output"])
    assert sorted(done.stderr.splitlines()) == ([] if "2>" in closed else ["[rank 0] error", "[rank 1] error"])


@pytest.mark.parametrize("closed", ["1>&-", "0<&- 1>&- 2>&-"])
def test_without_a_launcher_nothing_is_written_into_what_has_a_closed_streams_number(programs, closed):
    """A socket or shared memory that got the number of standard output would get what the ranks print."""
    place = {"WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": support.free_port()}
    command = ["sh", "-c", f'exec "$0" {closed}', programs.find("all_reduce")]
    children = [programs.start(*command, RANK=rank, **place) for rank in range(2)]
    for child in children:
        done = child.finish()
        assert (done.status, done.stdout) == (0, ""), done.text


def test_a_limit_on_open_files_that_is_too_low_is_said_in_one_line(programs):
    done = programs.run("sh", "-c", 'ulimit -c 0; ulimit -n 10; exec "$0" run echo started', programs.find("lockstep"))
    assert done.status == 1 and done.stdout == "", done.text
    assert re.fullmatch(r"lockstep: error: the limit on open files is 10, .*\(ulimit -n \d+\)\n" + SEE, done.stderr), done.text
    enough = re.search(r"ulimit -n (\d+)", done.stderr)[1]
    done = programs.run("sh", "-c", f'ulimit -n {enough}; exec "$0" run echo started', programs.find("lockstep"))
    assert (done.status, done.stdout) == (0, "started\n"), done.text
