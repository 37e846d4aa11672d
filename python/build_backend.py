"""The build backend: scikit-build-core, told which torch to build against, and with failures that end in one line.

c10d's C++ interface changes with every minor release of torch, so a wheel belongs to one minor version, which its
metadata require. It is that of the first torch of these:
  1. LOCKSTEP_TORCH: a torch package, or a virtual environment that has one;
  2. what the target environment's Python imports. Build isolation hides it from this process, not from a new one;
  3. what pip installs into the build environment when there is none of the above: NEWEST_TORCH.

Config setting `prebuilt=FOLDER` (pip's -C) packs what `cmake --install BUILD --component python --prefix FOLDER` took
from a build that is there already, and compiles nothing.
"""

import atexit
import contextlib
import functools
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile

from scikit_build_core import build as _skbuild

NEWEST_TORCH = "2.13.0"  # what Lockstep is developed with
OLDEST_TORCH = (2, 11)
HERE = pathlib.Path(__file__).resolve().parent
PARTS = ("lockstep", "lockstep_sweep", "_lockstep_autoload.py", "_lockstep_command.py")  # what the component "python" installs

__all__ = ["build_sdist", "build_wheel", "dynamic_metadata", "get_requires_for_build_sdist",
           "get_requires_for_build_wheel", "get_requires_for_dynamic_metadata", "prepare_metadata_for_build_wheel"]


def fail(message, remedy):
    """Ends the build with the one line that says what to do; pip shows it last."""
    sys.stdout.flush()
    sys.exit(f"lockstep: error: {message}; do: {remedy}")


# Which torch

def is_torch(folder):
    """Whether it is a torch package with libraries and C++ headers."""
    return all((folder / part).is_file() for part in
               ("version.py", "lib/libtorch_python.so", "include/torch/csrc/distributed/c10d/Backend.hpp"))


def given_torch():
    """The torch that LOCKSTEP_TORCH names, looked for as in cmake/FindLibTorch.cmake; None if it is not set."""
    root = os.environ.get("LOCKSTEP_TORCH")
    if not root:
        return None
    root = pathlib.Path(root).expanduser().absolute()
    for folder in (root, root / "torch", *sorted(root.glob("lib/python3*/site-packages/torch")), root / "../.."):
        if is_torch(folder):
            return folder.resolve()
    return fail(f"LOCKSTEP_TORCH is {root}, and that is no Python torch with C++ headers",
                "point it to a torch package or to a virtual environment with torch, or unset it")


def target_torch():
    """The torch that this Python imports by itself: -E and the bare environment undo pip's isolation."""
    command = [sys.executable, "-E", "-c",
               "import importlib.util as u; s = u.find_spec('torch'); print(s.origin if s and s.origin else '')"]
    found = subprocess.run(command, capture_output=True, text=True, cwd="/", check=False).stdout.strip()
    folder = pathlib.Path(found).parent.resolve() if found else None
    return folder if folder and is_torch(folder) else None


def required_torch():
    """The torch that pip put into the build environment."""
    spec = importlib.util.find_spec("torch")
    folder = pathlib.Path(spec.origin).parent.resolve() if spec and spec.origin else None
    return folder if folder and is_torch(folder) else None


def find_torch():
    """The folder of the torch to build against, or None."""
    return given_torch() or target_torch() or required_torch()


def torch_version(folder):
    """(major, minor) of a torch package; fails where it is older than Lockstep supports."""
    text = (folder / "version.py").read_text(encoding="utf-8")
    match = re.search(r"^__version__ = '(\d+)\.(\d+)", text, re.MULTILINE)
    if not match:
        fail(f"{folder}/version.py names no version", f"install torch again: pip install torch=={NEWEST_TORCH}")
    version = int(match[1]), int(match[2])
    if version < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        fail(f"{folder} is torch {version[0]}.{version[1]}, and Lockstep needs {oldest} or newer",
             f"pip install torch=={NEWEST_TORCH}, or point LOCKSTEP_TORCH to another one")
    return version


# Metadata

def get_requires_for_dynamic_metadata(_settings):
    return [] if given_torch() or target_torch() else [f"torch=={NEWEST_TORCH}"]


def dynamic_metadata(_settings, _project):
    """The version in CMakeLists.txt, and the requirement of the torch that is built against."""
    folder = find_torch()
    if not folder:
        fail("there is no torch to build against", f"pip install torch=={NEWEST_TORCH}, or set LOCKSTEP_TORCH")
    major, minor = torch_version(folder)
    project = (HERE.parent / "CMakeLists.txt").read_text(encoding="utf-8")
    version = re.search(r"^project\(Lockstep VERSION ([0-9.]+)", project, re.MULTILINE)[1]
    return {"version": version, "dependencies": [f"torch>={major}.{minor},<{major}.{minor + 1}"]}


# Building

def compile_jobs():
    """One compiler per core and 2 GiB of free memory, as in scripts/lib/build.sh; or LOCKSTEP_JOBS."""
    if os.environ.get("LOCKSTEP_JOBS"):
        return os.environ["LOCKSTEP_JOBS"]
    memory = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError):
        available = re.search(r"^MemAvailable: +(\d+) kB", pathlib.Path("/proc/meminfo").read_text(), re.MULTILINE)
        memory = int(available[1]) * 1024 if available else memory
    return str(max(1, min(len(os.sched_getaffinity(0)), memory // 2**31)))


@functools.cache
def aside():
    """A folder outside of the checkout, until this process ends."""
    folder = tempfile.mkdtemp(prefix="lockstep-wheel-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return pathlib.Path(folder)


@functools.cache
def copy_aside(part):
    """A copy of a file or folder in aside(): scikit-build-core silently leaves out what git ignores, as build/ is."""
    copy = aside() / part.name
    if part.is_dir():
        shutil.copytree(part, copy, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        shutil.copy2(part, copy)
    return copy


def settings_for(config_settings):
    """scikit-build-core's settings for ours, and the environment for CMake."""
    settings = dict(config_settings or {})
    prebuilt = settings.pop("prebuilt", None)
    if prebuilt:
        parts = [pathlib.Path(prebuilt).absolute() / name for name in PARTS]
        if not all(part.exists() for part in parts):
            fail(f"prebuilt is {prebuilt}, and {' or '.join(part.name for part in parts)} is missing there",
                 "cmake --install BUILD --component python --prefix FOLDER, and name that folder")
        settings |= {"wheel.cmake": "false", "wheel.platlib": "true",
                     "wheel.packages": ";".join(str(copy_aside(part)) for part in parts)}
    os.environ.setdefault("CMAKE_BUILD_PARALLEL_LEVEL", compile_jobs())
    folder = find_torch()
    if folder:
        os.environ["LOCKSTEP_TORCH"] = str(folder)  # for FindLibTorch.cmake, which knows nothing of isolation
    return settings


# (what a compiler must find, in C++; what to do where it doesn't)
PROBES = (
    ("#include <semaphore>\n#include <span>\nstatic_assert(__cplusplus >= 202002L);",
     "the C++ compiler '{compiler}' cannot compile C++20", "install g++ 11 or newer, and name it in CXX"),
    ("#include <Python.h>", "the headers of this Python ({python}) are missing",
     "install them (Debian: apt-get install python3-dev)"),
    ("#include <zlib.h>", "zlib.h is missing", "install it (Debian: apt-get install zlib1g-dev)"),
    ("#include <nlohmann/json_fwd.hpp>", "nlohmann/json_fwd.hpp is missing",
     "install it (Debian: apt-get install nlohmann-json3-dev)"),
    ("#include <CLI/Version.hpp>", "CLI11's headers are missing", "install them (Debian: apt-get install libcli11-dev)"),
)


def explain_failure():
    """What is missing here, as (message, remedy); None if nothing obvious is."""
    compiler = (os.environ.get("CXX") or "c++").split()
    if not shutil.which(compiler[0]):
        return f"there is no C++ compiler '{compiler[0]}'", "install g++ 11 or newer, or name a compiler in CXX"
    if shutil.disk_usage(HERE).free < 2**28:
        return f"the disk of {HERE} is full", "free some space"
    for code, message, remedy in PROBES:
        command = [*compiler, "-std=c++20", "-fsyntax-only", "-x", "c++", "-I", sysconfig.get_path("include"), "-"]
        if subprocess.run(command, input=code, text=True, capture_output=True, check=False).returncode:
            return message.format(compiler=" ".join(compiler), python=sys.executable), remedy
    folder = find_torch()
    version = torch_version(folder) if folder else ()
    if version > tuple(map(int, NEWEST_TORCH.split(".")[:2])):
        return (f"{folder} is torch {version[0]}.{version[1]}, and Lockstep is known to compile up to torch {NEWEST_TORCH}",
                f"pip install torch=={NEWEST_TORCH}, or point LOCKSTEP_TORCH to another one")
    return None


def run(hook, directory, config_settings, *rest):
    """Calls a hook of scikit-build-core; where it fails for a cause that we know, that cause has the last word."""
    settings = settings_for(config_settings)
    try:
        return hook(directory, settings, *rest)
    except (Exception, SystemExit) as error:
        if isinstance(error, SystemExit) and isinstance(error.code, str):
            raise  # said already
        reason = explain_failure()
        if reason:
            fail(*reason)
        raise


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    return run(_skbuild.build_wheel, wheel_directory, config_settings, metadata_directory)


def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    return run(_skbuild.prepare_metadata_for_build_wheel, metadata_directory, config_settings)


def get_requires_for_build_wheel(config_settings=None):
    return _skbuild.get_requires_for_build_wheel(settings_for(config_settings))


def get_requires_for_build_sdist(config_settings=None):
    return []


def build_sdist(sdist_directory, config_settings=None):
    """There is none: the sources are the whole repository's, which lie above this folder."""
    fail("there is no source distribution of lockstep, for it is built from the whole repository",
         "pip wheel ./python in a clone of it")
