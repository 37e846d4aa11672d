"""`lockstep bench`: its table and its JSON, how it starts, and how it ends when something goes wrong."""

import contextlib
import json
import os
import pathlib
import signal

import hosts
import pytest

MISUSE = 2
SMALL = ["-b", "4", "-e", "64K", "-f", "128", "-n", "3", "-w", "1"]  # 4 and 512 bytes, 64 KiB
COLLECTIVES = {
    "all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "gather", "scatter", "sendrecv",
    "pingpong", "barrier",
}  # fmt: skip
# nccl-tests, doc/PERFORMANCE.md: what the algorithm bandwidth is multiplied with, for n ranks.
FACTORS = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "gather": lambda n: (n - 1) / n,
    "scatter": lambda n: (n - 1) / n,
    "reduce": lambda n: 1,
    "broadcast": lambda n: 1,
    "sendrecv": lambda n: 1,
    "pingpong": lambda n: 1,
}


def rows_of(table: str) -> list:
    """The fields of every line that is no comment."""
    return [line.split() for line in table.splitlines() if not line.startswith("#")]


def has_variable(pid: int, entry: bytes) -> bool:
    """Whether the process was started with this entry in its environment."""
    with contextlib.suppress(OSError):
        return entry in pathlib.Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return False


@pytest.mark.parametrize("ranks, memory", [(2, "arena"), (3, "staged")])
def test_everything_is_measured_and_right(programs, ranks, memory):
    done = programs.run("lockstep", "bench", *SMALL, "--nproc-per-node", ranks, f"--{memory}", "--json", "-")
    assert done.status == 0, done.text
    report = json.loads(done.stdout)
    assert report["ranks"] == ranks and report["memory"] == memory and report["wrong"] == 0
    assert report["iterations"] == 3 and report["warmup"] == 1
    assert {entry["collective"] for entry in report["results"]} == COLLECTIVES
    for entry in report["results"]:
        measured = [entry[placement] for placement in ("out_of_place", "in_place") if entry[placement]]
        assert measured, entry
        for one in measured:
            assert one["wrong"] == 0, entry
            assert 0 < one["min_us"] <= one["p50_us"] <= one["p99_us"] == one["max_us"], entry
            if entry["collective"] != "barrier":
                assert one["algbw_gbps"] == pytest.approx(entry["size_bytes"] / one["time_us"] / 1000), entry
                factor = FACTORS[entry["collective"]](ranks)
                assert one["busbw_gbps"] == pytest.approx(one["algbw_gbps"] * factor), entry
    both = {entry["collective"] for entry in report["results"] if entry["out_of_place"] and entry["in_place"]}
    assert both == {"all_gather", "reduce_scatter", "gather", "scatter"}
    # The table is there too, once, and tells the same.
    assert done.stderr.count("# lockstep bench ") == 1 and f"memory {memory}" in done.stderr, done.text
    rows = rows_of(done.stderr)
    assert len(rows) == len(report["results"]) and all(len(row) == 17 for row in rows), done.text
    assert [int(row[0]) for row in rows] == [entry["size_bytes"] for entry in report["results"]]


def test_two_ranks_and_the_table_on_standard_output_are_the_default(programs):
    done = programs.run("lockstep", "bench", "all_gather", "barrier", *SMALL)
    assert done.status == 0 and done.stderr == "", done.text
    assert "# ranks 2," in done.stdout and done.stdout.count("# Out of bounds values : 0 OK") == 2, done.text
    assert done.stdout.count("# Avg bus bandwidth") == 1, done.text  # a barrier has none
    sizes = [row[0] for row in rows_of(done.stdout)]
    assert sizes == ["8", "512", "65536", "0"]  # at least one element from each rank


def test_options_reach_the_measurement(programs):
    done = programs.run(
        "lockstep", "bench", "reduce", "scatter", "-b", "1K", "-e", "1K", "-n", "2", "-w", "0", "-t", "int32", "-o", "max",
        "-r", "1", "--in-place", "--json", "result.json",
    )  # fmt: skip
    assert done.status == 0, done.text
    report = json.loads((programs.folder / "result.json").read_text())
    reduce, scatter = report["results"]
    assert (reduce["type"], reduce["redop"], reduce["root"]) == ("int32", "max", 1)
    assert (scatter["type"], scatter["redop"], scatter["root"]) == ("int32", None, 1)
    assert (reduce["size_bytes"], reduce["count"]) == (1024, 256)
    assert (scatter["size_bytes"], scatter["count"]) == (1024, 128)
    assert scatter["out_of_place"] is None and scatter["in_place"]["wrong"] == 0
    assert len(rows_of(done.stdout)) == 2, done.text


def test_it_joins_the_job_that_it_is_started_in(programs):
    bench = programs.find("lockstep")
    done = programs.lockstep_run(3, "--no-prefix", bench, "bench", "broadcast", *SMALL, "--json", "-")
    assert done.status == 0, done.text
    assert json.loads(done.stdout)["ranks"] == 3
    assert done.stderr.count("# lockstep bench ") == 1, done.text


def test_ranks_on_several_hosts_are_told_by_host(programs):
    net = hosts.PretendedHosts(2)
    ranks = programs.start_on(net, [2, 1], programs.find("lockstep"), "bench", "broadcast", *SMALL, "--json", "-")
    done = [rank.finish() for rank in ranks]
    done[0].skip_without_ucx()
    assert [each.status for each in done] == [0] * 3, "\n".join(each.text for each in done)
    report = json.loads(done[0].stdout)
    assert report["hosts"] == [{"name": "host-a", "ranks": [0, 1]}, {"name": "host-b", "ranks": [2]}]
    assert "# ranks 3, 2 hosts: host-a (ranks 0 and 1), host-b (rank 2), " in done[0].stderr, done[0].text


def test_started_by_hand_it_joins_too(programs):
    ranks = programs.run_ranks(range(2), "lockstep", "bench", "pingpong", *SMALL)
    assert [rank.status for rank in ranks] == [0, 0], "\n".join(rank.text for rank in ranks)
    assert "# ranks 2," in ranks[0].stdout and ranks[1].stdout == "", ranks[1].text


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["allreduce"], ["'allreduce'", "all_reduce", "pingpong", "barrier"]),
        (["-b", "1M", "-e", "1K"], ["--begin (1.0 MiB)", "--end (1.0 KiB)"]),
        (["-b", "4Q"], ["--begin", "'4Q'", "100M"]),
        (["-e", "0"], ["--end", "'0'"]),
        (["-f", "1"], ["--factor is 1"]),
        (["-n", "0"], ["--iters is 0"]),
        (["-n", "many"], ["--iters", "many"]),
        (["-t", "complex64"], ["'complex64'", "bfloat16"]),
        (["-o", "band"], ["band", "float"]),
        (["-r", "2"], ["--root is 2", "0 to 1"]),
        (["--nproc-per-node", "0"], ["--nproc-per-node is 0"]),
        (["--nproc-per-node", "1", "sendrecv"], ["sendrecv", "2 ranks"]),
        (["--staged", "--arena"], ["--arena"]),
        (["--out-of-place", "all_reduce"], ["all_reduce", "in place only"]),
        (["--timeout", "0"], ["--timeout"]),
        (["--json", "/"], ["'/'", "directory"]),
        (["--json", "no/such/folder.json"], ["no/such", "No such file"]),
        (["--bogus"], ["--bogus"]),
    ],
    ids=lambda words: " ".join(words),
)
def test_misuse_is_named_and_nothing_is_started(programs, arguments, words):
    done = programs.run("lockstep", "bench", *arguments)
    assert done.status == MISUSE and done.stdout == "", done.text
    assert all(word in done.stderr for word in [*words, "lockstep bench --help"]), done.text
    assert done.stderr.count("error:") == 1, done.text


@pytest.mark.parametrize("arguments, words", [(["-r", "3"], "--root is 3"), (["--nproc-per-node", "2"], "job of 2")])
def test_in_a_job_misuse_is_said_by_one_rank(programs, arguments, words):
    ranks = programs.run_ranks(range(2), "lockstep", "bench", *arguments)
    assert [rank.status for rank in ranks] == [MISUSE, MISUSE], "\n".join(rank.text for rank in ranks)
    assert words in ranks[0].stderr and ranks[1].stderr == "", "\n".join(rank.text for rank in ranks)


def test_sizes_beyond_the_memory_are_refused(programs):
    done = programs.run("lockstep", "bench", "broadcast", "-b", "900T", "-n", "1")
    assert done.status == MISUSE and done.stdout == "", done.text
    assert done.stderr.count("error:") == 1 and "1800.0 TiB" in done.stderr and "--end" in done.stderr, done.text


def test_ctrl_c_ends_all_ranks(programs):
    child = programs.start("lockstep", "bench", "all_reduce", "-n", "10000000")
    child.wait_for("# all_reduce")
    child.kill(signal.SIGINT)
    done = child.finish()
    assert done.status == 128 + signal.SIGINT and "ended by SIGINT" in done.stderr, done.text
    programs.wait_until_gone()


def test_a_rank_that_dies_is_named(programs):
    child = programs.start("lockstep", "bench", "all_reduce", "-n", "10000000")
    child.wait_for("# all_reduce")
    (rank_1,) = [pid for pid in programs.survivors() if has_variable(pid, b"RANK=1")]
    os.kill(rank_1, signal.SIGKILL)
    done = child.finish()
    assert done.status == 1 and "process 1 terminated with signal SIGKILL" in done.stderr, done.text
    programs.wait_until_gone()


def test_help_shows_its_options_and_examples(programs):
    done = programs.run("lockstep", "bench", "--help")
    assert done.status == 0 and done.stderr == "", done.text
    assert all(word in done.stdout for word in ["all_reduce", "--begin", "--json", "--staged", "Examples:"]), done.text
