"""Finds the C++ tests whose name contains a text; used by scripts/test --only.

usage: select_tests.py BUILD_DIR TEXT

Prints a line "program NAME" for each test of ctest whose own name contains the text, and "cases NAME" for each other
GoogleTest program (by convention ROOM_tests, and ROOM_gpu for its part on a card) that has a case of such a name. Case matters in neither.
"""

import json
import subprocess
import sys


def case_names(listing):
    """Full names (Suite.Case) out of --gtest_list_tests' output, whose case lines are indented below their suite's."""
    suite, names = "", []
    for line in listing.splitlines():
        name = line.split("#")[0].rstrip()
        if name.startswith("  "):
            names.append(suite + name.strip())
        elif name.endswith("."):
            suite = name
    return names


def select(tests, text, list_cases):
    """[(kind, name)] for ctest's [(name, command)]; list_cases(command) gives the output of --gtest_list_tests."""
    selected = []
    for name, command in tests:
        if text.lower() in name.lower():
            selected.append(("program", name))
        elif name.endswith(("_tests", "_gpu")):
            if any(text in case for case in case_names(list_cases(command))):
                selected.append(("cases", name))
    return selected


def main():
    build, text = sys.argv[1:]
    shown = subprocess.run(["ctest", "--test-dir", build, "--show-only=json-v1"], check=True, capture_output=True)
    tests = [(test["name"], test["command"]) for test in json.loads(shown.stdout)["tests"] if test.get("command")]

    def list_cases(command):
        return subprocess.run([*command, "--gtest_list_tests"], check=True, capture_output=True, text=True).stdout

    for kind, name in select(tests, text, list_cases):
        print(kind, name)


if __name__ == "__main__":
    main()
