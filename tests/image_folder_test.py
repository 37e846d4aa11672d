"""The example image_folder: learns shapes from JPEG and PNG files, and says what is wrong with a folder."""

import random
import re

import pytest

numpy = pytest.importorskip("numpy")
Image = pytest.importorskip("PIL.Image", reason="makes the images")

CLASSES = ("disc", "ring", "square")


def shape(kind, rng):
    """A picture of one shape, of any colour, size and place, on noise."""
    height, width = rng.randrange(40, 70), rng.randrange(40, 70)
    y, x = numpy.mgrid[0:height, 0:width]
    radius = rng.uniform(10, 18)
    dy, dx = y - rng.uniform(18, height - 18), x - rng.uniform(18, width - 18)
    far = numpy.hypot(dx, dy)
    inside = {
        "disc": far < radius,
        "ring": (far < radius) & (far > radius - 4),
        "square": numpy.maximum(abs(dx), abs(dy)) < radius * 0.8,
    }[kind]
    noise = numpy.random.default_rng(rng.randrange(1 << 30)).integers(0, 60, (height, width, 3))
    color = numpy.array([rng.randrange(120, 196) for _ in range(3)])
    return (noise + inside[..., None] * color).astype(numpy.uint8)


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shapes")
    rng = random.Random(3)
    for part, count in (("train", 160), ("val", 30)):
        for kind in CLASSES:
            (folder / part / kind).mkdir(parents=True)
            for number in range(count):
                ending = rng.choice(["jpg", "png"])
                Image.fromarray(shape(kind, rng)).save(folder / part / kind / f"{number}.{ending}")
    return folder


@pytest.fixture(autouse=True)
def component(bin_dir):
    if not (bin_dir / "image_folder").exists():
        pytest.skip("built without libjpeg and libpng")


def train(programs, *options):
    return programs.lockstep_run(2, "image_folder", "--size", 32, *options)


def test_learns_and_is_the_same_every_time(programs, shapes):
    done = train(programs, "--data", shapes, "--epochs", 6, "--batch-size", 32)
    assert done.status == 0, done.text
    accuracies = [float(number) for number in re.findall(r"^\[rank 0\] epoch \d+: test accuracy (\S+)$", done.stdout, re.M)]
    assert len(accuracies) == 6 and accuracies[-1] >= 0.7, done.text  # a guess would be right one time in three
    again = train(programs, "--data", shapes, "--epochs", 6, "--batch-size", 32)
    assert again.stdout == done.stdout, again.text


def test_a_broken_image_is_named(programs, tmp_path):
    for part in ("train", "val"):
        (tmp_path / part / "only").mkdir(parents=True)
        for number in range(8):
            Image.fromarray(shape("disc", random.Random(number))).save(tmp_path / part / "only" / f"{number}.jpg")
    broken = tmp_path / "train/only/5.jpg"
    broken.write_bytes(broken.read_bytes()[:600])
    done = train(programs, "--data", tmp_path, "--epochs", 1, "--batch-size", 8)
    assert done.status != 0 and str(broken) in done.stderr and "truncated" in done.stderr, done.text


def test_folders_that_are_not_there(programs, tmp_path):
    done = train(programs, "--data", tmp_path / "nothing")
    assert done.status == 1 and f"{tmp_path}/nothing/train" in done.stderr, done.text
