"""Ranks that share neither a host nor a network namespace meet; those of two users are told so; no socket listens wider
than needed."""

import ipaddress
import os
import shutil

import pytest
import support
from hosts import PORT

NOBODY = 65534


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def start_in(programs, net, host, rank, *options):
    address = net.addresses[0]
    method = f"tcp://[{address}]:{PORT}" if ":" in address else f"tcp://{address}:{PORT}"
    driver = ["meeting_driver", "--init-method", method, "--rank", rank, "--world-size", 2, *options]
    return programs.start(*net.inside(host, *driver))


def wait_for_the_sum(children):
    for child in children:
        try:
            child.wait_for("has the sum 1")
        except AssertionError as error:
            if "needs UCX" not in str(error):
                raise
            pytest.skip("ranks on several hosts need UCX")


@pytest.mark.parametrize("ipv6", [False, True])
def test_two_network_namespaces_are_two_hosts(programs, make_hosts, ipv6):
    """The ranks share no memory, and reduce over the cable."""
    net = make_hosts(2, ipv6=ipv6)
    children = [start_in(programs, net, rank, rank, "--hold") for rank in range(2)]
    wait_for_the_sum(children)
    assert {address for address, _ in programs.listening()} <= set(net.addresses)
    for child in children:
        result = child.finish()
        assert result.status == 0, result.text


def test_two_containers_of_one_host_are_two_hosts(programs):
    """Each has process and user namespaces of its own, in which it is process 1, and the host's network."""
    options = ["--init-method", f"tcp://127.0.0.1:{support.free_port()}", "--world-size", 2, "--hold"]
    driver = programs.find("meeting_driver")
    container = support.unshare("--kill-child")
    children = [
        programs.start(*container, driver, *options, "--rank", rank, LOCKSTEP_LOG="info") for rank in range(2)
    ]
    wait_for_the_sum(children)
    for child in children:
        result = child.finish()
        assert result.status == 0 and "all 2 ranks are there" in result.text and ", on 2 hosts: " in result.text, result.text


def test_on_an_address_of_its_own_the_store_listens_at_that_address_only(programs, make_hosts):
    net = make_hosts(1)
    children = [start_in(programs, net, 0, rank, "--hold") for rank in range(2)]
    for child in children:
        child.wait_for("has the sum 1")
    assert programs.listening() == {(net.addresses[0], PORT)}
    for child in children:
        result = child.finish()
        assert result.status == 0, result.text


def as_nobody(programs):
    """The words in front of a command that make it run as user nobody, in a rank of its own."""
    if os.geteuid() != 0 or not shutil.which("setpriv"):
        pytest.skip("to start a process as another user, setpriv and root are needed")
    words = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    probe = programs.run(*words, programs.find("meeting_driver"), "--help")
    if probe.status != 0:
        pytest.skip(f"user nobody can't start the programs of this build: {probe.stderr.strip()}")
    return words


@pytest.mark.parametrize("stranger", [0, 1])
def test_ranks_of_two_users_are_both_told(programs, stranger):
    words = as_nobody(programs)
    method = ["--init-method", f"tcp://127.0.0.1:{support.free_port()}", "--world-size", 2, "--timeout", 5]
    children = []
    for rank in range(2):
        driver = [programs.find("meeting_driver"), *method, "--rank", rank]
        children.append(programs.start(*(words if rank == stranger else []), *driver))
    for child in children:
        result = child.finish()
        assert result.status == 1, result.text
        assert f"rank {stranger} " in result.stderr and f"user {NOBODY}" in result.stderr, result.text
        assert f"rank {1 - stranger} " in result.stderr and f"user {os.geteuid()}" in result.stderr, result.text
        assert "timeout" not in result.stderr, result.text  # the users are known as soon as all have come


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
@pytest.mark.parametrize("scheme", ["env", "tcp"])
def test_a_store_on_loopback_listens_on_loopback_only(programs, scheme, host):
    port = support.free_port()
    if scheme == "tcp":
        common = ["--init-method", f"tcp://{host}:{port}", "--world-size", 2, "--hold"]
        children = [programs.start("meeting_driver", *common, "--rank", rank) for rank in range(2)]
    else:
        place = {"WORLD_SIZE": 2, "MASTER_ADDR": host, "MASTER_PORT": port}
        children = [programs.start("meeting_driver", "--hold", RANK=rank, **place) for rank in range(2)]
    for child in children:
        child.wait_for("has the sum 1")
    listening = programs.listening()
    assert [found for _, found in listening] == [port]
    assert all(is_loopback(address) for address, _ in listening), listening
    for child in children:
        result = child.finish()
        assert result.status == 0, result.text


def test_lockstep_run_listens_on_loopback_only(programs):
    launcher = programs.start("lockstep", "run", "--nproc-per-node", 2, "meeting_driver", "--hold")
    launcher.wait_for(r"rank 0 of 2 .* has the sum 1")
    launcher.wait_for(r"rank 1 of 2 .* has the sum 1")
    listening = programs.listening()
    assert len(listening) == 1 and all(is_loopback(address) for address, _ in listening), listening
    result = launcher.finish()
    assert result.status == 0, result.text


def test_a_meeting_at_a_file_opens_no_tcp_port(programs):
    options = ["--init-method", f"file://{programs.folder}/meeting", "--world-size", 2, "--hold"]
    children = [programs.start("meeting_driver", *options, "--rank", rank) for rank in range(2)]
    for child in children:
        child.wait_for("has the sum 1")
    assert programs.listening() == set()
    for child in children:
        result = child.finish()
        assert result.status == 0, result.text
