"""Fixtures of the tests of whole programs."""

import os
import pathlib

import pytest
import support
import sweeps


@pytest.fixture
def programs(bin_dir, tmp_path):
    """Starts the programs of this test; what is left of them at its end is killed."""
    running = support.Programs(bin_dir, tmp_path)
    yield running
    running.close()


@pytest.fixture
def sweep(programs):
    """Starts `lockstep sweep`."""
    return sweeps.Sweep(programs)


@pytest.fixture
def agents_are_built(programs):
    """Skips the test where `lockstep run` is for one host only."""
    done = programs.run("lockstep", "run", "--nnodes", 2, "--rdzv-backend", "c10d", "true")
    assert done.status == 2, done.text
    done.skip_without_openssl()


@pytest.fixture(scope="session")
def fashion_mnist_data() -> pathlib.Path:
    """The folder with the real data: LOCKSTEP_DATA_DIR, or where Debian's package puts it."""
    folder = pathlib.Path(os.environ.get("LOCKSTEP_DATA_DIR") or "/usr/share/datasets/fashion-mnist")
    if not any(folder.rglob("train-images-idx3-ubyte*")):
        pytest.skip(f"no Fashion-MNIST in {folder}; scripts/test fetches it, or set LOCKSTEP_DATA_DIR")
    if sum(path.stat().st_size for path in folder.rglob("train-images-idx3-ubyte*")) < 20 << 20:
        pytest.skip(f"{folder} does not hold all 60,000 images; it is of an offline kit")
    return folder


@pytest.fixture
def small_data(tmp_path):
    """640 and 200 images of ten classes that a network can tell apart: row 2k of class k is bright."""
    folder = tmp_path / "small"
    folder.mkdir()
    for part, count in (("train", 640), ("t10k", 200)):
        images = bytearray(count * 28 * 28)
        for image in range(count):
            row = image * 28 * 28 + 2 * (image % 10) * 28
            images[row : row + 28] = bytes([255 - image % 7]) * 28
        support.write_idx(folder / f"{part}-images-idx3-ubyte", images, count, 28, 28)
        support.write_idx(folder / f"{part}-labels-idx1-ubyte", bytes(i % 10 for i in range(count)), count)
    return folder
