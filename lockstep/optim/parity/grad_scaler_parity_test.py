"""GradScaler and clip_grad_value_ against PyTorch's: the same sequences of finite and infinite gradients, the same
scales, growth trackers, skipped steps, gradients and errors. grad_scaler_driver.cc runs them all at once."""

import random

import pytest
import torch

INDICES = torch.tensor([[0], [0], [2]])  # of the sparse embeddings: one twice
ITERATIONS = 40
# init_scale, growth_factor, backoff_factor, growth_interval
SETTINGS = [
    (65536.0, 2.0, 0.5, 2000),
    (65536.0, 2.0, 0.5, 1),
    (8.0, 1.5, 0.3, 3),
    (3.7, 1.1, 0.9, 2),  # inverses that are not exact
    (2.0**127, 2.0, 0.5, 2),  # the scale itself may not become infinite
    (1e-3, 10.0, 0.01, 2),
]
SETTERS = {"growth_factor": 3.0, "backoff_factor": 0.25, "growth_interval": 2.0}
NONE = torch.empty(0)


def make_weights(pick, shapes):
    """A gradient for each parameter. Some are infinite or NaN, or will be once they are scaled."""
    weights = []
    for shape, dtype in shapes:
        size = torch.tensor(shape).prod().item()
        values = torch.tensor([pick.gauss(0, 1) for _ in range(size)], dtype=torch.float64)
        values *= 10.0 ** pick.uniform(-3, 3)
        weights.append(values.reshape(shape).to(dtype))
    if pick.random() < 0.3:
        victim = pick.choice(weights).view(-1)
        victim[pick.randrange(len(victim))] = pick.choice([float("inf"), -float("inf"), float("nan"), 3e36])
    return weights


def make_script(pick, optimizers):
    words = ["zero", "backward"]
    if pick.random() < 0.2:
        words.append("backward")  # accumulation
    stepping = [i for i in range(optimizers) if pick.random() < 0.9] or [0]
    for i in stepping:
        if pick.random() < 0.5:
            words.append(f"unscale:{i}")
    if pick.random() < 0.4:
        words.append(pick.choice(["clip_value:0.5", "clip_value_slow:0.01", "clip_value:1e3"]))
    words += [f"step:{i}" for i in stepping]
    words.append("update" if pick.random() < 0.9 else pick.choice(["update:128.5", "update_tensor:7"]))
    if pick.random() < 0.1:
        words.append("reload")
    if pick.random() < 0.1:
        word = pick.choice(list(SETTERS))
        words.append(f"{word}:{SETTERS[word]}")
    return words


def make_jobs():
    jobs = {}
    for seed, options in enumerate(SETTINGS):
        pick = random.Random(seed)
        for kind in ("plain", "mixed"):
            # The last two are embeddings' with sparse gradients: weights for each of the indices.
            shapes = [((3, 4), torch.float32), ((5,), torch.float32)]
            if kind == "mixed":
                shapes += [((6,), torch.bfloat16), ((2, 2), torch.float64), ((3, 1, 3), torch.float32), ((3, 1, 2), torch.float64)]
            parameters = [torch.full(s if len(s) < 3 else (4, s[2]), 0.5, dtype=d) for s, d in shapes]
            optimizers = 3 if kind == "mixed" else 1
            jobs[f"{kind} {seed}"] = {
                "options": [float(number) for number in options],
                "optimizers": optimizers,
                "parameters": parameters,
                "owners": [i % optimizers for i in range(len(shapes))],
                "iterations": [
                    {"weights": make_weights(pick, shapes), "script": make_script(pick, optimizers)}
                    for _ in range(ITERATIONS)
                ],
            }
    # Optimizer 1's parameter has no gradient, optimizer 2's is float16.
    weights = [torch.ones(3), NONE, torch.ones(2, dtype=torch.float16)]
    jobs["misuse"] = {
        "options": [4.0, 2.0, 0.5, 2.0],
        "optimizers": 3,
        "parameters": [torch.ones(3), torch.ones(2), torch.ones(2, dtype=torch.float16)],
        "owners": [0, 1, 2],
        "iterations": [
            {"weights": weights, "script": script.split()}
            for script in (
                "update unscale:0 step:0 update:8 reload",  # before the first scale()
                "backward update unscale:0 unscale:0 update unscale:0 step:0 step:0 unscale:0 update update",
                "zero backward step:1 unscale:1 step:1 update unscale:2 step:2 step:0 update step:0 reload step:0",
            )
        ],
    }
    return jobs


def loss_of(parameters, weights):
    total = torch.zeros(())
    for parameter, weight in zip(parameters, weights):
        if weight.numel() == 0:
            continue
        used = parameter
        if weight.dim() > parameter.dim():
            used = torch.nn.functional.embedding(INDICES, parameter, sparse=True)
        total = total + (used * weight).sum().float()
    return total


def run_in_pytorch(job):
    def make_scaler(init_scale=65536.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000):
        return torch.amp.GradScaler("cpu", init_scale, growth_factor, backoff_factor, int(growth_interval))

    scaler = make_scaler(*job["options"])
    parameters = [value.clone().requires_grad_() for value in job["parameters"]]
    optimizers = [
        torch.optim.SGD([p for p, owner in zip(parameters, job["owners"]) if owner == i], lr=0.1)
        for i in range(job["optimizers"])
    ]
    result = {"errors": [], "scales": [], "trackers": [], "gradients": [], "parameters": []}

    def perform(text, weights):
        nonlocal scaler
        word, _, argument = text.partition(":")
        dense = [p for p in parameters if p.grad is None or not p.grad.is_sparse]
        if word == "zero":
            for optimizer in optimizers:
                optimizer.zero_grad()
        elif word == "backward":
            scaler.scale(loss_of(parameters, weights)).backward()
        elif word == "unscale":
            scaler.unscale_(optimizers[int(argument)])
        elif word == "clip_value":
            torch.nn.utils.clip_grad_value_(dense, float(argument))
        elif word == "clip_value_slow":
            torch.nn.utils.clip_grad_value_(dense, float(argument), foreach=False)
        elif word == "step":
            scaler.step(optimizers[int(argument)])
        elif word == "update":
            scaler.update(float(argument) if argument else None)
        elif word == "update_tensor":
            scaler.update(torch.tensor([float(argument)]).reshape(()))
        elif word in SETTERS:
            getattr(scaler, f"set_{word}")(type(getattr(scaler, f"get_{word}")())(float(argument)))
        else:
            assert word == "reload"
            state = scaler.state_dict()
            scaler = make_scaler()
            scaler.load_state_dict(state)

    for iteration in job["iterations"]:
        for word in iteration["script"]:
            error = ""
            try:
                perform(word, iteration["weights"])
            except (AssertionError, RuntimeError, ValueError) as raised:
                error = str(raised)
            result["errors"].append(error)
            result["scales"].append(scaler.get_scale())
            result["trackers"].append(scaler.state_dict()["_growth_tracker"])
            for parameter in parameters:
                result["parameters"].append(parameter.detach().clone())
                gradient = parameter.grad
                result["gradients"].append(NONE if gradient is None else gradient.to_dense().clone())
    return result


@pytest.fixture(scope="module")
def results(run_driver, tmp_path_factory):
    """(jobs, our results, PyTorch's)"""
    folder = tmp_path_factory.mktemp("scaler")
    jobs = make_jobs()
    torch.save(jobs, folder / "jobs.pt")
    run_driver("grad_scaler_driver", folder / "jobs.pt", folder / "ours.pt", OMP_NUM_THREADS="1")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    theirs = {name: run_in_pytorch(job) for name, job in jobs.items()}
    torch.set_num_threads(threads)
    return jobs, torch.load(folder / "ours.pt", weights_only=False), theirs


def words_of(job):
    return [word for iteration in job["iterations"] for word in iteration["script"]]


def test_scales_and_trackers_are_pytorchs_after_every_word(results):
    jobs, ours, theirs = results
    for name, job in jobs.items():
        words = words_of(job)
        for place, word in enumerate(words):
            where = f"{name}, word {place}: {words[max(0, place - 8) : place + 1]}"
            assert ours[name]["scales"][place] == theirs[name]["scales"][place], where
            assert ours[name]["trackers"][place] == theirs[name]["trackers"][place], where


def test_gradients_are_unscaled_and_clipped_to_the_same_bits(results):
    jobs, ours, theirs = results
    infinite = 0
    for name in jobs:
        for place, expected in enumerate(theirs[name]["gradients"]):
            actual = ours[name]["gradients"][place]
            assert actual.dtype == expected.dtype, (name, place)
            assert torch.equal(actual.nan_to_num(7.5), expected.nan_to_num(7.5)), (name, place)
            infinite += not expected.isfinite().all()
    assert infinite > 100, "the sequences have infinite gradients"


def test_the_same_steps_are_skipped(results):
    jobs, ours, theirs = results
    for name, job in jobs.items():
        count = len(job["parameters"])
        made = skipped = 0
        for place, word in enumerate(words_of(job)):
            before, after = slice((place - 1) * count, place * count), slice(place * count, (place + 1) * count)
            for actual, expected in zip(ours[name]["parameters"][after], theirs[name]["parameters"][after]):
                torch.testing.assert_close(actual, expected, rtol=1e-6 if actual.dtype != torch.bfloat16 else 1e-2, atol=0)
            if not word.startswith("step") or theirs[name]["errors"][place]:
                continue
            moved = [
                any(not torch.equal(a, b) for a, b in zip(side[name]["parameters"][before], side[name]["parameters"][after]))
                for side in (ours, theirs)
            ]
            assert moved[0] == moved[1], (name, place)
            made, skipped = made + moved[1], skipped + (not moved[1])
        if name != "misuse":
            assert made > 3 and skipped > 3, name


def test_misuse_gets_pytorchs_errors(results):
    jobs, ours, theirs = results
    for name, job in jobs.items():
        for place, (actual, expected) in enumerate(zip(ours[name]["errors"], theirs[name]["errors"], strict=True)):
            where = f"{name}, word {place}, {words_of(job)[place]}"
            assert bool(actual) == bool(expected), f"{where}: ours '{actual}', PyTorch's '{expected}'"
            assert expected in actual, where
    assert len({error for error in theirs["misuse"]["errors"] if error}) >= 7
