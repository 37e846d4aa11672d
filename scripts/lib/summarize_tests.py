"""Counts the tests in the JUnit reports of ctest and pytest; the last step of scripts/test.

usage: summarize_tests.py REPORTS_DIR SECONDS

ctest counts programs; the last lines of a GoogleTest program say how many cases passed, failed and were skipped.
Prints the slowest, the failed, those that need a second GPU, and then one line of counts. Exit status: 0, 1 if a test failed, 2 if there was none.
"""

import pathlib
import re
import sys
import xml.etree.ElementTree

# GoogleTest's summary, as in "[  PASSED  ] 12 tests." or "[  FAILED  ] 1 test, listed below:"
GTEST_SUMMARY = re.compile(r"^\[  (PASSED|FAILED|SKIPPED) +\] (\d+) tests?[.,]", re.MULTILINE)
GTEST_TIME = re.compile(r"^\[       OK \] ([\w/]+\.[\w/]+) \((\d+) ms\)", re.MULTILINE)
SLOW = 8.0  # seconds
SHOWN = 12  # of the slow ones
# A case that was skipped for want of cards: its reason comes before GoogleTest's line with its name.
NEEDS_GPUS = "needs 2 GPUs"
GTEST_SKIPPED = re.compile(r"needs 2 GPUs(?:(?!\[  SKIPPED \]).)*?\[  SKIPPED \] ([\w/]+\.[\w/]+) \(", re.DOTALL)
GTEST_FAILED = re.compile(r"^\[  FAILED  \] ([\w/]+\.[\w/]+)", re.MULTILINE)


def count_gtest(output):
    """{passed, failed, skipped} of a GoogleTest program, or None if it did not get to its summary.

    Programs with several ranks show their ranks' output; the program's own summary is after its last "==========] N".
    """
    end = output.rfind("[==========] ")
    if end < 0 or "ran" not in output[end:].split("\n", 1)[0]:
        return None
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    for word, number in GTEST_SUMMARY.findall(output[end:]):
        counts[word.lower()] = int(number)
    return counts


def count_case(case):
    """({passed, failed, skipped}, [names of the failed]) of one JUnit test case."""
    name = ".".join(filter(None, (case.get("classname"), case.get("name"))))
    failed = case.find("failure") is not None or case.find("error") is not None
    skipped = case.find("skipped") is not None
    output = case.findtext("system-out") or ""
    counts = count_gtest(output)
    if counts is None or (failed and not counts["failed"]):
        # Not GoogleTest, or it ended badly: it counts as one.
        return {"passed": int(not failed and not skipped), "failed": int(failed), "skipped": int(skipped)}, [name] * failed
    program = case.get("name")
    return counts, [f"{program}: {test}" for test in dict.fromkeys(GTEST_FAILED.findall(output))] if failed else []


def times(case):
    """[(seconds, name)] of what one JUnit test case ran: GoogleTest's own cases, or itself."""
    program = case.get("name")
    inner = [(int(milliseconds) / 1000, f"{program}: {test}")
             for test, milliseconds in GTEST_TIME.findall(case.findtext("system-out") or "")]
    return inner or [(float(case.get("time") or 0), ".".join(filter(None, (case.get("classname"), program))))]


def waiting_for_gpus(case):
    """Names of the tests in one JUnit test case that were skipped because they need two GPUs."""
    skipped = case.find("skipped")
    if skipped is not None and NEEDS_GPUS in (skipped.get("message") or "") + (skipped.text or ""):
        return [".".join(filter(None, (case.get("classname"), case.get("name"))))]
    program = case.get("name")
    return [f"{program}: {test}" for test in dict.fromkeys(GTEST_SKIPPED.findall(case.findtext("system-out") or ""))]


def cases_of(reports):
    """All test cases of all *.xml in the folder."""
    for path in sorted(reports.glob("*.xml")):
        yield from xml.etree.ElementTree.parse(path).getroot().iter("testcase")


def summarize(reports):
    """Counts, names of the failed, [(seconds, name)] of the slowest, and names of those that wait for a second GPU."""
    total, names, slow, waiting = {"passed": 0, "failed": 0, "skipped": 0}, [], [], []
    for case in cases_of(reports):
        counts, failed = count_case(case)
        for key, number in counts.items():
            total[key] += number
        names += failed
        slow += [entry for entry in times(case) if entry[0] >= SLOW]
        waiting += waiting_for_gpus(case)
    return total, names, sorted(slow, reverse=True)[:SHOWN], waiting


def main():
    reports, seconds = pathlib.Path(sys.argv[1]), int(sys.argv[2])
    total, names, slow, waiting = summarize(reports)
    for duration, name in slow:
        print(f"slow: {duration:.0f} s {name}")
    for name in names:
        print("failed:", name)
    for name in waiting:
        print("needs 2 GPUs:", name)
    print("tests: {passed} passed, {failed} failed, {skipped} skipped".format(**total),
          f"in {seconds // 60} min {seconds % 60} s")
    if not any(total.values()):
        sys.exit(2)
    sys.exit(1 if total["failed"] else 0)


if __name__ == "__main__":
    main()
