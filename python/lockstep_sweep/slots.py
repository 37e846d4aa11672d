"""Where trials run: slots of this host, or of those that --host names. Each has cores of its own."""

import contextlib
import pathlib
import re
import shlex
import socket
import subprocess
from dataclasses import dataclass

from lockstep_sweep import cores
from lockstep_sweep.options import Misuse

HOST = re.compile(r"(\[[^\[\]]+\]|[^:\[\]-][^:\[\]]*)(?::([1-9]\d*))?")
START = "import sys; exec(eval(sys.stdin.readline()))"  # of a program that comes by standard input, before what it reads


class _CoresElsewhere:
    """cores.Cores of another host: a process there, behind a remote shell, that ends with this one."""

    def __init__(self, shell, host):
        self.lost = False
        self._process = subprocess.Popen([*shell.split(), host, f"exec python3 -c {shlex.quote(START)}"], bufsize=0,
                                         stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        source = pathlib.Path(cores.__file__).read_text(encoding="utf-8")
        try:
            self.usable = self._ask(ascii(source + "\nserve()\n"))
        except ValueError as error:
            raise OSError(f"'{shell}' (--rsh) to {host} writes something else to standard output before its command does, as a "
                          f"greeting of the shell there: {error}") from None
        if self.lost:
            raise OSError(f"{host} can't be reached by '{shell}' (--rsh), or has no python3")

    def _tell(self, line):
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(f"{line}\n".encode())
            return
        self.lost = True

    def _ask(self, line):
        """The cores of the answer."""
        self._tell(line)
        answer = self._process.stdout.readline()
        self.lost = not answer
        return [int(core) for core in answer.split()]

    def claim(self, count):
        return self._ask(f"claim {count}")

    def release(self, taken):
        self._tell(" ".join(map(str, ["release", *taken])))


class _Host:
    def __init__(self, name, slots, found):
        self.name, self.slots, self.free, self.cores = name, slots, slots, found
        self.width = len(found.usable) // slots  # cores of a slot

    def claim(self, most):
        """The share of a trial that this host takes, of up to `most` slots; None where no slot is free."""
        for slots in range(min(most, self.free), 0, -1):
            taken = not self.cores.lost and self.cores.claim(slots * self.width)
            if taken:
                self.free -= slots
                return Share(self, slots, taken)
        return None


@dataclass
class Share:
    """What a trial has of a host."""

    host: _Host
    slots: int
    cores: list

    def release(self):
        self.host.free += self.slots
        self.host.cores.release(self.cores)


class Slots:
    """Gives each trial its place: a list of shares, with a slot for each process. Where no core is another sweep's, on one host
    if one has room for all processes, and else on several."""

    def __init__(self, options, launcher):
        self._processes = options.nproc_per_node
        if options.host:
            self._hosts = [_Host(name, slots, _cores_of(name, options.rsh)) for name, slots in _hosts_of(options.host).items()]
            self._wanted = self._room() if options.jobs in (None, "auto") else options.jobs
        else:
            here = cores.Cores()
            self._wanted = max(1, len(here.usable) // self._processes) if options.jobs == "auto" else options.jobs or 1
            self._hosts = [_Host("localhost", self._wanted * self._processes, here)]
        for host in self._hosts:
            if host.width == 0:
                raise Misuse(f"{host.slots} processes at once do not fit onto the {len(host.cores.usable)} cores that may be used "
                             f"on {host.name}; take fewer slots (--host), --jobs or --nproc-per-node")
        if not 0 < self._wanted <= self._room():
            raise Misuse(f"{max(1, self._wanted)} trials of {self._processes} processes do not fit onto the slots of --host")
        if len(self._hosts) > 1 and self._processes > 1:
            _check(options, launcher)

    def _room(self):
        return sum(host.slots for host in self._hosts if not host.cores.lost) // self._processes

    def lost(self):
        """Names of the hosts whose remote shell has ended."""
        return [host.name for host in self._hosts if host.cores.lost]

    @property
    def at_once(self):
        """How many trials there may be; none once too many hosts are lost."""
        return min(self._wanted, self._room())

    def take(self):
        """A trial's place, or None where there is none now."""
        whole = [[host] for host in self._hosts if host.free >= self._processes]
        for hosts in [*whole, self._hosts]:
            place = []
            for host in hosts:
                share = host.claim(self._processes - sum(share.slots for share in place))
                place += [share] if share else []
            if sum(share.slots for share in place) == self._processes:
                return place
            for share in place:
                share.release()
        return None


def _hosts_of(text):
    """{name: slots} of "HOST:SLOTS,…"."""
    found = [(entry, HOST.fullmatch(entry)) for entry in text.split(",")]
    wrong = [entry for entry, match in found if not match]
    if wrong:
        raise Misuse(f"--host has '{wrong[0]}'; it takes HOST or HOST:SLOTS")
    hosts = {match[1]: int(match[2] or 1) for _, match in found}
    if len(hosts) < len(found):
        raise Misuse(f"--host {text} names a host twice; give it all its slots at once")
    return hosts


def _is_here(name):
    """As lockstep run has it: no remote shell leads there."""
    return name in ("localhost", "[::1]", socket.gethostname()) or name.startswith("127.")


def _cores_of(name, shell):
    return cores.Cores() if _is_here(name) else _CoresElsewhere(shell, name.strip("[]"))


def _check(options, launcher):
    """That lockstep run can start jobs on these hosts together."""
    tried = subprocess.run([launcher, "run", "--dry-run", *run_options(options), "true"], capture_output=True, text=True,
                           check=False)
    if tried.returncode != 0:
        raise Misuse(tried.stderr.partition("\nTry:")[0])


def run_options(options, place=None, variables=()):
    """Those of `lockstep run` that say where: on a trial's hosts and cores, or, without a place, wherever there is room.
    `variables`: what goes to other hosts besides."""
    processes = ["--nproc-per-node", str(options.nproc_per_node)]
    if not options.host:
        hosts = []
    elif not place:
        hosts = ["--host", options.host, "--rsh", options.rsh]
    elif len(place) == 1 and _is_here(place[0].host.name):
        hosts = []
    else:
        hosts = ["--host", ",".join(f"{share.host.name}:{share.slots}" for share in place), "--rsh", options.rsh]
    exports = [word for given in (*options.export, *variables) for word in ("-x", given)] if hosts else []
    pins = ["--cpu-list", ";".join(",".join(map(str, share.cores)) for share in place)] if place else []
    return [*hosts, *exports, *pins, *processes]
