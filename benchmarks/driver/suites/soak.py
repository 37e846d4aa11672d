"""The suite `soak`: ranks that fail in all ways, and what the others are told.

bench_soak plays one round after the other, each drawn from its seed and played by processes of its own: two to five ranks
make calls of one kind, make groups, or meet in init_process_group() again and again, and one of them, the victim, is killed, is
stopped for longer than the group's timeout, aborts, calls something else than the others, or leaves. It answers with what each
of the others was told and when, and with the bytes of user tensors that changed after the error, while peers woke, ended and
used the group further. Here that is judged.

An error must name the victim as the cause, with its pid where it speaks of a process, and is counted apart if it also says
how the victim failed. What can be known decides what is asked for:
- a mismatch is told by what each rank called. Of all_to_all with sizes that don't fit one pair is named, which the victim
  belongs to: which of the two is wrong no rank can know. A message that does not fit is an error of its receiver alone, and
  the group goes on.
- a rank on another host may be told as lost, without its signal or status.
- a stopped rank that is alone on its host is known to those alone that wait for it: not to a receive from any rank, nor to those
  that wait for that one.
- a rank that ends by exit() leaves its groups on the way, and aborts one with calls that are not done.
- of a rank that has not come to init_process_group() yet no process is known: it is missed at the timeout, by its number.
The victim is judged by how its process ends, and, where it goes on after its failure, by whether it has an error itself.

With --hosts 2 there are four ranks, as 2 + 2 or 1 + 3, on pretended hosts; with --cuts on network namespaces, whose wire is cut,
too: for ever, or for 3 s, which no rank may notice. Errors then must name the host of the rank, too; after a cut, a rank beyond
it with its host. Where ranks are killed or cut off, survivors make a group of those that are left, and train on to the same bits:
those on the side of rank 0, whose process has the store. All others get an error.
"""

import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field

from benchmarks.driver.contenders import DEFAULT_ENVIRONMENT, ONE_THREAD, hosts, ports
from benchmarks.driver.job import BenchmarkError
from benchmarks.driver.suites.collectives import leave_out

# What is told together: {row: failures of soak_plan.h}
ROWS = {"kill": ("kill",), "stop": ("stop",), "abort": ("abort", "exception"), "mismatch": ("operation", "shape", "dtype"),
        "leave": ("destroy", "exit", "quick_exit"), "cut": ("cut",), "brief_cut": ("brief_cut",)}
WORDS = {"kill": "kill -9", "stop": "SIGSTOP beyond the timeout", "abort": "abort() or an exception",
         "mismatch": "another operation, shape or dtype", "leave": "left or exited early", "cut": "the wire is cut",
         "brief_cut": "the wire is cut for 3 s, and then kill -9"}
# How the victim's process ends, where not by `exit 0` as the others' do; and victims that get an error in their own calls.
ENDS = {"kill": "signal 9", "brief_cut": "signal 9", "exit": "exit 3", "quick_exit": "exit 4"}
TOLD = ("stop", "abort", *ROWS["mismatch"])
SUCCEEDED = "succeeded"  # a further call; kSucceeded of soak_board.h
ABSENT = "did not join within"
MOST_RANKS = 5  # kMostRanks of soak_board.h
COUNTS = ("survivors", "named", "how", "hung", "changed")
PROGRESS_SECONDS = 10
END_SECONDS = 30
CUT_HOST = 1  # of the two
SHARED_MEMORY = pathlib.Path("/dev/shm")


@dataclass
class Outcome:
    """One round, judged. Counts are of survivors that were to be told, but for `hung`, of all ranks, and `changed`: bytes."""

    survivors: int = 0
    named: int = 0
    how: int = 0
    hung: int = 0
    changed: int = 0
    latencies: list = field(default_factory=list)  # nanoseconds
    problems: list = field(default_factory=list)


def soak(fleet, results, rounds, generator):
    """Plays rounds until there are enough of them (`rounds` may be None), the time is over, or Ctrl-C."""
    program = fleet.bin_dir / "bench_soak"
    if not program.exists():
        leave_out(fleet, results, f"soak is left out: there is no {program}")
        return
    seed, seconds = results.options.get("seed", 1), results.options.get("seconds")
    where = options_of_hosts(results.options)
    fleet.say(f"soak: {rounds or 'any number of'} rounds from seed {seed}{where}")
    played = {row: [] for row in ROWS}
    failed = results.options.setdefault("failed_rounds", {})
    begin = told = time.monotonic()
    count = 0

    def fail(number, its_seed, problems):
        failed.setdefault(str(its_seed), []).extend(problems)
        fleet.say("\n   ".join([f"round {number} FAILED; alone: {again(its_seed, where)}", *problems]))

    try:
        for one in play(program, rounds, seed, seconds, where):
            count += 1
            outcome = judge(one)
            played[row_of(one)].append(outcome)
            if outcome.problems:
                what = f"{one['failure']} of rank {one['victim']} in {one['calls']} ({one['memory']}, {one['size']})"
                fail(count, one["seed"], [f"{what}: {problem}" for problem in outcome.problems])
            elif time.monotonic() - told > PROGRESS_SECONDS:
                told = time.monotonic()
                fleet.say(f"soak: {count} rounds in {told - begin:.0f} s, {len(failed)} failed")
    except KeyboardInterrupt:
        results.options["interrupted"] = True
    except hosts.NotAllowed as error:
        leave_out(fleet, results, f"soak is left out: {error}")
    except BenchmarkError as error:  # in the round after those that it told, or at its end
        number = count if count == rounds else count + 1
        fail(number, seed + number - 1, [str(error)])
    for row, outcomes in played.items():
        if not outcomes:
            continue
        for name in COUNTS:
            results.add_series(f"soak.{row}.{name}", "count", [getattr(outcome, name) for outcome in outcomes])
        if latencies := [latency for outcome in outcomes for latency in outcome.latencies]:
            results.add_series(f"soak.{row}.latency", "ns", latencies)


def options_of_hosts(options):
    """ " --hosts 2", " --cuts", or "" for one host."""
    return " --cuts" if options.get("cuts") else " --hosts 2" if options.get("hosts") else ""


def again(seed, where=""):
    return f"scripts/bench soak --rounds 1 --seed {seed}{where}"


def row_of(one):
    return next(row for row, failures in ROWS.items() if one["failure"] in failures)


def play(program, rounds, seed, seconds, where=""):
    """The rounds, as bench_soak tells them. No process is left behind when this ends, however it ends. Throws BenchmarkError
    when bench_soak fails, or leaves something."""
    environment = {name: value for name, value in os.environ.items() if name not in DEFAULT_ENVIRONMENT}
    until = None if seconds is None else time.monotonic() + seconds
    with contextlib.ExitStack() as stack:
        words, net = [program, str(rounds or sys.maxsize), str(seed)], None
        if where == " --cuts":
            net = stack.enter_context(hosts.Hosts(2))
            words += [f"tcp://{net.addresses[0]}:{hosts.PORT}", *map(str, net.pids())]
        elif where:
            words.append(f"tcp://127.0.0.1:{ports.free_port()}")
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="lockstep-bench-"))
        errors = stack.enter_context(open(os.path.join(folder, "errors"), "w+"))
        shared = set(SHARED_MEMORY.glob("*lockstep*"))
        # A session of its own: Ctrl-C comes to us alone.
        with subprocess.Popen(words, text=True, env={**environment, **ONE_THREAD, "TMPDIR": folder}, stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE, stderr=errors, start_new_session=True) as child:
            try:
                for line in child.stdout:
                    if not line.endswith("\n"):
                        break  # it ended in the midst
                    told = json.loads(line)
                    if "wire" in told:
                        {"cut": net.cut, "heal": net.heal}[told["wire"]](CUT_HOST)
                        with contextlib.suppress(BrokenPipeError):
                            print("done", file=child.stdin, flush=True)
                        continue
                    yield told
                    if until is not None and time.monotonic() > until:
                        return
                if child.wait() != 0:
                    errors.seek(0)
                    raise BenchmarkError(f"bench_soak ended with status {child.returncode}; it printed:\n{errors.read()[-2000:]}")
                if left := left_over(folder, net, shared):
                    raise BenchmarkError("what is left when bench_soak has ended: " + ", ".join(left))
            finally:
                end(child)


def left_over(folder, net, shared):
    """Files, shared memory, and processes on hosts; with these go their sockets."""
    left = [path for path in os.listdir(folder) if path != "errors"]
    left += [str(path) for path in set(SHARED_MEMORY.glob("*lockstep*")) - shared]
    return left + [f"process {pid}" for pid in (net.processes() if net else [])]


def end(child):
    """Its ranks die with it."""
    with contextlib.suppress(BrokenPipeError):
        child.stdin.close()  # it may wait for the wire
    if child.poll() is None:
        child.send_signal(signal.SIGTERM)
        try:
            child.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()


def judge(one):
    outcome = Outcome()
    if not one["struck"]:
        outcome.problems.append("the victim came to no harm")
    for rank in one["ranks"]:
        for number, lane in enumerate(rank["lanes"]):
            where = f"rank {rank['rank']}" + (f", thread {number}" if number else "") + f", {lane['call'] or 'no call'}"
            outcome.problems += [f"{where}: {problem}" for problem in judge_lane(one, rank, number, outcome)]
        expected = ENDS.get(one["failure"], "exit 0") if rank["rank"] == one["victim"] else "exit 0"
        if rank["end"] != expected:
            ended = "still runs" if rank["end"] == "running" else f"ended with {rank['end']} instead of {expected}"
            outcome.problems.append(f"rank {rank['rank']} {ended}: {rank['output']}")
            outcome.hung += rank["end"] == "running" and all(lane["state"] != "running" for lane in rank["lanes"])
    if one.get("goes_on"):
        outcome.problems += judge_sequels(one)
    return outcome


def judge_sequels(one):
    """What is wrong with how survivors go on: those that reach rank 0's store in one group, and with the same bits."""
    killed = one["victim"] if one["failure"] != "cut" else None
    survivors = [rank for rank in one["ranks"] if rank["rank"] != killed]
    side = [rank for rank in survivors if killed is not None or one["host_of"][rank["rank"]] == one["host_of"][0]]
    if killed == 0:
        side = []
    for rank in survivors:
        sequel, who = rank["sequel"], f"rank {rank['rank']}"
        if not sequel["done"]:
            yield f"{who} did not end shrink_group() or what follows"
        elif rank not in side:
            if not sequel["error"]:
                yield f"{who} went on in a group of {sequel['size']} without the store"
        elif sequel["error"]:
            yield f"{who} did not go on: {sequel['error']}"
        elif sequel["size"] != len(side):
            yield f"{who} went on in a group of {sequel['size']} instead of {len(side)}"
    if len({rank["sequel"]["bits"] for rank in side if not rank["sequel"]["error"]}) > 1:
        yield "survivors trained on to different bits"


def judge_lane(one, rank, number, outcome):
    """What is wrong with the report of one of a rank's threads; adds to the outcome's counts."""
    lane = rank["lanes"][number]
    named, how = patterns(one, number, rank["rank"])
    outcome.changed += lane["changed"]
    victim = rank["rank"] == one["victim"]
    if lane["changed"]:
        when = "it had left" if victim and one["failure"] == "destroy" else "the error"
        yield f"{lane['changed']} of {lane['watched']} bytes changed after {when}"
    is_message = one["calls"] == "messages" and row_of(one) == "mismatch"
    due = rank["expects_error"] or (victim and one["failure"] in TOLD and not is_message)
    if lane["state"] == "running" and not (victim and rank["end"] != "running"):
        outcome.hung += 1
        yield "hangs"
    elif due and not lane["error"]:
        yield "was told nothing"
    if lane["error"] and not due and not victim:
        yield f"was hit, and has nothing to do with it: {lane['error']}"
    outcome.survivors += rank["expects_error"]
    if rank["expects_error"] and lane["error"]:
        says_who, says_how = (re.search(pattern, lane["error"]) is not None for pattern in (named, how))
        outcome.named += says_who
        outcome.how += says_who and says_how
        at_timeout = one["failure"] == "stop" or ABSENT in lane["error"]
        latency = lane["after_ns"] - (one["timeout_ns"] if at_timeout else 0)
        outcome.latencies.append(latency)
        if not says_who:
            yield f"does not name rank {one['victim']} as the cause: {lane['error']}"
        if lane["after_ns"] <= 0:
            yield f"had an error before the failure: {lane['error']}"
        elif latency > one["patience_ns"] and lane["state"] != "running":
            outcome.hung += 1
            yield f"was told after {latency / 1e9:.1f} s only: {lane['error']}"
    if is_message:
        if lane["again"] not in ("", SUCCEEDED):
            yield f"the group does not go on after a message that did not fit: {lane['again']}"
    elif due and lane["again"] == SUCCEEDED:
        yield "a further call on the failed group succeeded"
    elif rank["expects_error"] and lane["again"] and not re.search(named, lane["again"]):
        yield f"a further call does not name rank {one['victim']} as the cause: {lane['again']}"


def place_of(one, rank, reader):
    """What follows a rank's pid in an error of the rank `reader`: its host, where that is another one."""
    host_of = one.get("host_of")
    if not host_of:
        return ""
    name = rf" on {hosts.name_of(host_of[rank])}"
    return name if host_of[rank] != host_of[reader] else f"(?:{name})?"


def missing(rank):
    """What says that the rank did not come to init_process_group(), alone or among others: "ranks 0, 2-4 of 5 did …"."""
    ranges = [f"{first}-{last}" for first in range(rank + 1) for last in range(rank, MOST_RANKS) if first < last]
    return rf"ranks? (?:[\d-]+(?:,| and) )*(?:{'|'.join([str(rank), *ranges])})(?:(?:,| and) [\d-]+)* of \d+ {ABSENT}"


def patterns(one, number, reader):
    """(what says who, what says how) in an error of a call of that thread of the rank `reader`."""
    rank, failure = one["victim"], one["failure"]
    if failure == "cut":
        beyond = [other for other, host in enumerate(one["host_of"]) if host != one["host_of"][reader]]
        names = "|".join(rf"{other} \(pid {one['ranks'][other]['pid']}{place_of(one, other, reader)}\)" for other in beyond)
        several = rf"ranks [\d, and]+\(pids? [\d, ]+ on {hosts.name_of(one['host_of'][beyond[0]])}\)"
        return rf"rank (?:{names})|{several}", r"silent for|the wire (?:is )?cut|unreachable"
    pid = one["ranks"][rank]["pid"]
    who = rf"rank {rank} \(pid {pid}{place_of(one, rank, reader)}\)"
    if row_of(one) == "mismatch":
        # "ranks 0 and 2: all_reduce(…); rank 1: barrier()", and with other sizes or messages a pair.
        called = rf"(?:: |; )rank {rank}: "
        return (rf"{called}|rank {rank} sends \d+ bytes|to rank {rank}, which expects|rank {rank} (?:sent|expects) ",
                rf"{called}{one['ranks'][rank]['lanes'][number]['call']}\(|sends \d+ bytes|rank {rank} (?:sent|expects) ")
    # Of a rank on another host how it ended may not be known: where it is alone no other one can say, else it may come too late.
    host_of = one.get("host_of") or [0] * len(one["ranks"])
    lost = rf"|{who} is lost: .*its process has ended" if host_of[rank] != host_of[reader] else ""
    absent, stopped = (f"|{missing(rank)}", rf"|{who} is stopped|{missing(rank)}") if one["calls"] == "init" else ("", "")
    killed = rf"{who} (?:was )?killed|{who} ended{lost}{absent}", "signal 9"
    from_any = any(lane["call"].endswith("from any rank") for other in one["ranks"] for lane in other["lanes"])
    unknown = "|timed out" if from_any and len(set(host_of)) > 1 and host_of.count(host_of[rank]) == 1 else ""
    return {"kill": killed, "brief_cut": killed,
            "stop": (rf"(?:waiting for|for which|which waits for) {who}(?!, (?:for which|which waits for|and))|"
                     rf"waiting for .*, and {who} is stopped{unknown}{stopped}",
                     rf"{who}(?: is the cause)?(?:, which)? is stopped"),
            "abort": (rf"aborted by {who}", "aborted by"),
            "exception": (rf"aborted by {who}", "aborted by"),
            "destroy": (rf"{who} has left the group", "has left"),
            "exit": (rf"{who} (?:has left the group|exited|ended)|aborted by {who}{lost}", "has left|status 3|aborted by"),
            "quick_exit": (rf"{who} (?:exited|ended){lost}{absent}", "status 4")}[failure]
