"""Hugging Face accelerate and Lightning, unchanged, with the engine in Gloo's place, train as one process does.

Three ways put it there: a call, a variable, and `python -m lockstep`. Over two hosts they train as on one. Lightning's
import takes ten times as long as the training, so it happens in no process that can do without.
"""

import importlib.util
import json
import os
import sys

import hosts
import pytest
import torch
import torch.distributed as dist
import training
from ports import free_port
from processes import PROGRAMS, run_programs, run_python
from ranks import BACKEND, run_ranks

ENGINE = {"lockstep": "lockstep._C", "gloo": "torch.distributed.distributed_c10d"}[BACKEND]  # the module of the group's class
REPLACE = {"LOCKSTEP_REPLACE_GLOO": int(BACKEND == "lockstep")}
RUNNER = ["-m", "lockstep"] if BACKEND == "lockstep" else []
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
ACCELERATE = PROGRAMS / "accelerate_training.py"
LIGHTNING = PROGRAMS / "lightning_training.py"


def needs(package):
    """Not importorskip(), which imports it."""
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed")


@pytest.fixture(scope="module")
def plain():
    return training.train_plainly()


def outcomes(folder, plain, backend="gloo"):
    """Both ranks', of which is shown that they trained, as one process would, on the engine."""
    results = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
    before = training.loss_of(training.make_model(), training.data()[:]).item()
    for result in results:
        assert result["engine"] == ENGINE and result["backend"] == backend
        assert result["loss"] < before / 2
        torch.testing.assert_close(torch.tensor(result["parameters"]), torch.tensor(plain["parameters"]))
    assert results[0]["parameters"] == results[1]["parameters"]  # bit for bit
    return results


def check_accelerate(folder, plain):
    for result in outcomes(folder, plain):
        assert result["gathered"] == list(range(21))
        assert result["mean"] == 1.5
        assert result["objects"] == ["rank 0", "rank 1"]


def check_lightning(folder, plain, backend="gloo"):
    first, second = outcomes(folder, plain, backend)
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


def run_lightning_under_both_names(rank, world, ports, folders):
    """Under Gloo's name, and in the same processes under our own, for which Lightning averages integers."""
    run_after_a_call(rank, world, "lightning_training", ports[0], folders[0], "ddp")
    dist.destroy_process_group()
    import lightning_training
    from lightning.pytorch.strategies import DDPStrategy

    os.environ["MASTER_PORT"] = str(ports[1])
    lightning_training.train(folders[1], DDPStrategy(process_group_backend=BACKEND))


@pytest.fixture(scope="module")
def accelerate_on_one_host(tmp_path_factory):
    folder = tmp_path_factory.mktemp("accelerate")
    run_ranks(run_after_a_call, 2, "accelerate_training", free_port(), str(folder), backend=None)
    return folder


@pytest.fixture(scope="module")
def lightning_on_one_host(tmp_path_factory):
    """Folders of the trainings under Gloo's name and under our own."""
    folders = [tmp_path_factory.mktemp(name) for name in ("gloo", "own")]
    run_ranks(run_lightning_under_both_names, 2, [free_port() for _ in folders], list(map(str, folders)), backend=None)
    return folders


@needs("accelerate")
def test_accelerate_by_a_call(accelerate_on_one_host, plain):
    check_accelerate(accelerate_on_one_host, plain)


@needs("accelerate")
def test_accelerate_by_a_variable(tmp_path, plain):
    run_python(*TORCHRUN, ACCELERATE, tmp_path, environment=REPLACE)
    check_accelerate(tmp_path, plain)


@needs("accelerate")
def test_accelerate_by_our_runner(tmp_path, plain):
    run_python(*TORCHRUN, *RUNNER, ACCELERATE, tmp_path)
    check_accelerate(tmp_path, plain)


@needs("lightning")
def test_lightning_by_a_call(lightning_on_one_host, plain):
    check_lightning(lightning_on_one_host[0], plain)


@needs("lightning")
def test_lightning_under_our_own_name(lightning_on_one_host, plain):
    check_lightning(lightning_on_one_host[1], plain, backend=BACKEND)
    logged = [json.loads((folder / "0.json").read_text())["logged"] for folder in lightning_on_one_host]
    assert logged[0] == pytest.approx(logged[1])


@needs("lightning")
def test_lightning_by_a_variable(tmp_path, plain):
    """Lightning spawns the processes."""
    run_python(LIGHTNING, tmp_path, "ddp_spawn", environment=REPLACE)
    check_lightning(tmp_path, plain)


@needs("lightning")
def test_lightning_by_our_runner(tmp_path, plain):
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


def check_equal_bits(*places):
    """A sum of two is the same in both orders."""
    one, two = [json.loads((place / "0.json").read_text())["parameters"] for place in places]
    assert one == two


@needs("accelerate")
def test_accelerate_over_two_hosts(make_hosts, tmp_path, accelerate_on_one_host, plain):
    run_on_hosts(make_hosts(2), ACCELERATE, tmp_path, environment=REPLACE)
    check_accelerate(tmp_path, plain)
    check_equal_bits(accelerate_on_one_host, tmp_path)


@needs("lightning")
def test_lightning_over_two_hosts(make_hosts, tmp_path, lightning_on_one_host, plain):
    run_on_hosts(make_hosts(2), LIGHTNING, tmp_path, "ddp", 2, environment=REPLACE)
    check_lightning(tmp_path, plain)
    check_equal_bits(lightning_on_one_host[0], tmp_path)
