"""The suite `pipeline`: PipelineRunner against theory and torch.distributed.pipelining, over Gloo and over Lockstep's backend.

Layers that sleep show the schedules without regard to cores; with layers that do next to nothing, what an action takes; a
transformer of 12 layers, real steps, and the job's memory. Two stages on two hosts, network namespaces on a wire of 1 Gbit/s,
pass each other the transformer's activations, and wide ones between layers that sleep, which take the wire nearly as long as a
layer sleeps.
"""

from benchmarks.driver import stats
from benchmarks.driver.contenders import Place, hosts
from benchmarks.driver.interleave import Turn, run_rounds
from benchmarks.driver.suites.collectives import leave_out, present
from benchmarks.driver.suites.sharding import peak_memory
from benchmarks.driver.suites.training import add_steps

SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble")
RANKS = (2, 4)
CONTENDERS = {"ours": "pipeline", "gloo": "python_pipeline", "torch_on_ours": "python_pipeline_lockstep"}
PEERS = ("gloo", "torch_on_ours")
STEPS = 3  # of one turn
ACTION_SECONDS = 0.3
TRANSFORMER_ROUNDS, MEMORY_ROUNDS = 7, 2
TWO_RANKS = ("1F1B", "InterleavedZeroBubble")  # the schedules of what 2 ranks alone do
WIRE = "1gbit"
OVER_HOSTS = {"transformer": "12 transformer layers", "wide": "sleeping layers, 512 KiB a micro-batch"}


def pipeline(fleet, results, rounds, generator):
    here = present(fleet, results, CONTENDERS.values())
    names = [name for name, kind in CONTENDERS.items() if kind in here]
    if "ours" not in names:
        return
    for ranks in RANKS:
        sleeping(fleet, results, rounds, generator, ranks, names)
    overhead(fleet, results, rounds, generator, names)
    transformer(fleet, results, rounds, generator, names)
    over_hosts(fleet, results, rounds, generator, names)
    fleet.stop()


def steps(fleet, cell, name, ranks, schedule, what, place=None):
    return Turn(f"{cell}.{name}", fleet.job(CONTENDERS[name], ranks, place), schedule, what, seconds=0, most=STEPS, least=STEPS)


def sleeping(fleet, results, rounds, generator, ranks, names):
    fleet.say(f"pipelines of layers that sleep, {ranks} ranks")
    for schedule in SCHEDULES:
        cell = f"pipeline.sleep.{ranks}.{schedule}"
        bursts = run_rounds([steps(fleet, cell, name, ranks, schedule, "sleep") for name in names], rounds, generator)
        add_steps(results, bursts)
        add_theory(results, cell, bursts)
        add_peers(results, cell, names)
    best = f"pipeline.sleep.{ranks}"
    results.add_ratio(f"{best}.zero_bubble_of_1F1B", f"{best}.InterleavedZeroBubble.ours", f"{best}.1F1B.ours", better="lower")


def add_theory(results, cell, bursts):
    """The schedule with naps as long as each is here, and all else taking nothing. All ranks say the same."""
    theory = [max(facts["theory_ns"] for facts in burst.facts) for burst in bursts[f"{cell}.ours"]]
    results.add_series(f"{cell}.theory", "ns", theory)
    results.add_ratio(f"{cell}.over_theory", f"{cell}.ours", f"{cell}.theory", better="lower")


def overhead(fleet, results, rounds, generator, names):
    """A step's time by its actions on the busiest rank."""
    fleet.say("what an action takes")
    cell = "pipeline.action.2"
    bursts = run_rounds([Turn(f"{cell}.{name}", fleet.job(CONTENDERS[name], 2), "1F1B", "empty", ACTION_SECONDS)
                         for name in names], rounds, generator)
    actions = max(facts["actions"] for burst in bursts[f"{cell}.ours"] for facts in burst.facts)
    for name, of_rounds in bursts.items():
        results.add_series(name, "ns", [stats.summarize(stats.slowest_rank(burst.wall)).median / actions for burst in of_rounds])
    add_peers(results, cell, names)


def transformer(fleet, results, rounds, generator, names):
    fleet.say("a pipeline of 12 transformer layers, 2 ranks")
    fleet.stop()  # memory is measured with nothing but this in it
    for schedule in TWO_RANKS:
        cell, memory = (f"pipeline.{what}.2.{schedule}" for what in ("transformer", "memory"))
        turns = {name: steps(fleet, cell, name, 2, schedule, "transformer") for name in names}
        add_steps(results, run_rounds(list(turns.values()), min(rounds, TRANSFORMER_ROUNDS), generator))
        for name, turn in turns.items():
            results.add_series(f"{memory}.{name}", "bytes", [peak_memory(turn) for _ in range(min(rounds, MEMORY_ROUNDS))])
            if name != "ours":
                results.add_ratio(f"{memory}.of_{name}", f"{memory}.ours", f"{memory}.{name}", better="lower")
        add_peers(results, cell, names)
        fleet.stop()


def over_hosts(fleet, results, rounds, generator, names):
    try:
        with fleet.hosts(2, WIRE) as net:
            for what, words in OVER_HOSTS.items():
                fleet.say(f"a pipeline over 2 hosts at {WIRE}: {words}")
                for schedule in TWO_RANKS:
                    cell = f"pipeline.hosts.{what}.{schedule}"
                    turns = [steps(fleet, cell, name, 2, schedule, what, Place(net, (1, 1))) for name in names]
                    bursts = run_rounds(turns, min(rounds, TRANSFORMER_ROUNDS), generator)
                    add_steps(results, bursts)
                    if what != "transformer":
                        add_theory(results, cell, bursts)
                    add_peers(results, cell, names)
            fleet.stop()
    except hosts.NotAllowed as error:
        leave_out(fleet, results, str(error))


def add_peers(results, cell, names):
    for peer in PEERS:
        if peer in names:
            results.add_ratio(f"{cell}.vs_{peer}", f"{cell}.{peer}", f"{cell}.ours")
