"""The example parquet learns from a file that pyarrow wrote, and says what is wrong with one that is not there."""

import random
import re

import pytest

pa = pytest.importorskip("pyarrow", reason="the component parquet is built from pyarrow's Arrow C++")
pq = pytest.importorskip("pyarrow.parquet")


@pytest.fixture
def houses(tmp_path):
    """4000 rows in row groups of odd sizes: price is a line in size and the two numbers of place."""
    rng = random.Random(5)
    size = [rng.random() for _ in range(4000)]
    place = [[rng.random(), rng.random()] for _ in size]
    price = [3 * s - 2 * x + y + 1 for s, (x, y) in zip(size, place, strict=True)]
    table = pa.table({"size": pa.array(size, pa.float32()), "place": pa.array(place, pa.list_(pa.float32(), 2)),
                      "price": price, "street": ["Main"] * len(size)})
    path = tmp_path / "houses.parquet"
    pq.write_table(table, path, row_group_size=370)
    return path


def errors_of(done):
    assert done.status == 0, done.text
    assert re.search(r"^4000 rows in 11 row groups, 3 features$", done.stdout, re.M), done.text
    return [float(error) for error in re.findall(r"^epoch \d+: mean squared error (\S+)$", done.stdout, re.M)]


def test_parquet_learns_on_two_ranks_and_is_the_same_every_time(programs, houses):
    options = ["--data", houses, "--target", "price", "--features", "size", "place", "--epochs", 4]
    first = errors_of(programs.lockstep_run(2, "--no-prefix", "parquet", *options))
    again = errors_of(programs.lockstep_run(2, "--no-prefix", "parquet", *options))
    assert first == again and len(first) == 4
    assert first[-1] < 0.005 < 0.05 < first[0], first


def test_parquet_refuses_what_it_cannot_read(programs, houses):
    done = programs.lockstep_run(1, "parquet", "--data", houses, "--target", "price")
    assert done.status != 0 and "'street' holds strings" in done.stderr, done.text
    done = programs.lockstep_run(1, "parquet", "--data", houses, "--target", "cost", "--features", "size")
    assert done.status != 0 and "has no column 'cost'; its columns are 'size', 'place', 'price', 'street'" in done.stderr
