"""The tables of the suite `hosts`."""

from benchmarks.driver.suites.several_hosts import (COMPRESSIONS, LARGE, LAYOUTS, PEERS, SCALING, SCALING_NETWORK, SCALING_WHO, SHAPED,
                                             SMALL, STEP_LAYOUT, STEP_NETWORK, STEPS, WIRES, bound)
from benchmarks.driver.suites.training import NETWORKS
from benchmarks.driver.tables import Table, duration, percent, ratio, spaced, times

WIRE_WORDS = {"1gbit": "1 Gbit/s", "unshaped": "unshaped"}
WHO = {"lockstep": "C++, Lockstep", "bf16": "C++, Lockstep, bf16 between hosts", "int8": "C++, Lockstep, int8 between hosts",
       "python": "Python, Gloo"}
NAMES = {"lockstep": "Lockstep", "bf16": "bf16", "int8": "int8", "gloo": "Gloo", "slices": "Gloo, slices alone",
         "mpi": "Open MPI", "wire": "plain sockets"}


def tables(results):
    return [*(table(results, wire) for wire in WIRES for table in (large, large_ratios, small)), processor_time(results),
            steps(results), scaling(results)]


def in_words(layout):
    """2x2 is two hosts with two ranks each, 1+3 one rank on the first and three on the second."""
    hosts = LAYOUTS[layout]
    return f"{len(hosts)} hosts, {'+'.join(map(str, hosts))} ranks"


def measured_layouts(results, prefix, suffix=""):
    """[(layout, its cell)] where ours was measured."""
    cells = [(layout, f"{prefix}.{layout}{suffix}") for layout in LAYOUTS]
    return [(layout, cell) for layout, cell in cells if f"{cell}.lockstep" in results.series]


def medians(results, cell, who):
    return [duration(results.median(f"{cell}.{each}")) for each in who]


def large(results, wire):
    rows = [[in_words(layout), *medians(results, cell, NAMES), duration(bound(wire, layout))]
            for layout, cell in measured_layouts(results, f"hosts.{wire}", f".{LARGE}")]
    return Table(f"all_reduce of {spaced(LARGE)} over hosts, {WIRE_WORDS[wire]}", ["", *NAMES.values(), "the wire's bound"],
                 rows)


def large_ratios(results, wire):
    figures = {"vs_gloo": "than Gloo", **{f"{each}_vs_gloo": f"{each}, than Gloo" for each in COMPRESSIONS},
               "vs_mpi": "than Open MPI", "of_wire": "time, of plain sockets'"}
    rows = [[in_words(layout), *(ratio(results, f"{cell}.{figure}") for figure in figures)]
            for layout, cell in measured_layouts(results, f"hosts.{wire}", f".{LARGE}")]
    return Table(f"How many times faster it is, {WIRE_WORDS[wire]} (quartiles)", ["", *figures.values()], rows)


def small(results, wire):
    rows = [[f"{what if what == 'barrier' else 'all_reduce ' + spaced(what)}, {in_words(layout)}",
             *medians(results, cell, ("lockstep", *PEERS)), *(ratio(results, f"{cell}.vs_{peer}") for peer in PEERS)]
            for what in (SMALL, "barrier") for layout, cell in measured_layouts(results, f"hosts.{wire}", f".{what}")]
    return Table(f"Small operations over hosts, {WIRE_WORDS[wire]}, and how many times faster (quartiles)",
                 ["", "Lockstep", *(NAMES[peer] for peer in PEERS), "than Gloo", "than Open MPI"], rows)


def processor_time(results):
    who = [each for each in NAMES if each != "wire"]
    rows = [[f"{in_words(layout)}, {WIRE_WORDS[wire]}", *medians(results, cell, who), ratio(results, f"{cell}.of_slices")]
            for wire in WIRES for layout, cell in measured_layouts(results, f"hosts_cpu.{wire}")]
    return Table(f"Processor time of a rank for an all_reduce of {spaced(LARGE)} over hosts",
                 ["", *(NAMES[each] for each in who), "of the slices' (quartiles)"], rows)


def steps(results):
    rows = []
    cell = f"hosts_step.{SHAPED}.{STEP_LAYOUT}.{STEP_NETWORK}"
    for who in STEPS:
        time = results.median(f"{cell}.{who}")
        if time is not None:
            rows.append([WHO[who], duration(time), f"{1e9 / time:.2f}",
                         ratio(results, f"{cell}.{'' if who == 'lockstep' else f'{who}_'}vs_python")])
    return Table(f"Training step with DDP, {STEP_NETWORK} network, batch {NETWORKS[STEP_NETWORK].batch} a rank, "
                 f"{in_words(STEP_LAYOUT)}, {WIRE_WORDS[SHAPED]}", ["", "step", "steps/s", "than Python (quartiles)"], rows)


def scaling(results):
    rows = []
    for who in SCALING_WHO:
        for ranks, layout in SCALING.items():
            cell = f"hosts_scaling.{SHAPED}.{ranks}.{who}"
            time = results.median(cell)
            if time is not None:
                efficiency = results.median(f"{cell}.efficiency")
                rows.append([f"{WHO[who]}, {ranks} rank{'s' * (ranks > 1)} on {len(layout)} host{'s' * (len(layout) > 1)}",
                             duration(time), f"{ranks * 1e9 / time:.2f}", times(ranks * efficiency), percent(efficiency, 1)])
    return Table(f"A simulation ({SCALING_NETWORK} instead of computing, 480 ms a step; 25 MiB of real gradients), "
                 f"{WIRE_WORDS[SHAPED]}", ["", "step", "batches/s", "speedup", "efficiency"], rows)
