"""Jobs that hang or diverge, and what `lockstep inspect flight` says of their records."""

import json
import pathlib
import re
import signal

import hosts
import pytest
import support

OK, PROBLEM, MISUSE = 0, 1, 2
DRIVER = pathlib.Path(__file__).parent / "drivers" / "flight_driver.cc"


def line_of(text: str, nth: int = 1) -> int:
    """Where the driver's nth line with this text stands."""
    lines = [number for number, line in enumerate(DRIVER.read_text().splitlines(), 1) if text in line]
    return lines[nth - 1]


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "flight"


def start_ranks(programs, folder, count, *arguments, **variables):
    """The driver once for each rank; by rank."""
    place = {"WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": support.free_port(), **variables}
    if folder:
        place["LOCKSTEP_FLIGHT_DIR"] = folder
    return [programs.start("flight_driver", *arguments, **place, RANK=rank) for rank in range(count)]


def inspect(programs, folder, *options):
    return programs.run("lockstep", "inspect", "flight", *options, folder)


def findings(programs, folder, kind):
    done = inspect(programs, folder, "--json")
    found = [finding for finding in json.loads(done.stdout)["findings"] if finding["kind"] == kind]
    assert found, done.text
    return found


def test_a_rank_that_leaves_out_an_all_reduce_is_named(programs, folder):
    ranks = start_ranks(programs, folder, 3, "leave-out", "--timeout", 1)
    ranks[1].wait_for("leaves out")
    # The others give up after a second; rank 1, which is in no operation, writes when it is asked.
    for rank in (0, 2):
        assert ranks[rank].finish().status == 1
    ranks[1].kill(signal.SIGUSR1)
    said = ranks[1].wait_for(r"flight record \(SIGUSR1.*\) written to (\S+); read it with: (.*)", "stderr")
    assert said[1] == str(folder / "rank_1.json") and said[2] == f"lockstep inspect flight {folder}"
    ranks[1].finish()

    done = inspect(programs, folder)
    assert done.status == PROBLEM and done.stderr == "", done.text
    second = line_of("lockstep::all_reduce(tensor);", 2)
    assert "rank 1 has not called all_reduce(SUM, Float [2, 3]), sequence 2 of group" in done.stdout, done.text
    assert re.search(rf"ranks? 0.* called it at \S*flight_driver\.cc:{second} ", done.stdout), done.text
    assert re.search(rf"rank 1 was last in sequence 1, .*flight_driver\.cc:{second - 6} ", done.stdout), done.text

    (missing,) = findings(programs, folder, "missing")
    assert missing["ranks"] == [1] and missing["waiting"] == [0, 2], missing
    assert missing["operation"] == "all_reduce" and missing["sequence"] == 2, missing
    assert missing["site"].endswith(f"flight_driver.cc:{second}"), missing


def test_records_of_several_hosts_are_merged_and_the_host_of_the_cause_is_named(programs, tmp_path):
    """Two ranks on each of two hosts; each host writes into a folder of its own."""
    net = hosts.PretendedHosts(2)
    place = {"WORLD_SIZE": 4, "MASTER_ADDR": net.addresses[0], "MASTER_PORT": support.free_port()}
    folders = [tmp_path / name for name in net.names]
    ranks = []
    for rank in range(4):
        words = net.inside(rank // 2, "flight_driver", "leave-out", "--timeout", 5)
        ranks.append(programs.start(*words, **place, RANK=rank, LOCKSTEP_FLIGHT_DIR=folders[rank // 2]))
    try:
        ranks[1].wait_for("leaves out")
    except AssertionError as error:
        if "needs UCX" not in str(error):
            raise
        pytest.skip("ranks on several hosts need UCX")
    for rank in (0, 2, 3):
        assert ranks[rank].finish().status == 1
    ranks[1].kill(signal.SIGUSR1)
    ranks[1].wait_for("written to", "stderr")
    ranks[1].finish()

    done = programs.run("lockstep", "inspect", "flight", *folders)
    assert done.status == PROBLEM and done.stderr == "", done.text
    assert "HANG: rank 1 on host-a has not called all_reduce(SUM, Float [2, 3])" in done.stdout, done.text
    assert "Look first at rank 1 on host-a." in done.stdout, done.text
    report = json.loads(programs.run("lockstep", "inspect", "flight", "--json", *folders).stdout)
    assert report["cause"] == {"ranks": [1], "hosts": ["host-a"]}, done.text
    assert [(host["name"], host["ranks"]) for host in report["hosts"]] == [("host-a", [0, 1]), ("host-b", [2, 3])]
    # One host's records alone tell of the other, too.
    alone = programs.run("lockstep", "inspect", "flight", folders[1])
    assert alone.status == PROBLEM and "nothing is known of ranks 0 and 1 on host-a" in alone.stdout, alone.text
    assert "no rank of host host-a wrote one" in alone.stdout, alone.text


def test_ranks_that_call_different_operations_are_told_with_their_places(programs, folder):
    ranks = start_ranks(programs, folder, 3, "other-operation", "--timeout", 30)
    assert [rank.finish().status for rank in ranks] == [1, 1, 1]
    done = inspect(programs, folder)
    assert done.status == PROBLEM, done.text
    place = line_of("lockstep::barrier();")
    assert re.search(rf"rank 1 called barrier\(\) at \S*flight_driver\.cc:{place} ", done.stdout), done.text
    (mismatch,) = findings(programs, folder, "mismatch")
    assert mismatch["ranks"] == [1] and mismatch["sequence"] == 2, mismatch


def test_a_rank_that_waits_writes_its_record_on_the_signal_and_goes_on(programs, folder):
    ranks = start_ranks(programs, folder, 2, "wait")
    ranks[0].wait_for("begins")
    for time in (1, 2):  # the second time nothing has changed, and a newer record is written all the same
        (folder / "rank_0.json").unlink(missing_ok=True)
        ranks[0].kill(signal.SIGUSR1)
        ranks[0].wait_for(rf"(written to .*\n[^$]*){{{time}}}", "stderr")
        assert (folder / "rank_0.json").is_file()
    record = json.loads((folder / "rank_0.json").read_text())
    assert record["reason"] == "SIGUSR1" and record["world_size"] == 2 and record["pid"] == ranks[0].pid
    results = [rank.finish() for rank in reversed(ranks)]  # rank 1 comes when its input ends
    for rank, result in zip((1, 0), results, strict=True):
        assert result.status == 0 and f"rank {rank} has the sum 2" in result.stdout, result.text


def test_abort_writes_the_records(programs, folder):
    ranks = start_ranks(programs, folder, 2, "abort")
    ranks[0].wait_for("waits")
    results = [rank.finish() for rank in reversed(ranks)]
    assert "written to" in results[1].stderr, results[1].text
    done = inspect(programs, folder)
    assert done.status == PROBLEM and "broadcast(" in done.stdout, done.text


def test_without_a_chosen_directory_the_records_go_to_a_private_one(programs):
    ranks = start_ranks(programs, None, 2, "leave-out", "--timeout", 1)
    failed = ranks[0].finish()
    ranks[1].finish()
    said = re.search(r"read it with: lockstep inspect flight (\S+)", failed.stderr)
    assert failed.status == 1 and said, failed.text
    place = pathlib.Path(said[1])
    assert place.stat().st_mode & 0o777 == 0o700 and place.parent.stat().st_mode & 0o777 == 0o700
    assert (place / "rank_0.json").stat().st_mode & 0o777 == 0o600
    done = inspect(programs, place)
    assert done.status == PROBLEM and "all_reduce(SUM, Float [2, 3])" in done.stdout, done.text


def test_a_healthy_record_is_said_to_be_so(programs, folder):
    ranks = start_ranks(programs, folder, 1, "wait")
    result = ranks[0].finish()
    assert result.status == 0 and not folder.exists(), result.text
    record = {
        "format": "lockstep-flight", "version": "1.0", "rank": 0, "world_size": 1, "pid": 1, "host": "h", "boot_id": "b",
        "program": "p", "reason": "SIGUSR1", "realtime_ns": 9, "monotonic_ns": 9, "loaded_ns": 1, "overwritten": 0,
        "pg_config": {}, "entries": [],
    }  # fmt: skip
    folder.mkdir()
    (folder / "rank_0.json").write_text(json.dumps(record))
    done = inspect(programs, folder)
    assert done.status == OK and "Nothing is wrong" in done.stdout, done.text


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"format": "other"}', b"\x80\x04pickle\x1b[1m", b"[" * 100000])
def test_a_file_that_is_no_record_is_named(programs, folder, content):
    folder.mkdir()
    (folder / "rank_0.json").write_bytes(content)
    done = inspect(programs, folder)
    assert done.status == MISUSE and done.stdout == "", done.text
    assert f"{folder}/rank_0.json: not a flight record" in done.stderr and "\x1b" not in done.stderr, done.text


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["inspect"], ["KIND", "flight", "inspect --help"]),
        (["inspect", "flihgt"], ["flihgt"]),
        (["inspect", "flight"], ["DIR"]),
        (["inspect", "flight", "/nonexistent"], ["/nonexistent", "No such file"]),
        (["inspect", "flight", "."], ["holds no flight records"]),
    ],
    ids=lambda words: " ".join(words),
)
def test_misuse_is_named(programs, arguments, words):
    done = programs.run("lockstep", *arguments)
    assert done.status == MISUSE and done.stdout == "", done.text
    assert all(word in done.stderr for word in words), done.text


def test_help_shows_examples(programs):
    done = programs.run("lockstep", "inspect", "flight", "--help")
    assert done.status == OK and "Examples:" in done.stdout and "--json" in done.stdout, done.text
    done = programs.run("lockstep", "inspect", "--help")
    assert done.status == OK and "flight" in done.stdout, done.text
