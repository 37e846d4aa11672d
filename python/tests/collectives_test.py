"""torch.distributed's collectives from Python, each compared with the same call on a group of Gloo's."""

import itertools
import operator

import pytest
import torch
import torch.distributed as dist
from ranks import BACKEND, run_ranks

INTEGERS = [torch.uint8, torch.int8, torch.int32, torch.int64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
EXACT = dict(rtol=0, atol=0)
RANKS = 3


def gloo_group():
    return dist.new_group(backend="gloo")


def values(rank, count, dtype, salt=0):
    """Small integers that differ by rank: sums and products of them are exact in every dtype."""
    return torch.tensor([(7 * rank + 3 * i + salt) % 5 + 1 for i in range(count)]).to(dtype)


# Each of these calls a collective on fresh tensors and gives (work or None, the tensors that it writes).


def all_reduce(rank, world, dtype, group, sync, op=dist.ReduceOp.SUM):
    tensor = values(rank, 5, dtype)
    return dist.all_reduce(tensor, op, group=group, async_op=not sync), [tensor]


def all_reduce_max(rank, world, dtype, group, sync):
    return all_reduce(rank, world, dtype, group, sync, dist.ReduceOp.MAX)


def all_reduce_min(rank, world, dtype, group, sync):
    return all_reduce(rank, world, dtype, group, sync, dist.ReduceOp.MIN)


def all_reduce_product(rank, world, dtype, group, sync):
    return all_reduce(rank, world, dtype, group, sync, dist.ReduceOp.PRODUCT)


def broadcast(rank, world, dtype, group, sync):
    tensor = values(rank, 5, dtype).view(5, 1)
    return dist.broadcast(tensor, src=1, group=group, async_op=not sync), [tensor]


def reduce(rank, world, dtype, group, sync):
    tensor = values(rank, 5, dtype)
    work = dist.reduce(tensor, dst=1, group=group, async_op=not sync)
    return work, [tensor] if rank == 1 else []  # elsewhere its content is unspecified


def all_gather(rank, world, dtype, group, sync):
    outputs = [torch.zeros(5, dtype=dtype) for _ in range(world)]
    return dist.all_gather(outputs, values(rank, 5, dtype), group=group, async_op=not sync), outputs


def all_gather_into_tensor(rank, world, dtype, group, sync):
    output = torch.zeros(world, 5, dtype=dtype)
    work = dist.all_gather_into_tensor(output, values(rank, 5, dtype).view(1, 5), group=group, async_op=not sync)
    return work, [output]


def gather(rank, world, dtype, group, sync):
    outputs = [torch.zeros(5, dtype=dtype) for _ in range(world)] if rank == 1 else None
    work = dist.gather(values(rank, 5, dtype), outputs, dst=1, group=group, async_op=not sync)
    return work, outputs or []


def scatter(rank, world, dtype, group, sync):
    inputs = [values(peer, 5, dtype) for peer in range(world)] if rank == 1 else None
    output = torch.zeros(5, dtype=dtype)
    return dist.scatter(output, inputs, src=1, group=group, async_op=not sync), [output]


def reduce_scatter(rank, world, dtype, group, sync):
    inputs = [values(rank, 5, dtype, salt) for salt in range(world)]
    output = torch.zeros(5, dtype=dtype)
    return dist.reduce_scatter(output, inputs, group=group, async_op=not sync), [output]


def reduce_scatter_tensor(rank, world, dtype, group, sync):
    output = torch.zeros(5, dtype=dtype)
    inputs = values(rank, 5 * world, dtype)
    return dist.reduce_scatter_tensor(output, inputs, group=group, async_op=not sync), [output]


def all_to_all(rank, world, dtype, group, sync):
    inputs = [values(rank, 4, dtype, peer) for peer in range(world)]
    outputs = [torch.zeros(4, dtype=dtype) for peer in range(world)]
    return dist.all_to_all(outputs, inputs, group=group, async_op=not sync), outputs


def all_to_all_single(rank, world, dtype, group, sync):
    output = torch.zeros(world, dtype=dtype)
    return dist.all_to_all_single(output, values(rank, world, dtype), group=group, async_op=not sync), [output]


def all_to_all_split(rank, world, dtype, group, sync):
    splits = [rank + peer for peer in range(world)]
    output = torch.zeros(sum(splits), 2, dtype=dtype)
    inputs = values(rank, 2 * sum(splits), dtype).view(-1, 2)
    return dist.all_to_all_single(output, inputs, splits, splits, group=group, async_op=not sync), [output]


COLLECTIVES = [all_reduce, all_reduce_max, all_reduce_min, all_reduce_product, broadcast, reduce, all_gather,
               all_gather_into_tensor, gather, scatter, reduce_scatter, reduce_scatter_tensor, all_to_all,
               all_to_all_single, all_to_all_split]  # fmt: skip


def run_collectives(rank, world, dtypes):
    """Sync, then async, then async read from a callback of the future: the same as Gloo's."""
    gloo = gloo_group()
    for dtype, call in itertools.product(dtypes, COLLECTIVES):
        work, expected = call(rank, world, dtype, gloo, True)
        assert work is None
        composite = BACKEND == "gloo" and call in (reduce_scatter, reduce_scatter_tensor)  # Gloo's has no future
        for mode in ("sync", "wait", "future"):
            what = f"{call.__name__}, {dtype}, {mode}"
            work, tensors = call(rank, world, dtype, None, mode == "sync")
            if mode == "sync":
                assert work is None, what
            elif mode == "wait" or composite:
                assert work.wait() and (work.is_completed() or composite), what
            else:
                seen = work.get_future().then(lambda future, t=tensors: [future.value(), [x.clone() for x in t]]).wait()
                assert_same(seen[1], expected, what)
            assert_same(tensors, expected, what)


def assert_same(tensors, expected, what):
    assert len(tensors) == len(expected), what
    for tensor, like in zip(tensors, expected):
        torch.testing.assert_close(tensor, like, **EXACT, msg=lambda message: f"{what}: {message}")


@pytest.mark.parametrize("dtypes", [INTEGERS, FLOATS], ids=["integers", "floats"])
def test_collectives_are_gloos(dtypes):
    run_ranks(run_collectives, RANKS, dtypes)


def run_chain(rank, world):
    """A callback that waits for a further collective of the same group, as PowerSGD's do."""

    def again(future):
        return dist.all_reduce(future.value()[0], async_op=True).get_future().wait()[0].clone()

    future = dist.all_reduce(torch.ones(3), async_op=True).get_future().then(again)
    assert future.wait().tolist() == [world**2.0] * 3


def test_a_callback_may_wait_for_another_collective():
    run_ranks(run_chain, 2)


def run_dropped(rank, world):
    """Nothing keeps works or tensors: the engine lets them go, which needs the GIL, while we hold it and ask on."""
    told = []
    for number in range(3000):
        work = dist.all_reduce(torch.full((2,), float(number)), async_op=True)
        told.append(work.get_future().then(lambda future, sum=2 * number: future.value()[0][0].item() == sum))
    return sum(torch.futures.wait_all(told))


def test_works_that_are_not_kept():
    assert run_ranks(run_dropped, 2) == [3000, 3000]


def run_other_dtypes(rank, world):
    """What is not in every dtype or size: bit operations, complex numbers, booleans, empty and uneven tensors."""
    tensor = torch.tensor([rank, 5, 2**20 + rank])
    for op, combine in ((dist.ReduceOp.BAND, operator.and_), (dist.ReduceOp.BOR, operator.or_),
                        (dist.ReduceOp.BXOR, operator.xor)):  # fmt: skip
        expected = torch.tensor([0, 5, 2**20])
        for peer in range(world):
            expected = combine(expected, torch.tensor([peer, 5, 2**20 + peer])) if peer else torch.tensor([0, 5, 2**20])
        result = tensor.clone()
        dist.all_reduce(result, op)
        assert torch.equal(result, expected), op
    result = torch.tensor([1 + 2j, rank * 1j])
    dist.all_reduce(result)
    assert torch.equal(result, torch.tensor([3 + 6j, 3j])), result
    flags = [torch.zeros(2, dtype=torch.bool) for _ in range(world)]
    dist.all_gather(flags, torch.tensor([rank == 1, True]))
    assert torch.equal(torch.stack(flags)[:, 0], torch.tensor([False, True, False])) and torch.stack(flags)[:, 1].all()
    if BACKEND != "gloo":  # whose all_to_all wants equal sizes
        outputs = [torch.zeros(rank + peer + 1) for peer in range(world)]
        dist.all_to_all(outputs, [values(rank, rank + peer + 1, torch.float32, peer) for peer in range(world)])
        for peer, output in enumerate(outputs):
            assert torch.equal(output, values(peer, rank + peer + 1, torch.float32, rank))
    empty = torch.empty(0)
    dist.all_reduce(empty)
    dist.barrier()
    dist.monitored_barrier(gloo_group())


def test_bit_operations_complex_and_bool():
    run_ranks(run_other_dtypes, RANKS)


def run_averages(rank, world):
    """Integers are averaged as NCCL averages them: the sum wraps around, and the quotient is truncated toward zero."""
    for dtype in [*INTEGERS, torch.int16, torch.uint16, torch.uint32, torch.uint64]:
        least = -4 if dtype.is_signed else 0
        for count in (1, 5, 9001):
            each = [(torch.arange(world * count) + 3 * peer) % 9 + least for peer in range(world)]
            expected = torch.div(sum(each), world, rounding_mode="trunc")
            own = slice(rank * count, (rank + 1) * count)
            tensor = each[rank].to(dtype)
            dist.all_reduce(tensor, dist.ReduceOp.AVG)
            assert torch.equal(tensor.long(), expected), (dtype, count)
            part = torch.zeros(count, dtype=dtype)
            dist.reduce_scatter_tensor(part, each[rank].to(dtype), dist.ReduceOp.AVG)
            assert torch.equal(part.long(), expected[own]), (dtype, count)
            tensor = each[rank].to(dtype)
            dist.reduce(tensor, 0, dist.ReduceOp.AVG)
            assert rank != 0 or torch.equal(tensor.long(), expected), (dtype, count)
            with dist._coalescing_manager():
                for tensor in (pair := [each[rank].to(dtype), each[rank].flip(0).to(dtype)]):
                    dist.all_reduce(tensor, dist.ReduceOp.AVG)
            assert torch.equal(pair[0].long(), expected) and torch.equal(pair[1].long(), expected.flip(0)), (dtype, count)
    large = torch.tensor([2**63 - 1])
    dist.all_reduce(large, dist.ReduceOp.AVG)
    total = (world * (2**63 - 1) + 2**63) % 2**64 - 2**63
    assert large.item() == (total // world if total >= 0 else -(-total // world))
    with pytest.raises(ValueError, match="AVG is not supported for Bool"):
        dist.all_reduce(torch.tensor([True]), dist.ReduceOp.AVG)


@pytest.mark.skipif(BACKEND == "gloo", reason="Gloo averages no integers")
@pytest.mark.parametrize("world", [1, 2, RANKS])
def test_averages_of_integers(world):
    run_ranks(run_averages, world)


def run_coalesced(rank, world):
    """Many tensors as one: the manager's batch, and the list forms."""
    tensors = [values(rank, count, torch.float32) for count in (1, 300, 5000)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    for tensor, count in zip(tensors, (1, 300, 5000)):
        assert torch.equal(tensor, sum(values(peer, count, torch.float32) for peer in range(world)))
    outputs = [torch.zeros(world * count) for count in (2, 3)]
    inputs = [values(rank, count, torch.float32) for count in (2, 3)]
    with dist._coalescing_manager():
        for output, tensor in zip(outputs, inputs):
            dist.all_gather_into_tensor(output, tensor)
    for output, count in zip(outputs, (2, 3)):
        assert torch.equal(output, torch.cat([values(peer, count, torch.float32) for peer in range(world)]))
    parts = [torch.zeros(2), torch.zeros(3)]
    with dist._coalescing_manager():
        for part in parts:
            dist.reduce_scatter_tensor(part, values(rank, world * len(part), torch.float32))
    for part in parts:
        count = len(part)
        total = sum(values(peer, world * count, torch.float32) for peer in range(world))
        assert torch.equal(part, total[rank * count : (rank + 1) * count])


def test_coalescing_manager():
    run_ranks(run_coalesced, RANKS)


def run_messages(rank, world):
    """A ring by isend and irecv, one by a batch, then messages with tags and from any source."""
    right, left = (rank + 1) % world, (rank - 1) % world
    received = torch.zeros(4)
    works = [dist.isend(torch.full((4,), float(rank)), right), dist.irecv(received, left)]
    assert [work.wait() for work in works] == [True, True]
    assert torch.equal(received, torch.full((4,), float(left)))
    received = [torch.zeros(100000), torch.zeros(3, dtype=torch.int64)]
    batch = [dist.P2POp(dist.irecv, tensor, left) for tensor in received]
    batch += [dist.P2POp(dist.isend, values(rank, 100000, torch.float32), right)]
    batch += [dist.P2POp(dist.isend, values(rank, 3, torch.int64), right)]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    assert torch.equal(received[0], values(left, 100000, torch.float32))
    assert torch.equal(received[1], values(left, 3, torch.int64))
    if rank == 0:
        tensors = {dist.recv(tensor := torch.zeros(1)): tensor.item() for _ in range(world - 1)}
        assert tensors == {peer: float(peer) for peer in range(1, world)}
    else:
        dist.send(torch.tensor([float(rank)]), 0)
    if rank == 1:
        for work in [dist.isend(torch.tensor([float(tag)]), 2, tag=tag) for tag in (1, 2)]:
            work.wait()
    if rank == 2:
        second, first = torch.zeros(1), torch.zeros(1)
        dist.irecv(second, 1, tag=2).wait()
        dist.recv(first, 1, tag=1)
        assert (first.item(), second.item()) == (1.0, 2.0)


def test_send_and_receive():
    run_ranks(run_messages, RANKS)


def run_objects(rank, world):
    """Every object collective, with objects whose pickles differ in length."""
    mine = {"rank": rank, "text": "é" * (10 ** (rank + 1)), "tensor": torch.arange(rank)}
    everything = [None] * world
    dist.all_gather_object(everything, mine)
    assert [thing["rank"] for thing in everything] == list(range(world))
    assert [len(thing["text"]) for thing in everything] == [10 ** (peer + 1) for peer in range(world)]
    assert torch.equal(everything[2]["tensor"], torch.arange(2))
    gathered = [None] * world if rank == 1 else None
    dist.gather_object(mine["text"], gathered, dst=1)
    assert rank != 1 or [len(text) for text in gathered] == [10 ** (peer + 1) for peer in range(world)]
    things = [mine["text"], {rank}] if rank == 2 else [None, None]
    dist.broadcast_object_list(things, src=2)
    assert things == ["é" * 1000, {2}]
    part = [None]
    dist.scatter_object_list(part, ["a", ("b", 1), None] if rank == 0 else None, src=0)
    assert part == [["a", ("b", 1), None][rank]]
    if rank == 0:
        dist.send_object_list(["to", 2, {0: "x"}], dst=2)
    if rank == 2:
        received = [None] * 3
        assert dist.recv_object_list(received, src=0) == 0
        assert received == ["to", 2, {0: "x"}]


def test_objects():
    run_ranks(run_objects, RANKS)


def wrong_root(rank, world):
    dist.broadcast(torch.zeros(1), src=world)


def wrong_outputs(rank, world):
    dist.all_gather([torch.zeros(1)] * (world + 1), torch.zeros(1))


def wrong_input(rank, world):
    dist.all_reduce([1, 2])


def test_bad_input_is_refused():
    refusal = RuntimeError if BACKEND == "gloo" else ValueError
    run_ranks(wrong_root, 2, expect={0: refusal, 1: refusal})
    run_ranks(wrong_outputs, 2, expect={0: refusal, 1: refusal})
    run_ranks(wrong_input, 2, expect={0: TypeError, 1: TypeError})
