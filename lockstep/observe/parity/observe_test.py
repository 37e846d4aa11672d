"""Event files that SummaryWriter wrote, read with TensorBoard, and held against those of torch.utils.tensorboard."""

import collections
import io
import math
import os
import pty
import subprocess
import time

import pytest
import torch

np = pytest.importorskip("numpy")
pytest.importorskip("PIL", reason="reads the images that SummaryWriter wrote")
pytest.importorskip("tensorboard", reason="reads what SummaryWriter wrote")
from google.protobuf.json_format import MessageToDict  # noqa: E402
from PIL import Image  # noqa: E402
from tensorboard.backend.event_processing import event_accumulator, event_file_loader  # noqa: E402
from tensorboard.compat.proto import event_pb2  # noqa: E402
from tensorboard.plugins.hparams import plugin_data_pb2  # noqa: E402
from torch.utils.tensorboard import SummaryWriter  # noqa: E402


@pytest.fixture(scope="module")
def driver(bin_dir):
    return bin_dir / "observe_driver"


def run(driver, *arguments):
    return subprocess.run([driver, *map(str, arguments)], capture_output=True, text=True, timeout=120)


def events(folder):
    """All events by run, {run: [Event]}; each record's checksums are verified by the loader."""
    found = collections.defaultdict(list)
    for path in sorted(folder.rglob("events.out.tfevents.*")):
        for event in event_file_loader.RawEventFileLoader(str(path)).Load():
            found[str(path.parent.relative_to(folder))].append(event_pb2.Event.FromString(event))
    return dict(found)


def python_calls(folder):
    """The same calls as observe_driver.cc's write_all_kinds()."""
    writer = SummaryWriter(folder, purge_step=3, filename_suffix=".py")
    for step in range(5):
        writer.add_scalar("train/loss", 1 / (step + 1), step, 100.5 + step)
    writer.add_scalar("no step", 7)
    writer.add_scalar("values", math.nan, -1, 1.0)
    writer.add_scalar("values", math.inf, 2**63 - 1, 2.0)
    writer.add_scalar("values", -1e300, 2, 3.0)
    writer.add_scalar("tensor", torch.tensor([[2.5]], dtype=torch.bfloat16), 1)
    writer.add_scalar("new", 0.1, 1, 4.0, new_style=True)
    writer.add_scalar("new double", 0.1, 1, 4.0, new_style=True, double_precision=True)
    writer.add_scalars("main/tag", {"a": 1.5, "b": 2.5}, 3, 5.0)
    writer.add_scalars("main/tag", {"a": 3.5}, 4, 6.0)

    torch.manual_seed(0)
    normal = torch.randn(20, 30)
    writer.add_histogram("normal", normal, 1)
    writer.add_histogram("wide", (normal * 10).exp().half().clamp(max=6e4), 2)
    writer.add_histogram("whole", torch.arange(-5, 100), 3)
    writer.add_histogram("equal", torch.full((3,), 2.0), 4, 10)
    writer.add_histogram("ten", normal, 5, 10)
    writer.add_histogram("edges", normal, 6, [-1, 0, 0.5, 3])
    writer.add_histogram("few", normal, 7, max_bins=100)
    writer.add_histogram("seven", normal, 8, 23, max_bins=7)
    writer.add_histogram("zeros", torch.zeros(4), 9)
    writer.add_histogram_raw("raw", 0, 9, 10, 45, 285, [3, 6, 9], [3, 3, 4], 10)

    colors = torch.rand(3, 5, 7)
    writer.add_image("chw", colors * 1.5 - 0.2, 1)
    writer.add_image("hwc", (colors * 255).byte().permute(1, 2, 0), 2, dataformats="HWC")
    writer.add_image("hw", colors[0].double(), 3, dataformats="hw")
    writer.add_image("wh", colors[0], 4, dataformats="WH")
    writer.add_image("gray", colors[:1], 5)
    writer.add_image("rgba", torch.rand(4, 6, 6), 6)
    writer.add_images("batch", torch.rand(11, 3, 4, 5), 7)
    writer.add_images("gray batch", torch.rand(2, 4, 5, 1), 8, dataformats="NHWC")

    writer.add_text("notes", "**größer** → kleiner", 1, 7.0)
    writer.add_hparams({"layers": 3, "lr": 0.1, "optimizer": "AdamW"}, {"hparam/accuracy": 0.9, "hparam/loss": 0.2},
                       {"lr": [0.1, 0.01], "optimizer": ["SGD", "AdamW"]}, "trial", 5)
    writer.close()


def plain(event):
    """An event as a dict: without what differs by nature, pictures as pixels, histograms' sums apart."""
    fields = MessageToDict(event)
    if event.wall_time > 1e9:
        fields.pop("wallTime")
    fields.pop("sourceMetadata", None)
    values = fields.get("summary", {}).get("value", [])
    for value, message in zip(values, event.summary.value, strict=True):
        if "image" in value:
            pixels = np.array(Image.open(io.BytesIO(message.image.encoded_image_string)))
            value["image"]["encodedImageString"] = pixels.tolist()
        if "histo" in value:
            value["histo"]["sum"], value["histo"]["sumSquares"] = (
                pytest.approx(message.histo.sum, rel=1e-12), pytest.approx(message.histo.sum_squares, rel=1e-12))
            value["histo"]["bucketLimit"] = pytest.approx(list(message.histo.bucket_limit), rel=1e-12)
        if message.metadata.plugin_data.plugin_name == "hparams":
            content = plugin_data_pb2.HParamsPluginData.FromString(message.metadata.plugin_data.content)
            value["metadata"]["pluginData"]["content"] = MessageToDict(content)
    return fields


def unwrapped(value):
    """Without approx, on one of two sides."""
    if isinstance(value, dict):
        return {key: unwrapped(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [unwrapped(inner) for inner in value]
    return value.expected if hasattr(value, "expected") else value


def test_events_are_those_that_pytorch_writes(driver, tmp_path):
    done = run(driver, "tensorboard", tmp_path / "cc")
    assert done.returncode == 0 and not done.stderr, done.stderr
    python_calls(tmp_path / "py")
    ours, theirs = events(tmp_path / "cc"), events(tmp_path / "py")
    assert set(ours) == set(theirs) == {".", "main_tag_a", "main_tag_b", "trial"}
    for folder, expected in theirs.items():
        assert len(ours[folder]) == len(expected), folder
        for event, wanted in zip(ours[folder], expected, strict=True):
            assert unwrapped(plain(event)) == plain(wanted), wanted
    assert all(path.name.endswith(".cc") for path in (tmp_path / "cc").rglob("events*")), "the suffix"


def test_a_resumed_run_hides_what_it_does_again(driver, tmp_path):
    assert run(driver, "resume", tmp_path).returncode == 0
    reader = event_accumulator.EventAccumulator(str(tmp_path))
    reader.Reload()
    steps = [(event.step, event.value) for event in reader.Scalars("loss")]
    assert steps == [(step, 1) for step in range(6)] + [(6, 2), (7, 2)]
    values = [value for event in events(tmp_path)["."] for value in event.summary.value
              if value.metadata.plugin_data.plugin_name == "hparams"]
    contents = [plugin_data_pb2.HParamsPluginData.FromString(value.metadata.plugin_data.content) for value in values]
    assert [value.tag for value in values] == ["_hparams_/session_start_info"] * 2 + ["_hparams_/session_end_info"]
    assert contents[0].session_start_info.hparams["nesterov"].bool_value is True
    assert contents[2].session_end_info.status == 2, "failed"


@pytest.mark.parametrize("how, status", [("exit", 0), ("abort", -6), ("throw", -6), ("terminate", -15), ("segfault", -11)])
def test_a_process_that_ends_without_clean_up_loses_nothing(driver, tmp_path, how, status):
    done = run(driver, "end", tmp_path, how, 300)
    assert done.returncode == status, done.stderr
    assert sum(len(event.summary.value) for event in events(tmp_path)["."]) == 300


def test_a_key_of_the_terminal_ends_a_process_the_first_time(driver, tmp_path):
    """Ctrl-C comes from the kernel, not from a process; and nothing is lost."""
    child, terminal = pty.fork()
    if child == 0:
        os.execv(driver, [str(driver), "end", str(tmp_path), "kill", "300"])
    said = b""
    while b"ready" not in said:
        said += os.read(terminal, 1000)
    os.write(terminal, b"\x03")
    _, status = os.waitpid(child, 0)
    os.close(terminal)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == 2, status
    assert sum(len(event.summary.value) for event in events(tmp_path)["."]) == 300


def test_a_killed_process_has_written_what_it_had_time_for(driver, tmp_path):
    """Nothing waits for a full queue or a flush: what was logged is in the file while the process sleeps."""
    with subprocess.Popen([driver, "end", tmp_path, "kill", "300"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        found = 0
        deadline = time.monotonic() + 60
        while found < 300 and time.monotonic() < deadline:
            found = sum(len(event.summary.value) for event in events(tmp_path).get(".", []))
        process.kill()
    assert sum(len(event.summary.value) for event in events(tmp_path)["."]) == 300


def test_a_full_disk_stops_nothing(driver, tmp_path):
    """The kernel lets no file grow beyond 4096 bytes: the first records are there, none is torn, one warning is."""
    command = f"ulimit -f 4; trap '' XFSZ; exec {driver} end {tmp_path} exit 2000"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("SummaryWriter: cannot write to") == 1, done.stderr
    size = sum(path.stat().st_size for path in tmp_path.rglob("events*"))
    found = sum(len(event.summary.value) for event in events(tmp_path).get(".", []))
    assert 0 < size <= 4096 and found < 2000
