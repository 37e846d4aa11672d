"""The calls that gloo_parity_test.py compares: layouts, dtypes, reduce operations and misuse of every operation."""

import gloo_parity_reference
import torch
from gloo_parity_cases import (
    COMPLEX_DTYPES,
    LAYOUTS,
    ODD_DTYPES,
    REAL_DTYPES,
    REDUCE_OPS,
    Cases,
    laid_out,
    tensor,
)

IN_PLACE = ["broadcast", "all_reduce", "reduce", "all_reduce_coalesced"]
REDUCING = [
    "all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor", "all_reduce_coalesced",
    "reduce_scatter_tensor_coalesced",
]  # fmt: skip
MOVING = [
    "broadcast", "all_gather", "all_gather_into_tensor", "all_gather_coalesced", "all_gather_into_tensor_coalesced",
    "gather", "scatter", "all_to_all", "all_to_all_single", "p2p",
]  # fmt: skip
#: Where Gloo's sends wait for each other for ever.
GLOO_DEADLOCK_MS = 150


def step(kind, index, peer, tag=0, wait=False):
    """A step of a point-to-point case; `index` counts the rank's inputs, then its outputs; peer -1: any."""
    return {"kind": kind, "tensor": index, "peer": peer, "tag": tag, "wait": wait}


def standard(cases, op, name, dtype, layout="contiguous", output_layout=None, **options):
    """A right call of an operation, with its inputs in one layout and its outputs in the same or another."""
    world, root = cases.world_size, cases.world_size - 1
    output_layout = layout if output_layout is None else output_layout

    def make(rank, memory):
        def some(count, seed=rank * 3, stacked=0):
            return [laid_out(memory, dtype, layout, seed + index, stacked) for index in range(count)]

        def results(count, stacked=0):
            return [laid_out(memory, dtype, output_layout, 4, stacked) for _ in range(count)]

        at_root = world if rank == root else 0
        around = [step("isend", 0, (rank + 1) % world), step("recv", 1, (rank - 1) % world)]
        calls = {
            "broadcast": lambda: {"inputs": some(1), "root": root},
            "reduce": lambda: {"inputs": some(1), "root": root},
            "all_reduce": lambda: {"inputs": some(1)},
            "all_reduce_coalesced": lambda: {"inputs": some(2)},
            "all_gather": lambda: {"inputs": some(1), "outputs": results(world)},
            "all_gather_coalesced": lambda: {"inputs": some(2), "outputs": results(2 * world)},
            "gather": lambda: {"inputs": some(1), "outputs": results(at_root), "root": root},
            "scatter": lambda: {"inputs": some(at_root), "outputs": results(1), "root": root},
            "all_gather_into_tensor": lambda: {"inputs": some(1), "outputs": results(1, world)},
            "all_gather_into_tensor_coalesced": lambda: {"inputs": some(2), "outputs": results(2, world)},
            "reduce_scatter": lambda: {"inputs": some(world), "outputs": results(1)},
            "reduce_scatter_tensor": lambda: {"inputs": some(1, stacked=world), "outputs": results(1)},
            "reduce_scatter_tensor_coalesced": lambda: {"inputs": some(2, stacked=world), "outputs": results(2)},
            "all_to_all": lambda: {"inputs": some(world), "outputs": results(world)},
            "all_to_all_single": lambda: {
                "inputs": some(1, stacked=world), "outputs": results(1, world), "input_splits": [], "output_splits": [],
            },
            "p2p": lambda: {"inputs": some(1), "outputs": results(1), "steps": around},
        }  # fmt: skip
        return calls[op]()

    if op == "p2p":
        options["moves"] = [[(rank + 1) % world, 0, rank, 0] for rank in range(world)]
    cases.add(name, op, make, **options)


def sized(cases, op, name, inputs, outputs=lambda rank: [], options=lambda rank: {}, **case_options):
    """A case of contiguous tensors: `inputs` and `outputs` give a rank's sizes, or (dtype, sizes), one a tensor."""

    def place(memory, wanted, seed):
        dtype, sizes = wanted if wanted and isinstance(wanted[0], str) else ("float32", wanted)
        return tensor(memory, dtype, sizes, seed=seed)

    def make(rank, memory):
        return {
            "inputs": [place(memory, wanted, rank * 3 + index) for index, wanted in enumerate(inputs(rank))],
            "outputs": [place(memory, wanted, 4) for wanted in outputs(rank)],
            **options(rank),
        }

    cases.add(name, op, make, **case_options)


def add_layouts(cases):
    def dtype(layout):
        return "complex64" if layout == "conj" else "float32"

    for op in REDUCING + MOVING:
        for layout in LAYOUTS:
            standard(cases, op, f"{op} layout {layout}", dtype(layout), layout)
        if op in IN_PLACE:
            continue
        for layout in ("transposed", "gaps", "rows_of_wider", "expanded", "conj", "negative"):
            # Gloo's scatter leaves the others waiting when it refuses on the source.
            options = {"gloo_timeout_ms": GLOO_DEADLOCK_MS} if (op, layout) == ("scatter", "conj") else {}
            standard(cases, op, f"{op} {layout} to contiguous", dtype(layout), layout, "contiguous", **options)
            standard(cases, op, f"{op} contiguous to {layout}", dtype(layout), "contiguous", layout, **options)


def add_layouts_by_rank(cases):
    """Rank 0 with another layout than the others."""
    world = cases.world_size
    for layout in ("transposed", "gaps", "offset"):

        def mine(rank, memory, layout=layout):
            return laid_out(memory, "float32", layout if rank == 0 else "contiguous", rank)

        for op in ("all_reduce", "reduce", "broadcast"):
            for root in (0, 1) if op != "all_reduce" else (0,):
                name = f"{op} rank 0 {layout} root {root}"
                cases.add(name, op, lambda r, m, root=root: {"inputs": [mine(r, m)], "root": root})
        cases.add(f"all_gather rank 0 {layout}", "all_gather", lambda r, m: {
            "inputs": [mine(r, m)], "outputs": [laid_out(m, "float32", "contiguous", 4) for _ in range(world)],
        })  # fmt: skip
        cases.add(f"all_gather output 0 {layout}", "all_gather", lambda r, m: {
            "inputs": [laid_out(m, "float32", "contiguous", r)], "outputs": [mine(i, m) for i in range(world)],
        })  # fmt: skip


def add_dtypes(cases):
    every = REAL_DTYPES + COMPLEX_DTYPES + ODD_DTYPES
    for op in MOVING:
        for dtype in every:
            standard(cases, op, f"{op} dtype {dtype}", dtype)
    for op in REDUCING:
        for dtype in every:
            for reduce in REDUCE_OPS if op == "all_reduce" else ["SUM", "AVG", "MAX", "BXOR", "PREMUL_SUM"]:
                standard(cases, op, f"{op} {dtype} {reduce}", dtype, reduce=reduce, factor=0.5)
    for op in ("all_reduce", "all_reduce_coalesced", "reduce"):
        for dtype in ("complex64", "float16", "int64"):
            standard(cases, op, f"{op} {dtype} transposed", dtype, "transposed")


def awkward_values(dtype, rank, count=999):
    """Random numbers, and what overflows, rounds and compares in odd ways."""
    random = torch.Generator().manual_seed(rank)
    if dtype in ("float32", "float64", "float16", "bfloat16"):
        values = torch.randn(count, generator=random, dtype=torch.float64)
        special = [0.0, -0.0, float("inf"), 60000.0, 1e-7, -float("inf")]
        values[: len(special)] = torch.tensor(special, dtype=torch.float64).roll(rank)
        return values.to(getattr(torch, dtype))
    info = torch.iinfo(getattr(torch, dtype))
    low, high = max(info.min, -(2**62)), min(info.max, 2**62)
    values = torch.randint(low, high, (count,), generator=random)
    values[0] = info.max
    return values.to(getattr(torch, dtype))


def add_values(cases):
    """Overflow, rounding, infinities, signed zeros, NaN."""
    for dtype in ("float32", "float64", "float16", "bfloat16", "int8", "uint8", "int32", "int64"):
        for reduce in ("SUM", "AVG", "PRODUCT", "MIN", "MAX"):
            cases.add(f"values {dtype} {reduce}", "all_reduce", lambda r, m, dtype=dtype: {
                "inputs": [tensor(m, dtype, (999,), values=awkward_values(dtype, r))],
            }, reduce=reduce)  # fmt: skip
    values = {True: torch.tensor([1.0, float("nan"), 2.0]), False: torch.tensor([3.0, 1.0, 0.5])}
    for reduce in ("SUM", "MIN", "MAX"):
        for name, where in {"first": 0, "last": cases.world_size - 1}.items():
            cases.add(f"values NaN of the {name} rank {reduce}", "all_reduce", lambda r, m, where=where: {
                "inputs": [tensor(m, "float32", (3,), values=values[r == where])],
            }, reduce=reduce)  # fmt: skip


def add_large(cases):
    """Tensors beyond what fits into one message or one chunk."""
    world, count = cases.world_size, 150001
    parts = lambda rank: [(count,)] * world  # noqa: E731
    one = lambda rank: [(count,)]  # noqa: E731
    whole = lambda rank: [(count * world,)]  # noqa: E731
    no_splits = lambda rank: {"input_splits": [], "output_splits": []}  # noqa: E731
    at_root = lambda rank: parts(rank) if rank == 0 else []  # noqa: E731
    root = lambda rank: {"root": 0}  # noqa: E731
    sized(cases, "all_reduce", "large all_reduce", one)
    sized(cases, "broadcast", "large broadcast", one, options=root)
    sized(cases, "reduce", "large reduce", one, options=root)
    sized(cases, "all_gather", "large all_gather", one, parts)
    sized(cases, "all_gather_into_tensor", "large all_gather_into_tensor", one, whole)
    sized(cases, "gather", "large gather", one, at_root, root)
    sized(cases, "scatter", "large scatter", at_root, one, root)
    sized(cases, "reduce_scatter", "large reduce_scatter", parts, one)
    sized(cases, "reduce_scatter_tensor", "large reduce_scatter_tensor", whole, one)
    sized(cases, "all_to_all", "large all_to_all", parts, parts)
    sized(cases, "all_to_all_single", "large all_to_all_single", whole, whole, no_splits)
    sized(cases, "all_reduce_coalesced", "large all_reduce_coalesced", parts)


def add_differing_ranks(cases):
    """Ranks that disagree about shape, count, dtype or root."""
    world = cases.world_size
    root = lambda rank: {"root": 0}  # noqa: E731
    for op in ("all_reduce", "broadcast", "reduce"):
        sized(cases, op, f"{op} shapes differ, counts equal", lambda r: [(4, 3) if r else (3, 4)], options=root)
        sized(cases, op, f"{op} counts differ", lambda r: [(4 + r,)], options=root)
        sized(cases, op, f"{op} dtypes differ", lambda r: [("int32" if r else "float32", (4,))], options=root)
        sized(cases, op, f"{op} rank 0 empty", lambda r: [(4 if r else 0,)], options=root)
    for op in ("broadcast", "reduce"):
        sized(cases, op, f"{op} root -1", lambda r: [(4,)], options=lambda r: {"root": -1})
        sized(cases, op, f"{op} root too large", lambda r: [(4,)], options=lambda r: {"root": world})
        sized(cases, op, f"{op} roots differ", lambda r: [(4,)], options=lambda r: {"root": min(r, 1)})
    for suffix in ("", "_coalesced"):
        gather, reduce = f"all_gather_into_tensor{suffix}", f"reduce_scatter_tensor{suffix}"
        sized(cases, gather, f"{gather} counts differ by rank", lambda r: [(2 + r,)], lambda r: [((2 + r) * world,)])
        sized(cases, reduce, f"{reduce} counts differ by rank", lambda r: [((2 + r) * world,)], lambda r: [(2 + r,)])
    op = "all_reduce_coalesced"
    sized(cases, op, f"{op} numbers of tensors differ", lambda r: [(4,)] if r == 0 else [(2,), (2,)])
    sized(cases, op, f"{op} splits of one total differ", lambda r: [(4,), (2,)] if r == 0 else [(2,), (4,)])


def add_lists(cases):
    """Lists and outputs that don't fit their inputs."""
    world = cases.world_size
    times = lambda wanted, count=world: lambda rank: [wanted] * count  # noqa: E731

    def all_gather(name, inputs, outputs):
        sized(cases, "all_gather", f"all_gather {name}", inputs, outputs)

    all_gather("shapes of inputs differ", lambda r: [(4 + r,)], lambda r: [(4 + i,) for i in range(world)])
    all_gather("output shape, count equal", times((3, 4), 1), times((4, 3)))
    all_gather("outputs too small", times((4,), 1), times((3,)))
    all_gather("output dtype", times((4,), 1), times(("int32", (4,))))
    all_gather("too many outputs", times((4,), 1), times((4,), world + 1))
    all_gather("too few outputs", times((4,), 1), times((4,), world - 1))
    all_gather("no outputs", times((4,), 1), times((4,), 0))
    all_gather("complex to real", times(("complex64", (4,)), 1), times((4, 2)))
    wholes = {
        "stack": (world, 2, 3), "cat": (2 * world, 3), "flat": (6 * world,), "cat in dimension 1": (2, 3 * world),
        "too large": (2 * world + 1, 3), "too small": (2, 3), "of other dtype": ("int32", (2 * world, 3)),
    }  # fmt: skip
    for suffix in ("", "_coalesced"):
        gather, reduce = f"all_gather_into_tensor{suffix}", f"reduce_scatter_tensor{suffix}"
        for name, whole in wholes.items():
            sized(cases, gather, f"{gather} output {name}", times((2, 3), 1), times(whole, 1))
            sized(cases, reduce, f"{reduce} input {name}", times(whole, 1), times((2, 3), 1))
        sized(cases, gather, f"{gather} of scalars", times((), 1), times((world,), 1))
        sized(cases, reduce, f"{reduce} to scalars", times((world,), 1), times((), 1))

    def reduce_scatter(name, inputs, outputs):
        sized(cases, "reduce_scatter", f"reduce_scatter {name}", inputs, outputs)

    reduce_scatter("too many inputs", times((4,), world + 1), times((4,), 1))
    reduce_scatter("too few inputs", times((4,), world - 1), times((4,), 1))
    reduce_scatter("uneven", lambda r: [(2 + i,) for i in range(world)], lambda r: [(2 + r,)])
    reduce_scatter("output shape, count equal", times((2, 3)), times((3, 2), 1))
    reduce_scatter("output too small", times((4,)), times((3,), 1))
    reduce_scatter("output dtype", times((4,)), times(("int32", (4,)), 1))

    def coalesced(op, name, inputs, outputs=times((), 0)):
        sized(cases, op, f"{op} {name}", inputs, outputs)

    op = "all_reduce_coalesced"
    coalesced(op, "dtypes differ", lambda r: [(4,), ("float64", (4,))])
    coalesced(op, "shapes differ", lambda r: [(4,), (2, 3), (0,), ()])
    op = "all_gather_coalesced"
    coalesced(op, "shapes differ", lambda r: [(4,), (2, 3)], lambda r: [(4,), (2, 3)] * world)
    coalesced(op, "too few outputs", lambda r: [(4,), (2, 3)], lambda r: [(4,), (2, 3)] * (world - 1))
    coalesced(op, "output shape", times((6,), 1), times((3,)))
    coalesced(op, "output dtype", times((6,), 1), times(("int32", (6,))))


def add_rooted(cases):
    """gather and scatter: lists that don't fit, roots that don't exist or differ."""
    world = cases.world_size

    def both(name, items, own=lambda rank: (4,), root=lambda rank: 0):
        """The list of each rank, and each rank's own tensor."""
        options = lambda rank: {"root": root(rank)}  # noqa: E731
        sized(cases, "gather", f"gather {name}", lambda r: [own(r)], items, options)
        sized(cases, "scatter", f"scatter {name}", items, lambda r: [own(r)], options)

    def at_root(wanted, count=world):
        return lambda rank: [wanted] * count if rank == 0 else []

    both("list missing", lambda r: [])
    both("list on every rank", lambda r: [(4,)] * world)
    both("list on the wrong rank", lambda r: [(4,)] * world if r == 1 else [])
    both("list too long", at_root((4,), world + 1))
    both("list too short", at_root((4,), world - 1))
    both("list of other shape, counts equal", at_root((2, 2)))
    both("list of too small ones", at_root((3,)))
    both("list of too large ones", at_root((5,)))
    both("list of other dtype", at_root(("int32", (4,))))
    both("root -1", at_root((4,)), root=lambda r: -1)
    both("root too large", at_root((4,)), root=lambda r: world)
    both("roots differ", lambda r: [(4,)] * world if r < 2 else [], root=lambda r: min(r, 1))
    both("counts differ by rank, list fits", lambda r: [(4 + i,) for i in range(world)] if r == 0 else [],
         own=lambda r: (4 + r,))  # fmt: skip
    both("counts differ by rank", at_root((4,)), own=lambda r: (4 + r,))


def add_all_to_all(cases):
    world = cases.world_size
    times = lambda wanted, count=world: lambda rank: [wanted] * count  # noqa: E731

    def lists(name, inputs, outputs):
        sized(cases, "all_to_all", f"all_to_all {name}", inputs, outputs)

    lists("uneven", lambda r: [(1 + r + 2 * i,) for i in range(world)],
          lambda r: [(1 + i + 2 * r,) for i in range(world)])  # fmt: skip
    some = lambda rank: [((rank + i) % 2 * 3,) for i in range(world)]  # noqa: E731
    lists("uneven with empty parts", some, some)
    lists("shapes differ, counts equal", times((2, 2)), times((4,)))
    lists("outputs too small", times((4,)), times((3,)))
    lists("outputs of other dtype", times((4,)), times(("int32", (4,))))
    lists("too few outputs", times((4,)), times((4,), world - 1))
    lists("too many outputs", times((4,)), times((4,), world + 1))
    lists("too few inputs", times((4,), world - 1), times((4,)))
    lists("too many inputs", times((4,), world + 1), times((4,)))
    lists("too few of both", times((4,), world - 1), times((4,), world - 1))

    def single(name, inputs, outputs=None, send=lambda r: [], receive=lambda r: []):
        options = lambda rank: {"input_splits": send(rank), "output_splits": receive(rank)}  # noqa: E731
        sized(cases, "all_to_all_single", f"all_to_all_single {name}", inputs, outputs or inputs, options)

    even = times((2 * world, 3), 1)
    two, one, three = ([count] * world for count in (2, 1, 3))
    uneven = lambda rank: [1 + rank + i for i in range(world)]  # noqa: E731
    holes = lambda rank: [(rank + i) % 2 for i in range(world)]  # noqa: E731
    single("uneven", lambda r: [(sum(uneven(r)), 3)], None, uneven, uneven)
    single("uneven with empty parts", lambda r: [(sum(holes(r)), 3)], None, holes, holes)
    single("splits on one rank", even, None, lambda r: [] if r else two, lambda r: [] if r else two)
    single("only input splits", even, None, lambda r: two)
    single("input splits too small", even, None, lambda r: one, lambda r: two)
    single("input splits too large", even, None, lambda r: three, lambda r: two)
    single("output splits too small", even, None, lambda r: two, lambda r: one)
    single("output splits too large", even, None, lambda r: two, lambda r: three)
    single("too few splits", even, None, lambda r: [2 * world], lambda r: [2 * world])
    single("too many splits", even, None, lambda r: [*two, 0], lambda r: [*two, 0])
    single("negative split", even, None, lambda r: [-1, 2 * world + 1] + [0] * (world - 2), lambda r: two)
    single("rows not divisible", times((2 * world + 1, 3), 1))
    single("output larger", even, times((3 * world, 3), 1))
    single("output of other shape, count equal", even, times((3 * world, 2), 1))
    single("output flat", even, times((6 * world,), 1))
    single("scalars", times((), 1))
    single("output dtype", even, times(("int32", (2 * world, 3)), 1))
    single("complex to real", times(("complex64", (world,)), 1), times((world, 2), 1))
    single("peers disagree", even, None, lambda r: two, lambda r: [1, 3] + [2] * (world - 2))


def add_point_to_point(cases):
    world = cases.world_size

    def add(name, first, second, moves, input_=(4,), output=(4,), **options):
        """Steps of ranks 0 and 1 with tensors 0, 1 (inputs) and 2, 3 (outputs); `moves` empty: misuse."""
        steps = {0: first, 1: second}
        sized(cases, "p2p", f"p2p {name}", lambda r: [input_] * 2, lambda r: [output] * 2,
              lambda r: {"steps": steps.get(r, [])}, moves=moves, **options)  # fmt: skip

    send, receive, big = [step("send", 0, 1)], [step("recv", 2, 0)], {"input_": (200000,), "output": (200000,)}
    there, crosswise = [[1, 0, 0, 0]], [[1, 0, 0, 1], [1, 1, 0, 0]]
    stuck = {"gloo_timeout_ms": GLOO_DEADLOCK_MS}
    add("in order", [step("send", 0, 1), step("send", 1, 1)], [step("recv", 2, 0), step("recv", 3, 0)],
        [[1, 0, 0, 0], [1, 1, 0, 1]])  # fmt: skip
    add("tags out of order", [step("send", 0, 1, 5), step("send", 1, 1, 6)],
        [step("recv", 2, 0, 6), step("recv", 3, 0, 5)], crosswise, **stuck)  # fmt: skip
    for size, options in {"": {}, "800 kB ": big}.items():
        add(f"{size}isend and irecv with tags out of order", [step("isend", 0, 1, 5), step("isend", 1, 1, 6)],
            [step("irecv", 2, 0, 6), step("irecv", 3, 0, 5)], crosswise, **options)  # fmt: skip
        add(f"{size}both isend first", [step("isend", 0, 1), step("recv", 2, 1)],
            [step("isend", 0, 0), step("recv", 2, 0)], [[1, 0, 0, 0], [0, 0, 1, 0]], **options)  # fmt: skip
        add(f"{size}any source", send, [step("recv", 2, -1)], there, **options)
    add("both send first", [step("send", 0, 1), step("recv", 2, 1)], [step("send", 0, 0), step("recv", 2, 0)],
        [[1, 0, 0, 0], [0, 0, 1, 0]], **stuck)  # fmt: skip
    add("any source with irecv", send, [step("irecv", 2, -1, 0, True)], there)
    add("any source with tags", [step("isend", 0, 1, 3), step("isend", 1, 1, 4)],
        [step("recv", 2, -1, 4), step("recv", 3, -1, 3)], crosswise)  # fmt: skip
    add("shapes differ, counts equal", send, receive, there, (2, 6), (4, 3))
    add("empty message", send, receive, there, (0,), (0,))
    add("large tag", [step("send", 0, 1, 2**31 - 1)], [step("recv", 2, 0, 2**31 - 1)], there)
    add("receiver larger", send, receive, [], (4,), (5,))
    add("receiver smaller", send, receive, [], (4,), (3,))
    add("dtypes differ", send, receive, [], (4,), ("int32", (4,)))
    add("dtypes differ, bytes equal", send, receive, [], (4,), ("float64", (2,)))
    add("tag that no rank sends", [step("isend", 0, 1, 5)], [step("recv", 2, 0, 6)], [])
    add("no rank sends", [], receive, [])
    add("any source, no rank sends", [], [step("recv", 2, -1)], [])
    add("no rank receives 800 kB", send, [], [], **big)
    add("send to self", [step("send", 0, 0)], [], [])
    add("recv from self", receive, [], [])
    add("isend and irecv to self", [step("isend", 0, 0), step("irecv", 2, 0)], [], [[0, 0, 0, 0]])
    add("negative tag", [step("send", 0, 1, -3)], [step("recv", 2, 0, -3)], [])
    add("peer too large", [step("send", 0, world)], [], [])


def add_sparse(cases):
    def sparse(name, indices, dtype="float32", sizes=lambda rank: (5, 3), dense=(), **options):
        def make(rank, memory):
            chosen = torch.tensor(indices(rank), dtype=torch.int64)
            values = tensor(memory, dtype, (chosen.size(1), *dense), seed=rank)
            index = tensor(memory, "int64", tuple(chosen.shape), values=chosen.flatten())
            return {"inputs": [index, values], "outputs": [tensor(memory, dtype, (*sizes(rank), *dense), seed=4)]}

        cases.add(f"sparse all_reduce {name}", "sparse_all_reduce", make, **options)

    def some(rank):
        return [[rank, rank + 1, 0][: rank + 1], [0, 1, 2][: rank + 1]]

    for dtype in [*REAL_DTYPES, "complex64"]:
        sparse(dtype, some, dtype)
    sparse("uncoalesced", lambda r: [[1, 1, 2], [0, 0, 1]])
    sparse("with a dense dimension", lambda r: [[r, 3], [0, 1]], dense=(2,))
    sparse("no elements on rank 0", lambda r: [[1, 2], [0, 1]] if r else [[], []])
    sparse("sizes differ", lambda r: [[1], [1]], sizes=lambda r: (5, 3 + r))
    for reduce in ("AVG", "MAX", "PRODUCT", "PREMUL_SUM"):
        sparse(reduce, some, reduce=reduce, factor=0.5)


def add_barriers(cases):
    def add(op, missing=-1, **options):
        name = f"{op} {options} without {missing}" if missing >= 0 else f"{op} {options}"
        cases.add(name, op, lambda rank, memory: {"absent": rank == missing, **options})

    for missing in (-1, 0, 1):
        add("barrier", missing)
        add("monitored_barrier", missing, wait_all_ranks=False)
        add("monitored_barrier", missing, wait_all_ranks=True)


def jobs(world_size):
    """All cases for a world size, and the ranks' blobs. What has nothing to do with the number is for two ranks."""
    cases = Cases(world_size)
    for add in (
        add_layouts, add_layouts_by_rank, add_values, add_large, add_differing_ranks, add_lists, add_rooted,
        add_all_to_all, add_point_to_point, add_sparse, add_barriers,
    ):  # fmt: skip
        add(cases)
    if world_size == 2:
        add_dtypes(cases)
    return cases.jobs(lambda case, blobs: gloo_parity_reference.result(case, blobs) is None)
