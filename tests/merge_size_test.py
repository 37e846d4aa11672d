"""Merging the traces of 64 ranks, 100 MB each, takes less than 4 GiB of memory."""

import gzip
import json
import os
import re
import subprocess

import pytest

RANKS = 64
TRACE_BYTES = 100_000_000  # of a rank, unpacked; the files are packed, so that the test needs 2 GB of disk
MOST_BYTES = 4 << 30
OPERATORS = 24  # between two operations of the group, as many as in training steps of a small model
BASE_NS = 1_790_000_000_000_000_000
OPERATION_US = 1000.0


def operators(begin):
    """The text of some operators, all ranks' alike but for the times."""
    events = []
    for i in range(OPERATORS):
        arguments = {
            "External id": i, "Record function id": 0, "Ev Idx": i, "Sequence number": i, "Fwd thread id": 0,
            "Input Dims": [[64, 784], [784, 512], [512]], "Input type": ["float", "float", "float"],
            "Call stack": ";".join(f"/home/user/train.cc({line}): Net::forward(at::Tensor const&)" for line in range(4)),
        }
        events.append({"ph": "X", "cat": "cpu_op", "name": "aten::addmm", "pid": 1, "tid": 77, "ts": begin + i, "dur": 0.5, "args": arguments})
    return "".join(",\n" + json.dumps(event) for event in events)


def operation(rank, number):
    """The last rank comes last, 100 us after the first one."""
    begin = number * OPERATION_US + 100.0 * rank / RANKS
    arguments = {
        "Collective name": "all_reduce", "Process Group Key": "default", "Rank": rank, "Seq": number, "Is P2P": False,
        "Process Group Ranks": str(list(range(RANKS))), "Queued (us)": 0.5,
    }
    end = number * OPERATION_US + 101
    return ",\n" + json.dumps({"ph": "X", "cat": "user_annotation", "name": "lockstep:all_reduce", "pid": 1, "tid": 1_000_000_000,
                               "ts": begin, "dur": end - begin, "args": arguments})


def write_trace(path, rank, blocks):
    """Packed files may be written in pieces, of which most are all ranks'."""
    header = {
        "schemaVersion": 1, "distributedInfo": {"backend": "lockstep", "rank": rank, "world_size": RANKS},
        "lockstep": {"pid": 1, "host": f"host{rank // 8}", "boot_id": f"boot{rank // 8}"}, "baseTimeNanoseconds": BASE_NS,
    }
    name = json.dumps({"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "train"}})
    with open(path, "wb") as file:
        file.write(gzip.compress((json.dumps(header)[:-1] + ', "traceEvents": [\n' + name).encode(), 1))
        for number, block in enumerate(blocks, 1):
            file.write(block + gzip.compress(operation(rank, number).encode(), 1))
        file.write(gzip.compress(b"\n]}", 1))


@pytest.mark.long
def test_64_ranks_of_100_mb_each_are_merged_within_4_gib(programs, tmp_path):
    size = len(operators(0.0)) + len(operation(0, 1))
    count = TRACE_BYTES // size + 1
    blocks = [gzip.compress(operators(number * OPERATION_US).encode(), 1) for number in range(1, count + 1)]
    folder = tmp_path / "traces"
    folder.mkdir()
    for rank in range(RANKS):
        write_trace(folder / f"rank{rank}.1.pt.trace.json.gz", rank, blocks)
    merged = tmp_path / "all.json.gz"
    command = [programs.find("lockstep"), "inspect", "trace", "--merge", merged, folder]
    with subprocess.Popen(command, env=programs.environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        said = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, said
    print(f"{usage.ru_maxrss >> 10} MiB, {usage.ru_utime + usage.ru_stime:.0f} s of processor time")
    assert usage.ru_maxrss * 1024 < MOST_BYTES, f"{usage.ru_maxrss} KiB"
    found = re.search(r"(\d+) traces of (\d+) ranks, (\d+) events; (\d+) collectives and 0 messages linked by (\d+) arrows", said)
    assert found, said
    events = RANKS * (1 + count * (OPERATORS + 1))
    assert [int(number) for number in found.groups()] == [RANKS, RANKS, events, count, count * (RANKS - 1)]
    unpacked = 0
    with gzip.open(merged) as file:
        while chunk := file.read(1 << 24):
            unpacked += len(chunk)
            last = chunk
    # It is written without the spaces after commas and colons, of which a fifteenth of these files consists.
    assert unpacked > 0.9 * RANKS * TRACE_BYTES and last.rstrip().endswith(b"]}")
