"""Ranks on several hosts, each with a network of its own: what is killed, cut off or stopped is named on all others, and what
is over in time is no error."""

import re
import signal
import time

import pytest

LIMIT = 3  # seconds of silence after which a rank is unreachable
DEFAULT_CUT = 3  # seconds that the default limit lets pass


def start(programs, net, layout, timeout=60, limit=LIMIT):
    """Ranks that sum for ever; `limit`: None for the default."""
    variables = {} if limit is None else {"LOCKSTEP_HEARTBEAT_TIMEOUT_SEC": limit}
    driver = ["meeting_driver", "--forever", "--timeout", timeout]
    children = programs.start_on(net, layout, programs.find(driver[0]), *driver[1:], **variables)
    for child in children:
        try:
            child.wait_for("has the sum ")
        except AssertionError as error:
            if "needs UCX" not in str(error):
                raise
            pytest.skip("ranks on several hosts need UCX")
    return children


def fails_with(child, pattern):
    done = child.finish()
    assert done.status == 1, done.text
    assert re.search(pattern, done.stderr), done.text


def name(children, rank, host):
    return rf"rank {rank} \(pid {children[rank].pid} on {host}\)"


# The second time UCX gives the connection up before.
@pytest.mark.parametrize("timeout", [10, pytest.param(60, marks=pytest.mark.long)])
def test_a_switch_with_a_smaller_mtu_than_the_hosts_is_named_at_the_start(programs, make_hosts, timeout):
    net = make_hosts(2, mtu=9000, switch_mtu=1500)
    driver = [programs.find("meeting_driver"), "--timeout", timeout]
    for child in programs.start_on(net, [1, 1], *driver):
        done = child.finish()
        if "needs UCX" in done.text:
            pytest.skip("ranks on several hosts need UCX")
        where = r"rank \d \(pid \d+ on host-[ab]\), by UCX .*, at [\d.]+:\d+\)"
        said = rf"{where}, and {where}, can't pass messages: .*small messages pass, but not 64 KiB: .* the same MTU\?"
        assert done.status == 1 and re.search(said, done.stderr), done.text


@pytest.mark.parametrize("layout", [[2, 2], [1, 3], [1, 1]], ids=lambda layout: "+".join(map(str, layout)))
def test_a_killed_rank_is_named_on_all_hosts(programs, make_hosts, layout):
    net = make_hosts(2)
    children = start(programs, net, layout)
    victim = len(children) - 1
    children[victim].kill()
    alone = layout[1] == 1
    how = r" is lost: .*no other rank is on its host" if alone else r" (was )?killed by signal 9 \(SIGKILL\)"
    for child in children[:victim]:
        fails_with(child, name(children, victim, net.names[1]) + how)
    assert children[victim].finish().status == -signal.SIGKILL
    programs.wait_until_gone()


def test_a_host_all_of_whose_ranks_are_killed_is_named(programs, make_hosts):
    net = make_hosts(2)
    children = start(programs, net, [2, 2])
    for child in children[2:]:
        child.kill()
    for child in children[:2]:
        fails_with(child, rf"rank [23] \(pid \d+ on {net.names[1]}\)")
    programs.wait_until_gone()


@pytest.mark.parametrize("layout", [[2, 2], [1, 1]], ids=lambda layout: "+".join(map(str, layout)))
def test_a_cut_wire_is_named_on_both_sides(programs, make_hosts, layout):
    net = make_hosts(2)
    children = start(programs, net, layout)
    net.cut(1)
    for rank, child in enumerate(children):
        host = 0 if rank < layout[0] else 1
        far = range(layout[0], len(children)) if host == 0 else range(layout[0])
        named = "|".join(name(children, other, net.names[1 - host]) for other in far)
        fails_with(child, rf"({named}) is unreachable: silent for .*the wire is cut")
    programs.wait_until_gone()


def test_a_rank_that_is_stopped_is_named(programs, make_hosts):
    net = make_hosts(2)
    children = start(programs, net, [2, 2], timeout=5, limit=2)
    children[3].kill(signal.SIGSTOP)
    for child in children[:3]:
        fails_with(child, rf"timed out.*{name(children, 3, net.names[1])}.*is stopped \(by SIGSTOP")
    children[3].kill(signal.SIGCONT)
    fails_with(children[3], r"rank [012] \(pid ")
    programs.wait_until_gone()


def test_a_rank_that_is_stopped_alone_on_its_host_is_unreachable(programs, make_hosts):
    net = make_hosts(2)
    children = start(programs, net, [2, 1], limit=2)
    children[2].kill(signal.SIGSTOP)
    for child in children[:2]:
        fails_with(child, rf"{name(children, 2, net.names[1])} is unreachable: silent for .*it is stopped, its host is lost")
    children[2].kill(signal.SIGCONT)
    # Which of the others' words it hears first is open: their farewell, the group's failure, or their ends.
    fails_with(children[2], r"rank \d \(pid \d+ on host-")
    programs.wait_until_gone()


@pytest.mark.long
@pytest.mark.parametrize("fault", ["cut", "mtu", "rate", "stop"])
def test_what_is_over_in_time_is_no_error(programs, make_hosts, fault):
    net = make_hosts(2)
    children = start(programs, net, [2, 2], limit=None)
    if fault == "cut":
        net.cut(1)
        time.sleep(DEFAULT_CUT)
        net.heal(1)
    elif fault == "stop":
        children[3].kill(signal.SIGSTOP)
        time.sleep(DEFAULT_CUT)
        children[3].kill(signal.SIGCONT)
    elif fault == "mtu":
        net.set_mtu(1, 1300)
    else:
        net.set_rate(1, "10mbit")
    # Longer than the limit: had it been an error, it would be known.
    time.sleep(12)
    # And the wire still tells what happens.
    children[3].kill()
    for child in children[:3]:
        fails_with(child, name(children, 3, net.names[1]) + r" (was )?killed by signal 9 \(SIGKILL\)")
    programs.wait_until_gone()
