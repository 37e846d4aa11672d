"""The tables of the suite `sharding`."""

from benchmarks.driver.suites.sharding import (FORMS_NETWORK, HOSTS_CELL, HOSTS_LAYOUT, HOSTS_NETWORK, NETWORKS, OPERATORS, RANKS,
                                        memory_of)
from benchmarks.driver.tables import Table, duration, mebibytes, ratio

WORDS = {"fsdp": "FullyShardedDataParallel", "ddp": "DistributedDataParallel", "alone": "no communication",
         "python": "Python, fully_shard, Gloo", "least": "weights, gradients and AdamW's state, once"}
FORMS = {"fsdp": "once in shared memory", "gather": "gathered, FULL_SHARD", "grad_op": "gathered, SHARD_GRAD_OP",
         "python": WORDS["python"]}
OVER_HOSTS = {"hybrid": "HYBRID_SHARD", "full": "FULL_SHARD", "python_hybrid": "Python, fully_shard on each host, Gloo",
              "python_full": "Python, fully_shard, Gloo"}


def tables(results):
    for network, shape in NETWORKS.items():
        for ranks in RANKS:
            yield steps(results, f"sharding.{ranks}.{network}", WORDS, {"fsdp": "FSDP's"},
                        f"Sharded training, {shown(network)}, {ranks} ranks, batch {shape.batch} a rank, AdamW: a step, and the "
                        "job's memory")
    grown = [[network, ratio(results, f"sharding_memory.{network}.growth")] for network in NETWORKS
             if f"sharding_memory.{network}.growth" in results.figures]
    yield Table(f"Memory of FullyShardedDataParallel on {RANKS[1]} ranks, of that on {RANKS[0]}", ["", "(quartiles)"], grown)
    for ranks in RANKS:
        yield steps(results, f"sharding_forms.{ranks}.{FORMS_NETWORK}", FORMS, {"fsdp": "shared", "gather": "FULL_SHARD"},
                    f"FullyShardedDataParallel on one host, {shown(FORMS_NETWORK)}, {ranks} ranks: shared against gathered")
    yield steps(results, HOSTS_CELL, OVER_HOSTS, {"hybrid": "HYBRID_SHARD", "full": "FULL_SHARD"},
                f"Sharded training over {len(HOSTS_LAYOUT)} hosts, {'+'.join(map(str, HOSTS_LAYOUT))} ranks, 1 Gbit/s, "
                f"{shown(HOSTS_NETWORK)}: a step, and the memory of all hosts")
    yield operators(results)


def shown(network):
    return f"{network}, {NETWORKS[network].parameters / 1e6:.0f} million parameters"


def steps(results, cell, names, ours, title):
    """How each contender's step and memory compare with those of ours, {name: how it is called}."""
    memory, rows = memory_of(cell), []
    for name, words in names.items():
        if results.median(f"{memory}.{name}") is not None:
            rows.append([words, duration(results.median(f"{cell}.{name}")), *(ratio(results, f"{cell}.{each}.vs_{name}") for each in ours),
                         mebibytes(results.median(f"{memory}.{name}")), *(ratio(results, f"{memory}.{each}.of_{name}") for each in ours)])
    return Table(title, ["", "step", *(f"of {each} (quartiles)" for each in ours.values()),
                         "memory", *(f"{each} of it (quartiles)" for each in ours.values())], rows)


def operators(results):
    plain = results.median("sharding_operator.plain")
    rows = [[words, f"{results.median(name):.0f} ns", f"{results.median(name) - plain:+.0f} ns"]
            for how, words in OPERATORS.items() if results.median(name := f"sharding_operator.{how}") is not None]
    return Table("An addition of 4 floats, in a process in which parameters are gathered", ["", "takes", "more"], rows)
