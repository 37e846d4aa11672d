"""Schedules, operators and tables against torch.profiler's, and what reads its traces on ours."""

import json
import pathlib
import random
import shutil
import warnings

import pytest
import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import EventList, FunctionEvent, FunctionEventAvg
from torch.profiler import ProfilerAction, ProfilerActivity, profile, record_function, schedule

RANKS = 2
SCHEDULES = 10_000
STEPS = 60
CYCLES = 100  # schedules of one's own
LISTS = 300  # of events
# What rows of averages add up.
SUMS = ("count", "flops", "cpu_time_total", "self_cpu_time_total", "device_time_total", "self_device_time_total",
        "cpu_memory_usage", "self_cpu_memory_usage", "device_memory_usage", "self_device_memory_usage")


def torchs_actions(wait, warmup, active, repeat, skip_first, skip_first_wait):
    try:
        when = schedule(
            wait=wait, warmup=warmup, active=active, repeat=repeat, skip_first=skip_first, skip_first_wait=skip_first_wait
        )
    except AssertionError:
        return "error"
    return "".join(str(when(step).value) for step in range(STEPS))


def test_schedules_are_torchs(ask_driver):
    rng = random.Random(20261123)
    most = (5, 5, 6, 4, 9)
    wanted = []
    for _ in range(SCHEDULES):
        low = -1 if rng.random() < 0.05 else 0
        wanted.append((*(rng.randint(low, high) for high in most), rng.randint(0, 1)))
    answers = ask_driver("profiler_driver", [" ".join(map(str, (*one, STEPS))) for one in wanted], "schedule")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a schedule without a warm-up
        for arguments, answer in zip(wanted, answers, strict=True):
            assert answer == torchs_actions(*arguments), arguments


def torchs_cycles(actions):
    """The scopes of each cycle, of which each step has one."""
    cycles = []

    def ready(recorded):
        cycles.append([event.name for event in recorded.events() if event.name.startswith("work ")])

    with profile(activities=[ProfilerActivity.CPU], schedule=lambda step: ProfilerAction(int(actions[step])),
                 on_trace_ready=ready) as recorded:  # fmt: skip
        for step in range(len(actions)):
            if step > 0:
                recorded.step()
            with record_function(f"work {step}"):
                pass
    return cycles


def test_schedules_of_ones_own_make_torchs_cycles(ask_driver):
    """Those that leave a cycle before its last step, too; but after a record no warm-up, of which torch ends by SIGSEGV."""
    rng = random.Random(20261130)
    wanted = []
    for _ in range(CYCLES):
        actions = [rng.choice("0123")]
        for _ in range(rng.randint(0, 11)):
            actions.append(rng.choice("023" if actions[-1] == "2" else "0123"))
        wanted.append("".join(actions))
    assert all(any(pair in actions for actions in wanted) for pair in ("10", "20", "32", "33"))
    answers = ask_driver("profiler_driver", wanted, "cycles")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what is left early
        for actions, answer in zip(wanted, answers, strict=True):
            assert json.loads(answer) == torchs_cycles(actions), actions


def numbers(*sizes):
    count = torch.Size(sizes).numel()
    return (torch.arange(count, dtype=torch.float32) / count).reshape(sizes)


class Model:
    """The same operators as profiler_driver.cc's."""

    def __init__(self):
        self.images, self.labels, self.one = numbers(4, 3, 8, 8), torch.arange(4), torch.ones([])
        self.filters = numbers(5, 3, 3, 3).requires_grad_()
        self.bias = numbers(5).requires_grad_()
        self.weight = numbers(10, 320).requires_grad_()

    def step(self):
        with record_function("step"):
            hidden = torch.relu(torch.conv2d(self.images, self.filters, self.bias, 1, 1))
            output = torch.nn.functional.linear(hidden.flatten(1), self.weight)
            loss = torch.nn.functional.cross_entropy(output, self.labels)
            # What loss.backward() calls after operators of its own.
            torch.autograd.Variable._execution_engine.run_backward(
                (loss,), (self.one,), False, False, (), allow_unreachable=True, accumulate_grad=True
            )
            with torch.no_grad():
                for parameter in (self.filters, self.bias, self.weight):
                    parameter.sub_(parameter.grad, alpha=0.125)
                    parameter.grad.zero_()


@pytest.fixture(scope="module")
def torchs_averages():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model = Model()
    model.step()
    with profile(
        activities=[ProfilerActivity.CPU], schedule=schedule(wait=0, warmup=1, active=2, repeat=1),
        record_shapes=True, profile_memory=True, with_flops=True,
    ) as recorded:  # fmt: skip
        for _ in range(3):
            model.step()
            recorded.step()
    torch.set_num_threads(threads)
    return {"by name": recorded.key_averages(), "by shape": recorded.key_averages(group_by_input_shape=True)}


@pytest.fixture(scope="module")
def our_averages(run_driver):
    return json.loads(run_driver("profiler_driver", "model").stdout)


@pytest.mark.parametrize("kind", ["by name", "by shape"])
def test_operators_are_torchs(torchs_averages, our_averages, kind):
    """Counts, shapes, operations, and which are called by no other; times are each one's own."""
    torchs = {(row.key, str(row.input_shapes or [])): (row.count, row.flops, row.cpu_parent is None)
              for row in torchs_averages[kind]}
    ours = {(row["key"], str(row["input_shapes"] or [])): (row["count"], row["flops"], row["is_top_level"])
            for row in our_averages[kind]["rows"]}
    assert ours == torchs
    assert any(flops > 0 for _, flops, _ in ours.values())


@pytest.mark.parametrize("kind", ["by name", "by shape"])
def test_tables_are_torchs(our_averages, kind):
    """What torch prints for our values."""
    rows = EventList(use_device=None, profile_memory=True, with_flops=True)
    for row in our_averages[kind]["rows"]:
        average = FunctionEventAvg()
        for name, value in row.items():
            setattr(average, name, value)
        average.input_shapes = row["input_shapes"] if row["input_shapes"] is not None else ""
        average.node_id, average.stack, average.overload_name, average.is_user_annotation = -1, [], "", False
        average.cpu_parent = None if row["is_top_level"] else average
        rows.append(average)
    check_against(our_averages[kind], rows)


def check_against(ours, rows):
    """Our tables and sums against what torch makes of its rows."""
    assert len(ours["tables"]) > 5
    for table in ours["tables"]:
        assert table["text"] == rows.table(**table["arguments"]), table["arguments"]
    total = rows.total_average()
    assert ours["total"]["key"] == total.key
    assert {name: ours["total"][name] for name in SUMS} == pytest.approx({name: getattr(total, name) for name in SUMS})
    assert ours["self_cpu_time_total"] == pytest.approx(rows.self_cpu_time_total)


def random_events(rng):
    """Calls in two threads, within each other or across each other's ends, with kernels and memory; and what runs on a card."""
    events = []
    for number in range(rng.randint(1, 40)):
        start, on_device = rng.randrange(200), number == 0 or rng.random() < 0.2
        events.append({
            "name": rng.choice(["aten::mm", "aten::add", "aten::empty", "step", "a kernel's name" * 5]),
            "thread": rng.randint(1, 2), "start_us": start, "end_us": start + rng.choice([1, 20, 100, 1500, 2_000_000]),
            "on_device": on_device, "kernel_us": 0 if on_device else rng.choice([0, 0, 7, 90]),
            "is_async": not on_device and rng.random() < 0.1, "is_user_annotation": number > 0 and rng.random() < 0.1,
            "flops": rng.choice([0, 0, 600, 10**7]),
            "input_shapes": rng.choice([[], [[2, 3], []], [[128, 1024], [1024, 4], [4]]]),
            **{name: 0 if on_device else rng.choice([0, 16, -16, 3000, 5 << 20, -(7 << 30)])
               for name in ("cpu_memory_usage", "device_memory_usage")}})
    return events


def torchs_events(events):
    made = []
    for number, one in enumerate(events):
        fields = {name: one[name] for name in ("name", "thread", "start_us", "end_us", "is_async", "is_user_annotation", "flops",
                                               "input_shapes", "cpu_memory_usage", "device_memory_usage")}
        device = DeviceType.CUDA if one["on_device"] else DeviceType.CPU
        event = FunctionEvent(id=number, stack=[], use_device="cuda", device_type=device, **fields)
        if one["kernel_us"] > 0:
            event.append_kernel("kernel", 0, one["kernel_us"])
        made.append(event)
    made.sort(key=lambda event: [event.time_range.start, -event.time_range.end])
    answer = EventList(made, use_device="cuda", profile_memory=True, with_flops=True)
    answer._build_tree()
    return answer


def test_averages_and_tables_with_devices_are_torchs(ask_driver):
    rng = random.Random(20261129)
    wanted = [random_events(rng) for _ in range(LISTS)]
    headers = set()
    answers = ask_driver("profiler_driver", [json.dumps(events) for events in wanted], "events")
    for events, line in zip(wanted, answers, strict=True):
        answer, theirs = json.loads(line), torchs_events(events)
        for kind, by_shape in (("by name", False), ("by shape", True)):
            rows = theirs.key_averages(group_by_input_shapes=by_shape)
            assert [row["key"] for row in answer[kind]["rows"]] == [row.key for row in rows]
            for ours, row in zip(answer[kind]["rows"], rows, strict=True):
                assert {name: ours[name] for name in SUMS} == {name: getattr(row, name) for name in SUMS}, events
            check_against(answer[kind], rows)
            headers.add(answer[kind]["tables"][0]["text"].splitlines()[1])
    assert any("Self CUDA %" in header and "Self CUDA Mem" in header and "Input Shapes" in header for header in headers)


def write_traces(run_driver, folder, collectives_as):
    for rank in range(RANKS):
        run_driver("profiler_driver", "traces", folder, rank, collectives_as)


@pytest.fixture(scope="module")
def traces(run_driver, tmp_path_factory):
    folder = tmp_path_factory.mktemp("traces")
    write_traces(run_driver, folder, "gloo")
    return folder


def test_traces_are_as_torchs_files(traces):
    files = sorted(traces.iterdir())
    assert len(files) == 2 * RANKS
    for path in files:
        trace = json.loads(path.read_text())
        assert trace["distributedInfo"]["world_size"] == RANKS
        assert path.name.startswith(f"rank{trace['distributedInfo']['rank']}.") and path.name.endswith(".pt.trace.json")
        assert trace["record_shapes"] == trace["profile_memory"] == trace["with_flops"] == 1
        steps = [event["name"] for event in trace["traceEvents"] if event.get("name", "").startswith("ProfilerStep#")]
        assert len(steps) == 3
        operations = [event for event in trace["traceEvents"] if event.get("name") == "gloo:all_reduce"]
        assert len(operations) == 3
        window = next(event for event in trace["traceEvents"] if event.get("name") == "PyTorch Profiler (0)")
        for event in operations:  # one clock
            assert window["ts"] <= event["ts"] <= window["ts"] + window["dur"]


@pytest.mark.parametrize("environment, level", [
    ({"RANK": "0", "LOCKSTEP_PROFILE": "1"}, "99"), ({"RANK": "0", "LOCKSTEP_PROFILE": "1", "KINETO_LOG_LEVEL": "0"}, "0"),
    ({"LOCKSTEP_PROFILE": "1"}, "none"), ({"RANK": "0", "LOCKSTEP_PROFILE": "on_signal"}, "none")])
def test_kineto_is_quietened_before_the_program_has_threads(run_driver, environment, level):
    assert run_driver("profiler_driver", "level", **environment).stdout == f"{level}\n"


@pytest.mark.parametrize("wait", [0, 90], ids=["records", "waits"])
def test_what_the_variable_has_begun_gives_way_to_a_programs_own_profiler(run_driver, tmp_path, wait):
    other = tmp_path / "other"
    done = run_driver("profiler_driver", "own", tmp_path / "own", LOCKSTEP_PROFILE=f"wait:{wait},warmup:0,active:100,dir={other}")
    assert done.stderr.count("the program starts a Profiler of its own, so this one ends") == 1, done.stderr
    assert "is its wait too long" not in done.stderr, done.stderr
    assert len(list((tmp_path / "own").iterdir())) == 1


@pytest.mark.parametrize("collectives_as", ["gloo", "nccl"])
def test_tensorboards_plugin_reads_traces(run_driver, tmp_path, collectives_as):
    pytest.importorskip("torch_tb_profiler", reason="reads our traces")
    from torch_tb_profiler.io.cache import Cache
    from torch_tb_profiler.profiler.loader import RunLoader

    write_traces(run_driver, tmp_path, collectives_as)
    run = RunLoader("run", str(tmp_path), Cache()).load()
    assert sorted(run.workers) == ["All", "rank0", "rank1"]
    for (worker, _), profile in run.profiles.items():
        if worker == "All":  # the distributed view
            assert sorted(profile.steps_to_wait["data"]["all"]) == ["rank0", "rank1"]
            assert len(profile.steps_to_wait["data"]) == 1 + 3  # all, and each
            for of_worker in profile.comm_ops["data"].values():
                assert [row[:2] for row in of_worker["rows"]] == [[f"{collectives_as}:all_reduce", 3]]
        else:
            assert "aten::linear" in {row["name"] for row in profile.operation_table_by_name["data"]}
            assert profile.has_communication


def test_holistic_trace_analysis_reads_traces(traces):
    hta = pytest.importorskip("hta.trace_analysis", reason="reads our traces")
    files = {rank: str(sorted(traces.glob(f"rank{rank}.*"))[0]) for rank in range(RANKS)}
    analysis = hta.TraceAnalysis(trace_files=files)
    assert sorted(analysis.t.traces) == list(range(RANKS))
    for rank in range(RANKS):
        assert len(analysis.t.get_trace(rank)) > 50


def test_holistic_trace_analysis_finds_the_ranks_in_a_folder(traces, tmp_path):
    """By a pattern of its own in the files. Of several cycles it takes any, and not the same for all ranks."""
    hta = pytest.importorskip("hta.trace_analysis", reason="reads our traces")
    for rank in range(RANKS):
        shutil.copy(sorted(traces.glob(f"rank{rank}.*"))[0], tmp_path)
    analysis = hta.TraceAnalysis(trace_dir=str(tmp_path))
    for rank, path in analysis.t.trace_files.items():
        assert pathlib.Path(path).name.startswith(f"rank{rank}.")
    assert sorted(analysis.t.traces) == list(range(RANKS))
    assert analysis.get_profiler_steps() == [1, 2]  # without the last one
    overlap = analysis.get_comm_comp_overlap(visualize=False)
    assert list(overlap["rank"]) == list(range(RANKS))
    assert overlap["comp_comm_overlap_pctg"].isna().all()  # of kernels, which there are none
