"""Tests of results.py."""

import pytest

from benchmarks.driver import results


def sample():
    run = results.Results(machine={"cpu": "a"}, options={"rounds": 3})
    run.add_series("all_reduce.2.4KiB.gloo", "ns", [300, 3000, 310])
    run.add_series("all_reduce.2.4KiB.lockstep", "ns", [3, 30, 5])
    run.add_ratio("all_reduce.2.4KiB.vs_gloo", "all_reduce.2.4KiB.gloo", "all_reduce.2.4KiB.lockstep")
    return run


def test_round_trip(tmp_path):
    path = tmp_path / "run.json"
    path.write_text(sample().to_json())
    loaded = results.load(path)
    assert loaded.median("all_reduce.2.4KiB.vs_gloo") == 100
    assert loaded.median("all_reduce.2.4KiB.gloo") == 310
    assert loaded.median("nothing") is None
    assert loaded.machine == {"cpu": "a"} and loaded.options == {"rounds": 3}


@pytest.mark.parametrize("text, message", [("", "is not a result"), ("[]", "is not a result"),
                                           ('{"format": 2}', "is not a result"), ('{"format": 1}', "format 1")])
def test_other_files_are_refused(tmp_path, text, message):
    path = tmp_path / "run.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        results.load(path)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match="run.json: No such file"):
        results.load(tmp_path / "run.json")
