"""Hugging Face accelerate and Lightning, unchanged, with the engine in Gloo's place, train as one process does.

Three ways put it there: a call, a variable, and `python -m lockstep`. Over two hosts they train as on one.
"""

import json
import os
import sys

import hosts
import pytest
import torch
import training
from ports import free_port
from processes import PROGRAMS, run_programs, run_python
from ranks import BACKEND, run_ranks

ENGINE = {"lockstep": "lockstep._C", "gloo": "torch._C._distributed_c10d"}[BACKEND]  # the module of the group's class
REPLACE = {"LOCKSTEP_REPLACE_GLOO": int(BACKEND == "lockstep")}
RUNNER = ["-m", "lockstep"] if BACKEND == "lockstep" else []
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
ACCELERATE = PROGRAMS / "accelerate_training.py"
LIGHTNING = PROGRAMS / "lightning_training.py"


@pytest.fixture(scope="module")
def plain():
    return training.train_plainly()


def outcomes(folder, plain):
    """Both ranks', of which is shown that they trained, as one process would, on the engine."""
    results = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
    before = training.loss_of(training.make_model(), training.data()[:]).item()
    for result in results:
        assert result["engine"] == ENGINE and result["backend"] == "gloo"
        assert result["loss"] < before / 2
        torch.testing.assert_close(torch.tensor(result["parameters"]), torch.tensor(plain["parameters"]))
    assert results[0]["parameters"] == results[1]["parameters"]  # bit for bit
    return results


def check_accelerate(folder, plain):
    for result in outcomes(folder, plain):
        assert result["gathered"] == list(range(21))
        assert result["mean"] == 1.5
        assert result["objects"] == ["rank 0", "rank 1"]


def check_lightning(folder, plain):
    first, second = outcomes(folder, plain)
    assert first["gathered"] == second["gathered"] == [0, 1]
    assert first["logged"] == second["logged"]
    assert list(folder.glob("checkpoints/*.ckpt"))


def run_after_a_call(rank, world, name, port, *arguments):
    """As under a launcher that sets the usual variables."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world), NODE_RANK="0", ACCELERATE_USE_CPU="true")
    if BACKEND == "lockstep":
        import lockstep

        lockstep.replace_gloo()
        assert lockstep.gloo_is_replaced()
    __import__(name).train(*arguments)


def test_accelerate_by_a_call(tmp_path, plain):
    pytest.importorskip("accelerate")
    run_ranks(run_after_a_call, 2, "accelerate_training", free_port(), str(tmp_path), backend=None)
    check_accelerate(tmp_path, plain)


def test_accelerate_by_a_variable(tmp_path, plain):
    pytest.importorskip("accelerate")
    run_python(*TORCHRUN, ACCELERATE, tmp_path, environment=REPLACE)
    check_accelerate(tmp_path, plain)


def test_accelerate_by_our_runner(tmp_path, plain):
    pytest.importorskip("accelerate")
    run_python(*TORCHRUN, *RUNNER, ACCELERATE, tmp_path)
    check_accelerate(tmp_path, plain)


def test_lightning_by_a_call(tmp_path, plain):
    pytest.importorskip("lightning")
    run_ranks(run_after_a_call, 2, "lightning_training", free_port(), str(tmp_path), "ddp", backend=None)
    check_lightning(tmp_path, plain)


def test_lightning_by_a_variable(tmp_path, plain):
    pytest.importorskip("lightning")
    """Lightning spawns the processes."""
    run_python(LIGHTNING, tmp_path, "ddp_spawn", environment=REPLACE)
    check_lightning(tmp_path, plain)


def test_lightning_by_our_runner(tmp_path, plain):
    pytest.importorskip("lightning")
    """Lightning runs the script once more for the second rank, without our runner."""
    run_python(*RUNNER, LIGHTNING, tmp_path, "ddp")
    check_lightning(tmp_path, plain)


def run_on_hosts(net, *arguments, environment=None):
    """torchrun on each of the two hosts, with one process."""
    launcher = ["-m", "torch.distributed.run", "--nnodes", 2, "--nproc-per-node", 1,
                "--master-addr", net.addresses[0], "--master-port", hosts.PORT]  # fmt: skip
    commands = [net.inside(host, sys.executable, *launcher, "--node-rank", host, *arguments) for host in range(2)]
    try:
        run_programs([(command, environment or {}) for command in commands])
    except AssertionError as error:
        if "needs UCX" not in str(error):
            raise
        pytest.skip("ranks on several hosts need UCX")


@pytest.fixture
def places(tmp_path):
    """Folders for what a training leaves on one host, and on two."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    return tmp_path / "one", tmp_path / "two"


def check_equal_bits(places):
    """A sum of two is the same in both orders."""
    one, two = [json.loads((place / "0.json").read_text())["parameters"] for place in places]
    assert one == two


def test_accelerate_over_two_hosts(make_hosts, places, plain):
    pytest.importorskip("accelerate")
    one, two = places
    run_on_hosts(make_hosts(2), ACCELERATE, two, environment=REPLACE)
    check_accelerate(two, plain)
    run_ranks(run_after_a_call, 2, "accelerate_training", free_port(), str(one), backend=None)
    check_equal_bits(places)


def test_lightning_over_two_hosts(make_hosts, places, plain):
    pytest.importorskip("lightning")
    one, two = places
    run_on_hosts(make_hosts(2), LIGHTNING, two, "ddp", 2, environment=REPLACE)
    check_lightning(two, plain)
    run_ranks(run_after_a_call, 2, "lightning_training", free_port(), str(one), "ddp", backend=None)
    check_equal_bits(places)
