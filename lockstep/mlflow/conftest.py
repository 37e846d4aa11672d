"""The fixture of MlflowWriter's tests, whose other helpers are in testing/."""

import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent / "testing"))
from mlflow_harness import Driver  # noqa: E402


@pytest.fixture
def start(bin_dir, tmp_path):
    """start(**environment): a driver; its files are in tmp_path."""
    program = bin_dir / "mlflow_driver"
    if not program.exists():
        pytest.skip("Lockstep::mlflow was not built, for want of libcurl")
    drivers = []

    def begin(**environment):
        drivers.append(Driver(program, tmp_path, **environment))
        return drivers[-1]

    yield begin
    for driver in drivers:
        driver.process.stdin.close()
        driver.kill()
