"""Ranks that do not share a host, a network namespace or a user are told so; no socket listens wider than needed."""

import contextlib
import ipaddress
import os
import shutil
import subprocess
import uuid

import pytest
import support

NOBODY = 65534
ADDRESSES = ["10.83.71.1", "10.83.71.2"]  # of our own namespaces; no other process sees them


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def ip(*words):
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=support.HANG)
    if done.returncode != 0:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.strip()}")


@pytest.fixture
def namespaces():
    """Names of two network namespaces of this machine, joined by a cable, with an address of ADDRESSES each."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    if not shutil.which("ip"):
        pytest.skip("ip (iproute2) is not installed")
    token = uuid.uuid4().hex[:8]
    names = [f"lockstep-{token}-{end}" for end in "ab"]
    with contextlib.ExitStack() as cleanup:
        try:
            for name in names:
                ip("netns", "add", name)
                cleanup.callback(ip, "netns", "del", name)
                ip("netns", "exec", name, "true")
            ip("link", "add", "cable", "netns", names[0], "type", "veth", "peer", "name", "cable", "netns", names[1])
            for name, address in zip(names, ADDRESSES, strict=True):
                ip("-n", name, "address", "add", f"{address}/24", "dev", "cable")
                for device in ("lo", "cable"):
                    ip("-n", name, "link", "set", device, "up")
        except RuntimeError as error:
            pytest.skip(f"network namespaces are not allowed here: {error}")
        yield names


def start_in(programs, namespace, rank, *options):
    method = f"tcp://{ADDRESSES[0]}:29500"
    driver = [programs.find("meeting_driver"), "--init-method", method, "--rank", rank, "--world-size", 2, *options]
    return programs.start("ip", "netns", "exec", namespace, *driver)


def test_two_network_namespaces_are_two_hosts(programs, namespaces):
    """Both ranks meet, and both are told which rank is where and that this is not supported yet."""
    children = [start_in(programs, namespace, rank) for rank, namespace in enumerate(namespaces)]
    for rank, child in enumerate(children):
        result = child.finish()
        assert result.status == 1, result.text
        message = result.stderr
        assert f"rank {rank} is on host" in message and f"but rank {1 - rank} on" in message, result.text
        assert "another network namespace" in message, result.text
        assert "across hosts are not supported yet" in message, result.text


def test_on_an_address_of_its_own_the_store_listens_at_that_address_only(programs, namespaces):
    children = [start_in(programs, namespaces[0], rank, "--hold") for rank in range(2)]
    for child in children:
        child.wait_for("has the sum 1")
    assert programs.listening() == {(ADDRESSES[0], 29500)}
    for child in children:
        result = child.finish()
        assert result.status == 0, result.text


def as_nobody(programs, rank):
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
    words = as_nobody(programs, stranger)
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
