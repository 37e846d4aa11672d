"""Copies the first images and labels of each of Fashion-MNIST's splits; used by scripts/offline-kit.

usage: shorten_idx.py FROM TO COUNT
"""

import gzip
import math
import pathlib
import struct
import sys


def shorten(content, count):
    """An IDX file of bytes with at most `count` items: magic number, number of items, other sizes, then the items."""
    dimensions = content[3]
    items, *item = struct.unpack_from(f">{dimensions}I", content, 4)
    header = 4 + 4 * dimensions
    count = min(count, items)
    return content[:4] + struct.pack(">I", count) + content[8:header + count * math.prod(item)]


def main():
    source, target, count = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), int(sys.argv[3])
    for part in ("train", "t10k"):
        for kind in ("images-idx3", "labels-idx1"):
            path = source / f"{part}-{kind}-ubyte"
            content = path.read_bytes() if path.exists() else gzip.decompress(path.with_name(path.name + ".gz").read_bytes())
            # Without a date, so that the same images make the same file.
            (target / f"{path.name}.gz").write_bytes(gzip.compress(shorten(content, count), mtime=0))


if __name__ == "__main__":
    main()
