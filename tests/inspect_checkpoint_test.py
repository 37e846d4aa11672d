"""`lockstep inspect checkpoint`: what it prints, and its exit status."""

import json
import subprocess

import pytest

OK, PROBLEM, MISUSE = 0, 1, 2


@pytest.fixture
def checkpoint(bin_dir, tmp_path):
    directory = tmp_path / "run" / "step-3"
    done = subprocess.run([bin_dir / "safetensors_driver"], input=f"checkpoint\t{directory}\n", capture_output=True, text=True, timeout=60)
    assert done.stdout == "ok\n", done.stdout + done.stderr
    return directory


def test_exit_status_and_words(programs, checkpoint, tmp_path):
    def inspect(*arguments):
        return programs.run("lockstep", "inspect", "checkpoint", *arguments)

    done = inspect(checkpoint)
    assert done.status == OK and "step-3: verified" in done.stdout and "fc1.weight" in done.stdout, done.text
    done = inspect(checkpoint.parent)
    assert done.status == OK and "step-3: verified, step 3" in done.stdout, done.text
    done = inspect(checkpoint, "--compare", checkpoint)
    assert done.status == OK and "no difference" in done.stdout, done.text
    answer = json.loads(inspect("--json", checkpoint).stdout)
    assert answer["info"]["step"] == 3 and answer["problems"] == []

    model = checkpoint / "model.safetensors"
    data = bytearray(model.read_bytes())
    data[-1] ^= 1
    model.write_bytes(data)
    done = inspect(checkpoint)
    assert done.status == PROBLEM and "'fc1.bias' of model is damaged" in done.stdout, done.text
    assert inspect("--no-verify", checkpoint).status == OK
    done = inspect(tmp_path / "nothing")
    assert done.status == MISUSE and "No such file" in done.stderr and done.stdout == "", done.text
    assert inspect().status == MISUSE
