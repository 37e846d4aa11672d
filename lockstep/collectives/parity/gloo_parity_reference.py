"""What the calls of gloo_parity_table.py should give: torch.distributed's documentation, computed in one process."""

import torch
from gloo_parity_cases import view

#: The operations in which PyTorch lets a complex tensor meet tensors of its element type.
MIX_COMPLEX_AND_REAL = ["all_gather", "scatter", "all_to_all", "all_to_all_single"]


class Misuse(Exception):
    """There is no right result."""


def need(condition):
    if not condition:
        raise Misuse


def result(case, blobs):
    """The case's parts of the blobs after the call, and [(rank, tensor)] that may hold anything; None for misuse."""
    parts = [blob[begin:end].clone() for blob, begin, end in zip(blobs, case["begin"], case["end"])]
    call = Call(case, parts)
    try:
        need(not any(rank.get("absent") for rank in case["ranks"]))
        return parts, getattr(call, case["op"])() or []
    except Misuse:
        return None


def reduced(op, factor, tensors):
    """The reduction of tensors of one dtype, in a wide type and cast back."""
    dtype = tensors[0].dtype
    need(all(t.dtype == dtype for t in tensors))
    floating = dtype.is_floating_point or dtype.is_complex
    need(not dtype.is_complex or op in ("SUM", "AVG", "PREMUL_SUM"))
    need(floating or op != "PREMUL_SUM")
    need(op != "AVG" or dtype != torch.bool)
    if op in ("BAND", "BOR", "BXOR"):
        need(not floating)
        fold = {"BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor}[op]
        folded = tensors[0]
        for other in tensors[1:]:
            folded = fold(folded, other)
        return folded
    wide_type = torch.complex128 if dtype.is_complex else torch.float64 if floating else torch.int64
    wide = torch.stack([t.to(wide_type) for t in tensors])
    if op == "AVG" and not floating:  # the sum wraps around, the quotient is truncated
        total = wide.sum(0).to(dtype).to(wide_type)
        return torch.div(total, len(tensors), rounding_mode="trunc").to(dtype)
    folds = {
        "SUM": lambda: wide.sum(0),
        "AVG": lambda: wide.sum(0) / len(tensors),
        "PREMUL_SUM": lambda: wide.sum(0) * factor,
        "PRODUCT": lambda: wide.prod(0),
        "MIN": lambda: wide.amin(0),
        "MAX": lambda: wide.amax(0),
    }
    return folds[op]().to(dtype)


def overlaps(tensor):
    """Whether two elements share memory, for the layouts of gloo_parity_cases.py."""
    span = 1  # elements from the first to the last of the dimensions looked at
    for stride, size in sorted(zip(tensor.stride(), tensor.shape)):
        if size > 1:
            if stride < span:
                return True
            span += (size - 1) * stride
    return False


def put(target, value):
    """Writes elements in logical order: shapes may differ, element counts and dtypes not."""
    value = value.resolve_conj().resolve_neg()
    need(target.dtype == value.dtype and target.numel() == value.numel() and not overlaps(target))
    target.copy_(value.reshape(target.shape))


def same_counts(tensors):
    need(len({t.numel() for t in tensors}) == 1)


def rows(tensor, splits, count):
    """The parts of a tensor along dimension 0."""
    need(tensor.dim() > 0)
    if splits:
        need(len(splits) == count and min(splits) >= 0 and sum(splits) == tensor.size(0))
        return tensor.split(splits)
    need(tensor.size(0) % count == 0)
    return tensor.split([tensor.size(0) // count] * count)


class Call:
    """A case's tensors, and a method for each operation that computes it."""

    def __init__(self, case, parts):
        self.case, self.ranks, self.size = case, case["ranks"], len(case["ranks"])

        def tensors(key):
            ranks = zip(self.ranks, parts, case["begin"])
            return [[view(part, spec, begin) for spec in rank[key]] for rank, part, begin in ranks]

        def real(lists):
            return [[torch.view_as_real(t) if t.is_complex() else t for t in some] for some in lists]

        self.inputs, self.outputs = tensors("inputs"), tensors("outputs")
        kinds = {t.is_complex() for some in self.inputs + self.outputs for t in some}
        if len(kinds) == 2 and case["op"] in MIX_COMPLEX_AND_REAL:
            self.inputs, self.outputs = real(self.inputs), real(self.outputs)
        self.before = [[t.clone() for t in some] for some in self.inputs]

    def root(self):
        root = self.ranks[0]["root"]
        need(0 <= root < self.size and all(rank["root"] == root for rank in self.ranks))
        return root

    def fold(self, tensors):
        same_counts(tensors)
        return reduced(self.case["reduce"], self.case["factor"], [t.reshape(-1) for t in tensors])

    def broadcast(self):
        root = self.root()
        for tensor, in self.inputs:
            put(tensor, self.before[root][0])

    def all_reduce(self):
        need(len({len(some) for some in self.before}) == 1 and self.before[0])
        need(len({t.dtype for some in self.before for t in some}) == 1)
        for index, tensors in enumerate(zip(*self.before)):
            for mine in self.inputs:
                put(mine[index], self.fold(tensors))

    all_reduce_coalesced = all_reduce

    def reduce(self):
        root = self.root()
        put(self.inputs[root][0], self.fold([some[0] for some in self.before]))
        return [(rank, mine["inputs"][0]) for rank, mine in enumerate(self.ranks) if rank != root]

    def all_gather(self, receivers=None):
        receivers = range(self.size) if receivers is None else receivers
        need(len({some[0].shape for some in self.before}) == 1)
        for rank, outputs in enumerate(self.outputs):
            need(len(outputs) == (self.size if rank in receivers else 0))
            for source, target in enumerate(outputs):
                need(target.shape == self.before[source][0].shape)
                put(target, self.before[source][0])

    def gather(self):
        self.all_gather([self.root()])

    def all_gather_into_tensor(self):
        for outputs in self.outputs:
            need(len({len(some) for some in self.before}) == 1 and len(outputs) == len(self.before[0]))
            for index, target in enumerate(outputs):
                tensors = [some[index] for some in self.before]
                same_counts(tensors)
                put(target, torch.cat([t.reshape(-1) for t in tensors]))

    all_gather_into_tensor_coalesced = all_gather_into_tensor

    def all_gather_coalesced(self):
        count = len(self.before[0])
        need(count and all(len(some) == count for some in self.before))
        need(len({t.dtype for some in self.before for t in some}) == 1)
        for outputs in self.outputs:
            need(len(outputs) == self.size * count)
            for index, target in enumerate(outputs):
                source = self.before[index // count][index % count]
                need(target.shape == source.shape)
                put(target, source)

    def scatter(self):
        root = self.root()
        need(all(len(some) == (self.size if rank == root else 0) for rank, some in enumerate(self.before)))
        need(len({t.shape for t in self.before[root]}) == 1)
        for (target,), source in zip(self.outputs, self.before[root]):
            need(target.shape == source.shape)
            put(target, source)

    def reduce_scatter(self):
        need(all(len(some) == self.size for some in self.before))
        for rank, (target,) in enumerate(self.outputs):
            need(all(some[rank].shape == target.shape for some in self.before))
            put(target, self.fold([some[rank] for some in self.before]))

    def reduce_scatter_tensor(self):
        for rank, outputs in enumerate(self.outputs):
            need(len({len(some) for some in self.before}) == 1 and len(outputs) == len(self.before[0]))
            for index, target in enumerate(outputs):
                whole = self.fold([some[index] for some in self.before])
                need(whole.numel() == self.size * target.numel())
                put(target, whole.reshape(self.size, -1)[rank])

    reduce_scatter_tensor_coalesced = reduce_scatter_tensor

    def all_to_all(self):
        need(all(len(some) == self.size for some in self.before + self.outputs))
        for rank, outputs in enumerate(self.outputs):
            for source, target in enumerate(outputs):
                put(target, self.before[source][rank])

    def all_to_all_single(self):
        pieces = [rows(some[0], mine["input_splits"], self.size) for some, mine in zip(self.before, self.ranks)]
        for rank, mine in enumerate(self.ranks):
            target = self.outputs[rank][0]
            need(target.numel() == sum(part[rank].numel() for part in pieces))
            if mine["output_splits"]:
                for source, part in enumerate(rows(target, mine["output_splits"], self.size)):
                    put(part, pieces[source][rank])
            else:
                same_counts([part[rank] for part in pieces])
                put(target, torch.cat([part[rank].reshape(-1) for part in pieces]))

    def p2p(self):
        need(self.case["moves"])
        for target_rank, target, source_rank, source in self.case["moves"]:
            put(self.outputs[target_rank][target], self.before[source_rank][source])

    def sparse_all_reduce(self):
        need(self.case["reduce"] == "SUM" and len({some[0].shape for some in self.outputs}) == 1)
        dense = [
            torch.sparse_coo_tensor(indices, values, some[0].shape, check_invariants=True).to_dense()
            for (indices, values), some in zip(self.before, self.outputs)
        ]
        for target, in self.outputs:
            put(target, reduced("SUM", 0, dense))

    def barrier(self):
        pass

    monitored_barrier = barrier
