"""Every way to start: by hand with env://, tcp:// and file://, under torchrun, and by torch.multiprocessing."""

import contextlib
import os
import pathlib
import socket
import sys
import threading

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
    dist.init_process_group(BACKEND, init_method=place, **where)
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    assert type(dist.group.WORLD._get_backend(torch.device("cpu"))).__name__ == ENGINE
    assert dist.get_backend() == BACKEND
    dist.destroy_process_group()
    return total.item()


def run_init_by_environment(rank, world, ports):
    """A destroyed group can be made again. At another port, for rank 0's store at the first one may still be there."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1")
    sums = []
    for port in ports:
        os.environ["MASTER_PORT"] = str(port)
        sums.append(run_init(rank, world, "env://"))
    return sums


def test_env():
    assert run_ranks(run_init_by_environment, 2, [free_port(), free_port()], backend=None) == [[3.0, 3.0]] * 2


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


@pytest.mark.skipif(BACKEND == "gloo", reason="is about lockstep")
@pytest.mark.parametrize("launcher", ["lockstep run", "torchrun"])
def test_groups_can_be_made_again_under(bin_dir, launcher):
    """Whose store is the same each time."""
    words = {"lockstep run": [bin_dir / "lockstep", "run", "--no-prefix"],
             "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python"]}[launcher]
    text = run_program(*words, "--nproc-per-node", 3, sys.executable, PROGRAMS / "start_again.py", BACKEND)
    expected = []
    for turn in range(3):
        pair = [turn, (turn + 1) % 3]
        expected += [f"turn {turn}, rank {rank}: {12.0 if rank in pair else 6.0}" for rank in range(3)]
    assert sorted(text.splitlines()) == expected


@pytest.mark.skipif(BACKEND == "gloo", reason="without `import lockstep` torch waits for the launcher's store")
@pytest.mark.parametrize("way", ["env", "an address of its own", "a place of its own", "tcp"])
@pytest.mark.parametrize("launcher", ["lockstep run", "torchrun"])
def test_a_program_may_set_the_address_under(bin_dir, launcher, way):
    """Where the program sets MASTER_ADDR and MASTER_PORT, there no launcher's store is, so rank 0 serves one."""
    port = free_port()
    place = {"env": "env", "tcp": f"tcp://localhost:{port}", "a place of its own": f"localhost:{port}"}.get(way, port)
    words = {"lockstep run": [bin_dir / "lockstep", "run", "--no-prefix"],
             "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python"]}[launcher]
    text = run_program(*words, "--nproc-per-node", 2, sys.executable, START, place, BACKEND)
    assert sorted(text.splitlines()) == LINES


def listening_at(port):
    """The addresses at which a process of this network listens at the port, as /proc has them: in hexadecimal."""
    lines = [line.split() for kind in ("tcp", "tcp6") for line in pathlib.Path(f"/proc/net/{kind}").read_text().splitlines()]
    return [address.split(":")[0] for _, address, _, state, *_ in lines if state == "0A" and address.endswith(f":{port:04X}")]


def run_and_look_who_listens(rank, world, port):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="localhost", MASTER_PORT=str(port))
    import lockstep  # noqa: F401

    dist.init_process_group(BACKEND)
    addresses = listening_at(port)
    dist.barrier()
    return addresses


@pytest.mark.skipif(BACKEND == "gloo", reason="without `import lockstep` torch opens the store")
def test_the_store_at_localhost_listens_on_loopback_only():
    assert run_ranks(run_and_look_who_listens, 2, free_port(), backend=None) == [["0100007F"]] * 2


def open_two_stores(rank, world, port):
    import lockstep  # noqa: F401

    place = f"tcp://127.0.0.1:{port}?rank=0&world_size=1"
    first, second = (next(dist.rendezvous(place))[0] for _ in range(2))
    first.set("key", "value")
    del first  # the server stays as long as one of them
    return second.get("key")


@pytest.mark.skipif(BACKEND == "gloo", reason="is about lockstep")
def test_two_stores_of_a_process_at_one_address_are_one():
    assert run_ranks(open_two_stores, 1, free_port(), backend=None) == [b"value"]


FAILS = """
import datetime, sys
import torch.distributed as dist
import lockstep
try:
    dist.init_process_group("lockstep", init_method=sys.argv[1], rank=int(sys.argv[2]), world_size=2,
                            timeout=datetime.timedelta(seconds=2))
except (RuntimeError, ValueError) as error:
    print(f"{type(error).__name__}: {error}")
    sys.stderr.flush()
"""


def error_of_init(method, rank):
    """In a process of its own, all of whose output is returned: stderr goes to stdout."""
    source = "import os; os.dup2(1, 2)\n" + FAILS
    return run_python("-c", source, method, rank)


@pytest.mark.skipif(BACKEND == "gloo", reason="is about lockstep")
def test_a_file_that_ends_in_a_record_is_named_at_the_timeout(tmp_path):
    """torch's FileStore would read on and on, and keep the GIL meanwhile."""
    torn = tmp_path / "store"
    torn.write_bytes(b"\x14\0\0\0\0\0\0\0abc")
    text = error_of_init(f"file://{torn}", 0)
    assert "DistStoreError: " in text and str(torn) in text and "delete the file" in text


@pytest.mark.skipif(BACKEND == "gloo", reason="is about lockstep")
def test_a_file_in_no_folder_is_refused(tmp_path):
    text = error_of_init(f"file://{tmp_path}/missing/store", 0)
    assert "ValueError: " in text and "there is no directory" in text


@contextlib.contextmanager
def foreign_server():
    """The port of something that answers, but not as a store does."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                    connection.close()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            server.shutdown(socket.SHUT_RDWR)  # ends accept()
            thread.join()


@pytest.mark.skipif(BACKEND == "gloo", reason="is about lockstep")
@pytest.mark.parametrize("rank, words", [(0, "is in use by another process"), (1, "does not answer as a store does")])
def test_a_foreign_server_at_the_port_is_said_in_one_line(rank, words):
    with foreign_server() as port:
        text = error_of_init(f"tcp://127.0.0.1:{port}", rank)
    assert "DistNetworkError: " in text and words in text
    assert "frame #" not in text and "[c10d]" not in text


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
