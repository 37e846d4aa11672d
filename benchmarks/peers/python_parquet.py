"""Times epochs over a Parquet file with torch.utils.data.DataLoader over pyarrow's row groups.

By hand: python benchmarks/peers/python_parquet.py --write rows.parquet
         torchrun --nproc-per-node 1 benchmarks/peers/python_parquet.py batches rows.parquet 5 1

Each iteration is an epoch over the row groups in a random order. Operations, as in benchmarks/parquet_loading.cc:
    batches       an iterable data set in one worker, which reads row groups, shuffles their rows and gives batches of 256
    row_groups    a data set of row groups with one worker, one row group a batch
"""

import argparse
import os
import random
import sys
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler

BATCH_SIZE = 256
NUMBERS = 16
ROWS, ROWS_A_GROUP = 400_000, 20_000


def write(path, rows=ROWS):
    """Sixteen float32, a label, and a list of 4 to 12 word numbers a row; snappy, as is the default."""
    rng = np.random.default_rng(1)
    columns = {f"x{i}": rng.random(rows, dtype=np.float32) for i in range(NUMBERS)}
    columns["label"] = rng.integers(0, 10, rows)
    lengths = rng.integers(4, 13, rows)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    words = rng.integers(0, 30_000, offsets[-1]).astype(np.int32)
    columns["words"] = pa.ListArray.from_arrays(offsets, words)
    pq.write_table(pa.table(columns), path, row_group_size=ROWS_A_GROUP)


def tensors(table):
    """A table's columns as tensors: numbers without a copy, lists as elements and offsets."""
    result = {}
    for name in table.column_names:
        array = table[name].combine_chunks()
        if pa.types.is_list(array.type):
            offsets = array.offsets.to_numpy()
            result[name] = torch.from_numpy(array.flatten().to_numpy(zero_copy_only=False).copy())
            result[name + ".offsets"] = torch.from_numpy(offsets - offsets[0])
        else:
            result[name] = torch.from_numpy(array.to_numpy(zero_copy_only=False).copy())
    return result


class RowGroups(Dataset):
    def __init__(self, path):
        self.path, self.file = path, None
        self.groups = pq.ParquetFile(path).num_row_groups

    def read(self, group):
        if self.file is None:
            self.file = pq.ParquetFile(self.path)  # each worker's own
        return self.file.read_row_group(group, use_threads=False)

    def __len__(self):
        return self.groups

    def __getitem__(self, group):
        return tensors(self.read(group))


class Batches(IterableDataset):
    """Batches within row groups, rows shuffled: what fits Python best, for a take() per row group is pyarrow's."""

    def __init__(self, path):
        self.groups = RowGroups(path)

    def __iter__(self):
        order = list(range(len(self.groups)))
        random.shuffle(order)
        for group in order:
            table = self.groups.read(group)
            table = table.take(torch.randperm(table.num_rows).numpy())
            for begin in range(0, table.num_rows, BATCH_SIZE):
                yield tensors(table.slice(begin, BATCH_SIZE))


def epoch(operation, path):
    """(rows, checksum) of an epoch."""
    if operation == "batches":
        loader = DataLoader(Batches(path), batch_size=None, num_workers=1, prefetch_factor=16)
    elif operation == "row_groups":
        groups = RowGroups(path)
        loader = DataLoader(groups, batch_size=None, sampler=RandomSampler(groups), num_workers=1)
    else:
        raise ValueError(f"there is no operation '{operation}'")
    rows, total = 0, 0.0
    for batch in loader:
        rows += len(batch["label"])
        total += batch["label"][0].item() + batch["x0"][-1].item() + len(batch["words"])
    return rows, total


def measure(operation, argument, iterations, warmup):
    wall, cpu = [], []
    for i in range(warmup + iterations):
        cpu_begin, begin = sum(os.times()[:4]), time.perf_counter_ns()
        rows, total = epoch(operation, argument)
        if i >= warmup:
            wall.append(time.perf_counter_ns() - begin)
            cpu.append(int((sum(os.times()[:4]) - cpu_begin) * 1e9))
    expected = pq.ParquetFile(argument).metadata.num_rows
    if rows != expected:
        raise AssertionError(f"an epoch had {rows} of {expected} rows")
    return wall, cpu, {"rows": rows, "sum": total}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--write"]:
        parser = argparse.ArgumentParser()
        parser.add_argument("--write", required=True)
        parser.add_argument("--rows", type=int, default=ROWS)
        told = parser.parse_args()
        write(told.write, told.rows)
    else:
        import command_loop

        command_loop.start("gloo")
        command_loop.serve(measure)
