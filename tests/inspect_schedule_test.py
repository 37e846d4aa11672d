"""`lockstep inspect schedule`: the table, the picture and the JSON of a pipeline's schedule."""

import json
import re
import xml.etree.ElementTree as xml

import pytest

OK, MISUSE = 0, 2
SHAPE = ("--ranks", 3, "--micro-batches", 4)
SVG = "{http://www.w3.org/2000/svg}"


def test_the_table_shows_every_action_and_what_is_idle(programs):
    done = programs.run("lockstep", "inspect", "schedule", "1f1b", *SHAPE)
    assert done.status == OK and done.stderr == "", done.text
    lines = done.stdout.splitlines()
    assert lines[0] == "1F1B: 3 ranks, 4 micro-batches" and lines[1].startswith("idle: 33.3 %"), done.text
    rows = [re.fullmatch(r"rank (\d)  (.*) keeps (\d) activations?", line).groups() for line in lines[3:]]
    assert [int(keeps) for _, _, keeps in rows] == [3, 2, 1], done.text
    for rank, cells, _ in rows:
        actions = re.findall(r"\d[FB]\d", cells)
        assert sorted(actions) == sorted(f"{rank}{kind}{m}" for kind in "FB" for m in range(4)), done.text
        assert len(cells.split()) == 18, done.text  # units of time


def test_json_and_picture_hold_the_same_actions(programs, tmp_path):
    picture = tmp_path / "schedule.svg"
    options = ["--stages-per-rank", 2, "--json", "--svg", picture]
    done = programs.run("lockstep", "inspect", "schedule", "InterleavedZeroBubble", "--ranks", 2, "--micro-batches", 4, *options)
    assert done.status == OK, done.text
    report = json.loads(done.stdout)
    assert report["schedule"] == "InterleavedZeroBubble" and 0 < report["bubble"] < 1
    actions = [action for row in report["rows"] for action in row["actions"]]
    assert len(actions) == 4 * 4 * 3
    assert report["bubble"] == pytest.approx(1 - sum(each["end"] - each["begin"] for each in actions) / (2 * report["end"]))
    drawn = [title.text for title in xml.parse(picture).getroot().findall(f"{SVG}g/{SVG}title")]
    assert drawn == [f"{each['stage']}{each['type']}{each['micro_batch']}" for each in actions]


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["2F2B", *SHAPE], ["2F2B", "Interleaved1F1B"]),
        (["1F1B", "--ranks", 0, "--micro-batches", 4], ["0 ranks"]),
        (["1F1B", "--ranks", 2], ["--micro-batches"]),
        (["1F1B", "--ranks", 3, "--micro-batches", 10**12], ["1000000000000 micro-batches", "at most"]),
        (["1F1B", *SHAPE, "--stages-per-rank", 2], ["one stage on each rank"]),
        (["Interleaved1F1B", "--ranks", 4, "--micro-batches", 9], ["9 micro-batches", "8 or 10"]),
        (["GPipe", *SHAPE, "--svg", "/nonexistent/schedule.svg"], ["/nonexistent/schedule.svg"]),
        ([], ["NAME"]),
    ],
    ids=str,
)
def test_what_it_refuses(programs, arguments, words):
    done = programs.run("lockstep", "inspect", "schedule", *arguments)
    assert done.status == MISUSE and done.stdout == "", done.text
    assert all(word in done.stderr for word in words), done.text
