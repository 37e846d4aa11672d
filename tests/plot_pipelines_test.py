"""Tests of scripts/plot-pipelines, which draws a recorded step of a pipeline."""

import importlib.machinery
import importlib.util
import pathlib
import xml.etree.ElementTree

import pytest

SCRIPT = str(pathlib.Path(__file__).resolve().parents[1] / "scripts" / "plot-pipelines")
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def script():
    loader = importlib.machinery.SourceFileLoader("plot_pipelines", SCRIPT)
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("plot_pipelines", loader))
    loader.exec_module(module)
    return module


def event(rank, name, begin, length):
    return {"ph": "X", "pid": rank, "tid": 1, "name": name, "ts": begin, "dur": length}


def test_actions_are_drawn_without_what_they_wait_for(script):
    trace = {"traceEvents": [
        event(0, "ProfilerStep#3", 0, 90), event(0, "PP:0F0", 10, 50),  # an earlier step
        event(0, "ProfilerStep#4", 100, 900), event(1, "ProfilerStep#4", 100, 900),
        event(0, "PP:0F0", 100, 100), event(0, "PP:0B0", 210, 600), event(0, "PP:0RECV_B0", 211, 390),
        event(1, "PP:1F0", 110, 200), event(1, "PP:1RECV_F0", 110, 100), event(1, "PP:1B0", 400, 200)]}  # fmt: skip
    ranks = script.actions_of(trace)
    assert ranks == {0: [(0, "F", 0, 100, 200), (0, "B", 0, 601, 810)], 1: [(1, "F", 0, 210, 310), (1, "B", 0, 400, 600)]}
    picture = xml.etree.ElementTree.fromstring(script.svg("1F1B", ranks))
    bars = {group.find(f"{SVG}title").text: float(group.find(f"{SVG}rect").get("width")) for group in picture.iter(f"{SVG}g")}
    assert set(bars) == {"0F0", "0B0", "1F0", "1B0"}
    assert bars["1B0"] / bars["1F0"] == pytest.approx(2, rel=0.01)
    busy = 100 + 209 + 100 + 200
    assert picture.find(f"{SVG}title").text == f"1F1B, recorded: 1 ms, idle {100 - 100 * busy / (2 * 710):.1f} %"
