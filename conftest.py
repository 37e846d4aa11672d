"""Fixtures of all Python tests."""

import os
import pathlib
import signal

import pytest

REPOSITORY = pathlib.Path(__file__).resolve().parent


# A shell that starts the tests in the background lets them ignore Ctrl-C, and every program that they start: those tests
# that press it would wait for ever.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def bin_dir() -> pathlib.Path:
    """The folder of the built programs: LOCKSTEP_BIN_DIR, or build/release/bin of this repository."""
    path = pathlib.Path(os.environ.get("LOCKSTEP_BIN_DIR") or REPOSITORY / "build" / "release" / "bin").resolve()
    if not path.is_dir():
        pytest.fail(f"{path} does not exist; build first with ./scripts/test, or set LOCKSTEP_BIN_DIR", pytrace=False)
    return path
