"""Averaged models against torch.optim.swa_utils: the same weights and buffers after every update."""


import pytest
import torch
from torch.optim import swa_utils

UPDATES = 12


def make_net():
    return torch.nn.Sequential(
        torch.nn.Linear(5, 7),
        torch.nn.BatchNorm1d(7),
        torch.nn.Tanh(),
        torch.nn.BatchNorm1d(7, momentum=0.3, affine=False),
        torch.nn.Linear(7, 3),
    ).double()


def make_jobs():
    generator = torch.Generator().manual_seed(11)
    states = []
    for update in range(UPDATES):
        state = {}
        for name, tensor in make_net().state_dict().items():
            if tensor.is_floating_point():
                state[name] = torch.randn(tensor.shape, dtype=torch.float64, generator=generator).abs() + update
            else:
                state[name] = torch.tensor(7 * update * update + 3)
        states.append(state)
    batches = [torch.randn(9, 5, dtype=torch.float64, generator=generator) for _ in range(4)]
    return {
        f"{average}, buffers {use_buffers}": {
            "average": average, "decay": 0.83, "use_buffers": use_buffers, "states": states, "batches": batches,
        }
        for average in ("none", "swa", "swa multi", "ema", "ema multi")
        for use_buffers in (False, True)
        if (average, use_buffers) != ("swa multi", True)  # Python refuses to divide the counter
    }


def python_answer(job):
    functions = {
        "none": {},
        "swa": {"avg_fn": swa_utils.get_swa_avg_fn()},
        "swa multi": {"multi_avg_fn": swa_utils.get_swa_multi_avg_fn()},
        "ema": {"avg_fn": swa_utils.get_ema_avg_fn(job["decay"])},
        "ema multi": {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(job["decay"])},
    }[job["average"]]
    net = make_net()
    average = swa_utils.AveragedModel(net, use_buffers=job["use_buffers"], **functions)
    averages = []
    for state in job["states"]:
        net.load_state_dict(state)
        average.update_parameters(net)
        averages.append({name: tensor.clone() for name, tensor in average.state_dict().items()})
    average.eval()
    swa_utils.update_bn(job["batches"], average)
    return averages, average.state_dict()


@pytest.fixture(scope="module")
def answers(run_driver, tmp_path_factory):
    """(jobs, our answers)"""
    folder = tmp_path_factory.mktemp("averages")
    jobs = make_jobs()
    torch.save(jobs, folder / "jobs.pt")
    run_driver("averaged_model_driver", folder / "jobs.pt", folder / "answers.pt")
    return jobs, torch.load(folder / "answers.pt", weights_only=False)


def assert_same(actual, wanted, what):
    # The foreach form of Python divides a tensor of integers, which rounds 1 / (n + 1) to float32.
    bound = 1e-7 if what.startswith("swa multi") else 1e-12
    assert set(actual) == set(wanted), what
    for name, tensor in wanted.items():
        assert actual[name].dtype == tensor.dtype, (what, name)
        torch.testing.assert_close(actual[name], tensor, rtol=bound, atol=bound, msg=lambda m: f"{what}, {name}: {m}")


def test_every_average_equals_pythons(answers):
    jobs, ours = answers
    for name, job in jobs.items():
        averages, after_bn = python_answer(job)
        assert len(ours[name]["averages"]) == UPDATES
        for update, wanted in enumerate(averages):
            assert_same(ours[name]["averages"][update], wanted, f"{name}, update {update}")
        assert_same(ours[name]["after update_bn"], after_bn, f"{name}, update_bn")
        assert not torch.equal(averages[-1]["module.1.running_mean"], after_bn["module.1.running_mean"]), name
