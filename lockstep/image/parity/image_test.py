"""Decoding, transforms and image folders against torchvision and Pillow, on the same inputs."""

import io
import os

import pytest
import torch

numpy = pytest.importorskip("numpy")
pytest.importorskip("PIL", reason="compares with Pillow")
T = pytest.importorskip("torchvision.transforms", reason="compares with torchvision")
from PIL import Image  # noqa: E402
from torchvision.datasets import ImageFolder  # noqa: E402
from torchvision.io import ImageReadMode, decode_image  # noqa: E402

CLOSE = 1  # levels of 255 by which a pixel resized with bilinear weights may differ from Pillow's
CLOSE_BICUBIC = 2


@pytest.fixture(autouse=True)
def component(bin_dir):
    if not (bin_dir / "image_driver").exists():
        pytest.skip("built without libjpeg and libpng")


def ask(run_driver, folder, cases):
    """The driver's answer to each case: a tensor, or an error's text."""
    torch.save(cases, folder / "cases")
    run_driver("image_driver", folder / "cases", folder / "answers")
    answers = torch.load(folder / "answers", weights_only=False)
    assert len(answers) == len(cases)
    return answers


def decoding(encoded, mode=ImageReadMode.UNCHANGED, exif=False, minimum_size=0, eight_bit=False, strict=False):
    return {
        "bytes": as_tensor(encoded),
        "mode": mode.value,
        "exif": exif,
        "minimum_size": minimum_size,
        "eight_bit": eight_bit,
        "strict": strict,
    }


def as_tensor(encoded):
    return torch.frombuffer(bytearray(encoded), dtype=torch.uint8)


def from_pillow(image):
    pixels = torch.from_numpy(numpy.array(image))
    return pixels.permute(2, 0, 1) if pixels.dim() == 3 else pixels[None]


def picture(height, width, channels=3, seed=0):
    """Waves with noise, H×W×C uint8: neither flat, which every algorithm gets right, nor noise alone."""
    rng = numpy.random.default_rng(seed)
    y, x = numpy.mgrid[0:height, 0:width]
    planes = [127 + 80 * numpy.sin(x / 7 + k) + 40 * numpy.cos(y / 5 + 2 * k) for k in range(channels)]
    return (numpy.stack(planes, -1) + rng.normal(0, 12, (height, width, channels))).clip(0, 255).astype(numpy.uint8)


def encode(pixels, format, mode=None, **options):
    if pixels.ndim == 3 and pixels.shape[2] == 1:
        pixels = pixels[..., 0]
    buffer = io.BytesIO()
    image = Image.fromarray(pixels) if mode is None else Image.frombytes(mode, pixels.shape[1::-1], pixels.tobytes())
    image.save(buffer, format, **options)
    return buffer.getvalue()


def largest_difference(a, b):
    assert isinstance(a, torch.Tensor), a
    assert a.shape == b.shape and a.dtype == b.dtype, (a.shape, b.shape, a.dtype, b.dtype)
    return (a.double() - b.double()).abs().max().item()


SIZES = [(1, 1), (8, 1), (33, 47), (97, 130), (120, 81)]


def jpeg_files():
    for height, width in SIZES:
        for subsampling in (0, 1, 2):
            for progressive in (False, True):
                options = {"quality": 85, "subsampling": subsampling, "progressive": progressive}
                yield encode(picture(height, width), "JPEG", **options), options
        yield encode(picture(height, width, 1), "JPEG", quality=30), "gray"
        yield encode(picture(height, width, 4), "JPEG", mode="CMYK", quality=92), "cmyk"
    yield encode(picture(70, 65), "JPEG", quality=100, keep_rgb=True), "RGB, not YCbCr"
    yield encode(picture(70, 65), "JPEG", quality=80, restart_marker_blocks=3), "restart markers"


def test_jpeg_pixels_are_torchvisions(run_driver, tmp_path):
    modes = (ImageReadMode.UNCHANGED, ImageReadMode.GRAY, ImageReadMode.RGB)
    files = [(encoded, about, mode) for encoded, about in jpeg_files() for mode in modes]
    answers = ask(run_driver, tmp_path, [decoding(encoded, mode) for encoded, _, mode in files])
    for (encoded, about, mode), got in zip(files, answers, strict=True):
        assert largest_difference(got, decode_image(as_tensor(encoded), mode)) == 0, (about, mode)


def test_smaller_jpegs_are_those_of_pillows_draft(run_driver, tmp_path):
    encoded = encode(picture(301, 427), "JPEG", quality=90)
    sizes = [1, 37, 38, 75, 76, 150, 151, 301, 400]
    for size, got in zip(sizes, ask(run_driver, tmp_path, [decoding(encoded, minimum_size=s) for s in sizes]), strict=True):
        image = Image.open(io.BytesIO(encoded))
        image.draft("RGB", (size, size))
        assert largest_difference(got, from_pillow(image)) == 0, size
        assert min(got.shape[1:]) >= min(size, 301)


def png_files():
    for height, width in SIZES:
        for channels in (1, 2, 3, 4):
            mode = "LA" if channels == 2 else None
            yield encode(picture(height, width, channels), "PNG", mode=mode), f"{channels} channels"
        wide = numpy.random.default_rng(1).integers(0, 1 << 16, (height, width), dtype=numpy.uint16)
        yield encode(wide, "PNG"), "16 bits"
        yield encode(picture(height, width, 1)[..., 0] > 127, "PNG"), "1 bit"


def palette_file(colors, **options):
    buffer = io.BytesIO()
    Image.fromarray(picture(31, 45)).quantize(colors).save(buffer, "PNG", **options)
    return buffer.getvalue()


def test_png_pixels_are_torchvisions(run_driver, tmp_path):
    files = [(encoded, about, mode) for encoded, about in png_files() for mode in ImageReadMode]
    # Alpha of an image with 1 bit a pixel: torchvision adds the value 1, where 255 is opaque.
    files = [f for f in files if not (f[1] == "1 bit" and f[2] in (ImageReadMode.GRAY_ALPHA, ImageReadMode.RGB_ALPHA))]
    palettes = [(palette_file(200), "palette", mode) for mode in (ImageReadMode.RGB, ImageReadMode.GRAY)]
    palettes += [(palette_file(5, bits=4), "palette", mode) for mode in (ImageReadMode.RGB, ImageReadMode.GRAY)]
    palettes += [(palette_file(9, transparency=3), "with alpha", mode) for mode in list(ImageReadMode)[1:]]
    files += palettes
    answers = ask(run_driver, tmp_path, [decoding(encoded, mode) for encoded, _, mode in files])
    for (encoded, about, mode), got in zip(files, answers, strict=True):
        assert isinstance(got, torch.Tensor), (about, mode, got)
        want = decode_image(as_tensor(encoded), mode)
        assert (about == "16 bits") == (want.dtype == torch.uint16), about
        assert torch.equal(got, want.int() if about == "16 bits" else want), (about, mode)


def test_png_where_torchvision_is_no_oracle(run_driver, tmp_path):
    """Indices of less than 8 bits, opaque alpha, the high 8 of 16 bits, and interlaced files."""
    four_bits, one_bit = palette_file(5, bits=4), encode(picture(9, 14, 1)[..., 0] > 127, "PNG")
    wide = numpy.random.default_rng(2).integers(0, 1 << 16, (20, 11), dtype=numpy.uint16)
    cases = [decoding(four_bits), decoding(palette_file(5), ImageReadMode.RGB_ALPHA)]
    cases += [decoding(one_bit, ImageReadMode.RGB_ALPHA), decoding(encode(wide, "PNG"), eight_bit=True)]
    indices, opaque, one, eight = ask(run_driver, tmp_path, cases)
    assert torch.equal(indices, from_pillow(Image.open(io.BytesIO(four_bits))))
    assert opaque.shape == (4, 31, 45) and (opaque[3] == 255).all()
    assert (one[3] == 255).all() and set(one[:3].unique().tolist()) == {0, 255}
    assert torch.equal(eight[0], torch.from_numpy((wide >> 8).astype(numpy.uint8)))


def test_exif_orientation_turns_as_torchvision(run_driver, tmp_path):
    files = []
    for orientation in range(10):
        exif = Image.Exif()
        exif[0x0112] = orientation
        exif[0x010E] = "another entry before it"
        files += [encode(picture(24, 40), format, exif=exif) for format in ("JPEG", "PNG")]
    for apply in (False, True):
        for encoded, got in zip(files, ask(run_driver, tmp_path, [decoding(f, exif=apply) for f in files]), strict=True):
            assert torch.equal(got, decode_image(as_tensor(encoded), apply_exif_orientation=apply))


def transformed(image, text, seed=0):
    return {"image": image, "transforms": text, "seed": seed}


def planar(pixels):
    return torch.from_numpy(pixels).permute(2, 0, 1)


def test_resize_is_close_to_pillows(run_driver, tmp_path):
    cases, expected, widest = [], [], 0
    for height, width in [(33, 47), (301, 427), (64, 64), (200, 7)]:
        pixels = picture(height, width)
        for size, text in [(24, "24"), (70, "70"), ((50, 31), "50,31"), ((400, 300), "400,300")]:
            for interpolation, number in [(T.InterpolationMode.BILINEAR, 2), (T.InterpolationMode.BICUBIC, 3)]:
                cases.append(transformed(planar(pixels), f"Resize size={text} interpolation={number}"))
                expected.append(from_pillow(T.Resize(size, interpolation)(Image.fromarray(pixels))))
    for case, got, want in zip(cases, ask(run_driver, tmp_path, cases), expected, strict=True):
        widest = max(widest, largest_difference(got, want))
        limit = CLOSE_BICUBIC if case["transforms"].endswith("3") else CLOSE
        assert largest_difference(got, want) <= limit, case["transforms"]
    assert widest > 0 or torch.backends.cpu.get_cpu_capability() == "DEFAULT", "the bound could be 0"


def test_transforms_without_chance_are_torchvisions(run_driver, tmp_path):
    tensor = planar(picture(53, 38, 3, seed=3))
    floats = tensor.float() / 255
    modes = ["constant", "edge", "reflect", "symmetric"]
    pairs = [  # input, ours, torchvision's
        (floats, "Resize size=20", T.Resize(20)),
        (floats, "Resize size=20 max_size=25", T.Resize(20, max_size=25)),
        (floats, "Resize size=90,20 antialias=0", T.Resize((90, 20), antialias=False)),
        (floats, "Resize size=61 interpolation=0", T.Resize(61, T.InterpolationMode.NEAREST)),
        (floats, "Resize size=61 interpolation=1", T.Resize(61, T.InterpolationMode.NEAREST_EXACT)),
        (floats, "Resize size=61 interpolation=3", T.Resize(61, T.InterpolationMode.BICUBIC)),
        (tensor, "Resize size=61 interpolation=0", T.Resize(61, T.InterpolationMode.NEAREST)),
        (tensor, "ToTensor", lambda x: T.ToTensor()(Image.fromarray(x.permute(1, 2, 0).numpy()))),
        (tensor.permute(0, 2, 1), "ToTensor", lambda x: x.float() / 255),
        (floats, "Normalize mean=0.485,0.456,0.406 std=0.229,0.224,0.225",
         T.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))),
        (floats, "Normalize mean=0.5 std=0.25", T.Normalize((0.5,), (0.25,))),
    ]  # fmt: skip
    for size in [(10,), (9, 38), (52, 37), (53, 38), (80, 60), (60, 11), (11, 61), (54, 39)]:
        pairs.append((tensor, "CenterCrop size=" + ",".join(map(str, size)), T.CenterCrop(size)))
    for number, mode in enumerate(modes):
        for padding in [(3,), (2, 5), (1, 2, 3, 4), (0, 0, 37, 52)]:
            ours = f"Pad padding={','.join(map(str, padding))} mode={number}" + (" fill=7" if mode == "constant" else "")
            pairs += [(x, ours, T.Pad(list(padding), 7 if mode == "constant" else 0, mode)) for x in (tensor, floats)]
    types = {torch.uint8: 0, torch.int8: 1, torch.int16: 2, torch.int32: 3, torch.int64: 4, torch.float32: 6, torch.float64: 7}
    for source in types:
        for target, number in types.items():
            start = floats.to(source) if source.is_floating_point else (tensor // 2).to(source)
            pairs.append((start, f"ConvertImageDtype dtype={number}", T.ConvertImageDtype(target)))
    answers = ask(run_driver, tmp_path, [transformed(given, ours) for given, ours, _ in pairs])
    for (given, ours, theirs), got in zip(pairs, answers, strict=True):
        try:
            want = theirs(given)
        except RuntimeError as error:
            assert str(error).split(" from ")[0] in got and "cannot be performed safely" in got, (ours, got)
            continue
        assert isinstance(got, torch.Tensor) and torch.equal(got, want), (ours, given.dtype)


def test_random_transforms_draw_as_torchvision(run_driver, tmp_path):
    image = planar(picture(60, 83, 3, seed=5)).float() / 255
    pairs = [
        ("RandomCrop size=32", T.RandomCrop(32)),
        ("RandomCrop size=60,83", T.RandomCrop((60, 83))),
        ("RandomCrop size=20,70 padding=4", T.RandomCrop((20, 70), padding=4)),
        ("RandomCrop size=100 pad_if_needed=1 fill=0.5", T.RandomCrop(100, pad_if_needed=True, fill=0.5)),
        ("RandomCrop size=70 padding=5,9 mode=2", T.RandomCrop(70, padding=(5, 9), padding_mode="reflect")),
        ("RandomHorizontalFlip", T.RandomHorizontalFlip()),
        ("RandomVerticalFlip p=0.2", T.RandomVerticalFlip(0.2)),
        ("RandomResizedCrop size=32", T.RandomResizedCrop(32)),
        ("RandomResizedCrop size=20,30 scale=0.9,1 ratio=3,4", T.RandomResizedCrop((20, 30), (0.9, 1), (3, 4))),
        ("RandomResizedCrop size=20 scale=0.9,1 ratio=0.1,0.2", T.RandomResizedCrop(20, (0.9, 1), (0.1, 0.2))),
        ("RandomResizedCrop size=40; RandomHorizontalFlip; RandomVerticalFlip; RandomCrop size=31",
         T.Compose([T.RandomResizedCrop(40), T.RandomHorizontalFlip(), T.RandomVerticalFlip(), T.RandomCrop(31)])),
    ]  # fmt: skip
    cases = [(ours, theirs, seed) for ours, theirs in pairs for seed in range(12)]
    answers = ask(run_driver, tmp_path, [transformed(image, ours, seed) for ours, _, seed in cases])
    for (ours, theirs, seed), got in zip(cases, answers, strict=True):
        torch.manual_seed(seed)
        assert isinstance(got, torch.Tensor) and torch.equal(got, theirs(image)), (ours, seed)


def test_misuse_is_refused(run_driver, tmp_path):
    image = planar(picture(12, 10))
    pairs = [
        ("RandomCrop size=11", "Required crop size (11, 11) is larger than input image size (12, 10)"),
        ("Resize size=20 max_size=20", "max_size = 20 must be strictly greater"),
        ("Resize size=20,20 max_size=30", "max_size should only be passed if"),
        ("Resize size=0", "at least 1"),
        ("Normalize mean=0.5 std=0.5", "Input tensor should be a float tensor. Got Byte"),
        ("ToTensor; Normalize mean=0.5 std=0", "division by zero"),
        ("ToTensor; Normalize mean=0.5,0.5 std=1", "2 means and 1 standard deviations, and the image 3 channels"),
        ("ToTensor; ToTensor", "ConvertImageDtype"),
        ("RandomHorizontalFlip p=1.5", "probability"),
        ("RandomResizedCrop size=8 scale=0.5,0.1", "scale is (0.5, 0.1)"),
        ("Pad padding=-1", "negative"),
    ]
    for (ours, words), got in zip(pairs, ask(run_driver, tmp_path, [transformed(image, ours) for ours, _ in pairs]), strict=True):
        assert isinstance(got, str) and words in got, (ours, got)


@pytest.fixture
def root(tmp_path):
    """A folder of classes with files of many kinds and names."""
    root = tmp_path / "root"
    files = ["cat/b.jpg", "cat/a.PNG", "cat/deep/er/c.jpeg", "cat/deep.jpg", "cat/Z.png", "dog/é.png", "dog/z.jpg", "Ape/1.png"]
    for number, name in enumerate(files):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = picture(50 + 7 * number, 64 - 3 * number, [3, 1, 4][number % 3], seed=number)
        format = "PNG" if name.lower().endswith("png") else "JPEG"
        path.write_bytes(encode(pixels, format, mode="CMYK" if format == "JPEG" and pixels.shape[2] == 4 else None))
    (root / "cat/notes.txt").write_text("no image")
    (root / "file.jpg").write_bytes(b"not in a class")
    (root / "linked").symlink_to(root / "cat/deep")
    return root


def test_image_folder_finds_torchvisions_samples(run_driver, tmp_path, root):
    (got,) = ask(run_driver, tmp_path, [{"folder": str(root), "transforms": "listing"}])
    folder = ImageFolder(root)
    lines = [f"{name}={index}" for name, index in folder.class_to_idx.items()]
    assert got.splitlines() == lines + [f"{path} {target}" for path, target in folder.samples]
    assert len(folder) == 9 and folder.classes == ["Ape", "cat", "dog", "linked"]


def test_image_folder_gives_torchvisions_images(run_driver, tmp_path, root):
    specifications = [
        ("Resize size=40; CenterCrop size=36; ToTensor", [T.Resize(40), T.CenterCrop(36), T.ToTensor()]),
        ("CenterCrop size=70; ToTensor", [T.CenterCrop(70), T.ToTensor()]),
    ]
    answers = ask(run_driver, tmp_path, [{"folder": str(root), "transforms": ours} for ours, _ in specifications])
    for (ours, theirs), got in zip(specifications, answers, strict=True):
        want = torch.stack([image for image, _ in ImageFolder(root, T.Compose(theirs))])
        limit = CLOSE / 255 + 1e-6 if "Resize" in ours else 0
        assert largest_difference(got, want) <= limit, ours


def test_image_folder_refuses_what_torchvision_refuses(run_driver, tmp_path, root):
    (tmp_path / "no classes").mkdir()
    (root / "empty").mkdir()
    (tmp_path / "endless/class").mkdir(parents=True)
    os.symlink(tmp_path / "endless/class", tmp_path / "endless/class/again")
    folders = [tmp_path / "absent", tmp_path / "no classes", root, tmp_path / "endless"]
    answers = ask(run_driver, tmp_path, [{"folder": str(folder), "transforms": "listing"} for folder in folders])
    for folder, got in zip(folders[:3], answers, strict=False):
        with pytest.raises(FileNotFoundError) as python:
            ImageFolder(folder)
        assert str(folder) in got
        if folder != folders[0]:
            assert str(python.value).split(". ")[0].removesuffix(".") in got
    assert "Supported extensions are: .jpg, .jpeg, .png" in answers[2]
    assert "a link to a folder that it lies in" in answers[3]
