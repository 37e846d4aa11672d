"""Command line: run, compare and document; see the package's docstring."""

import argparse
import os
import pathlib
import signal
import sys

# At the end: this folder's neighbour `lockstep` is source without its compiled part, the installed one comes first.
sys.path[0:1] = []
sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))

from conformance import document, driver, lists, results, suites  # noqa: E402

MISUSE, INTERRUPTED = 2, 130
PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "internals" / "conformance.md"


def positive(text):
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is no whole number from 1 up")
    return number


def seconds(text):
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"'{text}' is no number of seconds above 0")
    return number


def parse(arguments):
    parser = argparse.ArgumentParser(prog="python python/conformance", description="PyTorch's own distributed tests, "
                                     "run against gloo, lockstep, and lockstep in gloo's place.")
    # The hidden options are for the tests of this program.
    parser.add_argument("--left-out", type=pathlib.Path, default=lists.LEFT_OUT, help=argparse.SUPPRESS)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run the tests",
                              epilog="Exit status: 0, 1 if a test failed, 2 if none could run.")
    run.add_argument("--backend", action="append", choices=suites.BACKENDS, help="may be repeated (lockstep)")
    run.add_argument("--world-size", action="append", type=positive, metavar="N", help="ranks; may be repeated (4)")
    run.add_argument("--only", default="", metavar="PATTERN",
                     help="tests whose full name contains this or, with *, ? or [, matches it")
    run.add_argument("--subset", choices=("all", "quick"), default="all", help="quick: the part that scripts/test runs")
    run.add_argument("--output", type=pathlib.Path, metavar="FILE", help="where the results go, as JSON")
    run.add_argument("--jobs", type=positive, default=1, metavar="N", help="tests at a time (1)")
    run.add_argument("--deadline", type=seconds, default=driver.Options.deadline, metavar="SECONDS",
                     help=f"after which a test is ended and has failed ({driver.Options.deadline})")
    run.add_argument("--start-method", choices=("fork", "spawn"), default="fork",
                     help="spawn: a fresh interpreter for each rank, as PyTorch does; seconds a test (fork)")
    run.add_argument("--tests-from", default="", help=argparse.SUPPRESS)
    compare = commands.add_parser("compare", help="check that what passes with gloo passes with lockstep")
    page = commands.add_parser("document", help="write docs/internals/conformance.md from results")
    for command in (compare, page):
        command.add_argument("results", nargs="+", type=pathlib.Path, metavar="FILE", help="from run --output")
    page.add_argument("--page", type=pathlib.Path, default=PAGE, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def command_run(options):
    chosen = driver.Options(options.only, options.subset, options.jobs, options.deadline, options.start_method,
                            options.tests_from, options.left_out)
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)  # before the minutes of testing, not after
    runs = {}
    for world_size in dict.fromkeys(options.world_size or [4]):
        for backend in dict.fromkeys(options.backend or ["lockstep"]):
            runs[backend, world_size] = driver.run(backend, world_size, chosen)
            if options.output:
                results.save(list(runs.values()), options.output)
    return report_run(runs, lists.read_left_out(options.left_out))


def report_run(runs, allowed):
    """One line for each failure and each run; the exit status."""
    bad = 0
    for run in runs.values():
        for name, entry in run.tests.items():
            if entry["status"] in results.FAILED:
                excused = run.backend != "gloo" and name in allowed
                bad += not excused
                print(f"{'left out' if excused else entry['status']}: {name}: {entry['reason']}")
        counts = ", ".join(f"{number} {status}" for status, number in sorted(run.count().items()))
        print(f"{run.backend}, {run.world_size} ranks: {counts} in {run.about['seconds']} s")
    return int(bad + complain_about_idle(runs, allowed) > 0)


def complain_about_idle(runs, allowed):
    idle = results.idle_entries(runs, allowed)
    for name in idle:
        print(f"{lists.LEFT_OUT.name} leaves out {name}, but it passes: remove the entry")
    return len(idle)


def command_compare(options):
    runs = results.load(options.results)
    if not any(backend == "gloo" for backend, _ in runs):
        raise results.ResultsError("there is no run of gloo among these results; run with --backend gloo too")
    allowed = lists.read_left_out(options.left_out)
    violations = results.judge(runs, allowed)
    for violation in violations:
        print(violation)
    passed = sum(run.count()["passed"] for (backend, _), run in runs.items() if backend == "gloo")
    print(f"{passed} tests pass with gloo; {len(violations)} break the rule, {len(allowed)} are left out")
    return int(len(violations) + complain_about_idle(runs, allowed) > 0)


def command_document(options):
    options.page.write_text(document.page(results.load(options.results), lists.read_left_out(options.left_out)))
    print(f"wrote {options.page}")
    return 0


def interrupt(*_):
    raise KeyboardInterrupt  # so that the servers are stopped


def main():
    if sys.argv[1:2] == ["_serve"]:  # by driver.ServerProcess
        from conformance import server

        backend, world_size, start_method, tests_from, folder, parent = sys.argv[2:]
        server.serve(suites.Configuration(backend, int(world_size), start_method, tests_from), folder, int(parent))
        return 0
    options = parse(sys.argv[1:])
    signal.signal(signal.SIGTERM, interrupt)
    try:
        return {"run": command_run, "compare": command_compare, "document": command_document}[options.command](options)
    except (driver.DriverError, lists.ListError, results.ResultsError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return MISUSE
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    finally:
        sys.stdout.flush()


if __name__ == "__main__":
    status = main()
    if "_serve" in sys.argv[1:2]:
        os._exit(status)  # nothing of torch's to wait for
    sys.exit(status)
