"""CUDA stays out of programs that do not ask for it."""

import pathlib

import pytest


@pytest.mark.skipif(any(pathlib.Path("/dev", node).exists() for node in ("nvidiactl", "dxg", "nvhost-gpu")), reason="there is an NVIDIA driver")
def test_training_on_the_cpu_loads_no_cuda(programs):
    done = programs.run("lockstep", "run", "--no-prefix", "--nproc-per-node", "2", programs.find("cpu_training_driver"))
    assert done.status == 0, done.text
    assert done.stdout.splitlines() == ["cpu 2 lockstep no CUDA"] * 2, done.text


def test_hidden_cards_are_not_loaded(programs):
    done = programs.run("lockstep", "run", "--no-prefix", "--nproc-per-node", "1", programs.find("cpu_training_driver"), CUDA_VISIBLE_DEVICES="-1")
    assert done.stdout == "cpu 1 lockstep no CUDA\n", done.text
