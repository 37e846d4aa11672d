"""Finds the tests whose name contains a text, and what must be built to run them; used by scripts/test --only.

usage: select_tests.py BUILD_DIR TEXT

The build must be configured, but nothing of it built: names are read from the sources. Prints lines:

  program NAME   a test of ctest whose own name contains the text: all of it runs
  cases NAME     a GoogleTest program that has a case of such a name: by convention ROOM_tests, and ROOM_gpu for its part on
                 a card, for the files lockstep/**/ROOM/**/*_test.cc; not ROOM_hosts, whose own filter would count
  file FILE      a file of Python tests with the text in its path: all of it runs
  tests FILE     another that has a test of such a name
  target NAME    what ninja must build for those: the programs of ctest, and those whose names stand in the Python files

Case matters only in the names of C++ cases. What a program of ctest starts or loads when it runs, CMake knows.
"""

import collections
import json
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
PYTHON_FOLDERS = ("lockstep", "scripts", "examples", "benchmarks", "tests", "python")

CASE = re.compile(r"^(?:TYPED_)?TEST(?:_F|_P)?\((\w+),\s*(\w+)\)", re.MULTILINE)
INSTANCE = re.compile(r"^INSTANTIATE_TEST_SUITE_P\((\w*),\s*(\w+)", re.MULTILINE)
TYPED_SUITE = re.compile(r"^TYPED_TEST_SUITE\((\w+)", re.MULTILINE)
PYTHON_TEST = re.compile(r"^ *(?:async )?(?:def|class) ([Tt]est\w*)", re.MULTILINE)
LINKED = re.compile(r"^build ([^:\n]+): \w+_EXECUTABLE_LINKER", re.MULTILINE)


def program_names(ninja):
    """Names of the programs in bin/ by the text of build.ninja: what is linked, and the links to it that come with it."""
    outputs = [path for paths in LINKED.findall(ninja) for path in paths.split()]
    return [path.removeprefix("bin/") for path in outputs if path.startswith("bin/")]


def case_names(sources):
    """Names in the texts of one program's sources: Suite.Case, with parameters Prefix/Suite.Case/N, with types
    Suite/N.Case; the numbers are N here."""
    text = "\n".join(sources)
    prefixes, typed = collections.defaultdict(list), set(TYPED_SUITE.findall(text))
    for prefix, suite in INSTANCE.findall(text):
        prefixes[suite].append(prefix and f"{prefix}/")
    names = []
    for suite, case in CASE.findall(text):
        if suite in typed:
            names.append(f"{suite}/N.{case}")
        elif suite in prefixes:
            names += [f"{prefix}{suite}.{case}/N" for prefix in prefixes[suite]]
        else:
            names.append(f"{suite}.{case}")
    return names


def has_case(names, text):
    """Whether a case's name may contain the text."""
    known = re.sub(r"/\d+\b", "/N", text)
    # The end of a name with parameters may be any text that a test gives them.
    before = known[:known.rindex("/") + 1] if re.search(r"\w\.\w+/", known) else known
    return any(known in name or before in name for name in names)


def select_cpp(tests, rooms, text):
    """[(kind, name)] for the names of ctest's tests and {room: texts of its test sources}."""
    selected = []
    for name in tests:
        room = re.sub("_(tests|gpu)$", "", name)
        if text.lower() in name.lower():
            selected.append(("program", name))
        elif room != name and has_case(case_names(rooms.get(room, [])), text):
            selected.append(("cases", name))
    return selected


def select_python(files, text):
    """[("file" or "tests", path)] of those, of {path: text of the file}, that the text chooses."""
    text, selected = text.lower(), []
    for path, content in files.items():
        if text in path.lower():
            selected.append(("file", path))
        elif any(text in name.lower() for name in PYTHON_TEST.findall(content)):
            selected.append(("tests", path))
    return selected


def targets_of(selected, python, files, programs):
    """What to build: the selected programs, and each program whose name is a word in one of the selected Python files.

    Tests that start programs by their names do so by the fixtures and functions below, some under `lockstep run`.
    """
    targets = {"bin/" + re.sub("_(gpu|hosts)$", "_tests", name) for _, name in selected}
    for _, path in python:
        words = set(re.findall(r"\w+", files[path]))
        if path.startswith("python/"):
            targets.add("python/all")
        if words & {"bin_dir", "programs", "run_lockstep", "BIN"}:
            targets |= {f"bin/{name}" for name in programs if name in words} | {"bin/lockstep"}
        if path == "scripts/install_test.py":
            targets.add("lockstep_installable")
    return sorted(targets)


def sources_of_rooms():
    """{room: texts of its test sources}"""
    rooms = collections.defaultdict(list)
    for path in (ROOT / "lockstep").rglob("*_test.cc"):
        room = next(folder for folder in path.parents if (folder / "CMakeLists.txt").exists())
        rooms[room.name].append(path.read_text())
    return rooms


def main():
    build, text = pathlib.Path(sys.argv[1]), sys.argv[2]
    ninja = (build / "build.ninja").read_text()
    shown = subprocess.run(["ctest", "--test-dir", build, "--show-only=json-v1"], check=True, capture_output=True)
    tests = [test["name"] for test in json.loads(shown.stdout)["tests"]]
    files = {path.relative_to(ROOT).as_posix(): path.read_text()
             for folder in PYTHON_FOLDERS if folder != "python" or "build python/all:" in ninja for path in sorted((ROOT / folder).rglob("*_test.py"))}
    selected, python = select_cpp(tests, sources_of_rooms(), text), select_python(files, text)
    for kind, name in [*selected, *python]:
        print(kind, name)
    for name in targets_of(selected, python, files, program_names(ninja)):
        print("target", name)


if __name__ == "__main__":
    main()
