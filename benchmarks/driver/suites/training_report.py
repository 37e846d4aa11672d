"""The tables of the suites `step`, `tuning` and `hooks`."""

from benchmarks.driver import stats
from benchmarks.driver.suites import comm_hooks
from benchmarks.driver.suites.training import LANDING, NETWORKS, PEERS, RANKS
from benchmarks.driver.tables import Table, added, duration, mebibytes, percent, ratio, times

MODES = {"ddp": "DDP", "alone": "no communication", "abreast": "a barrier after each step", "single": "one process alone"}
KINDS = {"cpp": "C++", "cpp_keep": "C++, malloc keeps pages", "python": "Python, Gloo",
         "python_keep": "Python, Gloo, malloc keeps pages"}
HOOKS = {"all_reduce": "none (all_reduce)", "bf16": "bf16", "fp16": "fp16", "int8": "int8 per tensor",
         "power_sgd": "PowerSGD"}


def tables(results):
    return [*(step(results, name, ranks) for ranks in RANKS for name in NETWORKS), gradients(results), tuning(results),
            hooks(results)]


def step(results, network, ranks):
    """Time and communication of a step; overhead against the same malloc and against the better baseline."""
    rows, batch = [], NETWORKS[network].batch
    for kind, shown in KINDS.items():
        for mode in MODES:
            cell = f"{ranks}.{network}.{kind}"
            name = f"step.{cell}_{mode}"
            time = results.median(name)
            if time is None:
                continue
            alone, single = results.median(f"step.{cell}_alone"), results.median(f"step.{cell}_single")
            busy = 1 if mode == "single" else ranks
            row = [f"{shown}: {MODES[mode]}", duration(time), f"{busy * batch * 1e9 / time:.0f}"]
            if mode == "ddp":
                than_python = f"{name}.vs_{PEERS[kind]}" if kind in PEERS else None
                row += [added(time / alone) if alone else "-", added(results.median(f"{name}.over_baseline")),
                        added(results.median(f"{name}.over_abreast")), duration(results.median(f"step_cpu.{cell}")), percent(results.median(f"step_hidden.{cell}")),
                        ratio(results, than_python)]
            else:
                row += [""] * 6
            rows.append([*row, times(busy * single / time) if single else ""])
    return Table(f"Training step, {network} network, {ranks} ranks, batch {batch} a rank",
                 ["", "step", "samples/s", "over no comm.", "over the better", "over a barrier", "its processor time", "hidden",
                  "than Python (quartiles)", "speedup"], rows)


def gradients(results):
    rows = []
    for network in (*NETWORKS, *LANDING):
        size = results.median(f"step_gradients.2.{network}")
        if size is not None:
            rows.append([network, mebibytes(size), percent(results.median(f"step_in_place.2.{network}"), digits=1)])
    return Table("Gradients, and the share of their bytes that a kernel wrote into its bucket", ["", "gradients", "no copy"],
                 rows)


def tuning(results):
    rows = []
    for network in NETWORKS:
        cell = f"2.{network}.cpp"
        if f"tuning.{cell}_ddp.vs_fixed" in results.figures:
            rows.append([network, duration(results.median(f"tuning.{cell}_ddp")),
                         duration(results.median(f"tuning.{cell}_fixed")), ratio(results, f"tuning.{cell}_ddp.vs_fixed"),
                         cap(results.median(f"tuning_cap.{cell}_ddp")),
                         cap(results.median(f"tuning_first_cap.{cell}_ddp"))])
    return Table("Bucket sizes that DDP chose, against 1 and 25 MiB, 2 ranks",
                 ["", "chosen", "fixed", "faster (quartiles)", "bucket", "first bucket"], rows)


def cap(length):
    """A bucket's size; a petabyte and more stands for no limit."""
    return "all" if length is not None and length > 1e15 else mebibytes(length)


def hooks(results):
    rows = []
    for hook in comm_hooks.HOOKS:
        cell = f"{comm_hooks.RANKS}.{comm_hooks.NETWORK}"
        time = results.median(f"hooks_step.{cell}.{hook}")
        if time is not None:
            rows.append([HOOKS[hook], duration(time), ratio(results, f"hooks_step.{cell}.{hook}.vs_all_reduce"),
                         mebibytes(results.median(f"hooks_sent.{cell}.{hook}")),
                         mebibytes(results.median(f"hooks_received.{cell}.{hook}")), accuracy(results, hook)])
    return Table("Communication hooks, 2 ranks: a step of the large network, and accuracy on Fashion-MNIST",
                 ["", "step", "than none (quartiles)", "handed in", "handed out", "accuracy (least-most)"], rows)


def accuracy(results, hook):
    """The median over the seeds, and the extremes."""
    entry = results.series.get(f"hooks_accuracy.{comm_hooks.RANKS}.fashion_mnist.{hook}")
    if entry is None:
        return "-"
    rounds = entry["rounds"]
    return f"{100 * stats.summarize(rounds).median:.1f} % ({100 * min(rounds):.1f}-{100 * max(rounds):.1f})"
