"""Where trials run: slots of this host, or of those that --host names. Each has cores and cards of its own."""

import json
import os
import pathlib
import re
import select
import shlex
import signal
import socket
import subprocess
import time
from dataclasses import dataclass

from lockstep_sweep import keeper
from lockstep_sweep.options import Misuse

HOST = re.compile(r"(\[[^\[\]]+\]|[^:\[\]-][^:\[\]]*)(?::([1-9]\d*))?")
START = "import sys; exec(eval(sys.stdin.readline()))"  # of a program that comes by standard input, before what it reads
CARDS = "CUDA_VISIBLE_DEVICES"
FIRST_ANSWER, ANSWER = 60, 20  # seconds: a shell may be slow to log in, and the driver does nothing else while it waits
LONGEST = 1 << 20  # bytes of an answer


class _KeeperElsewhere:
    """keeper.Keeper of another host: a process there, behind a remote shell, that ends with this one."""

    def __init__(self, shell, host, visible):
        self.lost = ""
        program = f"{pathlib.Path(keeper.__file__).read_text(encoding='utf-8')}\nserve({visible!r})\n"
        self._process = subprocess.Popen([*shell.split(), host, f"exec python3 -c {shlex.quote(START)}"], bufsize=0,
                                         stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        try:
            self.units = self._ask(ascii(program), FIRST_ANSWER)
            self.place = self.units.pop("place", "")
        except BaseException:  # a signal
            self._lose("it was not waited for")
            raise
        if self.lost:
            raise OSError(f"{host} can't be reached by '{shell}' (--rsh): {self.lost}. It must run python3 there, without a question "
                          f"and without a greeting; try: {shell} {shlex.quote(host)} python3 --version")

    def _ask(self, line, seconds):
        """The answer; {} where there is none, and the host is lost."""
        deadline, answer = time.monotonic() + seconds, b""
        self._tell(line)
        while not self.lost and not answer.endswith(b"\n"):
            if not select.select([self._process.stdout], [], [], max(0, deadline - time.monotonic()))[0]:
                self._lose(f"its remote shell has not answered for {seconds} s")
            elif not (read := self._process.stdout.read(65536)):
                self._lose("its remote shell has ended")
            elif len(answer := answer + read) > LONGEST:
                self._lose("its remote shell writes without an end")
        try:
            return {} if self.lost else dict(json.loads(answer))
        except (ValueError, TypeError):
            self._lose(f"its remote shell has written '{answer[:80].decode(errors='replace').strip()}' where an answer was due")
            return {}

    def _tell(self, line):
        try:
            self._process.stdin.write(f"{line}\n".encode())
        except BrokenPipeError:
            self._lose("its remote shell has ended")

    def _lose(self, why):
        self.lost = self.lost or why
        os.killpg(self._process.pid, signal.SIGKILL)  # not waited for: it stays this process's child until that ends

    def claim(self, counts):
        return self._ask(json.dumps(["claim", counts]), ANSWER)

    def release(self, units):
        self._tell(json.dumps(["release", units]))


class _Host:
    def __init__(self, name, slots, found):
        self.name, self.slots, self.free, self.keeper = name, slots, slots, found

    def claim(self, most):
        """The share of a trial that this host takes, of up to `most` slots; None where no slot is free."""
        for slots in range(min(most, self.free), 0, -1):
            # Where there are fewer cards than slots, there is but one trial at a time (Slots), and it has them all.
            counts = {kind: slots * (len(units) // self.slots) or len(units) for kind, units in self.keeper.units.items()}
            taken = not self.keeper.lost and self.keeper.claim(counts)
            if taken:
                self.free -= slots
                return Share(self, slots, taken)
        return None


@dataclass
class Share:
    """What a trial has of a host."""

    host: _Host
    slots: int
    units: dict  # {"core": numbers, "card": names}

    def release(self):
        self.host.free += self.slots
        self.host.keeper.release(self.units)


class Slots:
    """Gives each trial its place: a list of shares, with a slot for each process. Where no core or card is another sweep's, on one
    host if one has room for all processes, the one with the most free slots, and else on several."""

    def __init__(self, options, launcher):
        self._processes = options.nproc_per_node
        visible = options.exported.get(CARDS)
        if options.host:
            self._hosts = [_Host(name, slots, _keeper_of(name, options.rsh, visible))
                           for name, slots in _hosts_of(options.host).items()]
            self._wanted = self._room() if options.jobs in (None, "auto") else options.jobs
        else:
            here = keeper.Keeper(visible)
            fitting = min(len(units) for units in here.units.values() if units) // self._processes
            self._wanted = max(1, fitting) if options.jobs == "auto" else options.jobs or 1
            self._hosts = [_Host("localhost", self._wanted * self._processes, here)]
        _check_machines(self._hosts)
        for host in self._hosts:
            self._check_units(host)
        if not 0 < self._wanted <= self._room():
            raise Misuse(f"{max(1, self._wanted)} trials of {self._processes} processes do not fit onto the slots of --host")
        if len(self._hosts) > 1 and self._processes > 1:
            _check(options, launcher)

    def _check_units(self, host):
        cores, cards = len(host.keeper.units["core"]), len(host.keeper.units["card"])
        fewer = "take fewer slots (--host), --jobs or --nproc-per-node"
        if cores < host.slots:
            raise Misuse(f"{host.slots} processes at once do not fit onto the {cores} cores that may be used on {host.name}; {fewer}")
        if 0 < cards < host.slots and self._wanted > 1:
            raise Misuse(f"{host.slots} processes of several trials at once do not fit onto the {cards} cards that may be used on "
                         f"{host.name}; {fewer}, or hide the cards if the trials need none: {CARDS}= (with --host: -x {CARDS}=)")

    def _room(self):
        return sum(host.slots for host in self._hosts if not host.keeper.lost) // self._processes

    def lost(self):
        """{name: why} of the hosts that get no more trials."""
        return {host.name: host.keeper.lost for host in self._hosts if host.keeper.lost}

    @property
    def at_once(self):
        """How many trials there may be; none once too many hosts are lost."""
        return min(self._wanted, self._room())

    def take(self):
        """A trial's place, or None where there is none now."""
        # A host's trials share its memory's bandwidth and its disks, so hosts with fewer trials come first.
        emptiest = sorted(self._hosts, key=lambda host: -host.free)
        whole = [[host] for host in emptiest if host.free >= self._processes]
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


def _check_machines(hosts):
    """Where two names lead to one machine, their trials would wait for each other's cores."""
    names = {}
    for host in hosts:
        other = names.setdefault(host.keeper.place, host.name)
        if host.keeper.place and other != host.name:
            raise Misuse(f"--host names one machine twice, as {other} and as {host.name}: the locks of their cores lie in the same "
                         f"{host.keeper.place.partition(' ')[0]}; give it all its slots at once, under one name")


def _is_here(name):
    """As lockstep run has it: no remote shell leads there."""
    return name in ("localhost", "[::1]", socket.gethostname()) or name.startswith("127.")


def _keeper_of(name, shell, visible):
    return keeper.Keeper(visible) if _is_here(name) else _KeeperElsewhere(shell, name.strip("[]"), visible)


def _check(options, launcher):
    """That lockstep run can start jobs on these hosts together."""
    tried = subprocess.run([launcher, "run", "--dry-run", *run_options(options), "true"], capture_output=True, text=True,
                           check=False)
    if tried.returncode != 0:
        raise Misuse(tried.stderr.partition("\nTry:")[0])


def run_options(options, place=None, variables=()):
    """Those of `lockstep run` that say where: on a trial's hosts and cores, or, without a place, wherever there is room.
    `variables`: what goes to other hosts besides."""
    words = []
    if options.host and not (place and len(place) == 1 and _is_here(place[0].host.name)):
        hosts = ",".join(f"{share.host.name}:{share.slots}" for share in place) if place else options.host
        words += ["--host", hosts, "--rsh", options.rsh]
        words += [word for given in (*options.export, *variables) for word in ("-x", given)]
    for option, kind in (("--cpu-list", "core"), ("--gpu-list", "card")):
        lists = [",".join(map(str, share.units[kind])) for share in place or []]
        words += [option, ";".join(lists)] if any(lists) else []
    return [*words, "--nproc-per-node", str(options.nproc_per_node)]
