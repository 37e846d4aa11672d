"""What one process can say of CUDA: most of it holds on a machine without a card, and each needs a process of its own."""

import os
import pathlib
import subprocess

import pytest

BIN = pathlib.Path(os.environ.get("LOCKSTEP_BIN_DIR", pathlib.Path(__file__).resolve().parents[2] / "build/release/bin"))
CUDA_BUILD = (BIN.parent / "lib/liblockstep_cuda.so").exists()
HAS_DRIVER = any(os.path.exists(f"/dev/{node}") for node in ("nvidiactl", "dxg", "nvhost-gpu"))
needs_cuda_build = pytest.mark.skipif(not CUDA_BUILD, reason="the component cuda is not built: torch is a CPU build, or lacks headers")
needs_no_driver = pytest.mark.skipif(HAS_DRIVER, reason="there is an NVIDIA driver here")


def ask(*questions, program="device_driver", **environment):
    """The answers, a line each; what they are about is said in device_driver.cc."""
    clean = {key: value for key, value in os.environ.items() if key not in ("CUDA_VISIBLE_DEVICES", "LOCAL_RANK", "LD_PRELOAD")}
    done = subprocess.run([BIN / program, *questions], text=True, capture_output=True, timeout=60, env=clean | environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def library(name):
    """A library as the driver loads it."""
    lines = subprocess.run(["ldd", BIN / "device_driver"], text=True, capture_output=True, check=True).stdout.splitlines()
    return next(pathlib.Path(line.split()[2]) for line in lines if line.split()[0] == name)


@needs_no_driver
def test_without_a_driver_a_cpu_program_loads_nothing():
    assert ask("is it loaded", "count", "choose", "chosen", "registrar", "is it loaded", LOCAL_RANK="3") == [
        "loaded: 0, mapped: 0", "devices: 0", "device: cpu", "chosen: none", "registrar: 0", "loaded: 0, mapped: 0"]


def test_hidden_devices_are_not_looked_for():
    assert ask("count", "choose", "is it loaded", CUDA_VISIBLE_DEVICES="") == ["devices: 0", "device: cpu", "loaded: 0, mapped: 0"]


@needs_cuda_build
@needs_no_driver
def test_asking_for_cuda_says_that_there_is_no_driver():
    loaded, problem, use, state, device, registrar, count = ask("load", "problem", "use", "is it loaded", "cuda:0", "registrar", "count")
    assert loaded.startswith("NCCL: 2."), "NCCL needs no card to tell its version"
    assert problem.startswith("problem: there is no NVIDIA driver on this system (libcuda.so.1); install it")
    assert use.startswith("usable devices: Error: CUDA was asked for, but there is no NVIDIA driver")
    assert state == "loaded: 1, mapped: 1"
    assert device.startswith("ValueError: cuda:0 was asked for, but there is no NVIDIA driver")
    assert registrar == "registrar: 1, locks: 0", "page-locking fails softly"
    assert count == "devices: 0"


@needs_cuda_build
def test_torch_asked_too_early_is_explained():
    early, state, loaded, device = ask("ask torch too early", "is it loaded", "load", "cuda:0")
    assert (early, state) == ("torch says: 0", "loaded: 0, mapped: 0")
    for answer in (loaded, device):
        assert "this program asked torch about CUDA before torch's CUDA library was loaded" in answer
        assert "call lockstep::set_device() first of all in main(), or link Lockstep::cuda" in answer


@needs_cuda_build
def test_a_program_that_links_the_component_has_no_order_problem():
    state, _, loaded = ask("is it loaded", "ask torch too early", "load", program="device_cuda_driver")
    assert state == "loaded: 1, mapped: 1" and loaded.startswith("NCCL: 2.")


def test_a_library_that_is_not_there_is_named_with_its_place(tmp_path):
    if not CUDA_BUILD:
        pytest.skip("torch is a CPU build")
    (tmp_path / "liblockstep.so").symlink_to(library("liblockstep.so"))
    count, loaded, device = ask("count", "load", "cuda:0", LD_PRELOAD=str(tmp_path / "liblockstep.so"))
    assert f"{tmp_path}/liblockstep_cuda.so: cannot open shared object file" in loaded, loaded
    assert "; liblockstep_cuda.so: cannot open shared object file" in loaded and "build Lockstep again, or link Lockstep::cuda" in loaded
    if not HAS_DRIVER:
        assert count == "devices: 0" and device.startswith("ValueError: cuda:0 was asked for, but Lockstep's part for it can't be loaded")


def test_a_cpu_build_of_torch_is_named_with_its_place(tmp_path):
    (tmp_path / "libtorch_cpu.so").symlink_to(library("libtorch_cpu.so"))
    loaded, device = ask("load", "cuda:0", LD_PRELOAD=str(tmp_path / "libtorch_cpu.so"))
    assert loaded.startswith(f"NCCL: Error: CUDA was asked for, but the torch in {tmp_path} is a CPU build"), loaded
    assert device.startswith("ValueError: cuda:0 was asked for, but the torch in"), device
