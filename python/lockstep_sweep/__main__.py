"""The command: `lockstep sweep` hands its words over to main(); `python -m lockstep_sweep` does the same."""

import contextlib
import importlib.util
import os
import pathlib
import signal
import sys

OPTUNA = "5.0.0"  # the extra "sweep" in pyproject.toml pins it, too
MISUSE = 2


def main(words=None):
    """Runs the command; returns its exit status."""
    try:
        return _main(sys.argv[1:] if words is None else words)
    except KeyboardInterrupt:  # before the driver waits for signals, or in a command that shows something
        return 128 + signal.SIGINT


def _main(words):
    if importlib.util.find_spec("optuna") is None:
        print(f"lockstep sweep: error: it needs Optuna, which {sys.executable} does not have; do: pip install "
              f"'optuna=={OPTUNA}' plotly, or install Lockstep's package with its extra: pip install './python[sweep]'",
              file=sys.stderr)
        return 1
    from optuna.exceptions import StorageInternalError

    from lockstep_sweep.options import Misuse

    launcher = "lockstep"
    if words[:1] == ["--launcher"]:  # the program that has handed over
        launcher, words = words[1], words[2:]
    try:
        return _run(words, launcher)
    except Misuse as error:
        print(f"lockstep sweep: error: {error}\nTry: lockstep sweep --help", file=sys.stderr)
        return MISUSE
    except ImportError as error:  # of a sampler, say, which misses it only after its first trials
        print(f"lockstep sweep: error: a package is missing: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # `| head` has read enough
        from lockstep_sweep.show import discard_output

        discard_output()
        return 128 + signal.SIGPIPE
    except OSError as error:
        what = f"{error.filename}: {error.strerror}" if error.filename else error
        print(f"lockstep sweep: error: {what}", file=sys.stderr)
        return 1
    except StorageInternalError as error:
        print(f"lockstep sweep: error: the study's database has failed: {error.__cause__ or error}\n"
              "Trials that ran here end; when it is back, lockstep sweep resume goes on", file=sys.stderr)
        return 1


def _run(words, launcher):
    from lockstep_sweep import driver, options, show, study

    views = {"status": show.status, "best": show.best, "plot": show.plot}
    command, *rest = words or [""]
    if command in views or command == "resume":
        if {"-h", "--help"} & set(rest):
            options.parse(["--help"])
        folder = pathlib.Path(rest.pop(0) if rest and not rest[0].startswith("-") else "sweep").absolute()
        cwd, asked = options.begun(folder, rest)
        os.chdir(cwd)
    else:
        asked = options.parse(words)
    if command not in views:
        with _leaving_on_signals():  # until run() waits for them; remote shells may have been started
            return driver.Driver(asked, launcher).run()
    found = study.load(study.Place(asked))
    if found is None:
        raise options.Misuse(f"there is no sweep in {folder}")
    status = views[command](found, asked)
    sys.stdout.flush()
    return status


@contextlib.contextmanager
def _leaving_on_signals():
    """SIGTERM and SIGHUP, where they would kill, raise SystemExit within; what a caller of main() had is put back."""
    changed = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) == signal.SIG_DFL]
    for number in changed:
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        for number in changed:
            signal.signal(number, signal.SIG_DFL)


if __name__ == "__main__":
    sys.exit(main())
