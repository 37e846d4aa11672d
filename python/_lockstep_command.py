"""The command `lockstep` of a Python environment: starts the program that lies in the package.

It stands outside the package, because `import lockstep` loads torch, which takes seconds and which the program does not
need.
"""

import importlib.util
import os
import pathlib
import re
import runpy
import sys

PACKAGE = pathlib.Path(__file__).resolve().parent / "lockstep"
PROGRAM = PACKAGE / "lockstep"
FORMER_LIBRARY_PATH = "LOCKSTEP_FORMER_LD_LIBRARY_PATH"  # the program gives it to what `lockstep run` starts


def _torch_folder():
    """Where this Python would import torch from, or None; imports nothing."""
    spec = importlib.util.find_spec("torch")
    return pathlib.Path(spec.origin).resolve().parent if spec and spec.origin else None


def _minor_version(folder):
    """The "major.minor" of a torch package, or None."""
    if not folder or not (folder / "version.py").is_file():
        return None
    text = (folder / "version.py").read_text(encoding="utf-8")
    match = re.search(r"^__version__ = '(\d+\.\d+)", text, re.MULTILINE)
    return match and match[1]


def main():
    """Replaces this process by the program, with the same arguments; `lockstep sweep` is Python and runs in this one."""
    if not PROGRAM.is_file():
        sys.exit("lockstep: error: this package was built without the command (LOCKSTEP_BUILD_CLI=OFF); "
                 "do: pip install --force-reinstall --no-deps ./python in Lockstep's repository")
    torch = _torch_folder()
    if _minor_version(torch) != runpy.run_path(str(PACKAGE / "_build.py"))["TORCH_VERSION"]:
        try:
            import lockstep  # noqa: F401  the check there names the torch that is missing or wrong
        except ImportError as error:
            sys.exit(f"lockstep: error: {error}")
    environment = dict(os.environ)
    environment.setdefault("PYTHON_EXEC", sys.executable)  # for `lockstep run train.py`
    if torch and torch != PACKAGE.parent / "torch":  # the program itself looks for torch only beside the package
        former = environment.get("LD_LIBRARY_PATH", "")
        environment[FORMER_LIBRARY_PATH] = former
        environment["LD_LIBRARY_PATH"] = f"{torch / 'lib'}:{former}" if former else str(torch / "lib")
    if sys.argv[1:2] == ["sweep"]:
        from lockstep_sweep.__main__ import main as sweep

        os.environ.update(environment)
        return sweep(["--launcher", str(PROGRAM), *sys.argv[2:]])
    return os.execve(PROGRAM, ["lockstep", *sys.argv[1:]], environment)
