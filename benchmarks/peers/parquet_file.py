"""What bench_data measures of Parquet files, with pyarrow: benchmarks/data_parquet.h does the same in C++.

By hand: python benchmarks/peers/parquet_file.py FILE ROWS writes the file.
"""

import os
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch.utils.data import Dataset

FILE = "LOCKSTEP_BENCH_PARQUET_FILE"
BATCH_SIZE = 256
NUMBERS = 16
ROWS_A_GROUP = 20_000


def write(path, rows):
    """Sixteen float32, a label (that of row i is i), and a list of 4 to 12 word numbers a row; snappy, as is the default."""
    rng = np.random.default_rng(1)
    columns = {f"x{i}": rng.random(rows, dtype=np.float32) for i in range(NUMBERS)}
    columns["label"] = np.arange(rows)
    lengths = rng.integers(4, 13, rows)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    words = rng.integers(0, 30_000, offsets[-1]).astype(np.int32)
    columns["words"] = pa.ListArray.from_arrays(offsets, words)
    pq.write_table(pa.table(columns), path, row_group_size=ROWS_A_GROUP)


def tensors(table):
    """A table's columns as tensors; lists as elements and offsets."""
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


class ShuffledRowGroups(Dataset):
    """Row groups whose rows pyarrow has shuffled in the worker: one message to the training process for each."""

    def __init__(self, path):
        self.path, self.file = path, None
        self.groups = pq.ParquetFile(path).num_row_groups

    def __len__(self):
        return self.groups

    def __getitem__(self, group):
        if self.file is None:
            self.file = pq.ParquetFile(self.path)  # each worker's own
        table = self.file.read_row_group(group, use_threads=False)
        return tensors(table.take(torch.randperm(table.num_rows).numpy()))


def cut(group):
    """A row group's batches: views, so that only whole row groups pass between the processes."""
    offsets = group["words.offsets"]
    for begin in range(0, len(group["label"]), BATCH_SIZE):
        end = min(begin + BATCH_SIZE, len(group["label"]))
        batch = {name: values[begin:end] for name, values in group.items() if not name.startswith("words")}
        batch["words.offsets"] = offsets[begin:end + 1] - offsets[begin]
        batch["words"] = group["words"][offsets[begin]:offsets[end]]
        yield batch


def row_groups():
    """The data set, of the file that the environment names."""
    return ShuffledRowGroups(os.environ[FILE])


if __name__ == "__main__":
    write(sys.argv[1], int(sys.argv[2]))
