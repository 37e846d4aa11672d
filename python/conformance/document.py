"""Writes docs/internals/conformance.md from results."""

from conformance import lists, results, suites

HEAD = """\
# PyTorch's own tests

PyTorch ships tests of `torch.distributed` in its wheel, in `torch/testing/_internal/distributed`. This project did not write
them, so they can say whether Lockstep's collectives are right. They run against three backends:

- `gloo`: PyTorch's own, the measure;
- `lockstep`: `init_process_group("lockstep")`. Some tests look at the backend's name and run for `gloo` alone;
- `replace_gloo`: the tests ask for `gloo`, and `lockstep.replace_gloo()` has put our engine in its place.

The rule: what passes with `gloo` passes with `replace_gloo`, and with `lockstep` unless the test is skipped there for
the backend's name. At most {most} tests of Gloo's own internals may be left out, by name and with a reason.

**{verdict}**

{versions}

This page is generated; to make it anew (some {minutes:.0f} minutes on {cores} cores):

    python python/conformance run --world-size 4 --world-size 8 \\
        --backend gloo --backend lockstep --backend replace_gloo --jobs 2 --output conformance.json
    python python/conformance compare conformance.json
    python python/conformance document conformance.json

`run --only PATTERN` runs some tests, `run --subset quick` the part that `./scripts/test` runs (with 4 ranks); `--help`
has the rest.

## How they are run
PyTorch starts a fresh interpreter for each rank of each test: seconds a test. Here a server imports torch and the tests
once, and each test's process, and from it the ranks, are forked from that server, which has one thread and no process
group; no test was found that needs more. `run --start-method spawn` uses fresh interpreters for the ranks. The test
code is PyTorch's; what differs:

- Stricter: the test fails too when a rank other than the first crashes or ends with a status of its own (PyTorch looks
  at the first alone), and when it is not done at its deadline. No process outlives its test.
- The tests' barrier between ranks, a loop over files, looks every 5 ms instead of every 100.
- The skips "Only MPI supports all_to_all" and "Only MPI supports CPU all_to_all_single" are lifted: they are older than
  Gloo's all_to_all, and these are the only tests of it on CPUs.
- `lockstep` joins the list of backends whose profiler events the tests of collectives look at.
- No GPU is visible, OMP_NUM_THREADS is 1, and all traffic stays on the loopback interface.

## Over hosts
With `LOCKSTEP_TEST_HOSTS=2` in the environment the ranks are as if on two hosts, in turns; with four ranks 2 x 2.
Between them messages go over UCX, within them through shared memory. `scripts/test --all` runs the tests so, too. On 23
November 2026, with torch 2.13.0, four ranks and the rule holding (passed / skipped / failed):

| module | `gloo` | `lockstep`, 2 x 2 | `replace_gloo`, 2 x 2 |
|---|---|---|---|
| `distributed_test` | 124 / 181 / 3 | 104 / 204 / 0 | 127 / 181 / 0 |
| `ddp_under_dist_autograd_test` | 8 / 0 / 0 | – | 8 / 0 / 0 |
| `nn.api.remote_module_test` | 16 / 0 / 0 | – | 16 / 0 / 0 |
| `rpc.rpc_test` | 252 / 2 / 0 | – | 252 / 2 / 0 |

`gloo` is on one host; in the last three rows its figures are those of the table below.

## Tests of Gloo's that the wheel lacks
PyTorch's repository has tests of Gloo itself. No text of theirs is here; they were run by hand on 23 and 30 November 2026, those
of torch 2.4 (without a line that imports what torch 2.13 no longer has) against torch 2.13.0. Passed / skipped / failed:

| file | `gloo` | `replace_gloo` | `replace_gloo`, 2 x 2 |
|---|---|---|---|
| `test_c10d_gloo.py` | 65 / 44 / 10 | 65 / 44 / 10 | 65 / 44 / 10 |
| `test_pg_wrapper.py` | 5 / 12 / 0 | 5 / 12 / 0 | 5 / 12 / 0 |
| `test_c10d_spawn_gloo.py` | 1 / 10 / 0 | 1 / 10 / 0 | 1 / 10 / 0 |
| `test_c10d_object_collectives.py` | 9 / 0 / 0 | 9 / 0 / 0 | 9 / 0 / 0 |

The same 80 pass everywhere. The ten fail everywhere: six need the `CommTensor` that torch dropped, two round-robin
groups, one a GPU, and one expects a store's timeout in another form. To run such a file:

    PYTHONPATH=FOLDER python python/conformance run --tests-from FOLDER/test_c10d_gloo.py \\
        --backend gloo --backend replace_gloo

What later versions of `test_c10d_gloo.py` test besides was tried with programs of our own: reductions of complex numbers and
of float16, `reduce_scatter` of unequal sizes, the coalesced forms for tensors, timeouts, lazy initialisation. What remains
different:

- torch's own flight recorder (`TORCH_FR_BUFFER_SIZE`, `_dump_fr_trace()`), in which Gloo records its operations, stays
  empty: libtorch exports no way to write into it. Lockstep has [its own](../debugging_a_hang.md).
- A rank that ends at once is named as such, also where the test that it ended in expects the other's timeout of 1 ms.
"""


def page(runs, left_out):
    """The whole page, from {(backend, world size): Run}."""
    sizes = sorted({size for _, size in runs})
    sections = [head(runs, left_out), "## Results\n" + summary(runs, sizes), modules_section(),
                left_out_section(left_out), not_passed_section(runs, sizes)]
    return "\n".join(sections)


def head(runs, left_out):
    violations = results.judge(runs, left_out)
    verdict = f"{len(violations)} tests that pass with gloo break the rule: see below." if violations else (
        "The rule holds: every test that passes with gloo passes with Lockstep"
        + (f", but for {len(left_out)} left out." if left_out else "."))
    about = [run.about for run in runs.values()]
    return HEAD.format(most=lists.MOST, verdict=verdict, versions=versions(about), cores=about[0].get("cores"),
                       minutes=max(1, sum(one.get("seconds", 0) for one in about) / 60))


def versions(about):
    """What was tested, when, and at which commit."""
    def seen(key, mark=""):
        return " and ".join(sorted({f"{mark}{one[key]}{mark}" for one in about if one.get(key)})) or "unknown"

    return (f"torch {seen('torch')}, lockstep {seen('lockstep')}, Python {seen('python')}; "
            f"ranks started by {seen('start_method')}. Run on {seen('date')} at commit {seen('commit', '`')}.")


def table(header, rows):
    def line(cells):
        return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"

    return "\n".join([line(header), "|" + "---|" * len(header), *map(line, rows)]) + "\n"


def summary(runs, sizes):
    """Module by world size by backend: passed, skipped, failed, time."""
    rows = []
    for size in sizes:
        at_size = {backend: run for (backend, world_size), run in runs.items() if world_size == size}
        for module in sorted({suites.module_of(name) for run in at_size.values() for name in run.tests}):
            rows.append([f"`{module}`", size if module == suites.MAIN else "own",
                         *(counts(at_size.get(backend), module) for backend in suites.BACKENDS)])
    return ("Each cell: passed / skipped / failed, time of the tests (no measure of speed: some run at once, and\n"
            "most of it goes into starting processes). Ranks \"own\": the tests fix their number, mostly 4, and the\n"
            "backend's name, so that there is nothing to run with `lockstep`.\n\n"
            + table(["module", "ranks", *(f"`{backend}`" for backend in suites.BACKENDS)], rows))


def counts(run, module):
    names = [name for name in run.tests if suites.module_of(name) == module] if run else []
    if not names:
        return "–"
    count = run.count(names)
    failed = sum(count[status] for status in results.FAILED)
    seconds = sum(run.tests[name]["seconds"] for name in names)
    return f"{count['passed']} / {count['skipped']} / {failed}, {seconds:.0f} s"


def modules_section():
    rows = [[f"`{name}`", text] for name, text in suites.TEST_MODULES.items()]
    helpers = [[f"`{name}`", text] for name, text in suites.HELPER_MODULES.items()]
    return ("## What is in the wheel\n"
            "Modules of `torch.testing._internal.distributed` with tests, all of which run. Their classes that need\n"
            "GPUs (Cuda… in the name) are left aside.\n\n" + table(["module", "tests of"], rows)
            + "\nModules that only help tests which the wheel lacks:\n\n" + table(["module", "what it is"], helpers))


def left_out_section(left_out):
    text = "".join(f"- `{name}`: {reason}\n" for name, reason in left_out.items()) or "None.\n"
    return f"## Left out\nFrom `python/conformance/{lists.LEFT_OUT.name}`:\n\n{text}"


def outcomes(runs, sizes):
    """{(test, (outcome per backend)): [world sizes]} of tests that not all pass; an outcome is text or None."""
    found = {}
    for size in sizes:
        at_size = [runs.get((backend, size)) for backend in suites.BACKENDS]
        names = dict.fromkeys(name for run in at_size if run for name in run.tests)
        for name in names:
            row = tuple(outcome(run.tests[name]) if run and name in run.tests else None for run in at_size)
            if set(row) - {None, "passed"}:
                found.setdefault((name, row), []).append(size)
    return found


def outcome(entry):
    return entry["status"] + (f": {entry['reason']}" if entry["reason"] else "")


def order(group):
    """Failures first, then what only some backends pass, then the skipped; large groups first."""
    (row, _), names = group
    kinds = {text.partition(":")[0] for text in row if text}
    return not kinds & set(results.FAILED), "passed" not in kinds, -len(names), names[0]


def not_passed_section(runs, sizes):
    """One row for all tests that end alike."""
    groups = {}
    for (name, row), at in outcomes(runs, sizes).items():
        ranks = ", ".join(map(str, at)) if suites.module_of(name) == suites.MAIN else "own"
        groups.setdefault((row, ranks), []).append(f"`{name.replace('.TestDistBackendWithSpawn.', '.')}`")
    rows = [[*(text or "–" for text in row), ranks, f"{len(names)}: " + ", ".join(names)]
            for (row, ranks), names in sorted(groups.items(), key=order)]
    body = table([*(f"`{backend}`" for backend in suites.BACKENDS), "ranks", "tests"], rows) if rows else "None.\n"
    return ("## Tests that are not passed everywhere\n"
            "Tests that end alike share a row; the class TestDistBackendWithSpawn is left out of names.\n\n" + body)
