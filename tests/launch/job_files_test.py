"""Job files of docs/jobs/ for schedulers that are not here to run them: what they would start on the second host."""

import pathlib
import re

import pytest

JOBS = pathlib.Path(__file__).resolve().parents[2] / "docs" / "jobs"
SECRET = "0123456789abcdef" * 4
POD = {"JOB_COMPLETION_INDEX": 1, "LOCKSTEP_JOB_SECRET": SECRET}
AZURE = {"AZUREML_NODE_COUNT": 2, "NODE_RANK": 1, "MASTER_ADDR": "10.0.0.4", "MASTER_PORT": 6105}
AZURE |= {"RANK": 1, "LOCAL_RANK": 0, "WORLD_SIZE": 2}  # of its instances
SAGEMAKER = {"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-2"}


@pytest.mark.parametrize("name, variables, endpoint", [
    ("kubernetes.yaml", POD, "train-0.train port 29500"),
    ("azure_ml.yaml", AZURE, "10.0.0.4 port 6105"),
    ("train_on_sagemaker.py", SAGEMAKER, "algo-1 port 29500"),
])  # fmt: skip
def test_the_second_host_takes_its_place(programs, name, variables, endpoint):
    (programs.folder / "key").write_text(SECRET)
    line = re.search(r"\blockstep,? run\b.*", (JOBS / name).read_text())[0]
    words = [word.strip('",]') for word in line.split()]
    assert words[-1] in ("./train", "/app/train"), words
    done = programs.run(*words[:2], "--dry-run", *words[2:-1], "true", **variables)
    done.skip_without_openssl()
    assert done.status == 0, done.text
    told = ["hosts: 2", "this host: number 1", f"endpoint: {endpoint}", "secret: given", "processes: 2"]
    assert [line for line in done.stdout.splitlines() if line in told] == told, done.text
