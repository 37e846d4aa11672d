"""DistributedDataParallel against PyTorch's with Gloo: same models, weights, batches and options, same numbers.

parity_jobs.py is the table of what is compared. All jobs run in one `lockstep run` and one parity_peer.py for each
number of ranks.
"""

import pathlib
import sys

import pytest
import torch

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE))
import parity_jobs  # noqa: E402
import parity_models  # noqa: E402
import parity_peer  # noqa: E402

BOUND = {"float32": 1e-5, "float64": 1e-10}


class Trained:
    """The results of all jobs for one number of ranks: {job: {name: tensor}} by rank."""

    def __init__(self, world_size, run_lockstep, run_pytorch, folder):
        self.world_size = world_size
        self.jobs = parity_jobs.make_jobs(world_size)
        torch.save(self.jobs, folder / "jobs")

        def ours(output):
            return run_lockstep("ddp_parity_driver", folder / "jobs", output, output=output, world_size=world_size,
                                OMP_NUM_THREADS="1")

        self.ours = ours(folder / "ours")
        self.again = ours(folder / "again")
        self.theirs = run_pytorch(HERE / "parity_peer.py", folder / "jobs", folder / "theirs", world_size,
                                  output=folder / "theirs", world_size=world_size, OMP_NUM_THREADS="1")
        for results in (*self.ours, *self.again):
            assert set(results) == set(self.jobs)


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.long), 3, pytest.param(4, marks=pytest.mark.long)],
                ids=lambda count: f"{count} ranks")
def trained(request, run_lockstep, run_pytorch, tmp_path_factory):
    return Trained(request.param, run_lockstep, run_pytorch, tmp_path_factory.mktemp("parity"))


def largest_error(ours, theirs):
    """max|a-b| / max|b| over the tensors of a model, and the tensor's name."""
    assert set(ours) == set(theirs)
    errors = []
    for name, expected in theirs.items():
        assert ours[name].shape == expected.shape, name
        a, b = ours[name].double(), expected.double()
        assert torch.isfinite(b).all(), name
        scale = b.abs().max().item() or 1.0
        error = (a - b).abs().max().item() / scale
        errors.append((error if error == error else float("inf"), name))
    return max(errors)


def without(results, *names):
    return {name: tensor for name, tensor in results.items() if name not in names}


def parameters_of(job):
    return [name for name, _ in parity_models.MODELS[job["model"]]().named_parameters(remove_duplicate=False)]


def agreed_by_all(job):
    """Buffers are each rank's own after a step, unless the layers themselves agree on them."""
    return list(job["weights"]) if job["model"] == "cnn sync" else parameters_of(job)


def test_parameters_buffers_and_losses_equal_pytorchs(trained):
    wrong = []
    for name, job in trained.jobs.items():
        if name not in trained.theirs[0]:
            assert job["model"] == "cnn sync" and job["one_process"]
            continue
        for rank in range(trained.world_size):
            error, tensor = largest_error(trained.ours[rank][name], trained.theirs[rank][name])
            if error > BOUND[job["dtype"]]:
                wrong.append(f"{name}: {tensor} of rank {rank}: {error:.1e}")
    assert not wrong, "\n".join(wrong)


def test_ranks_and_runs_are_bit_identical(trained):
    wrong = []
    for name, job in trained.jobs.items():
        for rank in range(trained.world_size):
            ours = trained.ours[rank][name]
            for tensor, value in ours.items():
                if not torch.equal(value, trained.again[rank][name][tensor]):
                    wrong.append(f"{name}: {tensor} of rank {rank} in the second run")
            if job["ranks_agree"]:
                for tensor in agreed_by_all(job):
                    if not torch.equal(ours[tensor], trained.ours[0][name][tensor]):
                        wrong.append(f"{name}: {tensor} of rank {rank}")
            elif trained.world_size > 2 and rank == 2:
                same = [torch.equal(ours[tensor], trained.ours[0][name][tensor]) for tensor in parameters_of(job)]
                assert not all(same), f"{name}: the ranks agree"
    assert not wrong, "\n".join(wrong)


def test_what_is_used_has_trained(trained):
    for name, job in trained.jobs.items():
        changed = []
        for tensor in parameters_of(job):
            moved = not torch.equal(trained.ours[0][name][tensor], job["weights"][tensor])
            if name in trained.theirs[0]:
                expected = not torch.equal(trained.theirs[0][name][tensor], job["weights"][tensor])
                assert moved == expected, f"{name}: {tensor}"
            changed.append(moved)
        assert sum(changed) >= 2, name


def test_ranks_with_small_batches_equal_one_process_with_the_large_one(trained):
    wrong = []
    for name, job in trained.jobs.items():
        if not job["one_process"]:
            continue
        alone = parity_peer.train(job, 0, 1)
        ours = [results[name] for results in trained.ours]
        errors = [largest_error(without(one, "losses", "buckets"), without(alone, "losses")) for one in ours]
        losses = torch.stack([one["losses"] for one in ours]).mean(0)
        errors.append(largest_error({"losses": losses}, {"losses": alone["losses"]}))
        error, tensor = max(errors)
        if error > BOUND[job["dtype"]]:
            wrong.append(f"{name}: {tensor}: {error:.1e}")
    assert not wrong, "\n".join(wrong)


def test_options_and_hooks_change_what_they_are_to_change(trained):
    if trained.world_size == 1:
        pytest.skip("alone, most of them change nothing")
    same = []
    for name, job in trained.jobs.items():
        other = job["differs_from"]
        if not other:
            continue
        errors = []
        for results in trained.ours:
            a, b = results[name], results[other]
            if a["losses"].shape != b["losses"].shape:  # one of them joins
                errors.append(float("inf"))
            else:
                errors.append(largest_error(without(a, "buckets"), without(b, "buckets"))[0])
        if max(errors) <= BOUND[job["dtype"]]:
            same.append(f"{name} equals {other}")
    assert not same, "\n".join(same)


def test_buckets_are_several_where_caps_are_small(trained):
    for name, job in trained.jobs.items():
        if job["buckets"]:  # that they are PyTorch's was compared above
            assert len(trained.ours[0][name]["buckets"]) > 1, name
