"""Every operation against PyTorch's with Gloo: the same calls, side by side.

What a side made of a case is one of
    right     what the documentation promises (gloo_parity_reference.py)
    wrong     something else, or bytes beside the tensors
    accepted  a misuse, without a word
    refused   an exception
    left out  it wasn't asked: Gloo would crash (known from DEVIATIONS); misuse is the same in private and shared memory
Lockstep must do as Gloo does but for DEVIATIONS, and never be wrong or accept a misuse.
"""

import collections
import pathlib
import re
import sys

import pytest
import torch

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE))
import gloo_parity_reference  # noqa: E402
import gloo_parity_table  # noqa: E402
from gloo_parity_cases import view  # noqa: E402

Deviation = collections.namedtuple("Deviation", "cases gloo ours reason")

#: Where the two differ, and why: (regular expression of names, Gloo's outcome, ours, reason). The first counts.
DEVIATIONS = [
    Deviation("(all_reduce|reduce|broadcast|reduce_scatter|scatter) layout (gaps|rows_of_wider)", "wrong", "right",
              "Gloo takes the memory as if it had no gaps"),
    Deviation("(all_reduce|reduce|broadcast) rank 0 (gaps|transposed) .*", "wrong", "right",
              "Gloo matches elements by their place in memory"),
    Deviation("(reduce_scatter|scatter) (contiguous to (gaps|rows_of_wider|transposed)|transposed to contiguous)",
              "wrong", "right", "Gloo matches elements by their place in memory"),
    Deviation("scatter (gaps|rows_of_wider|expanded) to contiguous", "wrong", "right",
              "Gloo takes the memory as if it had no gaps"),
    Deviation("all_to_all_single contiguous to (gaps|rows_of_wider|transposed)", "wrong", "refused",
              "PyTorch wants contiguous tensors, and checks only the input"),
    Deviation("all_to_all_single contiguous to expanded", "accepted", "refused",
              "PyTorch wants contiguous tensors, and checks only the input"),
    Deviation("(all_reduce|reduce|broadcast|scatter) layout expanded|scatter contiguous to expanded",
              "accepted", "refused", "Gloo writes beyond the tensor's memory"),
    Deviation("(?!p2p|all_to_all_single).* layout overlapping", "accepted", "refused",
              "elements that share memory can't take different values"),
    Deviation("all_to_all_single .*(conj|negative).*|p2p .*(conj|negative).*", "refused|wrong|right", "refused|right",
              "PyTorch wants contiguous tensors, and overlooks most lazy views"),
    Deviation("(reduce|reduce_scatter|reduce_scatter_tensor)(_coalesced)? (layout|contiguous to) conj", "wrong",
              "right", "Gloo overlooks the conjugation"),
    Deviation(".* (layout|contiguous to) conj|(?!reduce_).* conj to contiguous", "refused", "right",
              "PyTorch can't view it as real"),
    Deviation("(?!(all_)?gather(_coalesced)? ).* (layout|contiguous to) negative|"
              "scatter negative to contiguous", "wrong", "right", "Gloo overlooks the lazy negation"),
    Deviation("reduce_scatter_tensor(_coalesced)? (layout scalar|to scalars)", "left out", "right", "Gloo's bug"),
    Deviation("all_gather_into_tensor_coalesced output cat in dimension 1", "left out", "right",
              "Gloo's bug with more than two ranks; the count is what matters"),
    Deviation("all_gather_into_tensor_coalesced output too small", "left out", "refused",
              "Gloo's bug with more than two ranks"),
    Deviation("all_gather_into_tensor(_coalesced)? (layout scalar|of scalars|output (stack|flat|cat in .*))",
              "refused", "right", "PyTorch promises concatenation or stack; Gloo wants the former's shape"),
    Deviation("reduce_scatter_tensor(_coalesced)? input (stack|flat|cat in dimension 1)", "refused", "right",
              "PyTorch promises concatenation or stack; Gloo wants the former's shape"),
    Deviation("all_to_all (uneven.*|shapes differ, counts equal)", "refused", "right",
              "PyTorch promises uneven sizes; Gloo wants equal ones"),
    Deviation("(?!p2p).* dtype (int16|uint16|uint32|uint64|float8.*)", "refused", "right",
              "Gloo knows nine dtypes; moving needs to know none"),
    Deviation("(gather|all_gather_into_tensor_coalesced) dtype complex.*", "refused", "right",
              "PyTorch forgot to view them as real"),
    Deviation("(all_reduce|reduce|reduce_scatter)(_tensor)?(_coalesced)? (int16|uint(16|32|64)) (?!PREMUL_SUM).*",
              "refused", "right", "Gloo knows nine dtypes"),
    Deviation("((all_reduce|reduce|reduce_scatter)(_tensor)?(_coalesced)?|values) u?int(8|32|64) AVG", "refused", "right",
              "Gloo averages no integers; NCCL does"),
    Deviation(".* (float32|float64|float16|bfloat16|complex64|complex128) PREMUL_SUM", "refused", "right",
              "Gloo lacks it; NCCL has it"),
    Deviation("(all_reduce|reduce|reduce_scatter) bool SUM", "wrong", "right", "Gloo leaves bytes of value 2 in bools"),
    Deviation("values NaN of the last rank (MIN|MAX)", "wrong", "right", "Gloo's answer depends on who holds the NaN"),
    Deviation("(all_reduce|reduce) counts differ|.* counts differ by rank|p2p receiver smaller", "left out", "refused",
              "Gloo checks nothing across ranks"),
    Deviation("(all_reduce|reduce|broadcast|p2p) dtypes differ.*|broadcast (counts differ|rank 0 empty)", "accepted",
              "refused", "Gloo checks nothing across ranks"),
    Deviation("all_reduce_coalesced (numbers of tensors|splits of one total) differ|p2p receiver larger", "accepted",
              "refused", "Gloo checks nothing across ranks"),
    Deviation("all_to_all_single rows not divisible", "accepted", "refused", "Gloo leaves the rest as it was"),
    Deviation("all_to_all_single scalars", "accepted|refused", "refused", "Gloo refuses with more than two ranks"),
    Deviation("p2p (tags out of order|both send first)", "refused", "right",
              "Gloo's send waits for its receiver; small messages needn't"),
    Deviation("p2p isend and irecv to self", "refused", "right", "PyTorch promises it, Gloo lacks it"),
    Deviation("sparse all_reduce int16", "refused", "right", "Gloo knows nine dtypes"),
    Deviation("sparse all_reduce complex64", "wrong", "right", "PyTorch views only the real part"),
]  # fmt: skip


def deviation_of(name):
    return next((one for one in DEVIATIONS if re.fullmatch(one.cases, name)), None)


class Side:
    """What one side made of all cases."""

    def __init__(self, jobs, results):
        self.jobs, self.results = jobs, results
        self.outcomes = [self.outcome(number, case) for number, case in enumerate(jobs["cases"])]

    def errors(self, number):
        return [rank["errors"][number] for rank in self.results]

    def parts(self, number):
        """The case's part of each rank's memory."""
        case = self.jobs["cases"][number]
        return [rank["blob"][begin:end] for rank, begin, end in zip(self.results, case["begin"], case["end"])]

    def outcome(self, number, case):
        errors = self.errors(number)
        if "left out" in errors:
            return "left out"
        if any(errors):
            return "refused"
        if case["misuse"]:
            return "accepted"
        expected, unspecified = gloo_parity_reference.result(case, self.jobs["blobs"])
        for rank, spec in unspecified:
            begin = case["begin"][rank]
            view(expected[rank], spec, begin).copy_(view(self.parts(number)[rank], spec, begin))
        expected = rounded(case, expected, self.parts(number))
        return "right" if all(map(torch.equal, self.parts(number), expected)) else "wrong"


def has_nan(tensor):
    real = tensor.is_floating_point() and tensor.element_size() > 1
    return bool((real or tensor.is_complex()) and tensor.isnan().any())


def rounded(case, expected, actual):
    """`expected`, with elements of `actual` where they are as good: sums may be rounded in other orders."""
    reduces = case["op"].startswith(("all_reduce", "reduce", "sparse"))
    for rank, (mine, theirs) in enumerate(zip(expected, actual)):
        for spec in case["ranks"][rank]["inputs"] + case["ranks"][rank]["outputs"]:
            wanted, got = view(mine, spec, case["begin"][rank]), view(theirs, spec, case["begin"][rank])
            real = wanted.is_floating_point() and wanted.element_size() > 1
            if reduces and (real or wanted.is_complex()) and not gloo_parity_reference.overlaps(wanted):
                epsilon = torch.finfo(wanted.dtype).eps
                close = torch.isclose(got, wanted, rtol=4 * epsilon, atol=4 * epsilon, equal_nan=True)
                wanted.copy_(torch.where(close, got, wanted))
    return expected


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.long)])
def sides(request, run_lockstep, run_pytorch, tmp_path_factory):
    """{"gloo", "private": Lockstep with tensors in private memory, "shared": in shared memory}"""
    size, folder = request.param, tmp_path_factory.mktemp("parity")
    jobs = gloo_parity_table.jobs(size)
    for case in jobs["cases"]:
        known = deviation_of(case["name"])
        crashes = known and known.gloo == "left out"
        case["leave_out"] = ["gloo"] * bool(crashes) + ["shared"] * case["misuse"]
    torch.save(jobs, folder / "jobs.pt")
    theirs = run_pytorch(HERE / "gloo_parity_peer.py", folder / "jobs.pt", folder / "gloo", size,
                         output=folder / "gloo", world_size=size, OMP_NUM_THREADS="1")
    sides = {"gloo": Side(jobs, theirs)}
    for memory in ("private", "shared"):
        ours = run_lockstep("collectives_parity_driver", folder / "jobs.pt", folder / memory, memory,
                            output=folder / memory, world_size=size)
        sides[memory] = Side(jobs, ours)
    return sides


@pytest.fixture(scope="module")
def over_hosts(sides, run_lockstep, tmp_path_factory):
    """Lockstep with the ranks on two hosts, and tensors in private memory."""
    jobs, folder = sides["gloo"].jobs, tmp_path_factory.mktemp("parity_over_hosts")
    torch.save(jobs, folder / "jobs.pt")
    size = len(sides["gloo"].results)
    return Side(jobs, run_lockstep("collectives_parity_driver", folder / "jobs.pt", folder / "ours", "private",
                                   output=folder / "ours", world_size=size, hosts=2))


def each_case(sides):
    return enumerate(sides["gloo"].jobs["cases"])


def fail_if(problems):
    assert not problems, "\n" + "\n".join(problems)


@pytest.mark.parametrize("memory", ["private", "shared"])
def test_does_as_gloo_does_but_for_known_deviations(sides, memory):
    problems = []
    for number, case in each_case(sides):
        gloo, ours = sides["gloo"].outcomes[number], sides[memory].outcomes[number]
        if ours == "left out":
            continue
        known = deviation_of(case["name"])
        fits = gloo in known.gloo.split("|") and ours in known.ours.split("|") if known else gloo == ours
        if not fits:
            known_text = f"known: {known.gloo}, {known.ours}" if known else "no deviation known"
            texts = [error[:300] for error in sides["gloo"].errors(number) + sides[memory].errors(number) if error]
            problems.append(f"{case['name']}: Gloo {gloo}, Lockstep {ours} ({known_text}) {texts}")
    fail_if(problems)


@pytest.mark.parametrize("memory", ["private", "shared"])
def test_is_never_wrong_and_accepts_no_misuse(sides, memory):
    outcomes = zip(sides[memory].jobs["cases"], sides[memory].outcomes)
    fail_if([f"{case['name']}: {outcome}" for case, outcome in outcomes if outcome in ("wrong", "accepted")])


def same_bits(case, ones, others):
    """Whether all ranks' parts are equal; one NaN is as good as another."""
    ones = [part.clone() for part in ones]
    for rank, begin, one, other in zip(case["ranks"], case["begin"], ones, others):
        for spec in rank["inputs"] + rank["outputs"]:
            mine, theirs = view(one, spec, begin), view(other, spec, begin)
            if has_nan(mine) and not gloo_parity_reference.overlaps(mine):
                mine.copy_(torch.where(mine.isnan() & theirs.isnan(), theirs, mine))
    return all(map(torch.equal, ones, others))


def test_same_bits_as_gloo_where_order_cannot_matter(sides):
    problems = []
    for number, case in each_case(sides):
        gloo, ours = sides["gloo"], sides["private"]
        if not gloo.outcomes[number] == ours.outcomes[number] == "right" or case["op"] == "reduce":
            continue
        dtypes = [spec["dtype"] for rank in case["ranks"] for spec in rank["inputs"]]
        exact = not any(dtype.startswith(("float", "bfloat", "complex")) for dtype in dtypes)
        if exact or (len(case["ranks"]) == 2 and case["reduce"] != "AVG"):
            if not same_bits(case, gloo.parts(number), ours.parts(number)):
                problems.append(case["name"])
    fail_if(problems)


def test_private_and_shared_memory_give_the_same_bits(sides):
    private, shared = sides["private"], sides["shared"]
    fail_if([
        case["name"]
        for number, case in each_case(sides)
        if private.outcomes[number] == shared.outcomes[number] == "right"
        and not all(map(torch.equal, private.parts(number), shared.parts(number)))
    ])  # fmt: skip


def test_does_the_same_over_hosts(sides, over_hosts):
    fail_if([
        f"{case['name']}: {theirs} over hosts, {ours} on one: {[error[:300] for error in over_hosts.errors(number) if error]}"
        for number, case in each_case(sides)
        if (theirs := over_hosts.outcomes[number]) != (ours := sides["private"].outcomes[number])
    ])  # fmt: skip


def test_refuses_on_every_rank_that_calls(sides):
    problems = []
    for number, case in each_case(sides):
        if case["op"] == "p2p" or sides["private"].outcomes[number] != "refused":
            continue
        for rank, error in enumerate(sides["private"].errors(number)):
            if not error and not case["ranks"][rank].get("absent"):
                problems.append(f"{case['name']}: rank {rank}")
    fail_if(problems)


def test_refuses_before_it_writes(sides):
    private = sides["private"]
    problems = []
    for number, case in each_case(sides):
        before = [blob[begin:end] for blob, begin, end in zip(private.jobs["blobs"], case["begin"], case["end"])]
        if case["op"] != "p2p" and private.outcomes[number] == "refused":
            if not all(map(torch.equal, before, private.parts(number))):
                problems.append(case["name"])
    fail_if(problems)


def test_returns_the_same_sources(sides):
    problems = []
    for number, case in each_case(sides):
        theirs, ours = ([rank["returned"][number] for rank in sides[side].results] for side in ("gloo", "private"))
        if sides["gloo"].outcomes[number] == sides["private"].outcomes[number] == "right" and theirs != ours:
            problems.append(f"{case['name']}: {theirs}, {ours}")
    fail_if(problems)


def test_every_deviation_is_met(sides):
    cases = sides["gloo"].jobs["cases"]
    if len(cases[0]["ranks"]) != 2:
        return  # not all cases
    met = {id(deviation_of(case["name"])) for case in cases}
    fail_if([one.cases for one in DEVIATIONS if id(one) not in met])
