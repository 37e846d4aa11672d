"""The drawing of a round's phases in docs/internals/reducer.md is the table that the reducer checks each change against."""

import pathlib
import re

REPOSITORY = pathlib.Path(__file__).resolve().parents[4]
ARROW = re.compile(r"├─+►|◄─+┤")


def changes_in_source():
    text = (REPOSITORY / "lockstep/parallel/ddp/reducer/reduction_round.cc").read_text()
    table = re.search(r"kPhaseChanges\[\] = \{\n(.*?)\n\};", text, re.S)[1]
    pairs = re.findall(r"\{RoundPhase::k(\w+), RoundPhase::k(\w+)\}", table)
    assert len(pairs) == table.count("{")
    return {(before.lower(), after.lower()) for before, after in pairs}


def changes_in_drawing():
    """Phases stand side by side above the arrows, which lead from one's column to another's."""
    lines = (REPOSITORY / "docs/internals/reducer.md").read_text().splitlines()
    first = next(number for number, line in enumerate(lines) if ARROW.search(line))
    phases = [(word.start(), word.end(), word[0]) for word in re.finditer(r"\w+", lines[first - 1])]

    def phase_at(column):
        return next(name for start, end, name in phases if start <= column < end)

    changes = set()
    for line in lines[first:]:
        if not line.strip():
            return changes
        arrow = ARROW.search(line)
        ends = phase_at(arrow.start()), phase_at(arrow.end() - 1)
        changes.add(ends if arrow[0].endswith("►") else ends[::-1])


def test_drawing_is_the_table():
    assert changes_in_drawing() == changes_in_source()
