"""Writes into docs/internals/testing.md that a command of scripts/test has passed: how long it took, when, at which commit.

usage: record_tests.py DOCUMENT COMMAND REPORTS_DIR SECONDS COMMIT

COMMAND is `scripts/test` with its options, as it stands in the table's first column; the last two columns of its row are
filled in. Exit status 1 where it has no row, or where no test has passed.
"""

import datetime
import pathlib
import sys

import summarize_tests

COLUMNS = 5  # command, what it runs, when, takes, last passed


def cells_of(line):
    """The cells of a row of the table that holds commands, or None for any other line."""
    cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
    return cells if line.startswith("| `") and len(cells) == COLUMNS else None


def find_row(lines, command):
    """Index of the row of `command`; None where the table has none."""
    for index, line in enumerate(lines):
        cells = cells_of(line)
        if cells and cells[0] == f"`{command}`":
            return index
    return None


def record(text, command, minutes, result):
    """The document with that row's last two columns replaced. ValueError: it has no such row."""
    lines = text.splitlines()
    index = find_row(lines, command)
    if index is None:
        raise ValueError(f"no row for `{command}`")
    cells = cells_of(lines[index])[:-2] + [f"{minutes} min", result]
    lines[index] = f"| {' | '.join(cells)} |"
    return "\n".join(lines) + "\n"


def main():
    document, command, reports, seconds, commit = sys.argv[1:]
    total = summarize_tests.summarize(pathlib.Path(reports))[0]
    if not total["passed"]:
        sys.exit("no test has passed: all were skipped")
    result = (f"{datetime.date.today().isoformat()}, `{commit}`: "
              f"{total['passed']:,} tests passed, {total['skipped']} skipped")
    path = pathlib.Path(document)
    try:
        path.write_text(record(path.read_text(), command, max(1, round(int(seconds) / 60)), result))
    except ValueError as error:
        sys.exit(f"{document}: {error}")


if __name__ == "__main__":
    main()
