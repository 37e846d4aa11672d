"""Object pickles between C++ and Python: what one writes, the other reads, as torch.distributed makes and reads them."""

import collections
import fractions
import io
import math
import pickle
import random
import struct

import pytest
import torch
from torch.distributed import distributed_c10d


def dumps(value, protocol=None) -> bytes:
    """The bytes that torch.distributed sends."""
    if protocol is None:
        tensor, size = distributed_c10d._object_to_tensor(value, "cpu", None)
        assert size.item() == tensor.numel()
        return bytes(tensor.numpy())
    return pickle.dumps(value, protocol)


def loads(data: bytes):
    """What torch.distributed makes of received bytes, padding included."""
    padded = torch.frombuffer(bytearray(data + b"\0\0\0"), dtype=torch.uint8)
    return distributed_c10d._tensor_to_object(padded, len(data), None)


@pytest.fixture
def driver(run_driver, tmp_path):
    """driver("echo", pickles) or driver("samples"): [(ok, content)]"""

    def run(command, pickles=None):
        out = tmp_path / "out"
        arguments = [command]
        if pickles is not None:
            (tmp_path / "in").write_bytes(b"".join(struct.pack("<Q", len(data)) + data for data in pickles))
            arguments.append(tmp_path / "in")
        run_driver("objects_driver", *arguments, out)
        stream, records = io.BytesIO(out.read_bytes()), []
        while kind := stream.read(1):
            (size,) = struct.unpack("<Q", stream.read(8))
            records.append((kind == b"=", stream.read(size)))
        return records

    return run


def same(a, b) -> bool:
    """Equal in type, structure and bits."""
    if isinstance(a, torch.Tensor):
        return (
            type(b) is torch.Tensor
            and (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
            and not b.requires_grad
            and torch.equal(a.detach().contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
            if a.dim() and a.numel()
            else type(b) is torch.Tensor and a.dtype == b.dtype and a.shape == b.shape and a.tolist() == b.tolist()
        )
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    return a == b


def make_random(random_, depth):
    kinds = ["none", "bool", "int", "float", "complex", "str", "bytes", "tensor"] + ["list", "tuple", "dict"] * (2 * (depth > 0))
    kind = random_.choice(kinds)
    several = [make_random(random_, depth - 1) for _ in range(random_.randrange(5))] if depth > 0 else []
    if kind == "int":
        return random_.getrandbits(random_.randrange(64)) * random_.choice([1, -1])
    if kind == "str":
        return "".join(random_.choice("aß€😀\0\ud800") for _ in range(random_.randrange(400) if random_.random() < 0.2 else 4))
    if kind == "bytes":
        return b"\xff" + random_.randbytes(random_.randrange(300))  # not UTF-8: C++ tells bytes from str by that
    if kind == "dict":
        return {random_.choice([f"key {i}", i, i + 0.5]): value for i, value in enumerate(several)}
    if kind == "tensor":
        sizes = [random_.randrange(4) for _ in range(random_.randrange(4))]
        dtype = random_.choice([torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.complex64, torch.uint8])
        return torch.randint(2, sizes).to(dtype)
    return {
        "none": None, "bool": random_.random() < 0.5, "float": random_.uniform(-1e9, 1e9), "list": several,
        "complex": complex(random_.random(), -1), "tuple": tuple(several),
    }[kind]  # fmt: skip


TENSORS = {
    f"{dtype}".removeprefix("torch."): torch.arange(6).remainder(2).view(2, 3).to(dtype)
    for dtype in [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
                  torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128, torch.uint16, torch.uint32,
                  torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2]
}  # fmt: skip
VALUES = {
    "scalars": [None, True, False, 0, 255, 256, 65536, -1, 2**31, 2**63 - 1, -(2**63), 0.1, -0.0, math.inf, 1 - 2j],
    "strings": ["", "grün 😀", "\ud800", "x" * 70000, b"\xff\x00", "shared"] + ["shared"] * 3,
    "nested": {"a": [1, {"b": (2, [3.5, {}])}, [], ()], 1: None, 0.5: "half", True: 7} | {-1: {2: {3: [4] * 1500}}},
    "tensors": TENSORS,
    "views": [torch.zeros(0), torch.empty(2, 0, 3), torch.tensor(2.5), torch.arange(6)],
}


# Protocol 2 has no bytes (and so no tensors): Python writes a call instead.
CASES = [(name, protocol) for name in VALUES for protocol in [None, 2, 3, 4, 5] if name == "nested" or protocol != 2]


@pytest.mark.parametrize("name, protocol", CASES)
def test_cpp_reads_what_python_writes_and_python_reads_it_again(driver, name, protocol):
    [(ok, data)] = driver("echo", [dumps(VALUES[name], protocol)])
    assert ok, data
    assert same(VALUES[name], loads(data))
    assert same(VALUES[name], pickle.loads(data))


def test_random_values_survive_the_way_through_cpp(driver):
    random_ = random.Random(3)
    values = [make_random(random_, 4) for _ in range(300)]
    for value, (ok, data) in zip(values, driver("echo", map(dumps, values)), strict=True):
        assert ok and same(value, loads(data)), (value, data)


def test_tensors_are_read_as_values(driver):
    """Views, gradients and parameters arrive as plain tensors with the right elements."""
    base = torch.arange(24.0).view(2, 3, 4)
    lazy = torch.complex(base, base + 1).conj()
    views = [lazy, lazy.imag, base.transpose(0, 2), base[1, :, ::2], base[0], torch.ones(1).expand(3, 2), base.clone().requires_grad_(),
             torch.nn.Parameter(base.clone()), base.to(torch.bfloat16).t() if base.dim() == 2 else base.mT]  # fmt: skip
    [(ok, data)] = driver("echo", [dumps(views)])
    assert ok, data
    for view, read in zip(views, loads(data), strict=True):
        assert type(read) is torch.Tensor and not read.requires_grad and torch.equal(read, view.detach())


def test_what_becomes_a_plain_value(driver):
    model = torch.nn.Linear(2, 2)
    ordered = collections.OrderedDict([("b", 1), ("a", collections.OrderedDict())])
    values = [ordered, model.state_dict(), collections.Counter("aab"), torch.Size([1, 2]), torch.device("cuda", 1), b"ascii"]
    read = [loads(data) for ok, data in driver("echo", map(dumps, values)) if ok]
    assert same(read[0], {"b": 1, "a": {}})
    assert list(read[1]) == ["weight", "bias"] and torch.equal(read[1]["bias"], model.bias)
    assert same(read[2:], [{"a": 2, "b": 1}, (1, 2), torch.device("cuda", 1), "ascii"])


def test_identity_survives(driver):
    shared, tensor = [1], torch.ones(3)
    [(ok, data)] = driver("echo", [dumps([shared, shared, tensor, tensor])])
    read = loads(data)
    assert ok and read[0] is read[1] and read[2] is read[3]


class Evil:
    ran = False

    def __reduce__(self):
        return (exec, ("raise SystemExit",))


def recursive():
    value = []
    value.append(value)
    return value


def too_deep():
    value = []
    for _ in range(201):
        value = [value]
    return value


@pytest.mark.parametrize(
    "value, words",
    [
        (Evil(), "Python's builtins.exec"),
        (fractions.Fraction(1, 2), "Python's fractions.Fraction"),
        (object(), "Python's builtins.object"),
        (len, "Python's builtins.len"),
        (2**63, "does not fit into 64 bits"),
        (2**5000, "does not fit into 64 bits"),
        ({1, 2}, "a set"),
        (frozenset([1]), "a frozenset"),
        (bytearray(b"x"), "builtins.bytearray"),
        ({(1, 2): 3}, "keys other than strings, numbers and bools"),
        (recursive(), "contains itself"),
        (too_deep(), "deeper than 200"),
        (torch.ones(2, 2).to_sparse(), "Python's torch._utils._rebuild_sparse_tensor"),
        (torch.empty(2, device="meta"), "Python's torch._utils._rebuild_meta_tensor_no_storage"),
        (torch.float32, "Python's torch.float32"),
        (torch.nn.Linear(1, 1), "Python's torch.nn.modules.linear.Linear"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, str) else type(value).__name__,
)
def test_everything_else_is_a_clear_error(driver, value, words):
    [(ok, data)] = driver("echo", [dumps(value)])
    assert not ok, loads(data)
    assert words in data.decode() and data.startswith(b"the pickle can't be read: byte "), data


def test_torch_save_files_are_no_objects(driver):
    file = io.BytesIO()
    torch.save([1], file)
    [(ok, message)] = driver("echo", [file.getvalue()])
    assert not ok and message.startswith(b"the pickle can't be read: byte 0, opcode 0x50 'P'"), message


def test_python_reads_what_cpp_makes(driver):
    [(ok, data)] = driver("samples")
    matrix = torch.arange(12.0).view(3, 4)
    expected = {
        "none": None,
        "bools": [True, False],
        "integers": [0, -1, 255, 256, 65536, 2**63 - 1, -(2**63)],
        "doubles": [0.1, -0.0, 1e300, math.inf],
        "complex": 1 - 2j,
        "device": torch.device("cuda", 1),
        "string": "grün 😀",
        "long string": "x" * 70000,
        "bytes": b"\xff\x00\x01",
        "strings": ["a", ""],
        "empty": ([], {}, ()),
        "dict": {},
        "map": {-1: {"a": [0.5]}},
        "tuple": (1, "b", (True, 0.25)),
        "shared": [[1, 2], [1, 2]],
        "transposed": matrix.t(),
        "strided": matrix[:, ::2].contiguous(),
        "channels last": torch.arange(16).view(1, 2, 2, 4).contiguous(memory_format=torch.channels_last),
        "expanded": torch.ones(2, 3),
        "zero-size": torch.empty(3, 0, 2),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "bfloat16": matrix.bfloat16(),
        "float8": matrix.to(torch.float8_e4m3fn),
        "uint16": matrix.to(torch.uint16),
        "requires grad": torch.ones(2),
        "conjugated": torch.complex(matrix, -matrix),
        "tensors": {"a": [torch.ones(2, dtype=torch.bool), matrix]},
    }
    for read in (loads(data), pickle.loads(data)):
        assert ok and set(read) == set(expected)
        for name, value in expected.items():
            assert same(value, read[name]), (name, read[name])
        assert read["shared"][0] is read["shared"][1]
        read["transposed"].add_(1)  # it owns its memory
