"""A table, as text for the terminal or in Markdown, and how numbers are shown in it."""

import re
from dataclasses import dataclass

from benchmarks.driver import stats

# Markdown may be more than ASCII: (pattern, replacement) for each cell.
TYPOGRAPHY = ((r"(\d) us\b", r"\1 µs"), (r"(\d)x\b", r"\1×"), (r"(\d)-(\d)", r"\1–\2"))


@dataclass(frozen=True)
class Table:
    """The first column says what, the others hold numbers."""

    title: str
    header: list
    rows: list


def as_text(table):
    cells = [table.header, *table.rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(table.header))]
    lines = [table.title]
    for row in cells:
        rest = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))
        lines.append("  " + "  ".join([row[0].ljust(widths[0]), *rest]))
    return "\n".join(lines)


def as_markdown(table):
    def line(cells):
        for pattern, replacement in TYPOGRAPHY:
            cells = [re.sub(pattern, replacement, cell) for cell in cells]
        return "| " + " | ".join(cells) + " |"

    return "\n".join([f"{table.title}:", "", line(table.header), "|" + "---|" * len(table.header),
                      *map(line, table.rows)])


def duration(nanoseconds):
    """A difference of two times may be negative."""
    if nanoseconds is None:
        return "-"
    for unit, size in (("ms", 1e6), ("us", 1e3)):
        if abs(nanoseconds) >= size:
            short = abs(nanoseconds) < 1000 * size
            return f"{nanoseconds / size:.3g} {unit}" if short else f"{nanoseconds / size:.0f} {unit}"
    return f"{nanoseconds:.0f} ns"


def times(ratio):
    return f"{ratio:.0f}x" if ratio >= 100 else f"{ratio:.1f}x" if ratio >= 10 else f"{ratio:.2f}x"


def ratio(results, figure):
    """Median, with the quartiles over the rounds."""
    if figure not in results.figures:
        return "-"
    seen = stats.summarize(results.figures[figure]["rounds"])
    return f"{seen.median:.3g}x ({seen.low:.3g}-{seen.high:.3g})"


def added(ratio):
    """What a ratio adds to 1."""
    return "-" if ratio is None else f"{100 * (ratio - 1):+.1f} %"


def percent(share, digits=0):
    return "-" if share is None else f"{100 * share:.{digits}f} %"


def mebibytes(length):
    return "-" if length is None else f"{length / 2**20:.3g} MiB"


def spaced(size):
    return re.sub(r"(\d)([A-Z])", r"\1 \2", size)
