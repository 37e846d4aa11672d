"""Our safetensors files and checkpoints against Python's safetensors, in both directions."""

import json
import random
import struct

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

DTYPES = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64,
          torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2,
          torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2]  # fmt: skip


def random_tensor(rng, dtype):
    shape = [rng.choice([0, 1, 1, 2, 3, 5, 8]) for _ in range(rng.randrange(0 if dtype != torch.float4_e2m1fn_x2 else 1, 5))]
    count = torch.empty(shape, dtype=dtype).nbytes
    if dtype == torch.bool:
        return torch.randint(0, 2, shape).bool()
    return torch.frombuffer(bytearray(rng.randbytes(count)), dtype=dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)


def raw(tensor):
    return b"" if tensor.numel() == 0 else bytes(tensor.contiguous().flatten().view(torch.uint8).tolist())


def test_reads_and_writes_what_python_does(ask_driver, tmp_path):
    rng = random.Random(8)
    lines, expected = [], []
    for number in range(60):
        names = [rng.choice(["", "fc1.weight", 'quote"', "back\\slash", "ünï", "\U0001f600", "tab\t", "new\nline"]) + str(i)
                 for i in range(rng.randrange(12))]  # fmt: skip
        tensors = {name: random_tensor(rng, rng.choice(DTYPES)) for name in names}
        metadata = rng.choice([None, {"format": "pt"}, {"ü\n": '"\\', "": ""}])
        save_file(tensors, tmp_path / f"{number}.python", metadata)
        lines.append(f"copy\t{tmp_path}/{number}.python\t{tmp_path}/{number}.ours")
        expected.append((tensors, metadata))
    assert set(ask_driver("safetensors_driver", lines)) == {"ok"}
    for number, (tensors, metadata) in enumerate(expected):
        path = tmp_path / f"{number}.ours"
        loaded = load_file(path)
        assert loaded.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert loaded[name].dtype == tensor.dtype and loaded[name].shape == tensor.shape
            assert raw(loaded[name]) == raw(tensor), name
        with safe_open(path, "pt") as file:
            assert file.metadata() == metadata
        # Tensors of one element size may stand in another order, so that offsets have more digits or fewer.
        assert abs(path.stat().st_size - (tmp_path / f"{number}.python").stat().st_size) <= 16


def random_header(rng):
    """A header that is right, or nearly, and the size of its data."""
    at, parts = 0, []
    for i in range(rng.randrange(4)):
        dtype, size = rng.choice([("U8", 1), ("F16", 2), ("F32", 4), ("I64", 8), ("X1", 1), ("BOOL", 1)])
        shape = [rng.choice([0, 1, 2, 3]) for _ in range(rng.randrange(3))]
        count = size
        for length in shape:
            count *= length
        begin = at + rng.choice([0] * 12 + [1, -1])
        end = begin + count + rng.choice([0] * 12 + [1, -1])
        at = end
        parts.append(f'"{rng.choice("ab")}{i}":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{begin},{end}]}}')
    rng.shuffle(parts)
    if rng.random() < 0.2:
        parts.append('"__metadata__":' + rng.choice(["null", "{}", '{"a":"b"}', '{"a":1}', "[]"]))
    header = "{" + ",".join(parts) + "}" + " " * rng.randrange(3)
    if rng.random() < 0.15:
        place = rng.randrange(1, len(header))
        header = header[:place] + rng.choice('{}[],:"0-x.') + header[place + rng.randrange(2) :]
    return header.encode(), max(at, 0) + rng.choice([0] * 12 + [1])


def test_refuses_what_python_refuses(ask_driver, tmp_path):
    rng = random.Random(21)
    lines, outcomes = [], []
    for number in range(500):
        header, size = random_header(rng)
        path = tmp_path / f"{number}.safetensors"
        path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(size))
        try:
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118
                    file.get_tensor(name)
            outcomes.append("ok")
        except SafetensorError as error:
            outcomes.append(f"error: {error}")
        lines.append(f"check\t{path}")
    assert 100 < sum(outcome == "ok" for outcome in outcomes) < 400
    for line, ours, theirs in zip(lines, ask_driver("safetensors_driver", lines), outcomes, strict=True):
        assert (ours == "ok") == (theirs == "ok"), (line, ours, theirs)


def test_python_reads_a_checkpoint(ask_driver, tmp_path):
    directory = tmp_path / "step-3"
    assert ask_driver("safetensors_driver", [f"checkpoint\t{directory}"]) == ["ok"]
    model = load_file(directory / "model.safetensors")
    assert model.keys() == {"fc1.weight", "fc1.bias"}
    assert torch.equal(model["fc1.weight"], torch.arange(6.0).view(2, 3).t())
    assert torch.equal(model["fc1.bias"], torch.ones(3, dtype=torch.float16))
    assert load_file(directory / "optimizer.safetensors").keys() == {"state.fc1.weight.exp_avg"}
    state = json.loads((directory / "state.json").read_text())
    assert state["optimizer"] == {"lr": 0.1, "state": {"fc1.weight": {"exp_avg": {"$tensor": "state.fc1.weight.exp_avg"}}}}
    assert json.loads((directory / "rank00000.json").read_text()) == {"position": 5}
    manifest = json.loads((directory / "manifest.json").read_text())
    assert manifest["info"]["step"] == 3 and manifest["info"]["metrics"] == {"loss": 0.25}
    for file in manifest["files"]:
        assert (directory / file["name"]).stat().st_size == file["bytes"]
    for tensor in manifest["tensors"]:
        data = (directory / tensor["file"]).read_bytes()[tensor["offset"] :][: tensor["bytes"]]
        with safe_open(directory / tensor["file"], "pt") as file:
            assert raw(file.get_tensor(tensor["name"])) == data
    assert sum(file["bytes"] for file in manifest["files"]) < 2000
