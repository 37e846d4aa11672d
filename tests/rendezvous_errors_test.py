"""What is wrong when processes meet is said by each of them, with the value, and none hangs."""

import re
import signal
import socket

import pytest
import support

PLACE = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500}  # nothing here comes so far as to open it
TWO = {"RANK": 0, "WORLD_SIZE": 2}


def assert_says(result, *words):
    """It failed in good order (no signal), with one message that contains all the words and names the page for them."""
    assert result.status == 1, result.text
    for word in [*words, "docs/troubleshooting.md#meeting"]:
        assert word in result.stderr, f"no '{word}' in {result.text}"


BAD_VARIABLES = [
    # missing
    ({**PLACE, "RANK": 0}, ["WORLD_SIZE is not set", "rank 0 of ?"]),
    ({**PLACE, "WORLD_SIZE": 2}, ["RANK is not set", "rank ? of 2"]),
    ({**TWO, "MASTER_PORT": 29500}, ["MASTER_ADDR is not set", "rank 0 of 2"]),
    ({**TWO, "MASTER_ADDR": "127.0.0.1"}, ["MASTER_PORT is not set", "rank 0 of 2"]),
    (TWO, ["MASTER_ADDR and MASTER_PORT are not set", "lockstep run --nproc-per-node"]),
    ({"OMPI_COMM_WORLD_RANK": 0}, ["OMPI_COMM_WORLD_SIZE is not"]),
    # malformed
    ({**PLACE, "RANK": "first", "WORLD_SIZE": 2}, ["RANK is 'first'"]),
    ({**PLACE, "RANK": "1.0", "WORLD_SIZE": 2}, ["RANK is '1.0'"]),
    ({**PLACE, "RANK": -1, "WORLD_SIZE": 2}, ["RANK is -1"]),
    ({**PLACE, "RANK": 0, "WORLD_SIZE": 0}, ["WORLD_SIZE is 0"]),
    ({**PLACE, "RANK": 0, "WORLD_SIZE": "2x"}, ["WORLD_SIZE is '2x'"]),
    ({**PLACE, "RANK": 0, "WORLD_SIZE": 99999999999}, ["WORLD_SIZE is 99999999999"]),
    ({**TWO, **PLACE, "MASTER_PORT": "http"}, ["MASTER_PORT is 'http'"]),
    ({**TWO, **PLACE, "MASTER_PORT": 65536}, ["MASTER_PORT is 65536"]),
    ({**TWO, **PLACE, "MASTER_PORT": 0}, ["port to meet at is 0"]),
    # contradictory
    ({**PLACE, "RANK": 2, "WORLD_SIZE": 2}, ["RANK is 2", "WORLD_SIZE=2"]),
    ({**TWO, **PLACE, "LOCAL_RANK": 3, "LOCAL_WORLD_SIZE": 2}, ["LOCAL_RANK is 3", "LOCAL_WORLD_SIZE=2"]),
    ({**TWO, **PLACE, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 4}, ["LOCAL_WORLD_SIZE is 4", "WORLD_SIZE=2"]),
    ({"OMPI_COMM_WORLD_RANK": 0, "OMPI_COMM_WORLD_SIZE": 2, "RANK": 1}, ["RANK is 1", "OMPI_COMM_WORLD_RANK=0"]),
    ({"SLURM_PROCID": 2, "SLURM_STEP_NUM_TASKS": 2, "SLURM_STEP_ID": 0}, ["SLURM_PROCID is 2"]),
]


@pytest.mark.parametrize("variables, words", BAD_VARIABLES, ids=lambda value: " ".join(map(str, value)))
def test_a_bad_variable_is_named_with_its_value(programs, variables, words):
    assert_says(programs.run("meeting_driver", **variables), *words)


BAD_METHODS = [
    ("gloo://somewhere", ["'gloo://somewhere'", "tcp://HOST:PORT"]),
    ("tcp://127.0.0.1", ["'tcp://127.0.0.1'", "port number missing"]),
    ("tcp://127.0.0.1:no", ["'tcp://127.0.0.1:no'", "port 'no'"]),
    ("tcp://:29500", ["'tcp://:29500'", "host missing"]),
    ("tcp://127.0.0.1:29500?rang=1", ["'rang'"]),
    ("tcp://127.0.0.1:29500?rank=1&world_size=2", ["give them once"]),
    ("file://relative/path", ["'file://relative/path'", "file:///PATH"]),
    ("file:///no/such/folder/meeting", ["no directory /no/such/folder"]),
]


@pytest.mark.parametrize("method, words", BAD_METHODS, ids=lambda value: str(value))
def test_a_bad_init_method_is_shown(programs, method, words):
    options = ["--init-method", method, "--rank", 0, "--world-size", 2]
    assert_says(programs.run("meeting_driver", *options), *words)


@pytest.mark.parametrize(
    "options, words",
    [
        (["--rank", 2, "--world-size", 2], ["rank 2", "world_size 2"]),
        (["--world-size", 2], ["rank parameter missing"]),
        (["--rank", 0], ["world_size parameter missing"]),
    ],
)
def test_bad_options_are_named(programs, options, words):
    method = ["--init-method", "tcp://127.0.0.1:29500"]
    assert_says(programs.run("meeting_driver", *method, *options), *words)


def test_a_timeout_of_nothing_is_refused(programs):
    """Before the ranks meet: the message says all, and the page about meetings would add nothing."""
    method = ["--init-method", "tcp://127.0.0.1:29500", "--rank", 0, "--world-size", 2]
    result = programs.run("meeting_driver", *method, "--timeout", 0)
    assert result.status == 1, result.text
    assert "the timeout is 0 ms; it must be more than 0" in result.stderr, result.text


def test_options_that_contradict_the_environment(programs):
    done = programs.run("meeting_driver", "--rank", 1, "--world-size", 2, **TWO, **PLACE)
    assert_says(done, "rank 1", "rank 0 of 2")


def methods(programs):
    """init_methods of all kinds, for jobs that go wrong."""
    return {
        "env": "env://",
        "tcp": f"tcp://127.0.0.1:{support.free_port()}",
        "file": f"file://{programs.folder}/meeting",
    }


@pytest.fixture(params=["env", "tcp", "file"])
def meeting(request, programs):
    """Starts ranks of a driver that meet so: meeting(ranks, world_size, timeout)."""
    method = methods(programs)[request.param]
    port = support.free_port()

    def start(ranks, world_size, timeout, sizes=None):
        children = []
        for place, rank in enumerate(ranks):
            size = sizes[place] if sizes else world_size
            options = ["--init-method", method, "--timeout", timeout]
            if method == "env://":
                variables = {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            else:
                options += ["--rank", rank, "--world-size", size]
                variables = {}
            children.append(programs.start("meeting_driver", *options, **variables))
        return [child.finish() for child in children]

    return start


def test_two_processes_with_one_rank(meeting):
    """All three hear of it: the two that claim the rank, and the one that waits for the missing one."""
    for result in meeting([0, 1, 1], 3, timeout=30):
        assert_says(result, "rank 1 of 3 is claimed twice")


def test_a_rank_that_is_contested_before_it_has_published(programs):
    """Rank 0, which hosts the store, knows of the conflict first, and stays until the slow one has read it."""
    place = {"WORLD_SIZE": 3, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": support.free_port()}
    slow = {"LOCKSTEP_FAILPOINTS": "meet_claimed=delay(1000)"}
    children = [programs.start("meeting_driver", "--timeout", 30, RANK=0, **place)]
    children += [programs.start("meeting_driver", "--timeout", 30, RANK=1, **slow, **place) for _ in range(2)]
    for child in children:
        assert_says(child.finish(), "rank 1 of 3 is claimed twice")


def test_two_processes_with_rank_zero_at_one_port(programs):
    children = [
        programs.start("meeting_driver", "--timeout", 2, RANK=0, WORLD_SIZE=2, **meeting_place)
        for meeting_place in [{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": support.free_port()}] * 2
    ]
    host, guest = sorted((child.finish() for child in children), key=lambda result: "in use" in result.stderr)
    assert_says(host, "rank 1 of 2 did not join")
    assert_says(guest, "rank 0 cannot listen", "in use")


def test_ranks_that_disagree_about_the_world_size(meeting):
    results = meeting([0, 1], 0, timeout=30, sizes=[2, 3])
    for result in results:
        assert_says(result, "was started with world size", "2", "3")


def test_ranks_that_never_come_are_named_by_all_that_wait(meeting):
    for result in meeting([0, 2, 4], 5, timeout=4):
        assert_says(result, "ranks 1 and 3 of 5 did not join")


def test_a_rank_zero_that_never_comes_is_named(programs):
    port = support.free_port()
    method = ["--init-method", f"tcp://127.0.0.1:{port}", "--world-size", 3, "--timeout", 1]
    children = [programs.start("meeting_driver", *method, "--rank", rank) for rank in (1, 2)]
    for rank, child in zip((1, 2), children, strict=True):
        assert_says(child.finish(), f"rank {rank} could not reach rank 0 at 127.0.0.1 port {port}", "refused")


def test_a_rank_that_waits_for_rank_zero_says_so_and_waits_on(programs):
    """Not only in the error at the end of the timeout, which is 30 minutes unless told."""
    port = support.free_port()
    place = {"WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    guest = programs.start("meeting_driver", RANK=1, **place)
    waiting = rf"warning: still trying to reach rank 0 at 127\.0\.0\.1 port {port} after \d\S* s: .*connection refused"
    guest.wait_for(waiting, "stderr")
    host = programs.start("meeting_driver", RANK=0, **place)
    for child in (host, guest):
        result = child.finish()
        assert result.status == 0, result.text


def test_a_rank_that_waits_says_that_the_address_cannot_be_resolved(programs):
    place = {"WORLD_SIZE": 2, "MASTER_ADDR": "no-such-host.invalid", "MASTER_PORT": 29500}
    guest = programs.start("meeting_driver", RANK=1, **place)
    guest.wait_for(r"still trying to reach rank 0 at no-such-host\.invalid .*cannot be resolved", "stderr")
    guest.kill()
    guest.finish()


def test_a_rank_that_never_comes_under_lockstep_run(programs):
    """The launcher's store outlives the ranks, and its report shows their error."""
    absent = 'if [ "$RANK" = 1 ]; then exec cat; fi; exec "$0" --timeout 3'
    done = programs.lockstep_run(3, "sh", "-c", absent, programs.find("meeting_driver"))
    # Rank 1 reads from nothing and leaves in good order; the other two wait for it.
    assert done.status == 1, done.text
    for rank in (0, 2):
        assert re.search(rf"^\[rank {rank}\] .*rank 1 of 3 did not join", done.stderr, re.M), done.text


def test_an_address_that_cannot_be_resolved_is_named(programs):
    place = {"MASTER_ADDR": "no-such-host.invalid", "MASTER_PORT": 29500}
    done = programs.run("meeting_driver", "--timeout", 1, RANK=1, WORLD_SIZE=2, **place)
    assert_says(done, "no-such-host.invalid")


def test_a_port_in_use_is_named_by_rank_zero(programs):
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()  # it accepts, and never answers
        port = stranger.getsockname()[1]
        host, guest = programs.run_ranks([0, 1], "meeting_driver", "--timeout", 2, MASTER_PORT=port)
        assert_says(host, f"port {port} is in use")
        assert_says(guest, f"127.0.0.1 port {port}", "does not answer as a store does")


def test_a_master_port_in_use_is_named_by_the_launcher(programs):
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        port = stranger.getsockname()[1]
        done = programs.run("lockstep", "run", "--master-port", port, "true")
        assert done.status != 0 and str(port) in done.stderr and "in use" in done.stderr, done.text


def test_a_file_that_a_killed_job_left_behind_is_refused(programs):
    """To meet in it again would mix two jobs."""
    options = ["--init-method", f"file://{programs.folder}/meeting", "--world-size", 2]

    def start(*more):
        return [programs.start("meeting_driver", *options, "--rank", rank, *more) for rank in (0, 1)]

    killed = start("--hold")
    for child in killed:
        child.wait_for("has the sum 1")
    for child in killed:
        child.kill()
    for child in killed:
        assert child.finish().status == -signal.SIGKILL
    for child in start():
        assert_says(child.finish(), "claimed twice", "an earlier job left behind", "delete its file")
    (programs.folder / "meeting").unlink()
    for result in [child.finish() for child in start()]:
        assert result.status == 0, result.text
