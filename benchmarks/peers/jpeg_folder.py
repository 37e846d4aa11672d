"""What bench_data measures of image folders, with torchvision: benchmarks/data_jpeg.h does the same in C++.

By hand: python benchmarks/peers/jpeg_folder.py FOLDER COUNT makes the folder of images.
"""

import os
import pathlib
import sys

import numpy
import torchvision.transforms as T
from PIL import Image
from torchvision.datasets import ImageFolder

FOLDER = "LOCKSTEP_BENCH_JPEG_FOLDER"
SIZES = ((375, 500), (500, 375), (333, 500), (500, 400))  # ImageNet's usual ones


def make_image(number):
    """Waves and some noise: as large a file as a photograph of the size, 70 to 110 kB."""
    height, width = SIZES[number % len(SIZES)]
    rng = numpy.random.default_rng(number)
    y, x = numpy.mgrid[0:height, 0:width]
    planes = []
    for channel in range(3):
        slow = 60 * numpy.sin(x / rng.uniform(15, 60) + channel) + 50 * numpy.cos(y / rng.uniform(10, 50))
        planes.append(127 + slow + rng.normal(0, 6, (height, width)))
    return Image.fromarray(numpy.stack(planes, -1).clip(0, 255).astype(numpy.uint8))


def make_folder(folder, count):
    """Writes `count` images, each in a class of its own, so that the label of image i is i."""
    for number in range(count):
        path = pathlib.Path(folder) / f"{number:06}" / "image.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        make_image(number).save(path, quality=90)


def jpeg_folder(_samples=None):
    """The data set, from the folder that the environment names."""
    transform = T.Compose([
        T.RandomResizedCrop(224),
        T.RandomHorizontalFlip(),
        T.ToTensor(),
        T.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    ])  # fmt: skip
    return ImageFolder(os.environ[FOLDER], transform)


if __name__ == "__main__":
    make_folder(sys.argv[1], int(sys.argv[2]))
