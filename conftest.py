"""Fixtures of all Python tests."""

import contextlib
import os
import pathlib
import signal

import hosts
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


@pytest.fixture
def make_hosts():
    """Makes hosts as network namespaces: make_hosts(2, rate="1gbit"), see hosts.Hosts. Skips the test where it can't."""
    with contextlib.ExitStack() as made:

        def make(count, **options):
            try:
                return made.enter_context(hosts.Hosts(count, **options))
            except hosts.NotAllowed as error:
                pytest.skip(str(error))

        yield make
