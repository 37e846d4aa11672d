"""Several hosts on one machine, for tests and benchmarks.

Hosts are network namespaces, each with hostname, IPC, mounts and /sys of its own, cables to one switch, and nothing else:

    with hosts.Hosts(2, rate="1gbit") as net:
        subprocess.run(net.inside(0, "ping", "-c1", net.addresses[1]))

They need root. PretendedHosts has the same face and needs nothing: its ranks meet over loopback, and LOCKSTEP_TEST_HOST makes
Lockstep believe that they are on several hosts.

A namespace has no name and lives as long as its processes. The first of them is a keeper that waits for the end of a pipe
whose other end this process has: however this process dies, its hosts go too.
"""

import contextlib
import os
import pathlib
import select
import shutil
import signal
import string
import subprocess
import tempfile
import time

PROGRAMS = {"ip": "iproute2", "tc": "iproute2", "nsenter": "util-linux", "unshare": "util-linux", "mount": "mount"}
COMMAND_SECONDS = 60
END_SECONDS = 10
PORT = 29500  # on hosts of our own, where no other process listens
DEVICE = "eth0"  # of a host; its port at the switch is called port0, port1, …
TEST_HOST = "LOCKSTEP_TEST_HOST"
# Mounts happen in a namespace that nothing is passed on from. /sys shows the devices of the namespace it was mounted in; the
# control groups below it are kept.
KEEPER = """
set -e
hostname "$1"
mount --bind "$2/hosts" /etc/hosts
if [ -d /sys/fs/cgroup ]; then mount --rbind /sys/fs/cgroup "$2/cgroup"; fi
mount -t sysfs sysfs /sys
if [ -d /sys/fs/cgroup ]; then mount --move "$2/cgroup" /sys/fs/cgroup; fi
ip link set lo up
echo ready
exec cat
"""


class NotAllowed(Exception):
    """This machine does not let us make hosts; the message says why."""


def name_of(host):
    return f"host-{string.ascii_lowercase[host]}"


def torchrun_environments(layout, address, port):
    """[(host, torchrun's variables)] of each rank, where layout[h] of them are on host h. Rank 0's store is at the address."""
    answer = []
    for host, local_size in enumerate(layout):
        for local in range(local_size):
            answer.append((host, {
                "RANK": str(len(answer)), "WORLD_SIZE": str(sum(layout)), "LOCAL_RANK": str(local),
                "LOCAL_WORLD_SIZE": str(local_size), "GROUP_RANK": str(host), "MASTER_ADDR": address,
                "MASTER_PORT": str(port)}))  # fmt: skip
    return answer


class PretendedHosts:
    """Ranks over loopback that look as if they were on several hosts."""

    def __init__(self, count):
        self.names = [name_of(host) for host in range(count)]
        self.addresses = ["127.0.0.1"] * count

    def inside(self, host, *words):
        """The command line that runs these words on a host."""
        return ["env", f"{TEST_HOST}={self.names[host]}", *map(str, words)]

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass


class Hosts:
    """`count` hosts at one switch. Use it in a `with` statement; raises NotAllowed where it can't be had.

    rate: of each cable in both directions, as tc has it ("1gbit"); None: as fast as memory.
    ipv6: hosts have IPv6 addresses and no others, but for 127.0.0.1.
    mtu: of the hosts' devices. switch_mtu: what the switch lets through, where that is less.
    """

    def __init__(self, count, rate=None, ipv6=False, mtu=1500, switch_mtu=None):
        if not 1 <= count <= len(string.ascii_lowercase):
            raise ValueError(f"there can be 1 to {len(string.ascii_lowercase)} hosts, not {count}")
        self.rate, self.mtu, self.switch_mtu = rate, mtu, switch_mtu or mtu
        self.names = [name_of(host) for host in range(count)]
        self.addresses = [f"fd83:71::{host + 1}" if ipv6 else f"10.83.71.{host + 1}" for host in range(count)]
        self.prefix = 64 if ipv6 else 24
        self.keepers = []  # of the hosts, and then the switch's
        self.folder = None

    def __enter__(self):
        if os.geteuid() != 0:
            raise NotAllowed("hosts as network namespaces need root")
        for program, package in PROGRAMS.items():
            if not shutil.which(program):
                raise NotAllowed(f"hosts as network namespaces need {program} (Debian: {package})")
        try:
            self._make()
        except subprocess.CalledProcessError as error:
            self.close()
            raise NotAllowed(f"hosts as network namespaces are not allowed here: {error.stderr.strip()}") from None
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error):
        self.close()

    def inside(self, host, *words):
        """The command line that runs these words on a host, in the directory where it is started."""
        # nsenter would leave us in the root directory of the host's mounts.
        enter = f'exec {" ".join(self._enter(host, "--uts", "--ipc", "--mount"))} env -C "$PWD" "$@"'
        return ["sh", "-c", enter, "sh", *map(str, words)]

    def run(self, host, *words, **options):
        return subprocess.run(self.inside(host, *words), **{"check": True, "capture_output": True, "text": True,
                                                            "timeout": COMMAND_SECONDS, **options})  # fmt: skip

    def remote_shell(self):
        """A program that runs a command on a host as ssh does (PROGRAM HOST COMMAND…), for mpirun; by address or name."""
        path = self.folder / "remote_shell"
        cases = "".join(f'{name}|{address}) keeper={keeper.pid} ;;\n' for name, address, keeper in
                        zip(self.names, self.addresses, self.keepers))  # fmt: skip
        path.write_text(f'#!/bin/sh\nhost=$1; shift\ncase $host in\n{cases}*) echo "no host $host" >&2; exit 255 ;;\nesac\n'
                        'exec nsenter --target $keeper --net --uts --ipc --mount env -C "$PWD" sh -c "$*"\n')  # fmt: skip
        path.chmod(0o700)
        return path

    def cut(self, host):
        """Nothing comes from the host any more, nor goes to it. Its device, whose cable is still there, does not notice."""
        self._at_switch(f"link set dev port{host} nomaster")

    def heal(self, host):
        self._at_switch(f"link set dev port{host} master switch")

    def set_mtu(self, host, mtu):
        """Of the host's device alone, as when a host's network is set up anew."""
        self._ip(host, f"link set dev {DEVICE} mtu {mtu}")

    def set_rate(self, host, rate):
        """Of what the host sends."""
        shape = ["root", "tbf", "rate", rate, "burst", "128kb", "latency", "50ms"]
        self._check([*self._enter(host), "tc", "qdisc", "replace", "dev", DEVICE, *shape])

    def pids(self):
        """Of a process on each host, which lives as long as that and has its namespaces."""
        return [keeper.pid for keeper in self.keepers[:-1]]

    def processes(self):
        """Pids of what has been started on the hosts and still runs."""
        return self._processes(own=False)

    def add_slow_way(self, origin, target, rate):
        """From now on what one host sends to another goes by a cable of its own, of this rate; the way back stays."""
        device, arrival = f"to{target}", f"from{origin}"
        self._ip(origin, f"link add name {device} mtu {self.mtu} type veth peer name {arrival} mtu {self.mtu} "
                         f"netns {self.keepers[target].pid}", f"link set dev {device} up")  # fmt: skip
        # Packets that come where none would be sent back are dropped where the kernel is told to be strict.
        strict = [f"/proc/sys/net/ipv4/conf/{name}/rp_filter" for name in ("all", arrival)]
        self.run(target, "sh", "-c", f"for file in {' '.join(strict)}; do echo 0 > $file; done")
        self._ip(target, f"link set dev {arrival} up")
        self._ip(origin, f"route add {self.addresses[target]} dev {device}")
        shape = ["root", "tbf", "rate", rate, "burst", "32kb", "latency", "50ms"]
        self._check([*self._enter(origin), "tc", "qdisc", "add", "dev", device, *shape])

    def close(self):
        """Kills what still runs on the hosts; with the last process of each its namespaces go."""
        try:
            # The keepers come last, for by them the others are found.
            for own in (False, True):
                deadline = time.monotonic() + END_SECONDS
                while pids := self._processes(own):
                    for pid in pids:
                        kill(pid, deadline)
            for keeper in self.keepers:
                keeper.wait()
        finally:
            for keeper in self.keepers:
                keeper.stdin.close()
                keeper.stdout.close()
                keeper.stderr.close()
            self.keepers = []
            if self.folder:
                shutil.rmtree(self.folder, ignore_errors=True)
                self.folder = None

    def _make(self):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="lockstep-hosts-"))
        (self.folder / "cgroup").mkdir()
        lines = ["127.0.0.1 localhost", "::1 localhost"]
        lines += [f"{address} {name}" for address, name in zip(self.addresses, self.names, strict=True)]
        (self.folder / "hosts").write_text("\n".join(lines) + "\n")
        # Those of the first hosts are started while the later ones are: a namespace takes some milliseconds.
        for name in [*self.names, "switch"]:
            self.keepers.append(self._start_keeper(name))
        for keeper in self.keepers:
            if keeper.stdout.readline() != b"ready\n":
                keeper.wait(END_SECONDS)
                raise subprocess.CalledProcessError(keeper.returncode, "unshare", stderr=keeper.stderr.read().decode())
        self._connect()

    def _start_keeper(self, name):
        namespaces = ["--net", "--uts", "--ipc", "--mount", "--propagation", "private"]
        # A session of its own: Ctrl-C is ours, and close() follows.
        return subprocess.Popen(["unshare", *namespaces, "sh", "-c", KEEPER, "sh", name, str(self.folder)],
                                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                start_new_session=True)  # fmt: skip

    def _connect(self):
        at_switch = [f"link add name switch mtu {self.switch_mtu} type bridge", "link set switch up"]
        for host, keeper in enumerate(self.keepers[:-1]):
            at_switch += [
                f"link add name port{host} mtu {self.switch_mtu} type veth peer name {DEVICE} mtu {self.mtu} "
                f"netns {keeper.pid}",
                f"link set dev port{host} master switch", f"link set dev port{host} up"]  # fmt: skip
        self._at_switch(*at_switch)
        for host, address in enumerate(self.addresses):
            # nodad: an address is there at once, and not after a second in which the kernel asks who else has it.
            nodad = "nodad" if ":" in address else ""
            lines = [f"address add {address}/{self.prefix} dev {DEVICE} {nodad}"]
            if self.switch_mtu < self.mtu:  # a packet that the device itself would cut into frames passes as one otherwise
                lines.append(f"link set dev {DEVICE} gso_max_segs 1")
            self._ip(host, *lines, f"link set dev {DEVICE} up")
        if self.rate:
            # The burst lets a gigabit through at the timer's grain; the queue is that of a switch, not of the internet.
            shape = ["root", "tbf", "rate", self.rate, "burst", "128kb", "latency", "50ms"]
            for host in range(len(self.names)):
                for end, device in ((host, DEVICE), (-1, f"port{host}")):
                    self._check([*self._enter(end), "tc", "qdisc", "add", "dev", device, *shape])

    def _at_switch(self, *lines):
        self._ip(-1, *lines)

    def _ip(self, host, *lines):
        self._check([*self._enter(host), "ip", "-batch", "-"], input="".join(f"{line}\n" for line in lines))

    def _enter(self, host, *more):
        return ["nsenter", "--target", str(self.keepers[host].pid), "--net", *more]

    @staticmethod
    def _check(command, **options):
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=COMMAND_SECONDS, **options)

    def _processes(self, own):
        """The keepers that still run; or else what has been started in their network namespaces."""
        keepers = {keeper.pid: network_namespace(keeper.pid) for keeper in self.keepers if keeper.poll() is None}
        if own:
            return list(keepers)
        ours = set(keepers.values()) - {None, network_namespace("self")}  # which is that of a keeper's first moments
        pids = [int(entry.name) for entry in pathlib.Path("/proc").glob("[0-9]*") if network_namespace(entry.name) in ours]
        return [pid for pid in pids if pid not in keepers]


def network_namespace(pid):
    with contextlib.suppress(OSError):  # ended meanwhile, or of a kernel thread
        return os.readlink(f"/proc/{pid}/ns/net")
    return None


def kill(pid, deadline):
    """Returns once the process has ended."""
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(pid)
        try:
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            if not select.select([descriptor], [], [], max(0, deadline - time.monotonic()))[0]:
                raise RuntimeError(f"process {pid} of a host can't be killed")
        finally:
            os.close(descriptor)
