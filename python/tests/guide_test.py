"""The guide "Lockstep from Python" (docs/python.md): its program runs as shown there, in all the ways shown there."""

import pathlib
import re

import processes
import pytest
from ports import free_port

GUIDE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "python.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.fixture
def folder(tmp_path):
    """An empty directory with the guide's train.py in it."""
    (tmp_path / "train.py").write_text(BLOCKS[0], encoding="utf-8")
    return tmp_path


@pytest.fixture(scope="module")
def losses(tmp_path_factory):
    """What `python train.py` writes, which makes its own two processes."""
    folder = tmp_path_factory.mktemp("guide")
    (folder / "train.py").write_text(BLOCKS[0], encoding="utf-8")
    return processes.run_python("train.py", cwd=folder)


def test_the_program_learns(losses):
    epochs = re.findall(r"^epoch (\d+): loss ([0-9.]+)$", losses, re.MULTILINE)
    assert [int(epoch) for epoch, _ in epochs] == [5, 10, 15, 20], losses
    assert float(epochs[0][1]) > 2 * float(epochs[-1][1]), losses
    shown = re.search(r"^    epoch 20: loss ([0-9.]+)$", GUIDE.read_text(encoding="utf-8"), re.MULTILINE)
    assert float(epochs[-1][1]) == pytest.approx(float(shown[1]), rel=0.2), "the guide shows another training"


def test_torchrun_gives_the_same_numbers(folder, losses):
    command = ("-m", "torch.distributed.run", "--nproc-per-node", 2, "--master-port", free_port(), "train.py")
    assert processes.run_python(*command, cwd=folder) == losses


@pytest.mark.long
def test_processes_started_by_hand_give_the_same_numbers(folder, losses):
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    assert processes.run_python("train.py", cwd=folder, environment=meeting, processes=2) == losses


def test_the_other_blocks_are_python():
    assert len(BLOCKS) > 1
    for block in BLOCKS[1:]:
        compile(block, GUIDE.name, "exec")
