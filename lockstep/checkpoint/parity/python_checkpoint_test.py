"""Checkpoints between C++ and Python, both ways, by torch.save's files."""

import collections
import subprocess

import pytest
import torch
from torch.distributed.checkpoint import state_dict as dcp
from torch.optim import lr_scheduler, swa_utils

STEPS = 10  # of each of the three parts
CASES = ["sgd", "adam", "adamw", "rmsprop", "adagrad", "lbfgs"]


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(8, 16, bias=False)
        self.norm = torch.nn.BatchNorm1d(16)
        self.second = torch.nn.Linear(16, 4)

    def forward(self, x):
        return self.second(torch.tanh(self.norm(self.first(x))))


class Training:
    """What python_checkpoint_driver.cc has under the same name."""

    def __init__(self, name, initial):
        self.net = Net()
        if name == "lbfgs":
            self.net.double()  # its line searches make rounding large
        self.net.load_state_dict(initial)
        parameters = self.net.parameters()
        if name == "sgd":
            self.optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-3, nesterov=True)
            self.scheduler = lr_scheduler.OneCycleLR(self.optimizer, 0.1, total_steps=40)
        elif name == "adam":
            self.optimizer = torch.optim.Adam(parameters, lr=0.01, betas=(0.8, 0.99), weight_decay=1e-3, amsgrad=True)
            self.scheduler = lr_scheduler.CosineAnnealingLR(self.optimizer, 25, 1e-3)
        elif name == "adamw":
            parameters = list(parameters)
            groups = [
                {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
                {"params": [p for p in parameters if p.dim() <= 1], "lr": 0.02, "weight_decay": 0.001},
            ]
            self.optimizer = torch.optim.AdamW(groups, lr=0.01)
            self.scheduler = lr_scheduler.LinearLR(self.optimizer, 0.3, 1.0, 15)
        elif name == "rmsprop":
            self.optimizer = torch.optim.RMSprop(parameters, lr=0.001, momentum=0.5, centered=True, alpha=0.9)
            self.scheduler = lr_scheduler.MultiStepLR(self.optimizer, [5, 5, 17], 0.5)
        elif name == "adagrad":
            self.optimizer = torch.optim.Adagrad(parameters, lr=0.05, lr_decay=0.01, initial_accumulator_value=0.1)
            self.scheduler = lr_scheduler.ExponentialLR(self.optimizer, 0.97)
        else:
            self.optimizer = torch.optim.LBFGS(
                parameters, lr=0.5, max_iter=3, history_size=5, line_search_fn="strong_wolfe"
            )
            self.scheduler = lr_scheduler.StepLR(self.optimizer, 8, 0.5)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024, growth_interval=7)
        self.ema = swa_utils.AveragedModel(self.net, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
        self.closure = name == "lbfgs"
        self.losses, self.lrs = [], []

    def load(self, state):
        self.net.load_state_dict(state["model_state_dict"])
        self.optimizer.load_state_dict(state["optimizer_state_dict"])
        self.scheduler.load_state_dict(state["scheduler_state_dict"])
        self.scaler.load_state_dict(state["scaler_state_dict"])
        self.ema.load_state_dict(state["ema_state_dict"])

    def step(self, x, y):
        x = x.to(self.net.second.weight.dtype)

        def loss_of():
            return torch.nn.functional.cross_entropy(self.net(x), y)

        if self.closure:

            def closure():
                self.optimizer.zero_grad()
                value = loss_of()
                value.backward()
                return value

            loss = self.optimizer.step(closure)
        else:
            self.optimizer.zero_grad()
            loss = loss_of()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.losses.append(loss.item())
        self.scheduler.step()
        self.lrs.append(self.scheduler.get_last_lr()[-1])
        self.ema.update_parameters(self.net)

    def save(self, path, epoch):
        state = self.net.state_dict()
        torch.save(
            {
                "epoch": epoch,
                "model_state_dict": state,
                "ddp_state_dict": collections.OrderedDict((f"module.{key}", value) for key, value in state.items()),
                "optimizer_state_dict": self.optimizer.state_dict(),
                "optimizer_by_name": dcp.get_optimizer_state_dict(self.net, self.optimizer),
                "scheduler_state_dict": self.scheduler.state_dict(),
                "scaler_state_dict": self.scaler.state_dict(),
                "ema_state_dict": self.ema.state_dict(),
                "rng": torch.get_rng_state(),
                "draw": torch.rand(5),
                "loss": self.losses[-1],
            },
            path,
        )


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def runs(run_driver, tmp_path_factory):
    """{case: (all losses and learning rates, files of the three parts, uninterrupted training)}"""
    folder = tmp_path_factory.mktemp("checkpoints")
    torch.manual_seed(5)
    x = torch.randn(3 * STEPS, 16, 8)
    y = torch.randint(4, (3 * STEPS, 16))
    initial = Net().state_dict()
    torch.save({"initial": initial, "x": x, "y": y, "steps": STEPS}, folder / "input.pt")
    run_driver("python_checkpoint_driver", "start", folder / "input.pt", folder)
    middles = {}
    for name in CASES:
        middle = middles[name] = Training(name, initial)
        first = torch.load(folder / f"{name}.1.pt", weights_only=True)
        middle.load(first)
        torch.set_rng_state(first["rng"])
        middle.draw = torch.rand(5)
        for step in range(first["epoch"], 2 * STEPS):
            middle.step(x[step], y[step])
        middle.save(folder / f"{name}.2.pt", 2 * STEPS)
    run_driver("python_checkpoint_driver", "finish", folder / "input.pt", folder)
    answer = {}
    for name in CASES:
        whole = Training(name, initial)
        for step in range(3 * STEPS):
            whole.step(x[step], y[step])
        files = {part: torch.load(folder / f"{name}.{part}.pt", weights_only=True) for part in ("1", "2", "3", "3n")}
        answer[name] = (whole, middles[name], files)
    return answer


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("last", ["3", "3n"], ids=["by number", "by name"])
def test_losses_are_those_of_an_uninterrupted_run(runs, name, last):
    whole, middle, files = runs[name]
    for key in ("losses", "lrs"):
        ours = files["1"][key] + getattr(middle, key) + files[last][key]
        theirs = getattr(whole, key)
        assert len(ours) == len(theirs) == 3 * STEPS
        for step, (actual, wanted) in enumerate(zip(ours, theirs)):
            assert abs(actual - wanted) <= 1e-5, f"{name}, {key} of step {step}: {actual}, not {wanted}"
    assert min(whole.losses[2 * STEPS :]) < 0.9 * max(whole.losses[:STEPS]), "it learns nothing"
    for ours, theirs in (
        (files[last]["model_state_dict"], whole.net.state_dict()),
        (files[last]["ema_state_dict"], whole.ema.state_dict()),
    ):
        assert ours.keys() == theirs.keys()
        for key, wanted in theirs.items():
            assert ours[key].dtype == wanted.dtype
            torch.testing.assert_close(ours[key], wanted, rtol=1e-4, atol=1e-5, msg=lambda text: f"{key}: {text}")
    assert files[last]["scaler_state_dict"] == whole.scaler.state_dict()


@pytest.mark.parametrize("name", CASES)
def test_optimizer_states_have_pythons_form(runs, name):
    whole, _, files = runs[name]
    for theirs, ours in (
        (whole.optimizer.state_dict(), files["3"]["optimizer_state_dict"]),
        (dcp.get_optimizer_state_dict(whole.net, whole.optimizer), files["3"]["optimizer_by_name"]),
        (dcp.get_optimizer_state_dict(whole.net, whole.optimizer), files["3n"]["optimizer_by_name"]),
    ):
        assert ours["state"].keys() == theirs["state"].keys()
        for parameter, wanted in theirs["state"].items():
            actual = ours["state"][parameter]
            assert actual.keys() == wanted.keys(), parameter
            for key, value in wanted.items():
                if isinstance(value, torch.Tensor) and key != "t":  # LBFGS's step size is a number in C++
                    other = actual[key]
                    assert other.dtype == value.dtype and other.shape == value.shape, f"{parameter}, {key}"
                if key == "step":
                    assert torch.equal(value, other), parameter
        for wanted, actual in zip(theirs["param_groups"], ours["param_groups"], strict=True):
            assert sorted(actual["params"]) == sorted(wanted["params"])
            assert actual.keys() == wanted.keys()
            for key in actual.keys() - {"params"}:
                kinds = (bool, str, tuple, type(None))
                assert actual[key] == pytest.approx(wanted[key]), key
                assert isinstance(actual[key], kinds) == isinstance(wanted[key], kinds), key


@pytest.mark.parametrize("name", [name for name in CASES if name != "lbfgs"])  # PyTorch can't, for want of a closure
def test_what_c_writes_python_loads_by_name(runs, name):
    whole, _, files = runs[name]
    fresh = Training(name, whole.net.state_dict())
    dcp.set_optimizer_state_dict(fresh.net, fresh.optimizer, files["3n"]["optimizer_by_name"])
    ours, theirs = fresh.optimizer.state_dict(), files["3"]["optimizer_state_dict"]
    assert ours["state"].keys() == theirs["state"].keys()
    for number, state in theirs["state"].items():
        for key in ("exp_avg", "momentum_buffer", "sum", "square_avg", "d", "step"):
            if key in state:
                torch.testing.assert_close(ours["state"][number][key], state[key], rtol=1e-3, atol=1e-5)


def test_random_numbers_go_on(runs):
    for name in CASES:
        _, middle, files = runs[name]
        assert torch.equal(middle.draw, files["1"]["draw"]), "C++ to Python"
        for last in ("3", "3n"):
            assert torch.equal(files[last]["draw"], files["2"]["draw"]), "Python to C++"


def test_objects_of_all_kinds(run_driver, tmp_path):
    run_driver("python_checkpoint_driver", "write", tmp_path / "ours.pt")
    run_driver("python_checkpoint_driver", "copy", tmp_path / "ours.pt", tmp_path / "copy.pt")
    matrix = torch.arange(12.0).view(3, 4)
    for path in ("ours.pt", "copy.pt"):
        read = torch.load(tmp_path / path, weights_only=True)
        expected = {
            "none": None, "true": True, "int": -3, "large": 1 << 60, "float": 0.1, "complex": 1 - 2j, "text": "Grüße",
            "bytes": b"\xff\x00\x80", "list": [1, "a", []], "tuple": (0.9, 0.999), "by number": {0: "zero", 300: "many"},
            "device": torch.device("cuda:1"),
        }  # fmt: skip
        for key, value in expected.items():
            assert read[key] == value and type(read[key]) is type(value), key
        tensors = {
            "matrix": matrix, "again": matrix, "transposed": matrix.t(), "column": matrix[:, 2],
            "expanded": torch.ones(4), "scalar": torch.tensor(2.5, dtype=torch.float64),
            "empty": torch.empty(0, 3, dtype=torch.int64),
        }  # fmt: skip
        for key, value in tensors.items():
            assert read[key].dtype == value.dtype and torch.equal(read[key], value), key
        assert read["matrix"].data_ptr() == read["again"].data_ptr()
        dtypes = {value.dtype for key, value in read.items() if key.startswith("dtype ")}
        assert len(dtypes) == 12
        for key in (key for key in read if key.startswith("dtype ")):
            assert torch.equal(read[key].to(torch.complex64), torch.tensor([0, 1], dtype=torch.complex64)), key
    # The size on disk is that of the tensors, and not of what they were cut from.
    big = torch.zeros(100_000)
    torch.save({"view": big[:10]}, tmp_path / "view.pt")
    run_driver("python_checkpoint_driver", "copy", tmp_path / "view.pt", tmp_path / "small.pt")
    assert (tmp_path / "small.pt").stat().st_size < 3000


def test_attributes_of_tensors_are_left_out_and_bytes_may_be_empty(run_driver, tmp_path):
    tensor, parameter, small = torch.arange(3.0), torch.nn.Parameter(torch.ones(2)), torch.ones(2).to(torch.float8_e5m2)
    tensor.note, parameter.axes, small.scale = "of Python", ("in", "out"), 2.0
    torch.save({"tensor": tensor, "parameter": parameter, "small": small, "empty": b""}, tmp_path / "python.pt")
    run_driver("python_checkpoint_driver", "copy", tmp_path / "python.pt", tmp_path / "ours.pt")
    read = torch.load(tmp_path / "ours.pt", weights_only=True)
    assert torch.equal(read["tensor"], tensor) and torch.equal(read["parameter"], parameter)
    assert read["small"].dtype == small.dtype and torch.equal(read["small"].float(), small.float())
    assert read["empty"] == "", "in C++ a string, like other bytes that are UTF-8"


def test_lazy_views_empty_views_and_pairs_of_four_bits(run_driver, tmp_path):
    numbers = torch.randn(2, 2, dtype=torch.complex64)
    saved = {
        "conjugate": numbers.conj(), "negative": numbers.clone().conj().imag, "empty": torch.empty(0, 3)[:, 2:],
        "pairs": torch.arange(6, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
    }  # fmt: skip
    assert saved["empty"].storage_offset() > saved["empty"].untyped_storage().nbytes()
    torch.save(saved, tmp_path / "python.pt")
    run_driver("python_checkpoint_driver", "copy", tmp_path / "python.pt", tmp_path / "ours.pt")
    read = torch.load(tmp_path / "ours.pt", weights_only=True)
    for key in ("conjugate", "negative", "empty"):
        assert read[key].dtype == saved[key].dtype and torch.equal(read[key], saved[key]), key
    assert read["pairs"].dtype == torch.float4_e2m1fn_x2
    assert torch.equal(read["pairs"].view(torch.uint8), saved["pairs"].view(torch.uint8))


def test_what_cannot_be_read_says_what_to_do(bin_dir, tmp_path):
    class Thing:
        pass

    Thing.__qualname__ = "Thing"
    globals()["Thing"] = Thing
    torch.save({"a": torch.ones(2)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), tmp_path / "script.pt")
    torch.save({"a": Thing()}, tmp_path / "object.pt")
    torch.save({"a": {1, 2}}, tmp_path / "set.pt")
    torch.save({"a": torch.eye(3).to_sparse()}, tmp_path / "sparse.pt")
    (tmp_path / "empty.pt").write_bytes(b"")
    (tmp_path / "text.pt").write_text("not an archive")
    wanted = {
        "old.pt": "before PyTorch 1.6", "script.pt": "torch::jit::load()", "object.pt": "Thing", "set.pt": "set",
        "sparse.pt": "_rebuild_sparse_tensor", "empty.pt": "is empty", "text.pt": "damaged or truncated",
        "missing.pt": "No such file",
    }  # fmt: skip
    for name, text in wanted.items():
        done = subprocess.run(
            [bin_dir / "python_checkpoint_driver", "copy", tmp_path / name, tmp_path / "out.pt"],
            capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 1 and text in done.stderr and name in done.stderr, f"{name}: {done.stderr}"
        assert not (tmp_path / "out.pt").exists()
