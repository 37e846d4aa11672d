"""The example `profile`, what `lockstep inspect trace` says of it, and LOCKSTEP_PROFILE before programs unchanged."""

import gzip
import json
import pathlib
import re
import signal
import sys
import xml.etree.ElementTree

import pytest
from trace_format import broken_rules

PLOT_TRACE = pathlib.Path(__file__).resolve().parents[1] / "scripts" / "plot-trace"
OK, MISUSE = 0, 2
RANKS = 2
MEMORY_USES = ("inputs", "activations", "gradients", "optimizer_state", "temporary", "other")
HIDDEN_LAYERS_OUTPUT = 64 * 512 * 4  # bytes, of the example's batch
GPT = ["char_gpt", "--data", "text", "--block-size", 32, "--layers", 2, "--heads", 2, "--width", 32, "--batch-size", 16,
       "--micro-batches", 4, "--steps", 7, "--warm-up", 1, "--sample", 1]
PARAMETERS = (784 * 512 + 512 + 512 * 10 + 10) * 4


def traces_of(folder):
    """The traces by rank, in the order in which they were written."""
    found = {}
    for path in sorted(folder.iterdir()):
        trace = json.loads(path.read_text())
        found.setdefault(trace["distributedInfo"]["rank"], []).append(trace)
    return found


def events_named(trace, start):
    return [event for event in trace["traceEvents"] if event.get("ph") == "X" and event["name"].startswith(start)]


def operations(trace, name):
    """Those of the groups' rows; the thread that called them has a bar of the same name."""
    return [event for event in events_named(trace, name) if "Queued (us)" in event["args"]]


@pytest.fixture
def profiled(programs, tmp_path):
    folder = tmp_path / "log" / "profiler"
    done = programs.lockstep_run(RANKS, "--no-prefix", "profile", "--slow-rank", 1, "--dir", folder)
    assert done.status == OK and "call stacks" not in done.stderr, done.text
    return folder, done


def test_each_rank_writes_a_trace_of_each_cycle(profiled):
    folder, done = profiled
    assert done.stdout.count("Self CPU time total: ") == 2, done.text  # rank 0's, of each cycle
    for column in ["Self CPU %", "CPU Mem", "# of Calls"]:
        assert column in done.stdout
    by_rank = traces_of(folder)
    assert sorted(by_rank) == list(range(RANKS))
    for rank, traces in by_rank.items():
        steps = [[event["name"] for event in events_named(trace, "ProfilerStep#")] for trace in traces]
        assert steps == [[f"ProfilerStep#{n}" for n in cycle] for cycle in ((2, 3, 4), (7, 8, 9))]
        for trace in traces:
            reductions = operations(trace, "lockstep:all_reduce")
            assert len(reductions) >= 3
            for event in reductions:
                assert event["args"]["Rank"] == rank and event["args"]["Process Group Ranks"] == "[0,1]"
                assert event["args"]["Seq"] > 0 and event["args"]["Bytes"] > 0 and event["args"]["Queued (us)"] >= 0
            first = [one["args"] for one in reductions if one["args"].get("Purpose", "").startswith("DDP bucket 1 of ")]
            assert len(first) == 3 and all(one["Call"].startswith("reducer.cc:") for one in first)
            assert events_named(trace, "DistributedDataParallel.forward")
            assert events_named(trace, "DataLoader: make a batch"), "of the loader's thread"
            products = [event["args"] for event in events_named(trace, "aten::addmm")]
            assert any(one["Input Dims"][1] == [64, 784] for one in products)
            assert all("main" in one["Call stack"] for one in products)
            assert broken_rules(trace) == []


def test_the_analysis_the_merged_trace_and_the_picture_have_all_ranks(programs, profiled, tmp_path):
    folder, _ = profiled
    merged = tmp_path / "all.json.gz"
    done = programs.run("lockstep", "inspect", "trace", "--merge", merged, folder)
    assert done.status == OK, done.text
    assert "A step takes" in done.stdout and "Operators by their own time" in done.stdout, done.text
    assert re.search(r"4 traces of 2 ranks, \d+ events; [1-9]\d* collectives", done.stderr), done.text
    report = json.loads(programs.run("lockstep", "inspect", "trace", "--json", folder).stdout)
    assert [rank["rank"] for rank in report["ranks"]] == list(range(RANKS))
    assert [rank["steps"] for rank in report["ranks"]] == [6, 6]
    phases = report["phases"]
    parts = ["data", "forward", "backward", "communication", "optimizer", "idle"]
    assert sum(phases[part] for part in parts) == pytest.approx(report["step_ms"])
    assert phases["forward"] > 0 and phases["backward"] > 0 and phases["optimizer"] > 0
    assert {"aten::mm", "aten::addmm"} <= {one["name"] for one in report["operators"]}
    for rank in report["ranks"]:
        (peak,) = rank["memory"]
        assert sum(peak[use] for use in MEMORY_USES) == peak["bytes"]
        assert peak["activations"] >= HIDDEN_LAYERS_OUTPUT and peak["temporary"] > 0, peak
        assert peak["held"]["parameters"] == PARAMETERS, peak
        assert PARAMETERS <= peak["held"]["gradients"] < PARAMETERS + 4 * 64, peak  # four gradients, from a cache line each

    trace = json.loads(gzip.decompress(merged.read_bytes()))
    assert broken_rules(trace) == []
    sent = {event["id"]: event for event in trace["traceEvents"] if event["ph"] == "s" and event["cat"] == "operation"}
    received = [event for event in trace["traceEvents"] if event["ph"] == "f" and event["cat"] == "operation"]
    assert received and all(sent[event["id"]]["ts"] <= event["ts"] for event in received)
    assert all({sent[event["id"]]["pid"], event["pid"]} == {0, 1} for event in received)

    picture = tmp_path / "trace.svg"
    done = programs.run(sys.executable, PLOT_TRACE, merged, 8, picture)
    assert done.status == OK, done.text
    words = {text.text for text in xml.etree.ElementTree.parse(picture).iter("{http://www.w3.org/2000/svg}text")}
    assert {"rank 0", "rank 1", "more to do", "waits"} <= words


def test_holistic_trace_analysis_reads_the_merged_trace(programs, profiled, tmp_path):
    """It takes a file for a rank's; the ranks are processes there."""
    hta = pytest.importorskip("hta.trace_analysis", reason="reads our traces")
    merged = tmp_path / "all.json.gz"
    assert programs.run("lockstep", "inspect", "trace", "--merge", merged, profiled[0]).status == OK
    trace = hta.TraceAnalysis(trace_files={0: str(merged)}).t
    events = trace.get_trace(0)
    for name in ("aten::addmm", "lockstep:all_reduce"):
        assert set(events[events["name"] == trace.symbol_table.sym_index[name]]["pid"]) == set(range(RANKS)), name


def test_tensorboards_plugin_reads_the_merged_trace(programs, profiled, tmp_path):
    """It takes it for one worker's; a worker's file has torch's name, and a run its folder."""
    pytest.importorskip("torch_tb_profiler", reason="reads our traces")
    from torch_tb_profiler.io.cache import Cache
    from torch_tb_profiler.profiler.loader import RunLoader

    folder = tmp_path / "merged"
    folder.mkdir()
    done = programs.run("lockstep", "inspect", "trace", "--merge", folder / "all.pt.trace.json", profiled[0])
    assert done.status == OK, done.text
    run = RunLoader("run", str(folder), Cache()).load()
    (profile,) = run.profiles.values()
    products = [row for row in profile.operation_table_by_name["data"] if row["name"] == "aten::addmm"]
    assert products and products[0]["calls"] == RANKS * 2 * 3 * 2  # of two cycles of three steps, two in each


def test_the_clock_of_another_host_is_found_out(programs, profiled, tmp_path):
    """As if rank 1 had been on a host whose clock is 3 ms ahead."""
    folder, _ = profiled
    for path in folder.iterdir():
        trace = json.loads(path.read_text())
        if trace["distributedInfo"]["rank"] == 1:
            trace["lockstep"]["boot_id"] = "another"
            trace["baseTimeNanoseconds"] += 3_000_000
            path.write_text(json.dumps(trace))
    done = programs.run("lockstep", "inspect", "trace", "--merge", tmp_path / "all.json", folder)
    assert done.status == OK and "back in time" not in done.stderr, done.text
    found = [tuple(map(float, pair)) for pair in re.findall(r"its clock was (\S+) us ahead, within (\S+) us", done.stderr)]
    assert found[0] == (0, 0) and len(found) == 2, done.text
    ahead, error = found[1]
    assert abs(abs(ahead) - 3000) <= error + 0.02, done.text  # both are printed with six digits


def test_a_trace_of_pythons_profiler_is_read(programs, tmp_path):
    """Two cycles of one process, with torch's own scopes, and blocks whose sizes are known."""
    torch = pytest.importorskip("torch")
    profiler = torch.profiler
    weight = torch.zeros(256, 256, requires_grad=True)
    optimizer = torch.optim.Adam([weight], foreach=False)
    batches = torch.utils.data.DataLoader(torch.ones(2 * 64, 256), batch_size=64)
    with profiler.profile(
        activities=[profiler.ProfilerActivity.CPU], profile_memory=True,
        schedule=profiler.schedule(wait=0, warmup=0, active=1, repeat=2),
        on_trace_ready=profiler.tensorboard_trace_handler(str(tmp_path)),
    ) as recorded:  # fmt: skip
        for batch in batches:
            optimizer.zero_grad()
            with profiler.record_function("forward"):
                loss = torch.mm(batch, weight).pow(2).sum()
            loss.backward()
            optimizer.step()
            recorded.step()
    report = json.loads(programs.run("lockstep", "inspect", "trace", "--json", tmp_path).stdout)
    assert [rank["steps"] for rank in report["ranks"]] == [2]
    assert all(report["phases"][phase] > 0 for phase in ("data", "forward", "backward", "optimizer"))
    assert "aten::mm" in {one["name"] for one in report["operators"]}
    (peak,) = report["ranks"][0]["memory"]
    weights = 256 * 256 * 4
    assert peak["gradients"] == weights
    assert 2 * weights <= peak["optimizer_state"] < 2 * weights + 64  # Adam's two, and its count of steps
    assert peak["held"] == {}  # nothing tells of it


def test_two_runs_are_compared(programs, profiled, tmp_path):
    folder, _ = profiled
    done = programs.lockstep_run(RANKS, "profile", "--dir", tmp_path / "second")
    assert done.status == OK, done.text
    done = programs.run("lockstep", "inspect", "trace", "--json", "--compare", folder, tmp_path / "second")
    assert done.status == OK, done.text
    report = json.loads(done.stdout)
    assert report["change"]["step_ms"] == pytest.approx(report["after"]["step_ms"] - report["before"]["step_ms"])
    phases = {run: report[run]["phases"] for run in ("before", "after")}
    for part in ("waiting", "hidden_communication"):
        assert report["change"]["phases"][part] == pytest.approx(phases["after"][part] - phases["before"][part])
    assert report["change"]["slowest"]["before"] == report["before"]["slowest"]["rank"]
    (memory,) = report["change"]["memory"]
    largest = max((peak["bytes"] + sum(peak["held"].values()), peak["bytes"])
                  for rank in report["after"]["ranks"] for peak in rank["memory"])  # fmt: skip
    assert memory["device"] == "CPU" and memory["bytes"]["after"] == largest[1]
    assert "backward" in programs.run("lockstep", "inspect", "trace", "--compare", folder, tmp_path / "second").stdout


def test_directories_without_traces_are_refused(programs, tmp_path):
    for folder, words in ((tmp_path / "none", "can't be read"), (tmp_path, "has no traces")):
        done = programs.run("lockstep", "inspect", "trace", folder)
        assert done.status == MISUSE and words in done.stderr, done.text


def test_lockstep_profile_records_a_program_that_knows_nothing_of_it(programs, tmp_path):
    """Two micro-batches make a step of its DistributedDataParallel, and it has 10."""
    folder = tmp_path / "unchanged"
    wish = f"wait:2,warmup:1,active:3,shapes,as:gloo,dir={folder}"
    arguments = ("--steps", 2, "--updates", 10)
    done = programs.lockstep_run(RANKS, "accumulation", *arguments, LOCKSTEP_PROFILE=wish)
    assert done.status == OK, done.text
    assert done.stderr.count(f"LOCKSTEP_PROFILE: the trace is written; read it with: lockstep inspect trace {folder}") == RANKS
    by_rank = traces_of(folder)
    assert sorted(by_rank) == list(range(RANKS))
    for (trace,) in by_rank.values():
        assert [event["name"] for event in events_named(trace, "ProfilerStep#")] == [f"ProfilerStep#{n}" for n in (3, 4, 5)]
        assert operations(trace, "gloo:all_reduce") and trace["record_shapes"] == 1


@pytest.mark.parametrize("ranks, command, scope", [
    (2, [*GPT, "--strategy=fsdp"], "FullyShardedDataParallel.forward"), (2, [*GPT, "--strategy=pipeline"], "PP:"),
    (1, ["pipeline", "--plain", "--data", "small", "--epochs", 1, "--batch-size", 64], "DataLoader worker: wait for room")],
    ids=["FSDP", "pipeline", "loader"])
def test_lockstep_profile_records_each_kind_of_training(programs, small_data, tmp_path, ranks, command, scope):
    """A loader alone, too: of its batches four are taken while it is recorded, so that its worker waits once from begin to end."""
    (tmp_path / "text").write_text("What trains is recorded.\n" * 300)
    folder = tmp_path / "traces"
    done = programs.lockstep_run(ranks, *command, LOCKSTEP_PROFILE=f"wait:1,warmup:1,active:4,dir={folder}")
    assert done.status == OK and done.stderr.count("the trace is written") == ranks, done.text
    traces = [json.loads(path.read_text()) for path in folder.iterdir()]
    assert len(traces) == ranks and all(events_named(trace, scope) for trace in traces)
    assert all(bool(operations(trace, "lockstep:")) == (ranks > 1) for trace in traces)
    report = json.loads(programs.run("lockstep", "inspect", "trace", "--json", folder).stdout)
    assert [rank["steps"] for rank in report["ranks"]] == [4] * ranks
    for rank in report["ranks"]:
        assert all(rank["phases"][phase] > 0 for phase in ("data", "forward", "backward", "optimizer")), rank


@pytest.mark.parametrize("given", [{}, {"LOCKSTEP_PROFILE": "on_signal,active:2,dir=log/profiler"}], ids=["", "by words"])
def test_a_running_job_is_recorded_on_demand(programs, given):
    """Twice; then the job still runs, until it is ended."""
    folder = programs.folder / "log" / "profiler"
    training = ["accumulation", "--updates", 10**9]
    job = programs.start("lockstep", "run", "--nproc-per-node", RANKS, *training, LOCKSTEP_LOG="info", **given)
    job.wait_for(rf"(?s)(joined {RANKS} ranks.*){{{RANKS}}}", "stderr")
    for times in (1, 2):
        job.kill(signal.SIGUSR2)
        job.wait_for(rf"(?s)(the trace is written.*){{{times * RANKS}}}", "stderr")
    assert {rank: len(traces) for rank, traces in traces_of(folder).items()} == {rank: 2 for rank in range(RANKS)}
    job.kill(signal.SIGTERM)
    assert job.finish().status == 128 + signal.SIGTERM


def test_a_programs_own_profiler_goes_first(programs, tmp_path):
    wish = f"wait:0,warmup:0,active:1,dir={tmp_path / 'other'}"
    done = programs.lockstep_run(RANKS, "profile", "--dir", tmp_path / "own", LOCKSTEP_PROFILE=wish)
    assert done.status == OK, done.text
    assert done.stderr.count("the program runs a Profiler of its own") == RANKS
    assert len(traces_of(tmp_path / "own")) == RANKS and not (tmp_path / "other").exists()


def test_the_signal_does_not_end_what_has_no_handler(programs):
    job = programs.start("lockstep", "run", "sh", "-c", "echo begun; read line; echo $line")
    job.wait_for("begun")
    job.kill(signal.SIGUSR2)
    job.wait_for("no process has a handler", "stderr")
    job.process.stdin.write("alive\n")
    done = job.finish()
    assert done.status == OK and "alive" in done.stdout, done.text


def test_lockstep_profile_says_what_is_wrong(programs):
    done = programs.lockstep_run(1, "accumulation", LOCKSTEP_PROFILE="active:none")
    assert done.status != OK and "LOCKSTEP_PROFILE" in done.stderr, done.text
    for updates in (1, 20):  # it ends in a step that waits, and in one that is recorded
        done = programs.lockstep_run(1, "accumulation", "--updates", updates, LOCKSTEP_PROFILE="active:1000")
        assert done.status == OK and "ask for fewer steps" in done.stderr, done.text
    done = programs.lockstep_run(1, "all_reduce", LOCKSTEP_PROFILE="1")
    assert done.status == OK and done.stderr.count("LOCKSTEP_PROFILE: nothing was recorded") == 1, done.text
