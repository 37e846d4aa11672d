"""How gloo_parity_test.py describes calls, so that Python with Gloo and C++ with Lockstep can both make them.

A case is a dictionary:
    name, op, reduce, factor (of PREMUL_SUM), moves (of point-to-point cases: output rank, output, input rank, input)
    ranks: for each rank {inputs, outputs: tensors, root, input_splits, output_splits, steps, wait_all_ranks};
           "absent": the rank doesn't call
    begin, end: for each rank the part of its blob that belongs to the case
    misuse: there is no right result (gloo_parity_reference.py)
    leave_out: the implementations that are not asked: "gloo", "private", "shared"; set by the test
    timeout_ms, gloo_timeout_ms
A tensor is {at, bytes: its place in the rank's blob; dtype, size, stride, offset: in elements; lazy: "", "conj" or
"negative", as torch.conj() and x.conj().imag make views}. All memory of a rank is one blob of bytes, so that what is
written beside a tensor's elements shows as well.
"""

import torch

#: Beyond each tensor: more than any case can overrun by.
GUARD_BYTES = 512
ALIGNMENT = 64
#: A misuse may leave ranks waiting for each other; on a slow machine it is refused all the same.
MISUSE_TIMEOUT_MS = 150
TIMEOUT_MS = 60000

REAL_DTYPES = ["float32", "float64", "float16", "bfloat16", "int8", "uint8", "int16", "int32", "int64", "bool"]
COMPLEX_DTYPES = ["complex64", "complex128"]
ODD_DTYPES = ["float8_e4m3fn", "float8_e5m2", "uint16", "uint32", "uint64"]
REDUCE_OPS = ["SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM"]

#: name: (sizes, strides or None for contiguous, offset), all in elements
LAYOUTS = {
    "contiguous": ((4, 6), None, 0),
    "offset": ((4, 6), None, 5),
    "transposed": ((4, 6), (1, 4), 0),
    "channels_last": ((2, 3, 2, 2), (12, 1, 6, 3), 0),
    "permuted": ((2, 3, 4), (4, 8, 1), 0),
    "odd_stride_of_1": ((1, 24), (100, 1), 0),
    "gaps": ((4, 6), (12, 2), 0),
    "rows_of_wider": ((4, 6), (9, 1), 0),
    "expanded": ((4, 6), (0, 1), 0),
    "overlapping": ((4, 6), (1, 1), 0),
    "scalar": ((), None, 0),
    "empty": ((0, 6), None, 0),
    "conj": ((4, 6), None, 0),
    "negative": ((4, 6), None, 0),
}
#: Layouts whose values are not what lies in memory.
LAZY = {"conj", "negative"}
#: The layouts in which a tensor of world size times (4, 6) is made too; its other layouts are contiguous.
STACKED_STRIDES = {"gaps": (12, 2), "rows_of_wider": (9, 1), "expanded": (0, 1), "overlapping": (1, 1)}


class Memory:
    """The blob of one rank while cases are made."""

    def __init__(self):
        self.parts = []
        self.size = 0

    def add(self, values):
        """Places a one-dimensional tensor and a guard after it; returns its byte offset and size."""
        data = values.contiguous().view(torch.uint8) if values.numel() else torch.empty(0, dtype=torch.uint8)
        guard = torch.full((-data.numel() % ALIGNMENT + GUARD_BYTES,), 0xA5, dtype=torch.uint8)
        at = self.size
        self.parts += [data, guard]
        self.size += data.numel() + guard.numel()
        return at, data.numel()

    def blob(self):
        return torch.cat(self.parts)


def small_values(count, dtype, seed):
    """Whole numbers 1 to 5 (bool: both), whose sums and products of three ranks are exact in every dtype."""
    index = torch.arange(count, dtype=torch.int32)
    values = (index * 7 + seed * 11 + (index >> 3) * seed) % 5 + 1
    dtype = getattr(torch, dtype)
    if dtype == torch.bool:
        return values % 2 == 0
    if dtype.is_complex:
        return torch.complex(values.double(), (values * 3 % 5 - 2).double()).to(dtype)
    return values.float().to(dtype) if dtype.is_floating_point else values.to(dtype)


def contiguous_strides(sizes):
    strides, step = [], 1
    for size in reversed(sizes):
        strides.insert(0, step)
        step *= max(size, 1)
    return strides


def tensor(memory, dtype, sizes, strides=None, offset=0, seed=0, lazy="", values=None):
    """Places a tensor, filled with `values` (its whole span, flat) or small ones."""
    strides = contiguous_strides(sizes) if strides is None else strides
    span = 0 if 0 in sizes else 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides))
    values = small_values(offset + span, dtype, seed) if values is None else values
    at, count = memory.add(values)
    return {
        "at": at, "bytes": count, "dtype": dtype, "size": list(sizes), "stride": list(strides), "offset": offset,
        "lazy": lazy,
    }  # fmt: skip


def laid_out(memory, dtype, layout, seed, stacked=0):
    """A tensor of a layout; `stacked`: that many along dimension 0."""
    sizes, strides, offset = LAYOUTS[layout]
    if stacked:
        sizes = (stacked * sizes[0], *sizes[1:]) if sizes else (stacked,)
        strides = (1, sizes[0]) if layout == "transposed" else STACKED_STRIDES.get(layout)
    return tensor(memory, dtype, sizes, strides, offset, seed, layout if layout in LAZY else "")


def view(blob, spec, begin=0):
    """The tensor of a description in a blob, or in the part of it that begins at `begin`."""
    at = spec["at"] - begin
    part = blob[at : at + spec["bytes"]].view(getattr(torch, spec["dtype"]))
    strided = torch.as_strided(part, spec["size"], spec["stride"], part.storage_offset() + spec["offset"])
    if spec["lazy"] == "negative":
        return torch._neg_view(strided)
    return strided.conj() if spec["lazy"] == "conj" else strided


class Cases:
    """Collects cases for one world size."""

    def __init__(self, world_size):
        self.world_size = world_size
        self.memories = [Memory() for _ in range(world_size)]
        self.cases = []

    def add(self, name, op, make, **options):
        """`make(rank, memory)`: the rank's part; `options`: further entries of the case."""
        begin = [memory.size for memory in self.memories]
        ranks = [{"inputs": [], "outputs": [], **make(rank, memory)} for rank, memory in enumerate(self.memories)]
        end = [memory.size for memory in self.memories]
        case = {"name": name, "op": op, "reduce": "SUM", "factor": 0.0, "moves": [], "ranks": ranks, "begin": begin}
        self.cases.append({**case, "end": end, **options})

    def jobs(self, is_misuse):
        """What both sides read: {"cases", "blobs" by rank}."""
        names = [case["name"] for case in self.cases]
        assert len(set(names)) == len(names), {name for name in names if names.count(name) > 1}
        blobs = [memory.blob() for memory in self.memories]
        for case in self.cases:
            case["misuse"] = is_misuse(case, blobs)
            case.setdefault("timeout_ms", MISUSE_TIMEOUT_MS if case["misuse"] else TIMEOUT_MS)
            case.setdefault("gloo_timeout_ms", case["timeout_ms"])
        return {"cases": self.cases, "blobs": blobs}
