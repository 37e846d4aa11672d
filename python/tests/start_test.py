"""Every way to start: by hand with env://, tcp:// and file://, under torchrun, and by torch.multiprocessing."""

import os
import sys

import pytest
import torch
import torch.distributed as dist
from ports import free_port
from processes import PROGRAMS, run_program, run_python
from ranks import BACKEND, run_ranks

ENGINE = {"lockstep": "ProcessGroupLockstep", "gloo": "ProcessGroupGloo"}[BACKEND]
START = PROGRAMS / "start.py"
LINES = [f"rank {rank} of 2: 3.0 by {ENGINE}" for rank in range(2)]


def run_init(rank, world, place):
    if BACKEND == "lockstep":
        import lockstep  # noqa: F401
    where = {} if place == "env://" else {"rank": rank, "world_size": world}
    for _ in range(2 if place == "env://" else 1):  # a destroyed group can be made again
        dist.init_process_group(BACKEND, init_method=place, **where)
        total = torch.tensor([rank + 1.0])
        dist.all_reduce(total)
        assert type(dist.group.WORLD._get_backend(torch.device("cpu"))).__name__ == ENGINE
        assert dist.get_backend() == BACKEND
        dist.destroy_process_group()
    return total.item()


def run_init_by_environment(rank, world, port):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    return run_init(rank, world, "env://")


def test_env():
    assert run_ranks(run_init_by_environment, 2, free_port(), backend=None) == [3.0, 3.0]


def test_tcp():
    assert run_ranks(run_init, 2, f"tcp://127.0.0.1:{free_port()}", backend=None) == [3.0, 3.0]


def test_file(tmp_path):
    assert run_ranks(run_init, 2, f"file://{tmp_path}/store", backend=None) == [3.0, 3.0]


def run_with_store(rank, world, path):
    import lockstep  # noqa: F401

    store = dist.FileStore(path, world)
    dist.init_process_group(BACKEND, store=store, rank=rank, world_size=world)
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    return total.item()


@pytest.mark.skipif(BACKEND == "gloo", reason="is about lockstep")
def test_store_and_no_end(tmp_path):
    """A store of the user's, and a group that is not destroyed."""
    assert run_ranks(run_with_store, 2, str(tmp_path / "store"), backend=None) == [3.0, 3.0]


def test_processes_by_hand(tmp_path):
    """Started one by one, as a cluster's own launcher does."""
    text = run_python(START, f"file://{tmp_path}/store", BACKEND, processes=2)
    assert sorted(text.splitlines()) == LINES


def test_torchrun():
    arguments = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    assert sorted(run_python(*arguments, START, "env", BACKEND).splitlines()) == LINES


@pytest.mark.skipif(BACKEND == "gloo", reason="without `import lockstep` torch waits for the launcher's store")
@pytest.mark.parametrize("way", ["env", "an address of its own", "tcp"])
def test_lockstep_run(bin_dir, way):
    """Also where the program sets MASTER_ADDR and MASTER_PORT: there no launcher's store is, so rank 0 serves one."""
    place = {"env": "env", "tcp": f"tcp://localhost:{free_port()}"}.get(way, free_port())
    launcher = [bin_dir / "lockstep", "run", "--nproc-per-node", 2, "--no-prefix"]
    text = run_program(*launcher, sys.executable, START, place, BACKEND)
    assert sorted(text.splitlines()) == LINES


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_multiprocessing(method):
    assert sorted(run_python(START, method, BACKEND).splitlines()) == LINES


def test_another_backend_for_another_device():
    """CPU tensors go to ours; the other one must only be there."""
    assert sorted(run_python(START, "fork", f"cpu:{BACKEND},cuda:gloo").splitlines()) == LINES


@pytest.mark.gpu
def test_beside_nccl(tmp_path):
    gpus = {"CUDA_VISIBLE_DEVICES": "0", "RANK": 0, "WORLD_SIZE": 1}
    text = run_python(START, f"file://{tmp_path}/store", f"cpu:{BACKEND},cuda:nccl", environment=gpus)
    assert text == f"rank 0 of 1: 1.0 by {ENGINE}\n"
