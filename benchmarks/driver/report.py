"""Tables from a Results: for the terminal, or in Markdown for docs/performance.md and docs/internals/."""

import statistics

from benchmarks.driver import stats, targets
from benchmarks.driver.suites import (checkpoint, data, from_python, gpu, largest_model, launch, pipeline, profiler,
                                      several_hosts_report, sharding_report, soak, startup, sweep, training_report)
from benchmarks.driver.suites.collectives import MPI_OPERATIONS, OPERATIONS, OURS, PEERS, RANKS, SIZES, cells
from benchmarks.driver.suites.training import NETWORKS
from benchmarks.driver.tables import Table, as_markdown, as_text, duration, mebibytes, ratio, spaced, times

TENSORS = {"lockstep": "plain tensors", "arena": "tensors in shared memory"}


def report(results, markdown=False):
    """All tables of what was measured, as one text."""
    tables = [matrix(results, ranks, who) for who in OURS for ranks in RANKS]
    tables += [overview(results), collectives(results), latency(results), processor_time(results), barriers(results),
               *training_report.tables(results), *python(results), loading(results), checkpoints(results), *profiles(results),
               *sharding_report.tables(results), largest_models(results), *pipelines(results),
               gpu_steps(results), gpu_staging(results), startups(results), *several_hosts_report.tables(results),
               launches(results), launches_in_a_row(results), idle_launchers(results), sweeps(results), soaked(results),
               failed_rounds(results), promises(results)]
    render = as_markdown if markdown else as_text
    return "\n\n".join(render(table) for table in tables if table.rows)


def matrix(results, ranks, who):
    """One cell for each operation and size."""
    measured = cells(results, who)
    rows = []
    for operation in OPERATIONS:
        names = [f"{operation}.{ranks}.{size}" for size in SIZES]
        if any(name in measured for name in names):
            rows.append([operation, *(f"{times(measured[name])}, {duration(results.median(f'{name}.{who}'))}"
                                      if name in measured else "-" for name in names)])
    return Table(f"{ranks} ranks, {TENSORS[who]}: how many times faster than Gloo, and our time",
                 ["", *map(spaced, SIZES)], rows)


def overview(results):
    """What the cells come to, and the worst of them."""
    rows = []
    for who, tensors in TENSORS.items():
        measured = cells(results, who)
        if measured:
            worst = sorted(measured, key=measured.get)[:3]
            slower = sum(value < 1 for value in measured.values())
            rows.append([tensors, str(len(measured)), str(slower), times(statistics.median(measured.values())),
                         "; ".join(f"{times(measured[cell])} {in_words(cell)}" for cell in worst)])
    return Table("All operations, sizes and numbers of ranks, against Gloo",
                 ["", "cells", "slower", "median", "the three least"], rows)


def in_words(cell):
    operation, ranks, *size = cell.split(".")
    return ", ".join([operation.removesuffix("_p50"), *map(spaced, size), f"{ranks} ranks"])


def collectives(results):
    """Those that Open MPI was measured at too."""
    rows = []
    for operation in MPI_OPERATIONS:
        for ranks in RANKS:
            for size in SIZES:
                cell = f"{operation}.{ranks}.{size}"
                if any(f"{cell}.{peer}" in results.series for peer in PEERS):
                    rows.append([f"{operation} {spaced(size)}, {ranks} ranks",
                                 *(duration(results.median(f"{cell}.{who}")) for who in (*OURS, *PEERS)),
                                 *(ratio(results, f"{cell}.{prefix}vs_{peer}") for peer in PEERS
                                   for prefix in ("", "arena_"))])
    return Table("Median time, and how many times faster than a peer (quartiles)",
                 ["", "plain", "shared", "Gloo", "Open MPI", "plain, than Gloo", "shared, than Gloo", "plain, than Open MPI",
                  "shared, than Open MPI"], rows)


def latency(results):
    figure = "all_reduce.2.4B.over_bare_barrier"
    rows = []
    if figure in results.figures:
        rows.append(["2 ranks", duration(results.median("all_reduce.2.4B.lockstep")),
                     duration(results.median("flag_barrier.2.bare")), ratio(results, figure)])
    return Table("A synchronous all_reduce of 4 bytes, and the bare barrier of two processes",
                 ["", "all_reduce", "bare barrier", "of it (quartiles)"], rows)


def processor_time(results):
    rows = []
    for name, entry in results.series.items():
        operation, *_, who = name.split(".")
        if operation.endswith("_cpu") and operation.removesuffix("_cpu") in OPERATIONS:
            seen = stats.summarize(entry["rounds"])
            rows.append([f"{operation.removesuffix('_cpu')}, {who}", f"{1000 * seen.median:.3g} ms/GB",
                         f"({1000 * seen.low:.3g}-{1000 * seen.high:.3g})"])
    return Table("Processor time of all ranks, 25 MiB", ["", "median", "quartiles"], rows)


def barriers(results):
    rows = []
    for ranks in RANKS:
        for percent in (50, 99):
            measure = f"barrier_p{percent}.{ranks}"
            if results.median(f"{measure}.lockstep") is not None:
                rows.append([f"{ranks} ranks, p{percent}",
                             *(duration(results.median(f"{measure}.{who}")) for who in ("lockstep", *PEERS))])
    return Table("Barrier", ["", "Lockstep", "Gloo", "Open MPI"], rows)


def python(results):
    return [*(python_all_reduce(results, ranks) for ranks in RANKS), python_train(results),
            *(python_step(results, network) for network in from_python.STEP_NETWORKS)]


def against_gloo(results, cell):
    return [*(duration(results.median(f"{cell}.{backend}")) for backend in from_python.BACKENDS),
            ratio(results, f"{cell}.vs_gloo")]


def python_all_reduce(results, ranks):
    rows = [[spaced(size), *against_gloo(results, f"python_all_reduce.{ranks}.{size}"),
             *against_gloo(results, f"python_all_reduce_async.{ranks}.{size}")]
            for size in from_python.SIZES if f"python_all_reduce.{ranks}.{size}.vs_gloo" in results.figures]
    return Table(f"all_reduce from Python, {ranks} ranks, and how many times faster than Gloo (quartiles)",
                 ["", "Lockstep", "Gloo", "than Gloo", "async, Lockstep", "async, Gloo", "async, than Gloo"], rows)


def python_train(results):
    rows = [[f"{spaced(size)}, {ranks} ranks", *against_gloo(results, f"python_all_reduce_train.{ranks}.{size}"),
             *against_gloo(results, f"python_processor.{ranks}.{size}")]
            for ranks in RANKS for size in from_python.TRAIN_SIZES
            if f"python_processor.{ranks}.{size}.vs_gloo" in results.figures]
    return Table("all_reduce from Python, many in a row: time of one, and processor time of all ranks for it",
                 ["", "Lockstep", "Gloo", "than Gloo", "processor, Lockstep", "processor, Gloo", "less than Gloo"],
                 rows)


def python_step(results, network):
    cell = f"python_step.{from_python.STEP_RANKS}.{network}"
    shown = {"lockstep_ddp": "DDP, Lockstep", "gloo_ddp": "DDP, Gloo", **training_report.MODES}
    alone, rows = results.median(f"{cell}.alone"), []
    for who, words in shown.items():
        time = results.median(f"{cell}.{who}")
        if time is not None:
            rows.append([words, duration(time), f"{1e9 / time:.1f}",
                         f"{100 * (time / alone - 1):+.1f} %" if who.endswith("_ddp") else "",
                         ratio(results, f"{cell}.{who}.vs_gloo") if who == "lockstep_ddp" else ""])
    return Table(f"Training step from Python, {network} network, batch {NETWORKS[network].batch} a rank",
                 ["", "step", "steps/s", "over no comm.", "than Gloo (quartiles)"], rows)


def loading(results):
    rows = []
    for name, source in data.SOURCES.items():
        for workers in source.workers:
            cell = f"data.{name}.{workers}"
            if f"{cell}.vs_python" in results.figures:
                rows.append([f"{source.words}, {workers} workers",
                             *(f"{1e9 * source.samples / results.median(f'{cell}.{who}'):,.0f}" for who in data.CONTENDERS),
                             ratio(results, f"{cell}.vs_python")])
    return Table("Loading data, samples a second", ["", "Lockstep", "torch.utils.data", "faster (quartiles)"], rows)


def checkpoints(results):
    rows = []
    for operation, peers in checkpoint.OPERATIONS.items():
        ours = results.median(checkpoint.series("lockstep", operation))
        if ours is not None:
            rows.append([operation, duration(ours),
                         *(cell for library, peer in peers.items()
                           for cell in (duration(results.median(checkpoint.series("python", peer))),
                                        ratio(results, f"checkpoint.{operation.replace(':', '.')}.vs_{library}")))])
    held_up = results.median(checkpoint.series("lockstep", checkpoint.ASYNC))
    if held_up is not None:
        rows.append([f"{checkpoint.ASYNC}, as long as it holds up", duration(held_up), "", "", "", ""])
    return Table(f"Checkpoints of {checkpoint.MEBIBYTES} MiB",
                 ["", "Lockstep", "torch", "faster (quartiles)", "safetensors", "faster (quartiles)"], rows)


def largest_models(results):
    rows = []
    for name, words in {"lockstep": "FullyShardedDataParallel, offload to files", "python": "Python, fully_shard, Gloo"}.items():
        parameters = results.median(f"sharding_largest.{largest_model.RANKS}.{name}")
        if parameters is not None:
            rows.append([words, f"{parameters / 1e6:.0f} million parameters"])
    return Table(f"The largest model that trains in {largest_model.LIMIT / 2**30:.0f} GiB, {largest_model.RANKS} ranks, AdamW, weights in "
                 f"bfloat16, to {100 * (largest_model.PRECISION - 1):.0f} %", ["", ""], rows)


def pipelines(results):
    shown = {"ours": "PipelineRunner", "theory": "theory", "gloo": "torch, Gloo", "torch_on_ours": "torch, Lockstep"}

    def columns(cell):
        return [*(duration(results.median(f"{cell}.{name}")) for name in shown),
                *(ratio(results, f"{cell}.{figure}") for figure in ("over_theory", "vs_gloo", "vs_torch_on_ours"))]

    heads = [*shown.values(), "of theory's (quartiles)", "faster than torch, Gloo", "faster than torch, Lockstep"]
    rows = [[f"{schedule}, {ranks} ranks", *columns(cell)] for ranks in pipeline.RANKS for schedule in pipeline.SCHEDULES
            if f"{(cell := f'pipeline.sleep.{ranks}.{schedule}')}.ours" in results.series]
    yield Table("Pipelines of layers that sleep, 8 micro-batches: a step", ["", *heads], rows)
    rows = [[words, *columns(cell)] for cell, words in (
        ("pipeline.action.2", "one action, 1F1B, next to no work"),
        *((f"pipeline.transformer.2.{schedule}", f"12 transformer layers, {schedule}, a step")
          for schedule in pipeline.TWO_RANKS)) if f"{cell}.ours" in results.series]
    yield Table("Pipelines on 2 ranks", ["", *heads], rows)
    rows = [[f"{words}, {schedule}", *columns(cell)] for what, words in pipeline.OVER_HOSTS.items() for schedule in pipeline.TWO_RANKS
            if f"{(cell := f'pipeline.hosts.{what}.{schedule}')}.ours" in results.series]
    yield Table(f"Pipelines of 2 stages on 2 hosts, {pipeline.WIRE}: a step", ["", *heads], rows)
    rows = [[schedule, *(mebibytes(results.median(f"{cell}.{name}")) for name in pipeline.CONTENDERS),
             *(ratio(results, f"{cell}.of_{name}") for name in pipeline.PEERS)]
            for schedule in pipeline.TWO_RANKS
            if f"{(cell := f'pipeline.memory.2.{schedule}')}.ours" in results.series]
    yield Table("Memory of that transformer's job at most", ["", *(shown[name] for name in pipeline.CONTENDERS),
                "of torch's, Gloo (quartiles)", "of torch's, Lockstep (quartiles)"], rows)


def profiles(results):
    rows = [[words, *(duration(results.median(f"profiler.{what}.{who}")) for who in profiler.CONTENDERS),
             ratio(results, f"profiler.{what}.vs_python") if what != "off" else ""]
            for what, words in {"scope": "a scope, not recorded", "off": "an addition of 4 floats, not recorded",
                                **{what: f"{words}, adds" for what, words in profiler.LEVELS.items()},
                                "export": "the end and the file, for each",
                                "export_stack": "the end and the file with all but with_flops, for each"}.items()
            if f"profiler.{what}.lockstep" in results.series]
    if "profiler.phases" in results.series:
        rows.append(["what a step tells of its phases, always", duration(results.median("profiler.phases")), "", ""])
    yield Table("What recording costs an operator", ["", "Profiler", "torch.profiler", "faster (quartiles)"], rows)
    merged = []
    if "profiler.merge.time" in results.series:
        data, memory = (f"{results.median(f'profiler.merge.{what}') / (1 << 30):.1f} GiB" for what in ("data", "memory"))
        merged.append([data, duration(results.median("profiler.merge.time")), memory])
    yield Table(f"Merging the traces of {profiler.MERGE_RANKS} ranks", ["traces", "time", "resident at most"], merged)


def gpu_steps(results):
    rows = []
    for ranks in gpu.RANKS:
        for network in NETWORKS:
            cell = f"gpu_step.{ranks}.{network}"
            if f"{cell}.vs_python" in results.figures:
                rows.append([f"{network}, {ranks} rank{'s' * (ranks > 1)}",
                             *(duration(results.median(f"{cell}.{who}")) for who in gpu.STEPS[ranks]),
                             ratio(results, f"{cell}.over_alone"), ratio(results, f"{cell}.vs_python")])
    return Table("Training step on one card: one rank over NCCL, two ranks staged (Python: Gloo)",
                 ["", "DDP", "without DDP", "Python DDP", "DDP, of without (quartiles)", "faster than Python (quartiles)"], rows)


def gpu_staging(results):
    rows = [[spaced(size), *(duration(results.median(f"{cell}.{what}")) for what in ("all_reduce", "copies")),
             ratio(results, f"{cell}.of_bus")]
            for size in gpu.SIZES if f"{(cell := f'gpu_staging.2.{size}')}.of_bus" in results.figures]
    return Table("all_reduce of device memory by two ranks on one card, staged, and the copies that it needs at least",
                 ["", "all_reduce", "copies both ways", "of the bus's limit (quartiles)"], rows)


def startups(results):
    rows = [[words, duration(results.median(f"startup.time.{who}")), mebibytes(results.median(f"startup.memory.{who}")),
             *(ratio(results, f"startup.{what}.vs_{who}") if who != "lockstep" else "" for what in ("time", "memory"))]
            for who, (_, words) in startup.PROGRAMS.items() if f"startup.time.{who}" in results.series]
    return Table("A program of one rank that does one all_reduce, from start to end",
                 ["", "time", "resident at most", "time, of ours (quartiles)", "memory, of ours (quartiles)"], rows)


def launches(results):
    words = {"start": "start", "worker": "worker killed", "agent": "launcher killed", "cut": "cable cut"}
    rows = []
    for what, text in words.items():
        for layout, workers in launch.STARTS.items():
            for program, language in launch.PROGRAMS.items():
                cell = f"launch.{what}.{layout}.{program}"
                if f"{cell}.lockstep" in results.series:
                    place = f"{sum(workers)} workers on {len(workers)} host{'s' * (len(workers) > 1)}"
                    rows.append([f"{text}, {place}, {language}", *(duration(results.median(f"{cell}.{who}"))
                                 for who in ("lockstep", "torchrun", launch.NO_LAUNCHER)), ratio(results, f"{cell}.vs_torchrun")])
    return Table("Launchers: until the first collective of all ranks; where a launcher is killed, until its last worker's end",
                 ["", "lockstep run", "torchrun", "no launcher", "times faster (quartiles)"], rows)


def launches_in_a_row(results):
    rows = []
    if "launch.row.failed" in results.series:
        rows.append([duration(results.median("launch.row.start")), str(results.median("launch.row.failed")),
                     str(results.median("launch.row.left"))])
    return Table(f"lockstep run: {launch.IN_A_ROW} jobs in a row on 2 hosts, at one port",
                 ["start of one, median", "failed", "files and processes left"], rows)


def sweeps(results):
    rows = []
    for who, words in sweep.CONTENDERS.items():
        if f"sweep.pause.{who}" in results.series:
            seen = stats.summarize(results.series[f"sweep.pause.{who}"]["rounds"])
            rows.append([words, duration(seen.median), f"{seen.low / 1e6:.3g}-{seen.high / 1e6:.3g} ms",
                         ratio(results, "sweep.pause.vs_optuna") if who == "lockstep" else ""])
    return Table("Between two trials, on average", ["", "median", "quartiles", "times faster (quartiles)"], rows)


def idle_launchers(results):
    rows = []
    for who, words in (("lockstep", "lockstep run"), ("torchrun", "torchrun")):
        if f"launch.idle.memory.{who}" in results.series:
            rows.append([words, mebibytes(results.median(f"launch.idle.memory.{who}")),
                         duration(results.median(f"launch.idle.cpu.{who}"))])
    return Table(f"Launchers whose {launch.IDLE_WORKERS} workers are idle, with their helpers",
                 ["", "memory", "processor time a second"], rows)


def soaked(results):
    rows = []
    for row, words in soak.WORDS.items():
        if f"soak.{row}.survivors" in results.series:
            latencies = results.series.get(f"soak.{row}.latency", {"rounds": []})["rounds"]
            rows.append([words, str(len(results.series[f"soak.{row}.survivors"]["rounds"])),
                         *(str(sum(results.series[f"soak.{row}.{name}"]["rounds"])) for name in soak.COUNTS),
                         *(duration(stats.percentile(latencies, percent) if latencies else None)
                           for percent in (50, 90, 99, 100))])
    return Table("Ranks that fail: what the others were told, and the time until then (for SIGSTOP, from the timeout on)",
                 ["", "rounds", "errors due", "named the rank", "and how", "hung", "bytes changed", "p50", "p90", "p99", "max"],
                 rows)


def failed_rounds(results):
    return Table("Failed rounds of soak", ["", "what is wrong"],
                 [[soak.again(seed, soak.options_of_hosts(results.options)), problem] for seed, problems in results.options.get("failed_rounds", {}).items()
                  for problem in problems])


def promises(results):
    rows = []
    for target, value, met in targets.judge(results):
        sign = "<=" if target.at_most else ">="
        rows.append([target.what, target.show(value), f"{sign} {target.show(target.bound)}", "met" if met else "MISSED"])
    return Table("Targets (2 cores)", ["", "measured", "target", ""], rows)


def comparison(changes, notes):
    rows = [[change.name, f"{change.old:.3g}", f"{change.new:.3g}", f"{100 * (change.new / change.old - 1):+.1f} %",
             f"{100 * change.noise:.0f} %", change.outcome.upper() if change.outcome == "slower" else change.outcome]
            for change in changes]
    table = Table("Compared with the old run", ["", "old", "new", "change", "noise", ""], rows)
    return "\n".join([as_text(table) if rows else "Nothing to compare", *(f"note: {note}" for note in notes)])
