"""The backend over two hosts, which are mostly pretended: what other tests of this folder ask of it on one, and what hosts add."""

import copy
import datetime
import os
import signal
import subprocess
import sys

import collectives_test
import ddp_test
import fork_test
import functional_test
import fully_sharded_test
import gloo_test
import pytest
import torch
import torch.distributed as dist
from hosts import PORT
from processes import PROGRAMS, run_programs
from ranks import BACKEND, RanksFailed, run_ranks
from torch.nn.parallel import DistributedDataParallel

pytestmark = pytest.mark.skipif(BACKEND != "lockstep", reason="only this backend pretends hosts")


def total(rank, world):
    tensor = torch.tensor([rank + 1.0])
    dist.all_reduce(tensor)
    return tensor.item()


@pytest.fixture(scope="module", autouse=True)
def ucx():
    try:
        assert run_ranks(total, 4, hosts=2) == [10.0] * 4
    except RanksFailed as failure:
        if "needs UCX" not in str(failure):
            raise
        pytest.skip("ranks on several hosts need UCX")


@pytest.mark.parametrize(
    ("run", "world", "arguments"),
    [
        (collectives_test.run_collectives, 3, [[torch.float32, torch.bfloat16, torch.int64]]),
        (collectives_test.run_other_dtypes, 3, []),
        (collectives_test.run_averages, 3, []),
        (collectives_test.run_coalesced, 3, []),
        (collectives_test.run_messages, 4, []),
        (collectives_test.run_objects, 3, []),
        (ddp_test.run_options, 2, []),
        (ddp_test.run_whole_batch, 4, []),
        (ddp_test.run_joins, 2, []),
        (functional_test.run_functional, 2, []),
        (functional_test.run_groups, 4, []),
        (functional_test.run_mesh, 4, []),
        (functional_test.run_dtensor, 4, []),
        (fully_sharded_test.run_fully_shard, 2, []),
        (fully_sharded_test.run_hybrid_shard, 4, []),
        (fully_sharded_test.run_zero, 2, []),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_as_on_one_host(run, world, arguments):
    run_ranks(run, world, *arguments, hosts=2)


@pytest.mark.parametrize("run", [gloo_test.run_several, gloo_test.run_futures], ids=lambda run: run.__name__)
def test_in_gloos_place(run):
    run_ranks(run, gloo_test.RANKS, backend="gloo", hosts=2)


def subgroup_of_a_host(rank, world):
    """Groups of one host's ranks, of one rank of each, and of all: each is right, and none is in another's way."""
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [3, 1])]
    sums = []
    for _ in range(20):
        for group in groups:
            if dist.get_rank(group) >= 0:
                tensor = torch.full((1000,), float(rank))
                dist.all_reduce(tensor, group=group)
                sums.append(tensor[999].item())
    return sorted(set(sums))


def test_groups_within_and_over_hosts():
    assert run_ranks(subgroup_of_a_host, 4, hosts=2) == [[1.0, 2.0], [1.0, 4.0], [2.0, 5.0], [4.0, 5.0]]


def test_a_forked_child_is_told_that_it_can_make_no_group_over_hosts(tmp_path):
    for (status, said), total in run_ranks(fork_test.children_with_groups, 2, str(tmp_path), hosts=2):
        assert status != 0 and "DistBackendError" in said and "forked from one that has used UCX" in said, said
        assert total == 2


def late(rank, world):
    """Rank 3 never calls the group's operation; the others give it up."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=1))
    if rank < 3:
        with pytest.raises(dist.DistError) as error:
            dist.all_reduce(torch.ones(1), group=group)
    dist.barrier()
    return str(error.value) if rank < 3 else "rank 3 host-1"


def test_a_late_rank_is_named_with_its_host():
    for said in run_ranks(late, 4, hosts=2):
        assert "rank 3" in said and "host-1" in said, said


def killed(rank, world):
    dist.barrier()
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        dist.all_reduce(torch.ones(1))


def test_a_killed_rank_is_named_on_all_hosts():
    failures = {3: signal.SIGKILL} | {rank: dist.DistBackendError for rank in range(3)}
    for said in run_ranks(killed, 4, hosts=2, expect=failures)[:3]:
        assert "rank 3" in said and "host-1" in said, said


LOCKSTEP_RUN = "lockstep run"
NO_TUNNEL = "lockstep run --no-tunnel"


@pytest.mark.parametrize("launcher, port", [
    (LOCKSTEP_RUN, PORT + 1),
    (NO_TUNNEL, PORT + 1),
    *(pytest.param(*case, marks=pytest.mark.long) for case in [
        (LOCKSTEP_RUN, PORT), (NO_TUNNEL, PORT), ("torchrun", PORT), ("torchrun", PORT + 1)]),
])  # fmt: skip
def test_a_program_may_set_its_place_under(bin_dir, make_hosts, launcher, port):
    """At the port of the launcher's, and at another one, where rank 0 serves a store."""
    run = [bin_dir / "lockstep", "run", "--nnodes", "2"]
    if "built without OpenSSL" in subprocess.run([*run, "--rdzv-backend", "c10d", "true"], capture_output=True, text=True).stderr:
        pytest.skip("lockstep was built without OpenSSL")
    net = make_hosts(2)
    words = {"torchrun": [sys.executable, "-m", "torch.distributed.run", "--nnodes", 2, "--no-python"],
             LOCKSTEP_RUN: [*run, "--no-prefix"], NO_TUNNEL: [*run, "--no-prefix", "--no-tunnel"]}[launcher]
    words += ["--master-addr", net.addresses[0], "--master-port", PORT]
    program = [sys.executable, PROGRAMS / "start.py", f"{net.addresses[0]}:{port}", BACKEND]
    secret = {"LOCKSTEP_JOB_SECRET": "0123456789abcdef" * 4}
    text = run_programs([(net.inside(host, *words, "--node-rank", host, *program), secret) for host in range(2)])
    assert sorted(text.splitlines()) == [f"rank {rank} of 2: 3.0 by ProcessGroupLockstep" for rank in range(2)]


LARGE = 8192  # elements: what is smaller than 16 KiB is not shortened


def shortened(group=None):
    """Whether a sum over the group has lost bits between hosts; else it is exact. All ranks have the same in any case."""
    mine = torch.randn(LARGE, generator=torch.Generator().manual_seed(dist.get_rank()))
    exact, total = mine.double(), mine.clone()
    dist.all_reduce(exact, group=group)
    dist.all_reduce(total, group=group)
    everywhere = [torch.empty(LARGE) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everywhere, total, group=group)
    assert all(torch.equal(total, other) for other in everywhere)
    worst = ((total - exact).abs().max() / exact.abs().max()).item()
    assert worst < 0.02, worst
    return worst > 1e-4


def scopes(rank, world):
    import lockstep

    host = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][rank // 2]
    seen = [shortened()]
    for compression in ("bf16", "int8"):
        with lockstep.between_hosts(compression):
            with lockstep.between_hosts("none"):
                seen.append(shortened())
            seen += [shortened(), shortened(host)]
    with pytest.raises(ValueError, match='"fp8"; it takes "none", "bf16" or "int8"'):
        lockstep.between_hosts("fp8").__enter__()
    return [*seen, shortened()]


def test_reductions_of_a_scope_are_shortened_between_hosts():
    assert run_ranks(scopes, 4, hosts=2) == [[False, *2 * [False, True, False], False]] * 4


def group_options(rank, world):
    import lockstep

    group = dist.new_group(pg_options=lockstep.ProcessGroupLockstep.Options(between_hosts="int8"))
    assert group._get_backend(torch.device("cpu")).options.between_hosts == "int8"
    assert shortened(group) and not shortened()
    with lockstep.between_hosts("none"):
        assert not shortened(group)
    with pytest.raises(TypeError, match="pg_options is a dict; the backend lockstep takes"):
        dist.new_group(pg_options={"between_hosts": "int8"})
    with pytest.raises(ValueError, match='"fp8"'):
        lockstep.ProcessGroupLockstep.Options(between_hosts="fp8")


def test_a_group_has_it_as_an_option():
    run_ranks(group_options, 4, hosts=2)


def disagree(rank, world):
    import lockstep

    options = lockstep.ProcessGroupLockstep.Options(between_hosts="int8" if rank == 3 else "none")
    with pytest.raises(dist.DistBackendError) as error:
        dist.new_group(pg_options=options)
    dist.barrier()
    return str(error.value)


def test_ranks_that_differ_in_it_make_no_group():
    for said in run_ranks(disagree, 4, hosts=2):
        assert "ranks 0-2: open_backend(between_hosts none); rank 3: open_backend(between_hosts int8)" in said, said


class Weight(torch.nn.Module):
    """Its gradient is its input."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(LARGE))

    def forward(self, inputs):
        return (self.weight * inputs).sum()


def sum_of_gradients(model, steps):
    """Of an element that int8 rounds to nothing beside its neighbour, which is 1."""
    inputs = torch.full((LARGE,), 0.001)
    inputs[::256] = 1
    total = torch.zeros(LARGE)
    for _ in range(steps):
        model.zero_grad()
        model(inputs).backward()
        total += model.module.weight.grad
    assert total[0].item() == pytest.approx(steps, rel=0.01)
    return total[1].item()


def hook(rank, world):
    import lockstep

    steps = 100
    group = dist.new_group(pg_options=lockstep.ProcessGroupLockstep.Options(between_hosts="int8"))
    assert sum_of_gradients(DistributedDataParallel(Weight(), process_group=group), steps) == 0
    sums = []
    for compression in ("none", "bf16", "int8"):
        model = DistributedDataParallel(Weight())
        state = lockstep.BetweenHostsState(compression)
        assert copy.deepcopy(state).compression == compression
        model.register_comm_hook(state, lockstep.between_hosts_hook)
        sums.append(sum_of_gradients(model, steps))
    assert sums[:2] == pytest.approx([0.1, 0.1], rel=0.01)
    assert sums[2] == pytest.approx(0.1, abs=0.02)  # what is still to be added is less than two of int8's steps
    with pytest.raises(ValueError, match="not Lockstep's"):
        lockstep.BetweenHostsState("int8", dist.new_group(backend="gloo"))
    return sums


def test_ddps_hook_feeds_back_what_rounding_has_lost():
    sums = run_ranks(hook, 4, hosts=2)
    assert sums == sums[:1] * 4
