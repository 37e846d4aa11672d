"""The harness itself: hosts as network namespaces (tests/hosts.py), and pretended ones."""

import os
import pathlib
import select
import shutil
import signal
import subprocess
import sys

import hosts
import pytest
import support

# Receives on a port of its own, which it prints, and prints what came: until the end of a connection, or one datagram.
TCP_SINK = """
import socket, sys
sink = socket.create_server((sys.argv[1], 0), family=socket.getaddrinfo(sys.argv[1], 0)[0][0])
print(sink.getsockname()[1], flush=True)
peer, total = sink.accept()[0], 0
while part := peer.recv(1 << 16):
    total += len(part)
print(total, flush=True)
"""
UDP_ECHO = """
import socket, sys
echo = socket.socket(socket.getaddrinfo(sys.argv[1], 0)[0][0], socket.SOCK_DGRAM)
echo.bind((sys.argv[1], 0))
print(echo.getsockname()[1], flush=True)
while True:
    data, sender = echo.recvfrom(1 << 16)
    echo.sendto(data, sender)
"""
TCP_SOURCE = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as sink:
    sink.sendall(bytes(int(sys.argv[3])))
"""
# Ends with 0 if a datagram of that length comes back, and with 3 if none of some does; does not cut it in pieces.
UDP_PING = """
import socket, sys
ping = socket.socket(socket.getaddrinfo(sys.argv[1], 0)[0][0], socket.SOCK_DGRAM)
ping.setsockopt(socket.IPPROTO_IP, 10, 2)  # IP_MTU_DISCOVER, IP_PMTUDISC_DO: never a fragment
ping.settimeout(float(sys.argv[4]))
ping.connect((sys.argv[1], int(sys.argv[2])))
for _ in range(3):
    ping.send(bytes(int(sys.argv[3])))
    try:
        sys.exit(0 if len(ping.recv(1 << 16)) == int(sys.argv[3]) else 1)
    except TimeoutError:
        pass
sys.exit(3)
"""
LOST = 3
SOON, LATE = 0.2, 20  # seconds without an answer: where none is expected, and where one is


class Peer:
    """A program on a host that has a port."""

    def __init__(self, net, host, program):
        self.net, self.host = net, host
        self.process = subprocess.Popen(net.inside(host, sys.executable, "-c", program, net.addresses[host]),
                                        stdout=subprocess.PIPE, text=True)  # fmt: skip
        self.port = int(self.process.stdout.readline())

    def answers(self, from_host, length=8, timeout=LATE):
        """Whether a datagram from there comes back."""
        done = self.net.run(from_host, sys.executable, "-c", UDP_PING, self.net.addresses[self.host], self.port, length,
                            timeout, check=False)  # fmt: skip
        assert done.returncode in (0, LOST), done.stderr
        return done.returncode == 0

    def close(self):
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def echo_on():
    made = []

    def make(net, host):
        made.append(Peer(net, host, UDP_ECHO))
        return made[-1]

    yield make
    for peer in made:
        peer.close()


@pytest.mark.parametrize("ipv6", [False, True])
def test_each_host_reaches_each_other(make_hosts, echo_on, ipv6):
    net = make_hosts(3, ipv6=ipv6)
    assert all((":" in address) == ipv6 for address in net.addresses)
    for host in range(3):
        echo = echo_on(net, host)
        assert all(echo.answers(peer) for peer in range(3))


def test_a_host_has_only_addresses_of_its_family(make_hosts):
    net = make_hosts(1, ipv6=True)
    # Of IPv4 there is the loopback, without which some programs do not run at all.
    assert "inet " not in net.run(0, "ip", "address", "show", "dev", hosts.DEVICE).stdout
    assert net.addresses[0] in net.run(0, "ip", "address", "show", "dev", hosts.DEVICE).stdout


def test_a_host_has_its_name_devices_and_names_of_the_others(make_hosts, tmp_path):
    net = make_hosts(2)
    before = {name: os.readlink(f"/proc/self/ns/{name}") for name in ("net", "uts", "ipc", "mnt", "pid")}
    for host, name in enumerate(["host-a", "host-b"]):
        assert net.run(host, "hostname").stdout == f"{name}\n"
        assert sorted(net.run(host, "ls", "/sys/class/net").stdout.split()) == [hosts.DEVICE, "lo"]
        assert net.run(host, "getent", "hosts", net.names[1 - host]).stdout.split()[0] == net.addresses[1 - host]
        seen = {name: net.run(host, "readlink", f"/proc/self/ns/{name}").stdout.strip() for name in before}
        assert {name for name in before if seen[name] != before[name]} == {"net", "uts", "ipc", "mnt"}
        assert seen == {name: net.run(host, "readlink", f"/proc/self/ns/{name}").stdout.strip() for name in before}
    done = subprocess.run(net.inside(0, "sh", "-c", "pwd; echo $WORD; cat"), cwd=tmp_path, env={**os.environ, "WORD": "x y"},
                          input="from here", capture_output=True, text=True, check=True)  # fmt: skip
    assert done.stdout == f"{tmp_path}\nx y\nfrom here"


def test_bytes_pass_a_wire_of_some_speed(make_hosts):
    net = make_hosts(2, rate="1gbit")
    sink = Peer(net, 1, TCP_SINK)
    try:
        net.run(0, sys.executable, "-c", TCP_SOURCE, net.addresses[1], sink.port, 1 << 20)
        assert sink.process.stdout.readline() == f"{1 << 20}\n"
    finally:
        sink.close()
    for host in range(2):
        assert "rate 1Gbit" in net.run(host, "tc", "qdisc", "show", "dev", hosts.DEVICE).stdout


def test_a_slow_way_carries_what_goes_one_way(make_hosts):
    net = make_hosts(2)
    net.add_slow_way(0, 1, "100mbit")
    sent = 500000
    for origin, target in ((0, 1), (1, 0)):
        sink = Peer(net, target, TCP_SINK)
        net.run(origin, sys.executable, "-c", TCP_SOURCE, net.addresses[target], sink.port, sent)
        assert int(sink.process.stdout.readline()) == sent
        sink.close()
    carried = [int(net.run(host, "cat", f"/sys/class/net/{device}/statistics/tx_bytes").stdout)
               for host, device in ((0, "to1"), (1, "from0"))]  # fmt: skip
    assert carried[0] > sent > carried[1]


def test_a_cut_wire_carries_nothing_until_it_is_healed(make_hosts, echo_on):
    net = make_hosts(3)
    echo = echo_on(net, 0)
    net.cut(0)
    assert not echo.answers(1, timeout=SOON)
    assert echo_on(net, 2).answers(1)  # the others go on
    assert "LOWER_UP" in net.run(0, "ip", "link", "show", hosts.DEVICE).stdout  # the host does not see it
    net.heal(0)
    assert echo.answers(1)


def test_a_switch_may_let_less_through_than_the_hosts_send(make_hosts, echo_on):
    net = make_hosts(2, mtu=9000, switch_mtu=1500)
    echo = echo_on(net, 0)
    assert echo.answers(1, length=1000)
    assert not echo.answers(1, length=8000, timeout=SOON)
    wide = make_hosts(2, mtu=9000)
    assert echo_on(wide, 0).answers(1, length=8000)


def test_two_runs_do_not_meet(make_hosts, echo_on):
    """Equal names and addresses, but other hosts."""
    first, second = make_hosts(2), make_hosts(2)
    assert first.addresses == second.addresses
    echo = echo_on(first, 0)
    assert echo.answers(1)
    with pytest.raises(subprocess.CalledProcessError):  # nothing listens there: refused
        second.run(1, sys.executable, "-c", TCP_SOURCE, second.addresses[0], echo.port, 1)
    second.close()
    assert echo.answers(1)


def test_mpirun_may_use_the_remote_shell(make_hosts):
    net = make_hosts(2)
    shell = str(net.remote_shell())
    done = subprocess.run([shell, net.addresses[1], "hostname;", "echo", "'two words'"], capture_output=True, text=True)
    assert done.stdout == "host-b\ntwo words\n", done
    assert subprocess.run([shell, "elsewhere", "true"], capture_output=True).returncode == 255


def mounts():
    return pathlib.Path("/proc/self/mountinfo").read_text()


def left_in(namespaces):
    """Processes in these network namespaces."""
    found = (hosts.network_namespace(entry.name) for entry in pathlib.Path("/proc").glob("[0-9]*"))
    return [namespace for namespace in found if namespace in namespaces]


@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt])
def test_nothing_is_left(make_hosts, error):
    make_hosts(1)  # skips
    before = mounts()
    kept = []
    try:
        with hosts.Hosts(2) as net:
            kept += [hosts.network_namespace(keeper.pid) for keeper in net.keepers]
            folder = net.folder
            stubborn = subprocess.Popen(net.inside(1, "sh", "-c", "trap '' TERM INT HUP; echo here; sleep 1000; sleep 1000"),
                                        stdout=subprocess.PIPE, start_new_session=True)  # fmt: skip
            assert stubborn.stdout.readline() == b"here\n"
            assert set(left_in(kept)) == set(kept)
            if error:
                raise error
    except (RuntimeError, KeyboardInterrupt) as seen:
        assert type(seen) is error
    assert left_in(kept) == [] and not folder.exists() and mounts() == before
    stubborn.communicate()
    assert stubborn.returncode == -signal.SIGKILL


def test_hosts_end_with_a_process_that_is_killed(make_hosts):
    make_hosts(1)  # skips
    program = ("import hosts; net = hosts.Hosts(2).__enter__(); "
               "print(net.folder, *[keeper.pid for keeper in net.keepers], flush=True); input()")  # fmt: skip
    owner = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                             env={**os.environ, "PYTHONPATH": str(pathlib.Path(hosts.__file__).parent)})  # fmt: skip
    folder, *pids = owner.stdout.readline().split()
    watched = [os.pidfd_open(int(pid)) for pid in pids]
    owner.kill()
    owner.communicate()
    for pidfd in watched:
        assert select.select([pidfd], [], [], support.HANG)[0], "a host outlived its owner"
        os.close(pidfd)
    shutil.rmtree(folder)


def test_without_root_the_reason_is_told(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(hosts.NotAllowed, match="need root"), hosts.Hosts(1):
        pass
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda program: None if program == "tc" else program)
    with pytest.raises(hosts.NotAllowed, match=r"need tc \(Debian: iproute2\)"), hosts.Hosts(1):
        pass


def test_a_refusal_of_the_kernel_is_told(make_hosts, monkeypatch):
    make_hosts(1)  # skips
    monkeypatch.setattr(hosts, "KEEPER", "echo 'mount: not here' >&2; exit 1")
    net = hosts.Hosts(2)
    with pytest.raises(hosts.NotAllowed, match="not allowed here: mount: not here"), net:
        pass
    assert net.keepers == [] and net.folder is None


def test_ranks_are_placed_as_torchrun_does():
    ranks = hosts.torchrun_environments([1, 2], "10.0.0.1", 4000)
    assert [host for host, _ in ranks] == [0, 1, 1]
    assert [(each["RANK"], each["LOCAL_RANK"], each["LOCAL_WORLD_SIZE"], each["GROUP_RANK"]) for _, each in ranks] == [
        ("0", "0", "1", "0"), ("1", "0", "2", "1"), ("2", "1", "2", "1")]  # fmt: skip
    assert {(each["WORLD_SIZE"], each["MASTER_ADDR"], each["MASTER_PORT"]) for _, each in ranks} == {("3", "10.0.0.1", "4000")}


def test_pretended_hosts_name_themselves_and_need_nothing():
    with hosts.PretendedHosts(2) as net:
        said = [subprocess.run(net.inside(host, "printenv", hosts.TEST_HOST), capture_output=True, text=True).stdout
                for host in range(2)]  # fmt: skip
        assert said == ["host-a\n", "host-b\n"] and net.addresses == ["127.0.0.1"] * 2


@pytest.mark.parametrize("pretended", [False, True])
def test_a_job_has_its_ranks_on_the_hosts_that_it_is_told(programs, make_hosts, pretended):
    net = hosts.PretendedHosts(2) if pretended else make_hosts(2)
    command = ["sh", "-c", "echo $RANK of $WORLD_SIZE at $MASTER_ADDR, $(hostname) $WORD"]
    children = programs.start_on(net, [1, 2], *command, WORD="x")
    here = os.uname().nodename
    said = [child.finish().stdout for child in children]
    names = [here] * 3 if pretended else ["host-a", "host-b", "host-b"]
    assert said == [f"{rank} of 3 at {net.addresses[0]}, {name} x\n" for rank, name in enumerate(names)]
