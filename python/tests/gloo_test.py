"""What the engine owes to programs that ask for "gloo": arguments, errors, futures and class members as Gloo has them.

Each rank has three groups: one of Gloo's own, one of the engine's in its place, and one called "lockstep".
"""

import copy
import datetime
import os
import re
import signal
import warnings

import pytest
import torch
import torch.distributed as dist
from processes import run_python
from ranks import run_ranks

RANKS = 3
CPU = torch.device("cpu")
WRAPPED = torch.__version__ >= (2, 13)  # the engine, with TORCH_DISTRIBUTED_DEBUG=DETAIL


def backends():
    """Gloo itself, the engine in its place, and the engine under its own name; the default group must be Gloo's."""
    import lockstep

    lockstep.replace_gloo()
    groups = dist.group.WORLD, dist.new_group(backend="gloo"), dist.new_group(backend="lockstep")
    return [group._get_backend(CPU) for group in groups]


def options(kind, **values):
    result = kind()
    for name, value in values.items():
        setattr(result, name, value)
    return result


def broadcast_from(root, tensor=0):
    return options(dist.BroadcastOptions, rootRank=root, rootTensor=tensor)


def reduce_to(root, tensor=0):
    return options(dist.ReduceOptions, rootRank=root, rootTensor=tensor)


def gather_to(root):
    return options(dist.GatherOptions, rootRank=root)


def scatter_from(root):
    return options(dist.ScatterOptions, rootRank=root)


def reducing(operation, kind=dist.AllreduceOptions):
    return options(kind, reduceOp=operation)


def sparse(size):
    return torch.sparse_coo_tensor([[0]], [1.0], size=(size,), check_invariants=True)


def wrong_calls(group, rank, world):
    """By what is wrong: calls that Gloo refuses at once."""
    one, double, two = torch.zeros(1), torch.zeros(1, dtype=torch.double), torch.zeros(2)
    other = (rank + 1) % world
    csr = torch.eye(2).to_sparse_csr()
    return {
        "broadcast: root -1": lambda: group.broadcast([one], broadcast_from(-1)),
        "broadcast: root too large": lambda: group.broadcast([one], broadcast_from(world)),
        "broadcast: root tensor": lambda: group.broadcast([one], broadcast_from(0, 1)),
        "broadcast: no tensor": lambda: group.broadcast([], broadcast_from(0)),
        "broadcast: dtypes": lambda: group.broadcast([one, double], broadcast_from(0)),
        "broadcast: sizes": lambda: group.broadcast([one, two], broadcast_from(0)),
        "broadcast: sparse": lambda: group.broadcast([sparse(1)], broadcast_from(0)),
        "all_reduce: no tensor": lambda: group.allreduce([]),
        "all_reduce: dtypes": lambda: group.allreduce([one, double]),
        "all_reduce: sizes": lambda: group.allreduce([one, two]),
        "all_reduce: layouts": lambda: group.allreduce([one, sparse(1)]),
        "all_reduce: sparse sizes": lambda: group.allreduce([sparse(1), sparse(2)]),
        "all_reduce: sparse maximum": lambda: group.allreduce([sparse(1)], reducing(dist.ReduceOp.MAX)),
        "all_reduce: CSR": lambda: group.allreduce([csr]),
        "all_reduce_coalesced: no tensor": lambda: group.allreduce_coalesced([]),
        "all_reduce_coalesced: dtypes": lambda: group.allreduce_coalesced([one, double]),
        "all_reduce_coalesced: layouts": lambda: group.allreduce_coalesced([one, sparse(1)]),
        "all_reduce_coalesced: sparse": lambda: group.allreduce_coalesced([sparse(1), sparse(1)]),
        "reduce: root": lambda: group.reduce([one], reduce_to(-1)),
        "reduce: two tensors": lambda: group.reduce([one, one], reduce_to(0)),
        "reduce: sparse": lambda: group.reduce([sparse(1)], reduce_to(0)),
        "all_gather: no tensor": lambda: group.allgather([], []),
        "all_gather: no list": lambda: group.allgather([], [one]),
        "all_gather: list too short": lambda: group.allgather([[one] * (world - 1)], [one]),
        "all_gather: dtypes of inputs": lambda: group.allgather([[one] * 2 * world] * 2, [one, double]),
        "all_gather: sizes of inputs": lambda: group.allgather([[one] * 2 * world] * 2, [one, two]),
        "all_gather: dtype of outputs": lambda: group.allgather([[double] * world], [one]),
        "all_gather: size of outputs": lambda: group.allgather([[two] * world], [one]),
        "all_gather: sparse": lambda: group.allgather([[one] * world], [sparse(1)]),
        "all_gather_coalesced: no tensor": lambda: group.allgather_coalesced([[]] * world, []),
        "all_gather_coalesced: lists": lambda: group.allgather_coalesced([[one]] * (world + 1), [one]),
        "all_gather_coalesced: list": lambda: group.allgather_coalesced([[one, one]] * world, [one]),
        "all_gather_coalesced: size": lambda: group.allgather_coalesced([[two]] * world, [one]),
        "all_gather_coalesced: dtype": lambda: group.allgather_coalesced([[double]] * world, [one]),
        "gather: root": lambda: group.gather([], [one], gather_to(world)),
        "gather: no input": lambda: group.gather([], [], gather_to(0)),
        "gather: no outputs": lambda: group.gather([], [one], gather_to(rank)),
        "gather: two lists": lambda: group.gather([[one] * world] * 2, [one], gather_to(rank)),
        "gather: list too long": lambda: group.gather([[one] * (world + 1)], [one], gather_to(rank)),
        "gather: dtype": lambda: group.gather([[double] * world], [one], gather_to(rank)),
        "gather: size": lambda: group.gather([[two] * world], [one], gather_to(rank)),
        "gather: outputs elsewhere": lambda: group.gather([[one] * world], [one], gather_to(other)),
        "scatter: root": lambda: group.scatter([one], [], scatter_from(-1)),
        "scatter: no output": lambda: group.scatter([], [], scatter_from(0)),
        "scatter: two outputs": lambda: group.scatter([one, one], [], scatter_from(0)),
        "scatter: no inputs": lambda: group.scatter([one], [], scatter_from(rank)),
        "scatter: list too short": lambda: group.scatter([one], [[one] * (world - 1)], scatter_from(rank)),
        "scatter: dtype": lambda: group.scatter([one], [[double] * world], scatter_from(rank)),
        "scatter: size": lambda: group.scatter([one], [[two] * world], scatter_from(rank)),
        "scatter: inputs elsewhere": lambda: group.scatter([one], [[one] * world], scatter_from(other)),
        "reduce_scatter: two outputs": lambda: group.reduce_scatter([one, one], [[one] * world] * 2),
        "reduce_scatter: list too short": lambda: group.reduce_scatter([one], [[one] * (world - 1)]),
        "all_to_all: too few outputs": lambda: group.alltoall([one] * (world - 1), [one] * world),
        "all_to_all: too few inputs": lambda: group.alltoall([one] * world, [one] * (world - 1)),
        "send: two tensors": lambda: group.send([one, one], other, 0),
        "send: not contiguous": lambda: group.send([torch.zeros(2, 2).t()], other, 0),
        "send: tag": lambda: group.send([one], other, -1),
        "recv: two tensors": lambda: group.recv([one, one], other, 0),
        "recv_anysource: two tensors": lambda: group.recv_anysource([one, one], 0),
    }


def refusal(call):
    try:
        call()
    except Exception as error:
        return type(error), str(error).splitlines()[0]
    return None


def run_wrong_calls(rank, world):
    _, stand_in, own = [wrong_calls(group, rank, world) for group in backends()]
    for what, call in stand_in.items():
        assert refusal(call)[0] is RuntimeError, what
        if what != "broadcast: root tensor":  # which is of no interest where there is one tensor
            assert refusal(own[what])[0] is ValueError, what


def test_wrong_arguments_are_refused():
    run_ranks(run_wrong_calls, RANKS, backend="gloo")


def run_gloos_words(rank, world):
    gloo, stand_in, _ = [wrong_calls(group, rank, world) for group in backends()]
    for what, call in gloo.items():
        expected = refusal(call)
        assert expected[0] is RuntimeError, f"{what}: Gloo raises {expected}"
        assert refusal(stand_in[what]) == expected, what


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="the words are those of Gloo in torch 2.13")
def test_wrong_arguments_are_refused_in_gloos_words():
    run_ranks(run_gloos_words, RANKS, backend="gloo")


def run_own_refusals(rank, world):
    """Where Gloo has no words, or takes a call that can't go well, the type is its own all the same."""
    _, stand_in, own = backends()
    expanded = torch.zeros(1).expand(4)
    one_sparse = torch.sparse_coo_tensor([[0]], [[1.0, 2.0]], size=(3, 2), check_invariants=True)
    kind, text = refusal(lambda: stand_in.allreduce([torch.ones(3, 2).to_sparse(), one_sparse]))
    assert kind is RuntimeError and "sparse dimensions, these have 2 and 1" in text, text
    for group, kind in ((stand_in, RuntimeError), (own, ValueError)):
        assert refusal(lambda: group.allreduce([expanded]))[0] is kind
        assert refusal(lambda: group.allreduce([torch.zeros(1)], reducing(dist.ReduceOp.BAND)))[0] is kind
        assert refusal(lambda: group._allgather_base(torch.zeros(1), torch.zeros(1)))[0] is kind
        assert refusal(lambda: group._reduce_scatter_base(torch.zeros(1), torch.zeros(1)))[0] is kind
        assert refusal(lambda: group.alltoall_base(torch.zeros(1), torch.zeros(1), [], []))[0] is kind
        assert refusal(lambda: group.send([torch.zeros(1)], world, 0))[0] is kind


def run_averages_of_integers(rank, world):
    """In Gloo's place refused, as by Gloo, by every reduction."""
    gloo, stand_in, own = backends()

    def averages(group):
        one, all_ = torch.ones(1, dtype=torch.int64), torch.ones(world, dtype=torch.int64)
        scatter = reducing(dist.ReduceOp.AVG, dist.ReduceScatterOptions)
        return {
            "allreduce": lambda: group.allreduce([one], reducing(dist.ReduceOp.AVG)).wait(),
            "allreduce_coalesced": lambda: group.allreduce_coalesced(
                [one], reducing(dist.ReduceOp.AVG, dist.AllreduceCoalescedOptions)).wait(),
            "reduce": lambda: group.reduce([one], reducing(dist.ReduceOp.AVG, dist.ReduceOptions)).wait(),
            "reduce_scatter": lambda: group.reduce_scatter([one], [list(all_.split(1))], scatter).wait(),
            "_reduce_scatter_base": lambda: group._reduce_scatter_base(one, all_, scatter).wait(),
        }  # fmt: skip

    assert refusal(averages(gloo)["allreduce"])[0] is RuntimeError
    for what, call in averages(stand_in).items():
        kind, text = refusal(call)
        assert kind is RuntimeError and "ReduceOp.AVG of Long tensors" in text, (what, text)
    for call in averages(own).values():
        assert refusal(call) is None


def test_averages_of_integers_are_refused_as_by_gloo():
    run_ranks(run_averages_of_integers, RANKS, backend="gloo")


def test_refusals_of_the_engines_own_are_runtime_errors():
    run_ranks(run_own_refusals, RANKS, backend="gloo")


def make_tensors(rank, count, strided, dtype=torch.float32):
    """Small integers, different by rank and tensor; `strided`: with gaps between them."""
    tensors = [torch.arange(1, 7).add(3 * rank + 2 * i).fmod(5).add(1).to(dtype).view(3, 2) for i in range(count)]
    return [torch.stack([tensor, tensor], -1)[..., 0] if strided else tensor for tensor in tensors]


def map_tensors(function, tensors):
    if isinstance(tensors, list):
        return [map_tensors(function, each) for each in tensors]
    return function(tensors)


def as_lists(tensors):
    """To be compared: torch.testing would be imported anew in each rank, for seconds."""
    return map_tensors(lambda tensor: tensor.to_dense().tolist(), tensors)


def run_several(rank, world):
    gloo, stand_in, own = backends()

    def compare(what, call, tensors):
        """`call`, given the group and the tensors, has the same result on both, waited for and told by its future."""
        # Gloo takes tensors with gaps, but ignores their strides.
        expected = map_tensors(lambda each: each.clone() if each.is_sparse else each.clone().contiguous(), tensors)
        call(gloo, expected).wait()
        result, told = copy.deepcopy(tensors), copy.deepcopy(tensors)
        call(stand_in, result).wait()
        assert as_lists(result) == as_lists(expected), what
        value = call(stand_in, told).get_future().wait()
        assert as_lists(told) == as_lists(expected), what
        return value

    for strided in (False, True):
        for operation in (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX):
            for dtype in (torch.float32, torch.int64):
                tensors = make_tensors(rank, 2, strided, dtype)
                compare(f"all_reduce {operation}", lambda g, t: g.allreduce(t, reducing(operation)), tensors)
        for root, root_tensor in ((0, 0), (1, 1)):
            tensors = make_tensors(rank, 2, strided)
            compare("broadcast", lambda g, t: g.broadcast(t, broadcast_from(root, root_tensor)), tensors)
        for count in (2, 3):
            lists = [make_tensors(rank, count * world, strided) for _ in range(count)]
            inputs = make_tensors(rank, count, strided)
            value = compare("all_gather", lambda g, t: g.allgather(t, inputs), lists)
            assert [len(each) for each in value] == [count * world] * count
    sparse_tensors = [torch.sparse_coo_tensor([[rank, rank + 1]], [1.0, 10.0 * i], size=(5,), check_invariants=True)
                      for i in (1, 2)]
    compare("sparse", lambda g, t: g.allreduce(t), sparse_tensors)
    # As many as each likes; and the average is over ranks, of every tensor.
    tensors = make_tensors(rank, rank + 1, False)
    stand_in.allreduce(tensors, reducing(dist.ReduceOp.AVG)).wait()
    mean = sum(sum(make_tensors(peer, peer + 1, False)) for peer in range(world)) / world
    assert all(torch.allclose(tensor, mean) for tensor in tensors)
    tensors = make_tensors(rank, rank + 1, True)
    stand_in.broadcast(tensors, broadcast_from(1)).wait()
    assert as_lists(tensors) == as_lists(make_tensors(1, 1, False)) * (rank + 1)
    empty = [torch.empty(0), torch.empty(0)]
    stand_in.allreduce(empty).wait()

    one = torch.zeros(1)
    assert refusal(lambda: own.allreduce([one, one]))[0] is ValueError
    assert refusal(lambda: own.broadcast([one, one], broadcast_from(0)))[0] is ValueError
    assert refusal(lambda: own.allgather([[one] * 2 * world] * 2, [one, one]))[0] is ValueError


def test_several_tensors_a_rank():
    run_ranks(run_several, RANKS, backend="gloo")


def shapes_of(value):
    return [shapes_of(each) for each in value] if isinstance(value, list) else tuple(value.shape)


def run_futures(rank, world):
    gloo, stand_in, own = backends()

    def outputs():
        return [torch.zeros(2) for _ in range(world)]

    calls = {
        "all_reduce": lambda g: g.allreduce([torch.zeros(2)]),
        "all_gather": lambda g: g.allgather([outputs()], [torch.full((2,), float(rank))]),
        "all_gather_coalesced": lambda g: g.allgather_coalesced([[each] for each in outputs()], [torch.zeros(2)]),
        "gather": lambda g: g.gather([outputs()] if rank == 0 else [], [torch.zeros(2)], gather_to(0)),
        "broadcast": lambda g: g.broadcast([torch.zeros(2)], broadcast_from(0)),
        "barrier": lambda g: g.barrier(),
    }
    for what, call in calls.items():
        expected = shapes_of(call(gloo).get_future().wait())
        assert shapes_of(call(stand_in).get_future().wait()) == expected, what
    gathered = calls["all_gather"](stand_in).get_future().wait()
    assert [tensor.tolist() for tensor in gathered] == [[float(peer)] * 2 for peer in range(world)]
    # NCCL's form under the engine's own name.
    assert shapes_of(calls["all_gather"](own).get_future().wait()) == [(world, 2)]


def test_values_of_futures():
    run_ranks(run_futures, RANKS, backend="gloo")


def run_members(rank, world):
    gloo, stand_in, own = backends()
    for name in ("create_device", "create_default_device", "_Options"):
        assert getattr(stand_in, name) is getattr(gloo, name), name
        assert not hasattr(own, name), name
    assert stand_in.create_device(interface="lo") is not None
    assert stand_in.name() == gloo.name() == "gloo" and own.name() == "lockstep"
    assert isinstance(stand_in, dist.ProcessGroupGloo)
    for group in (stand_in, own):
        group._set_default_timeout(datetime.timedelta(seconds=23))
        assert group.options._timeout == datetime.timedelta(seconds=23)
    # Groups that come from it stand in for Gloo, too.
    smaller = stand_in.shrink([world - 1]) if rank < world - 1 else None
    if smaller is not None:
        assert type(smaller) is type(stand_in)
        assert refusal(lambda: smaller.allreduce([])) == refusal(lambda: stand_in.allreduce([]))


def test_class_members_and_timeout():
    run_ranks(run_members, RANKS, backend="gloo")


def run_late(rank, world):
    """Rank 0 waits for others that don't come; they stay until it has given up."""
    true_gloo = dist.new_group(backend="gloo")._get_backend(CPU)
    _, stand_in, own = backends()
    messages = dist.new_group(backend="gloo")._get_backend(CPU)
    if rank == 0:
        short = options(dist.AllreduceOptions, timeout=datetime.timedelta(milliseconds=1))
        for group in (true_gloo, stand_in):
            kind, text = whole_refusal(lambda: group.allreduce([torch.zeros(1)], short).wait())
            assert issubclass(kind, RuntimeError) and "Timed out waiting 1ms" in text, text
        kind, text = whole_refusal(lambda: own.allreduce([torch.zeros(1)], short).wait())
        assert "timed out after 1 ms" in text and "Timed out waiting" not in text, text
        messages._set_default_timeout(datetime.timedelta(milliseconds=1))
        kind, text = whole_refusal(lambda: messages.recv([torch.zeros(1)], 1, 0).wait())
        assert issubclass(kind, RuntimeError) and "Timed out waiting 1ms" in text, text
    dist.barrier()


def test_a_timeout_has_gloos_words_too():
    run_ranks(run_late, RANKS, backend="gloo")


def run_killed(rank, world):
    _, stand_in, own = backends()
    dist.barrier()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    for group, words in ((stand_in, True), (own, False)):
        kind, text = whole_refusal(lambda: group.allreduce([torch.zeros(1)]).wait())
        assert issubclass(kind, dist.DistBackendError) and "rank 2 " in text, text
        assert text.endswith("Connection closed by peer") == words, text
    kind, text = whole_refusal(lambda: stand_in.recv([torch.zeros(1)], 2, 0).wait())
    assert "rank 2 " in text and "Connection closed by peer" in text, text


def test_a_members_end_has_gloos_words_too():
    run_ranks(run_killed, RANKS, backend="gloo", expect={2: signal.SIGKILL})


def run_debugged(rank, world):
    """torch's wrapper names what differs before the engine sees it, so the group goes on."""
    import lockstep

    dist.set_debug_level(dist.DebugLevel.DETAIL)
    _, stand_in, own = backends()
    assert isinstance(own, lockstep.ProcessGroupLockstep) and isinstance(stand_in, dist.ProcessGroupGloo)
    assert isinstance(stand_in, torch._C._distributed_c10d._ProcessGroupWrapper) == WRAPPED
    timed = dist.new_group(backend="gloo")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns where it finds nothing to set
        dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=23), timed)
    engine = timed._get_backend(CPU)
    engine = engine.wrapped_pg if WRAPPED else engine
    assert isinstance(engine, lockstep.ProcessGroupLockstep)
    assert engine.options._timeout == datetime.timedelta(seconds=23)
    if not WRAPPED:
        stand_in.allreduce([torch.zeros(1)]).wait()
        return
    tensor = torch.zeros(20, 10)
    for _ in range(2):
        kind, text = whole_refusal((lambda: stand_in.allreduce([tensor])) if rank == 0 else stand_in.barrier)
        assert kind is RuntimeError
        assert ("ALLREDUCE" if rank == 0 else "BARRIER") in text and "Collectives differ in the following" in text, text
    kind, text = whole_refusal(lambda: stand_in.allreduce([torch.zeros(20, 2 + rank)]))
    assert kind is RuntimeError and f"[20, {2 + rank}]" in text and "SequenceNumber" in text, text
    stand_in.allreduce([tensor]).wait()
    # A rank that does not come is named on rank 0, to which the others point.
    hanging = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=1))._get_backend(CPU)
    if rank != 1:
        kind, text = whole_refusal(lambda: hanging.allreduce([tensor]))
        assert issubclass(kind, RuntimeError)
        on_rank_0 = "Ranks 1 failed to pass monitoredBarrier"
        assert (on_rank_0 if rank == 0 else "Please check rank 0 logs for faulty rank") in text, text
    dist.barrier()


def whole_refusal(call):
    try:
        call()
    except Exception as error:
        return type(error), str(error)
    raise AssertionError("the call went well")


def test_debug_level_detail():
    run_ranks(run_debugged, RANKS, backend="gloo")


IN_A_TORCH_WITHOUT_GLOO = """
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

for module in (torch._C._distributed_c10d, distributed_c10d, dist):
    for name in ("ProcessGroupGloo", "_ProcessGroupWrapper"):
        vars(module).pop(name, None)
distributed_c10d._GLOO_AVAILABLE = False

import lockstep

lockstep.replace_gloo()
dist.set_debug_level(dist.DebugLevel.DETAIL)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(1))
print(isinstance(dist.group.WORLD._get_backend(torch.device("cpu")), lockstep.ProcessGroupLockstep))
dist.destroy_process_group()
"""


def test_debug_level_detail_in_a_torch_without_gloo():
    environment = {"LOCKSTEP_REPLACE_GLOO": "0"}
    assert run_python("-c", IN_A_TORCH_WITHOUT_GLOO, environment=environment).splitlines() == ["True"]


IN_GLOOS_PLACE_AND_NOT = """
import os
import torch.distributed as dist
import lockstep

os.dup2(1, 2)  # where the log goes
lockstep.replace_gloo()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.new_group(backend="lockstep")
dist.destroy_process_group()
"""


@pytest.mark.parametrize("level", [{"LOCKSTEP_LOG": "info"}, {"TORCH_DISTRIBUTED_DEBUG": "INFO"}])
def test_the_log_tells_which_groups_are_in_gloos_place(level):
    output = run_python("-c", IN_GLOOS_PLACE_AND_NOT, environment=level)
    joined = re.findall(r"joined group '.*' as rank 0 of 1(, in Gloo's place)?", output)
    assert joined == [", in Gloo's place", ""], output
