"""The learning-rate schedules against PyTorch's: the same numbers in every step, and states that either side reads."""

import collections
import copy
import math
import warnings

import pytest
import torch
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR

STEPS = 300
MIDDLE = 137
LRS = [0.1, 0.0317, 2.5]

LINEAR = {"class": "LinearLR", "start_factor": 0.013, "end_factor": 0.97, "total_iters": 71}
COSINE = {"class": "CosineAnnealingLR", "T_max": 53, "eta_min": 0.0007}
STEP = {"class": "StepLR", "step_size": 17, "gamma": 0.83}
EXPONENTIAL = {"class": "ExponentialLR", "gamma": 0.9871}
RESTARTS = {"class": "CosineAnnealingWarmRestarts", "T_0": 7, "T_mult": 3, "eta_min": 1e-5}
MOMENTA = {"base_momentum": [0.71, 0.8, 0.3], "max_momentum": [0.93, 0.88, 0.9]}
LAMBDAS = [{"kind": "power", "x": 0.97}, {"kind": "inverse", "x": 7.3}, {"kind": "alternate", "x": 0.91}]
SCHEDULERS = {
    "LambdaLR": {"class": "LambdaLR", "lr_lambda": LAMBDAS},
    "MultiplicativeLR": {"class": "MultiplicativeLR", "lr_lambda": LAMBDAS[::-1]},
    "StepLR": STEP,
    "MultiStepLR": {"class": "MultiStepLR", "milestones": [3, 41, 41, 137, 250], "gamma": 0.37},
    "ConstantLR": {"class": "ConstantLR", "factor": 0.29, "total_iters": 140},
    "LinearLR": LINEAR,
    "LinearLR down": {"class": "LinearLR", "start_factor": 0.9, "end_factor": 0.0, "total_iters": 299},
    "ExponentialLR": EXPONENTIAL,
    "PolynomialLR": {"class": "PolynomialLR", "total_iters": 251, "power": 1.7},
    "CosineAnnealingLR": COSINE,
    "CosineAnnealingWarmRestarts": {"class": "CosineAnnealingWarmRestarts", "T_0": 11},
    "CosineAnnealingWarmRestarts, longer and longer": RESTARTS,
    "CyclicLR": {"class": "CyclicLR", "base_lr": 0.001, "max_lr": [0.1, 0.2, 0.03], "step_size_up": 13, **MOMENTA},
    "CyclicLR, triangular2": {"class": "CyclicLR", "base_lr": [0.01, 0.1, 0.05], "max_lr": 0.7, "step_size_up": 9,
                              "step_size_down": 31, "mode": "triangular2"},
    "CyclicLR, exp_range": {"class": "CyclicLR", "base_lr": 0.01, "max_lr": 0.7, "step_size_up": 29, "mode": "exp_range",
                            "gamma": 0.9943, "cycle_momentum": False},
    "CyclicLR, scale_fn": {"class": "CyclicLR", "base_lr": 0.01, "max_lr": 0.7, "step_size_up": 29,
                           "scale_fn": {"kind": "inverse", "x": 50.0}, "scale_mode": "iterations"},
    "OneCycleLR": {"class": "OneCycleLR", "max_lr": [0.3, 0.05, 1.1], "total_steps": 300, **MOMENTA},
    "OneCycleLR, three phases": {"class": "OneCycleLR", "max_lr": 0.3, "epochs": 7, "steps_per_epoch": 43,
                                 "pct_start": 0.37, "anneal_strategy": "linear", "three_phase": True,
                                 "div_factor": 13.0, "final_div_factor": 77.0},
    "SWALR": {"class": "SWALR", "swa_lr": [0.05, 0.2, 0.001], "anneal_epochs": 61},
    "SWALR, linear": {"class": "SWALR", "swa_lr": 0.05, "anneal_epochs": 150, "anneal_strategy": "linear"},
    "SWALR at once": {"class": "SWALR", "swa_lr": 0.05, "anneal_epochs": 0},
    "SequentialLR": {"class": "SequentialLR", "schedulers": [LINEAR, COSINE, EXPONENTIAL], "milestones": [71, 190]},
    "SequentialLR of all sorts": {
        "class": "SequentialLR",
        "schedulers": [{"class": "ConstantLR", "factor": 0.1, "total_iters": 9}, STEP, RESTARTS,
                       {"class": "PolynomialLR", "total_iters": 60}, {"class": "LambdaLR", "lr_lambda": LAMBDAS}],
        "milestones": [10, 60, 170, 240]},
    "SequentialLR of two OneCycleLR": {
        "class": "SequentialLR",
        "schedulers": [{"class": "OneCycleLR", "max_lr": 0.3, "total_steps": 150},
                       {"class": "OneCycleLR", "max_lr": 0.8, "total_steps": 170}], "milestones": [140]},
    "SequentialLR in SequentialLR": {
        "class": "SequentialLR",
        "schedulers": [{"class": "SequentialLR", "schedulers": [LINEAR, STEP], "milestones": [30]}, EXPONENTIAL],
        "milestones": [200]},
    "SequentialLR that begins with a chain": {
        "class": "SequentialLR",
        "schedulers": [{"class": "ChainedScheduler", "schedulers": [STEP, LINEAR]}, COSINE], "milestones": [150]},
    "ChainedScheduler": {"class": "ChainedScheduler", "schedulers": [{"class": "ConstantLR"}, EXPONENTIAL, COSINE, STEP]},
    "ChainedScheduler with a sequence": {
        "class": "ChainedScheduler",
        "schedulers": [{"class": "SequentialLR", "schedulers": [LINEAR, COSINE], "milestones": [71]}, EXPONENTIAL]},
}
PLATEAU = {"class": "ReduceLROnPlateau", "factor": 0.71, "patience": 3, "cooldown": 2, "threshold": 0.003}
PLATEAUS = {
    "ReduceLROnPlateau": {**PLATEAU, "min_lr": 0.004},
    "ReduceLROnPlateau, max abs": {**PLATEAU, "mode": "max", "threshold_mode": "abs", "min_lr": [0.01, 0.0, 0.3]},
    "ReduceLROnPlateau, min abs": {**PLATEAU, "threshold_mode": "abs", "patience": 0},
    "ReduceLROnPlateau, max rel": {**PLATEAU, "mode": "max", "eps": 0.01},
}
CLOSED_FORMS = ["StepLR", "MultiStepLR", "ConstantLR", "LinearLR", "ExponentialLR", "PolynomialLR", "CosineAnnealingLR",
                "LambdaLR", "CosineAnnealingWarmRestarts", "CosineAnnealingWarmRestarts, longer and longer"]
LAST_EPOCHS = ["LambdaLR", "MultiplicativeLR", "StepLR", "MultiStepLR", "ConstantLR", "LinearLR", "ExponentialLR",
               "PolynomialLR", "CosineAnnealingLR", "CosineAnnealingWarmRestarts", "CyclicLR"]


def make_jobs():
    optimizers = ["sgd", "adam", "adamw", "rmsprop"]
    jobs = {}

    def add(name, scheduler, **more):
        kind = optimizers[len(jobs) % len(optimizers)]
        jobs[name] = {"optimizer": kind, "lrs": LRS, "scheduler": scheduler, "steps": STEPS, "middle": MIDDLE, **more}

    for name, scheduler in SCHEDULERS.items():
        add(name, scheduler)
    generator = torch.Generator().manual_seed(3)
    noise = torch.rand(STEPS, generator=generator, dtype=torch.float64)
    metrics = [1 / (1 + 0.05 * step) + 0.1 * noise[step].item() for step in range(STEPS)]
    metrics[20] = math.nan
    for name, scheduler in PLATEAUS.items():
        add(name, scheduler, metrics=metrics if scheduler.get("mode") != "max" else [-m for m in metrics])
    for name in CLOSED_FORMS:
        fractions = name.startswith("CosineAnnealingWarmRestarts")
        epochs = [float((7 * step) % 311) + (step % 4 / 4 if fractions else 0) for step in range(STEPS)]
        add(f"{name} by epochs", SCHEDULERS[name], epochs=epochs)
    for name in LAST_EPOCHS:
        add(f"{name} from epoch 40 on", {**SCHEDULERS[name], "last_epoch": 40}, initial_lr=[0.2, 0.05, 3.0])
    return jobs


def function_of(spec):
    x = spec["x"]
    return {
        "power": lambda epoch: x**epoch,
        "inverse": lambda epoch: 1 / (1 + epoch / x),
        "alternate": lambda epoch: x if epoch % 2 == 0 else 1 / x,
    }[spec["kind"]]


def make_scheduler(spec, optimizer):
    spec = copy.deepcopy(spec)
    kind = spec.pop("class")
    if "schedulers" in spec:
        spec["schedulers"] = [make_scheduler(part, optimizer) for part in spec["schedulers"]]
    if "lr_lambda" in spec:
        spec["lr_lambda"] = [function_of(each) for each in spec["lr_lambda"]]
    if "scale_fn" in spec:
        spec["scale_fn"] = function_of(spec["scale_fn"])
    if kind == "SWALR":
        spec["anneal_strategy"] = spec.get("anneal_strategy", "cos")
        return SWALR(optimizer, **spec)
    if kind == "ChainedScheduler":
        return lr_scheduler.ChainedScheduler(spec["schedulers"])
    return getattr(lr_scheduler, kind)(optimizer, **spec)


def make_training(job):
    parameters = [torch.nn.Parameter(torch.ones(2, dtype=torch.float64)) for _ in job["lrs"]]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    groups = [{"params": [p], "lr": lr} for p, lr in zip(parameters, job["lrs"], strict=True)]
    for group, lr in zip(groups, job.get("initial_lr", []), strict=False):
        group["initial_lr"] = lr
    optimizer = {
        "sgd": lambda: torch.optim.SGD(groups, momentum=0.9),
        "adam": lambda: torch.optim.Adam(groups),
        "adamw": lambda: torch.optim.AdamW(groups),
        "rmsprop": lambda: torch.optim.RMSprop(groups, momentum=0.9),
    }[job["optimizer"]]()
    return optimizer, make_scheduler(job["scheduler"], optimizer)


def lrs_of(optimizer):
    return [group["lr"] for group in optimizer.param_groups]


def momenta_of(optimizer):
    return [group["betas"][0] if "betas" in group else group["momentum"] for group in optimizer.param_groups]


def run(job, optimizer, scheduler, begin, end):
    """(learning rates, momenta) after each step."""
    lrs, momenta = [], []
    optimizer.step()  # once is enough for Python, and its steps are slow
    for step in range(begin, end):
        if "metrics" in job:
            scheduler.step(job["metrics"][step])
        elif "epochs" in job:
            epoch = job["epochs"][step]
            scheduler.step(int(epoch) if epoch == int(epoch) else epoch)
        else:
            scheduler.step()
        lrs.append(lrs_of(optimizer))
        momenta.append(momenta_of(optimizer))
    return lrs, momenta


def picklable(state):
    """As documented: LibTorch reads no Counter."""
    if isinstance(state, collections.Counter):
        return dict(state)
    if isinstance(state, dict):
        return {key: picklable(value) for key, value in state.items()}
    return [picklable(value) for value in state] if isinstance(state, (list, tuple)) else state


@pytest.fixture(scope="module")
def outcomes(run_driver, tmp_path_factory):
    """{job name: (job, Python's results, ours)}"""
    folder = tmp_path_factory.mktemp("schedulers")
    jobs = make_jobs()
    expected = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # step(epoch) is deprecated
        for name, job in jobs.items():
            optimizer, scheduler = make_training(job)
            first = [lrs_of(optimizer)], [momenta_of(optimizer)]
            before = run(job, optimizer, scheduler, 0, MIDDLE)
            state = picklable(scheduler.state_dict())
            job.update(state=copy.deepcopy(state), state_lrs=lrs_of(optimizer), state_momenta=momenta_of(optimizer))
            after = run(job, optimizer, scheduler, MIDDLE, STEPS)
            expected[name] = {
                "lrs": first[0] + before[0] + after[0],
                "momenta": first[1] + before[1] + after[1],
                "state": state,
                "end_state": picklable(scheduler.state_dict()),
            }
    torch.save(jobs, folder / "jobs.pt")
    run_driver("lr_scheduler_driver", folder / "jobs.pt", folder / "answers.pt")
    answers = torch.load(folder / "answers.pt", weights_only=False)
    for name, answer in answers.items():
        assert "error" not in answer, (name, answer)
    return {name: (jobs[name], expected[name], answers[name]) for name in jobs}


def assert_close(actual, wanted, what):
    actual, wanted = torch.tensor(actual, dtype=torch.float64), torch.tensor(wanted, dtype=torch.float64)
    assert actual.shape == wanted.shape, what
    error = (actual - wanted).abs() / wanted.abs().clamp(min=1)
    assert error.max() <= 1e-12, f"{what}: off by {error.max()} in step {error.amax(1).argmax()}"


def test_learning_rates_and_momenta_equal_pythons_in_every_step(outcomes):
    for name, (job, python, ours) in outcomes.items():
        assert len(python["lrs"]) == STEPS + 1 and any(lrs != job["lrs"] for lrs in python["lrs"]), name
        assert_close(ours["lrs"], python["lrs"], name)
        assert_close(ours["momenta"], python["momenta"], f"{name}, momenta")


def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(outcomes):
    for name, (job, python, ours) in outcomes.items():
        assert ours["resumed"] == ours["lrs"][MIDDLE + 1 :], name
        assert ours["resumed_momenta"] == ours["momenta"][MIDDLE + 1 :], name


def test_a_state_of_pythons_loads_here(outcomes):
    for name, (job, python, ours) in outcomes.items():
        assert_close(ours["from_python"], python["lrs"][MIDDLE + 1 :], name)


def test_a_state_of_ours_loads_in_python(outcomes):
    for name, (job, python, ours) in outcomes.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer, scheduler = make_training(job)
            for group, lr, momentum in zip(optimizer.param_groups, job["state_lrs"], job["state_momenta"], strict=True):
                group["lr"] = lr
                group.update(betas=(momentum, 0.999)) if "betas" in group else group.update(momentum=momentum)
            state = copy.deepcopy(ours["state"])
            if "milestones" in state:
                state["milestones"] = collections.Counter(state["milestones"])
            scheduler.load_state_dict(state)
            assert_close(run(job, optimizer, scheduler, MIDDLE, STEPS)[0], python["lrs"][MIDDLE + 1 :], name)


def assert_same_state(actual, wanted, where):
    if isinstance(wanted, dict):
        # A part that SequentialLR has started has two keys more in Python; they are true within calls only.
        extra = {"_is_initial", "_step_count"} if "_schedulers" in wanted else set()
        assert set(actual) == set(wanted) - extra, where
        for key in actual:
            assert_same_state(actual[key], wanted[key], f"{where}[{key!r}]")
    elif isinstance(wanted, list):
        assert len(actual) == len(wanted), where
        for index, (a, w) in enumerate(zip(actual, wanted, strict=True)):
            assert_same_state(a, w, f"{where}[{index}]")
    elif isinstance(wanted, float) or (isinstance(wanted, int) and not isinstance(wanted, bool)):
        assert actual == pytest.approx(wanted, rel=1e-12, abs=1e-12, nan_ok=True), where
    else:
        assert actual == wanted, where


def test_states_have_pythons_keys_and_values(outcomes):
    for name, (job, python, ours) in outcomes.items():
        assert_same_state(ours["state"], python["state"], name)
        assert_same_state(ours["end_state"], python["end_state"], name)
