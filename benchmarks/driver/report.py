"""Tables for the terminal, from a Results."""

from benchmarks.driver import stats, targets
from benchmarks.driver.collectives import PEERS, SIZES
from benchmarks.driver.training import BATCH

MODES = {"ddp": "DDP", "alone": "no communication", "single": "one process alone"}
KINDS = {"cpp": "C++", "cpp_keep": "C++, malloc keeps pages", "python": "Python, Gloo",
         "python_keep": "Python, Gloo, malloc keeps pages"}


def report(results):
    """All tables of what was measured, as one text."""
    parts = [collectives(results), processor_time(results), barriers(results), training(results), promises(results)]
    return "\n\n".join(part for part in parts if part)


def table(title, header, rows):
    """A text table; empty without rows. The first column is aligned to the left, the others to the right."""
    if not rows:
        return ""
    cells = [header, *rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = [title]
    for row in cells:
        rest = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))
        lines.append("  " + "  ".join([row[0].ljust(widths[0]), *rest]))
    return "\n".join(lines)


def duration(nanoseconds):
    if nanoseconds is None:
        return "-"
    for unit, size in (("ms", 1e6), ("us", 1e3)):
        if nanoseconds >= size:
            return f"{nanoseconds / size:.3g} {unit}" if nanoseconds < 1000 * size else f"{nanoseconds / size:.0f} {unit}"
    return f"{nanoseconds:.0f} ns"


def ratio(results, figure):
    """Median, with the quartiles over the rounds."""
    if figure not in results.figures:
        return "-"
    seen = stats.summarize(results.figures[figure]["rounds"])
    return f"{seen.median:.3g}x ({seen.low:.3g}-{seen.high:.3g})"


def collectives(results):
    rows = []
    for operation in ("all_reduce", "all_reduce_staged", "broadcast", "all_gather"):
        for ranks in (2, 4):
            for size in SIZES:
                measure = f"{operation}.{ranks}.{size}"
                if results.median(f"{measure}.lockstep") is None:
                    continue
                peers = measure.replace("_staged", "")
                rows.append([f"{operation} {size}, {ranks} ranks", duration(results.median(f"{measure}.lockstep")),
                             *(duration(results.median(f"{peers}.{peer}")) for peer in PEERS),
                             *(ratio(results, f"{measure}.vs_{peer}") for peer in PEERS)])
    return table("Collectives, float32: median time, and how many times faster than a peer (quartiles)",
                 ["", "Lockstep", "Gloo", "Open MPI", "than Gloo", "than Open MPI"], rows)


def processor_time(results):
    rows = []
    for name, entry in results.series.items():
        operation, *_, who = name.split(".")
        if operation.endswith("_cpu"):
            seen = stats.summarize(entry["rounds"])
            rows.append([f"{operation.removesuffix('_cpu')}, {who}", f"{1000 * seen.median:.3g} ms/GB",
                         f"({1000 * seen.low:.3g}-{1000 * seen.high:.3g})"])
    return table("Processor time of all ranks, 25 MiB", ["", "median", "quartiles"], rows)


def barriers(results):
    rows = []
    for ranks in (2, 4):
        for percent in (50, 99):
            measure = f"barrier_p{percent}.{ranks}"
            if results.median(f"{measure}.lockstep") is not None:
                rows.append([f"{ranks} ranks, p{percent}",
                             *(duration(results.median(f"{measure}.{who}")) for who in ("lockstep", *PEERS))])
    return table("Barrier", ["", "Lockstep", "Gloo", "Open MPI"], rows)


def training(results):
    tables = []
    for network, batch in BATCH.items():
        rows = []
        for kind, shown in KINDS.items():
            for mode in MODES:
                time = results.median(f"step.2.{network}.{kind}_{mode}")
                if time is None:
                    continue
                ranks = 1 if mode == "single" else 2
                alone = results.median(f"step.2.{network}.{kind}_alone")
                single = results.median(f"step.2.{network}.{kind}_single")
                speedup = ranks * single / time if single else None
                rows.append([f"{shown}: {MODES[mode]}", duration(time), f"{ranks * batch * 1e9 / time:.0f}",
                             f"{100 * (time / alone - 1):+.1f} %" if mode == "ddp" else "",
                             f"{speedup:.2f}x" if speedup else "", f"{100 * speedup / ranks:.0f} %" if speedup else ""])
        tables.append(table(f"Training step, {network} network, batch {batch} a rank",
                            ["", "step", "samples/s", "over no comm.", "speedup", "efficiency"], rows))
    return "\n\n".join(part for part in tables if part)


def promises(results):
    rows = []
    for target, value, met in targets.judge(results):
        sign = "<=" if target.at_most else ">="
        rows.append([target.what, target.show(value), f"{sign} {target.show(target.bound)}", "met" if met else "MISSED"])
    return table("Targets (2 cores)", ["", "measured", "target", ""], rows)


def comparison(changes, notes):
    rows = [[change.name, f"{change.old:.3g}", f"{change.new:.3g}", f"{100 * (change.new / change.old - 1):+.1f} %",
             f"{100 * change.noise:.0f} %", change.verdict.upper() if change.verdict == "slower" else change.verdict]
            for change in changes]
    text = table("Compared with the old run", ["", "old", "new", "change", "noise", ""], rows) or "Nothing to compare"
    return "\n".join([text, *(f"note: {note}" for note in notes)])
