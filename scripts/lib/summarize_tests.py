"""Counts the tests in the JUnit reports of ctest and pytest; the last step of scripts/test.

usage: summarize_tests.py REPORTS_DIR SECONDS

ctest counts programs; a GoogleTest program's own last words say how many cases passed, failed and were skipped.
Prints the failed and then one line of counts. Exit status: 0, 1 if a test failed, 2 if there was none.
"""

import pathlib
import re
import sys
import xml.etree.ElementTree

# GoogleTest's summary, as in "[  PASSED  ] 12 tests." or "[  FAILED  ] 1 test, listed below:"
GTEST_SUMMARY = re.compile(r"^\[  (PASSED|FAILED|SKIPPED) +\] (\d+) tests?[.,]", re.MULTILINE)
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


def summarize(reports):
    """Counts and names over all *.xml in the folder."""
    total, names = {"passed": 0, "failed": 0, "skipped": 0}, []
    for path in sorted(reports.glob("*.xml")):
        for case in xml.etree.ElementTree.parse(path).getroot().iter("testcase"):
            counts, failed = count_case(case)
            for key, number in counts.items():
                total[key] += number
            names += failed
    return total, names


def main():
    reports, seconds = pathlib.Path(sys.argv[1]), int(sys.argv[2])
    total, names = summarize(reports)
    for name in names:
        print("failed:", name)
    print("tests: {passed} passed, {failed} failed, {skipped} skipped".format(**total),
          f"in {seconds // 60} min {seconds % 60} s")
    if not any(total.values()):
        sys.exit(2)
    sys.exit(1 if total["failed"] else 0)


if __name__ == "__main__":
    main()
