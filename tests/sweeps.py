"""Starts `lockstep sweep` for tests, and what several of them search with it."""

import inspect
import math
import sys

import pytest

needs_toml = pytest.mark.skipif(sys.version_info < (3, 11), reason="this Python reads no TOML, which --file takes")
MISUSE = 2
BOWL = ["--param", "lr=log:1e-5:1", "--param", "hidden=logint:16:512", "--metric", "loss"]
LOSS = ["--regex", "loss=loss: ([0-9.e+-]+)"]


def losses(lr, hidden):
    """Of two parameters nine reports, some of which are worth pruning."""
    return [(math.log10(lr) + 2.5) ** 2 + ((hidden - 200) / 200) ** 2 + (1 + hidden % 7) / epoch for epoch in range(1, 10)]


PROGRAM = f"""
import math, sys
{inspect.getsource(losses)}
for loss in losses(float(sys.argv[1]), int(sys.argv[2])):
    print("loss:", loss, flush=True)
"""
# As where the Ctrl-C that ends a sweep has also ended the `tee` that it writes to.
WITHOUT_READER = [sys.executable, "-c", """if True:
    import os, signal, sys
    reads, writes = os.pipe()
    os.close(reads)
    os.dup2(writes, 1)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    os.execvp(sys.argv[1], sys.argv[1:])
"""]


class Sweep:
    """`lockstep sweep` with this Python, in the test's folder."""

    def __init__(self, programs):
        self._programs = programs
        self.folder = programs.folder
        self.wait_until_gone = programs.wait_until_gone
        self.find = programs.find

    def start(self, *words, before=(), **variables):
        return self._programs.start(*before, "lockstep", "sweep", *words, LOCKSTEP_SWEEP_PYTHON=sys.executable, **variables)

    def run(self, *words, status=0, **variables):
        return self._finish(self.start(*words, **variables), status)

    def run_with_cards(self, count, *words, status=0, **variables):
        """On a host with the devices of so many cards."""
        folder = self.folder / f"{count} cards"
        folder.mkdir(exist_ok=True)
        for number in range(count):
            (folder / f"nvidia{number}").touch()
        start = f"from lockstep_sweep import keeper; keeper.DEVICES = {str(folder)!r}; from lockstep_sweep.__main__ import main"
        command = [sys.executable, "-c", f"import sys; {start}; sys.exit(main())", "--launcher", self.find("lockstep")]
        return self._finish(self._programs.start(*command, *words, **variables), status)

    @staticmethod
    def _finish(driver, status):
        done = driver.finish()
        assert done.status == status, done.text
        return done

    def script(self, text, name="train.py"):
        """A program of Python that starts at once."""
        path = self.folder / name
        path.write_text(f"#!{sys.executable} -S\n{text}")
        path.chmod(0o755)
        return path

    def study(self, name="sweep"):
        from lockstep_sweep import options, study

        return study.load(study.Place(options.begun(self.folder / name)[1]))
