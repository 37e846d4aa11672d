"""The suite `profiler`: what recording costs each operator, against torch.profiler; its file; and merging the ranks' traces."""

from benchmarks.driver.interleave import Turn, run_rounds
from benchmarks.driver.suites.collectives import present

OPERATORS = 10_000  # in a turn's iteration
SECONDS, MOST = 1, 12  # of a turn, and iterations in it
# Each with those before it, but with_flops, which takes shapes alone.
LEVELS = {"plain": "recorded", "shapes": "and record_shapes", "memory": "and profile_memory", "stack": "and with_stack",
          "flops": "record_shapes and with_flops"}
# Series that are no differences, and what is done for them.
WHOLE = {"scope": "scope", "export": "export:plain", "export_stack": "export:stack"}
CONTENDERS = {"lockstep": "profiler", "python": "python_profiler"}
STEPS = 100_000
ALLOWED = 1_000  # nanoseconds that a step tells of its phases
MERGE_RANKS, MERGE_MEBIBYTES = 64, 10  # of 100 MiB, it takes minutes


def profiler(fleet, results, rounds, generator):
    """What a small operator takes longer while it is recorded, and what the file takes for each, both of Python's."""
    if len(present(fleet, results, CONTENDERS.values())) < 2:
        return
    fleet.say("operators while they are recorded")
    operations = [*WHOLE.values(), *(f"add:{how}" for how in ("off", *LEVELS))]
    turns = [Turn(f"{who} {operation}", fleet.job(kind, 1), operation, OPERATORS, SECONDS, most=MOST, least=3)
             for who, kind in CONTENDERS.items() for operation in operations]
    bursts = run_rounds(turns, rounds, generator)

    def each(who, operation):
        """Nanoseconds of an operator, in each round: of its fastest iteration, for what else runs makes differences of times large."""
        return [min(burst.wall[0]) / OPERATORS for burst in bursts[f"{who} {operation}"]]

    for who in CONTENDERS:
        off = each(who, "add:off")
        results.add_series(f"profiler.off.{who}", "ns", off)
        for what, operation in WHOLE.items():
            results.add_series(f"profiler.{what}.{who}", "ns", each(who, operation))
        for how in LEVELS:
            added = [recorded - plain for recorded, plain in zip(each(who, f"add:{how}"), off)]
            results.add_series(f"profiler.{how}.{who}", "ns", added)
    for what in (*WHOLE, *LEVELS):
        results.add_ratio(f"profiler.{what}.vs_python", f"profiler.{what}.python", f"profiler.{what}.lockstep")
    fleet.say("what a step tells of its phases, always")
    (answer,) = fleet.job("profiler", 1).measure("phases", STEPS, 5, 1)
    results.add_series("profiler.phases", "ns", [cpu / STEPS for cpu in answer["cpu"]])
    results.add_series("profiler.allowed", "ns", [ALLOWED] * len(answer["cpu"]))
    results.add_ratio("profiler.phases.of_allowed", "profiler.phases", "profiler.allowed", better="lower")
    fleet.say(f"merging the traces of {MERGE_RANKS} ranks, {MERGE_MEBIBYTES} MiB each")
    (answer,) = fleet.job("profiler", 1).measure(f"merge:{MERGE_RANKS}", MERGE_MEBIBYTES, 1, 0)
    results.add_series("profiler.merge.time", "ns", answer["wall"])
    results.add_series("profiler.merge.memory", "bytes", [answer["facts"]["resident_bytes"]])
    results.add_series("profiler.merge.data", "bytes", [answer["facts"]["bytes"]])
    results.add_ratio("profiler.merge.memory_of_traces", "profiler.merge.memory", "profiler.merge.data", better="lower")
