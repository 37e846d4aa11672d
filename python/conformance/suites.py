"""Which tests there are: the modules of torch.testing._internal.distributed that hold some, as unittest classes."""

import dataclasses
import functools
import importlib
import importlib.util
import os
import pathlib
import time
import types
import unittest

PACKAGE = "torch.testing._internal.distributed"
BACKENDS = ("gloo", "lockstep", "replace_gloo")
OWN_WORLD_SIZE = 4  # of the modules whose tests fix the number of ranks themselves
MAIN = "distributed_test"
BARRIER_POLL_SECONDS = 0.1  # that distributed_test.Barrier sleeps between looks
QUICK_POLL_SECONDS = 0.005

# Every module of the package that has code is in one of these two; a test checks that.
TEST_MODULES = {
    "distributed_test": "collectives, point-to-point, groups, DDP, profiler; the backend is a parameter",
    "ddp_under_dist_autograd_test": "DDP over gloo under distributed autograd",
    "nn.api.remote_module_test": "RemoteModule",
    "rpc.dist_autograd_test": "distributed autograd",
    "rpc.dist_optimizer_test": "the distributed optimizer",
    "rpc.examples.parameter_server_test": "a parameter server",
    "rpc.examples.reinforcement_learning_rpc_test": "agents and observers",
    "rpc.faulty_agent_rpc_test": "RPC with injected faults",
    "rpc.jit.dist_autograd_test": "distributed autograd in TorchScript",
    "rpc.jit.rpc_test": "RPC in TorchScript",
    "rpc.jit.rpc_test_faulty": "RPC in TorchScript with injected faults",
    "rpc.rpc_test": "RPC; some tests make a gloo group beside it",
}
HELPER_MODULES = {
    "_shard.sharded_tensor": "base class of tests of ShardedTensor",
    "_shard.sharded_tensor._test_ops_common": "modules and sharding specs for tests",
    "_shard.sharded_tensor._test_st_common": "tensors for tests",
    "_shard.test_common": "a model for tests",
    "_tensor.common_dtensor": "base classes and models of DTensor's tests (the test_ in it is in a docstring)",
    "checkpoint_utils": "a storage reader and decorators for checkpoint tests",
    "common_state_dict": "assertions on state dicts",
    "distributed_utils": "a mock process group for tests of one process",
    "fake_pg": "the backend \"fake\", which communicates nothing",
    "multi_threaded_pg": "the backend \"threaded\", ranks as threads",
    "rpc.faulty_rpc_agent_test_fixture": "chooses the faulty TensorPipe agent",
    "rpc.rpc_agent_test_fixture": "base of the two fixtures",
    "rpc.tensorpipe_rpc_agent_test_fixture": "chooses the TensorPipe agent",
    "rpc_utils": "puts RPC tests and agents together",
}


# Skips that say what was so when the test was written: gloo has all_to_all for CPU tensors meanwhile. They are lifted,
# for these tests are the only ones of that operation.
OUTDATED_SKIPS = ("Only MPI supports CPU all_to_all_single", "Only MPI supports all_to_all")


# Variables of the caller that would change what the tests do, by their beginnings.
DISTURBING = ("LOCKSTEP_REPLACE_GLOO", "TORCH_", "TORCHELASTIC_", "PYTORCH_TEST", "RPC_INIT_WITH_TCP", "MASTER_",
              "GLOO_", "TP_", "NCCL_", "DISTRIBUTED_TESTS_")


class SuiteError(Exception):
    """What the user must know before any test runs."""


@dataclasses.dataclass(frozen=True)
class Configuration:
    """What a server is started for."""

    backend: str
    world_size: int
    start_method: str = "fork"
    tests_from: str = ""  # a Python file with tests of its own, in place of PyTorch's

    def environment(self):
        """For the server: no GPU, loopback only, one thread a process (a fork keeps only the thread that forks)."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith(DISTURBING)}
        return kept | {
            "BACKEND": "lockstep" if self.backend == "lockstep" else "gloo",
            "WORLD_SIZE": str(self.world_size),
            "CUDA_VISIBLE_DEVICES": "",
            "INIT_METHOD": "file://set-by-each-test",  # read at import: "env://" would leave out tests
            "MASTER_ADDR": "127.0.0.1",
            "GLOO_SOCKET_IFNAME": "lo",
            "TP_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "PYTORCH_PRINT_REPRO_ON_FAILURE": "0",  # it names a file of PyTorch's repository
        }


@dataclasses.dataclass(frozen=True)
class Test:
    """One test method, and its full name: module, class, method."""

    name: str
    case_class: type
    method: str
    build: object = None  # makes the class to run, where making it would disturb other tests of this process

    def runnable_class(self):
        return self.build() if self.build else self.case_class

    @property
    def skip_reason(self):
        """Why a decorator skips it, known without running it; else None."""
        for holder in (getattr(self.case_class, self.method), self.case_class):
            if getattr(holder, "__unittest_skip__", False):
                return getattr(holder, "__unittest_skip_why__", "") or "no reason given"
        return None


def load(configuration):
    """Imports the tests for this backend: {full name: Test}, in a fixed order."""
    try:
        import expecttest  # noqa: F401 (PyTorch's test classes do)
    except ImportError as error:
        raise SuiteError("PyTorch's tests need the package expecttest; pip install -r requirements-test.txt") from error
    engage(configuration)
    if configuration.tests_from:
        return tests_of_file(configuration.tests_from)
    tests = tests_of_distributed_test()
    if configuration.backend != "lockstep" and configuration.world_size == OWN_WORLD_SIZE:
        tests |= tests_of_rpc()  # these ask for "gloo" by name and fix their number of ranks
    return tests


def engage(configuration):
    """Makes the backend what the configuration says, before any test module is imported."""
    if configuration.backend == "gloo":
        return
    try:
        import lockstep
    except ImportError as error:
        raise SuiteError(f"backend {configuration.backend}: lockstep cannot be imported ({error}); "
                         "install it with ./scripts/test or pip install ./python") from error
    if configuration.backend == "replace_gloo":
        lockstep.replace_gloo()
        return
    from torch.testing._internal.common_distributed import DistTestCases

    for feature in ("gpu", "cuda", "ddp", "subgroup", "plugin"):
        DistTestCases.backend_feature[feature].add("lockstep")


def poll_barrier_faster(module):
    """distributed_test.Barrier, a loop over files, sleeps 0.1 s between looks, at least twice a test: look oftener."""

    def sleep(seconds):
        time.sleep(QUICK_POLL_SECONDS if seconds == BARRIER_POLL_SECONDS else seconds)

    replacement = types.ModuleType("time")
    replacement.__dict__.update(time.__dict__)
    replacement.sleep = sleep
    module.time = replacement


def tests_of_distributed_test():
    module = importlib.import_module(f"{PACKAGE}.{MAIN}")
    poll_barrier_faster(module)
    lift_outdated_skips(module.DistributedTest._DistTestBase)
    module.PROFILING_SUPPORTED_BACKENDS.append("lockstep")  # so that its collectives' profiler events are looked at too

    class TestDistBackendWithSpawn(module.TestDistBackend, module.DistributedTest._DistTestBase):
        """As in PyTorch's test/distributed/test_distributed_spawn.py, which the wheel lacks."""

        def setUp(self):
            super().setUp()
            module.INIT_METHOD = os.environ["INIT_METHOD"]  # in a forked rank the module is not imported again
            self._spawn_processes()

    plain = [value for value in vars(module).values()
             if isinstance(value, type) and issubclass(value, unittest.TestCase) and value.__module__ == module.__name__
             and value is not module.TestDistBackend]
    return tests_of_classes(MAIN, [TestDistBackendWithSpawn, *plain])


def lift_outdated_skips(case_class):
    for method in vars(case_class).values():
        if getattr(method, "__unittest_skip_why__", None) in OUTDATED_SKIPS:
            method.__unittest_skip__ = False


def tests_of_rpc():
    """The tests of RPC and what builds on it, put together as PyTorch's test_tensorpipe_agent and test_faulty_agent."""
    utils = importlib.import_module(f"{PACKAGE}.rpc_utils")
    tests = {}
    for origin in utils.GENERIC_TESTS + utils.TENSORPIPE_TESTS:
        tests |= tests_of_classes(home_of(origin), [with_agent(origin, "TensorPipe")])
    for origin in utils.FAULTY_AGENT_TESTS:
        # Importing the faulty agent replaces the enumeration of agents, which other tests look at: only where it runs.
        build = functools.partial(with_agent, origin, "Faulty")
        listed = tests_of_classes(home_of(origin), [type(origin.__name__, (origin, utils.SpawnHelper), {})])
        tests |= {name: dataclasses.replace(test, build=build) for name, test in listed.items()}
    return tests


def home_of(origin):
    return origin.__module__.removeprefix(PACKAGE + ".")


def with_agent(origin, agent):
    """The runnable class of an RPC test class: with the fixture that chooses the agent. Some tests pickle it."""
    utils = importlib.import_module(f"{PACKAGE}.rpc_utils")
    fixture = f"{agent}RpcAgentTestFixture"
    home = importlib.import_module(f"{PACKAGE}.rpc.{agent.lower()}_rpc_agent_test_fixture")
    made = utils.generate_tests("", getattr(home, fixture), [origin], __name__)
    globals().update(made)
    return waits_for_all_at_init(made[origin.__name__])


def waits_for_all_at_init(case_class):
    """A call may ask a rank for a group as soon as the caller's init_process_group() has returned: ddp_under_dist_autograd_test
    does, with any backend. With this variable it returns once all ranks have their default group."""
    set_up = case_class.setUp

    def setUp(self):
        os.environ["TORCH_DIST_INIT_BARRIER"] = "1"  # in the process of this test, and its ranks
        set_up(self)

    case_class.setUp = setUp
    return case_class


def tests_of_file(path):
    """The unittest classes of a Python file, for tests of the driver itself."""
    path = pathlib.Path(path)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    classes = [value for value in vars(module).values()
               if isinstance(value, type) and issubclass(value, unittest.TestCase) and value.__module__ == path.stem]
    return tests_of_classes(path.stem, classes)


def tests_of_classes(home, classes):
    found = {}
    for case_class in classes:
        for method in unittest.TestLoader().getTestCaseNames(case_class):
            name = f"{home}.{case_class.__name__}.{method}"
            found[name] = Test(name, case_class, method)
    return found


def module_of(name):
    """The module of a test's full name."""
    return name.rsplit(".", 2)[0]


def engine():
    """The class that does the work when this process asks for the backend: with one rank, for a moment."""
    import torch
    import torch.distributed as dist

    dist.init_process_group(os.environ["BACKEND"], store=dist.HashStore(), rank=0, world_size=1)
    made = type(dist.group.WORLD._get_backend(torch.device("cpu")))
    dist.destroy_process_group()
    return f"{made.__module__}.{made.__qualname__}"
