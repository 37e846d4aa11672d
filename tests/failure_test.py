"""A rank that dies, a rank that stops, Ctrl-C, a launcher that is killed: all are told, all end, nothing is left."""

import re
import signal

import pytest
import support

# Arms a failpoint in one rank only; no core files.
ARM = 'ulimit -c 0; if [ "$RANK" = "$VICTIM" ]; then export LOCKSTEP_FAILPOINTS="$FAILPOINT"; fi; exec "$@"'
ENDLESS = ["--epochs", 1000000, "--batch-size", 64]


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
    # The survivor's own error says the same: who, which process, in which operation, and how it ended.
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
    assert "failed first" not in done.stderr, done.text  # nobody is blamed
    programs.wait_until_gone()


def test_nothing_outlives_a_launcher_that_is_killed(programs, small_data):
    launcher = start_training(programs, small_data)
    launcher.kill()
    programs.wait_until_gone()
    assert launcher.finish().status == -signal.SIGKILL


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
    # How it ended only its parent knows, which is this test; so far it has not asked.
    end = rf"rank {victim} \(pid {children[victim].pid}\) ended without a note \(SIGKILL"
    assert re.search(rf"all_reduce \(sequence \d+, .*on rank {1 - victim} .*: {end}", done.stderr), done.text
    assert children[victim].finish().status == -signal.SIGKILL


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


def test_a_rank_that_fails_before_the_group_is_there_ends_the_others(programs):
    """Those who wait at the rendezvous must not wait for its timeout."""
    early = 'if [ "$RANK" = 1 ]; then echo no data here >&2; exit 7; fi; exec "$0"'
    done = programs.lockstep_run(2, "sh", "-c", early, programs.find("meeting_driver"))
    assert done.status == 1, done.text
    assert re.search(r"rank 1 \(pid \d+\) failed first: exited with status 7\n", done.stderr), done.text
    assert "its last lines on standard error:\n    no data here\n" in done.stderr, done.text
    programs.wait_until_gone()
