"""Lockstep compiles with the oldest torch that it claims to work with.

scripts/test --all fetches that torch and names it in LOCKSTEP_OLDEST_TORCH, and every source of the libraries is compiled
with it, without precompiled headers.
"""

import concurrent.futures
import json
import os
import pathlib
import re
import shlex
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent

pytestmark = pytest.mark.long


def library_sources(build):
    """{source: its compiler's arguments} of Lockstep's libraries, from the build's compile_commands.json. Where files are
    compiled in batches, a source is a batch."""
    commands = {}
    for entry in json.loads((build / "compile_commands.json").read_text()):
        arguments = shlex.split(entry["command"])
        output = arguments[arguments.index("-o") + 1] if "-o" in arguments else ""
        target = re.search(r"CMakeFiles/([^/]+)\.dir/", output)
        if target and re.fullmatch(r"lockstep(_(?!testing|fuzz_driver|driver_main|cli|python|examples)\w+)?", target.group(1)):
            if not pathlib.Path(entry["file"]).name.startswith("cmake_pch"):
                commands[entry["file"]] = (arguments, entry["directory"])
    return commands


def with_torch(arguments, torch, oldest):
    """The arguments for a check of the syntax with another torch: no output, no precompiled header, no ccache."""
    compiler = next(i for i, word in enumerate(arguments) if re.search(r"(\+\+|clang)[-\d.]*$", word))
    checked, words = [], iter(arguments[compiler:])
    for word in words:
        if word in ("-o", "-MF", "-MT", "-MQ", "-include"):
            next(words)
        elif word not in ("-MD", "-c", "-Winvalid-pch", "-fpch-preprocess"):
            checked.append(word.replace(str(torch), str(oldest)))
    return [*checked, "-fsyntax-only"]


@pytest.fixture(scope="module")
def oldest():
    folder = os.environ.get("LOCKSTEP_OLDEST_TORCH")
    if not folder:
        pytest.skip("LOCKSTEP_OLDEST_TORCH is not set; scripts/test --all fetches that torch and sets it")
    return pathlib.Path(folder)


@pytest.fixture(scope="module")
def sources():
    build = pathlib.Path(os.environ.get("LOCKSTEP_BUILD_DIR") or ROOT / "build" / "release")
    return library_sources(build)


@pytest.fixture(scope="module")
def built_with():
    build = pathlib.Path(os.environ.get("LOCKSTEP_BUILD_DIR") or ROOT / "build" / "release")
    found = re.search(r"-isystem (\S+)/include/torch/csrc/api/include", (build / "compile_commands.json").read_text())
    return pathlib.Path(found.group(1))


def compile_all(sources, built_with, oldest):
    def check(item):
        source, (arguments, directory) = item
        run = subprocess.run(with_torch(arguments, built_with, oldest), cwd=directory, capture_output=True, text=True,
                             stdin=subprocess.DEVNULL)
        return source, run.returncode, run.stderr

    jobs = int(os.environ.get("LOCKSTEP_JOBS") or os.cpu_count() or 1)
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        results = list(pool.map(check, sources.items()))
    failed = [f"{source}:\n{errors[:3000]}" for source, status, errors in results if status != 0]
    assert not failed, "\n".join(failed)


def test_it_is_the_oldest_that_cmake_accepts(oldest):
    claimed = re.search(r"find_package\(LibTorch ([\d.]+) REQUIRED\)", (ROOT / "CMakeLists.txt").read_text()).group(1)
    assert (oldest / "version.py").read_text().find(f"'{claimed}.") > 0


def test_every_source_of_the_libraries_compiles(oldest, sources, built_with):
    assert len(sources) >= 40, sorted(sources)
    compile_all(sources, built_with, oldest)
