"""Tables of actions against those of torch.distributed.pipelining, of random sizes. Its schedules want processes only to run."""

import random
import subprocess
from unittest import mock

import pytest
import torch
import torch.distributed.pipelining.schedules as torchs

SINGLE = {"GPipe": torchs.ScheduleGPipe, "1F1B": torchs.Schedule1F1B}
MULTI = {"Interleaved1F1B": torchs.ScheduleInterleaved1F1B, "InterleavedZeroBubble": torchs.ScheduleInterleavedZeroBubble}


@pytest.fixture(scope="module")
def ours(run_driver):
    """ours([(schedule, ranks, stages per rank, micro-batches)]): their tables, rows of actions in torch's words, "-" is idle."""

    def ask(shapes):
        lines = "".join(" ".join(map(str, shape)) + "\n" for shape in shapes)
        tables = run_driver("schedule_parity_driver", given=lines).stdout.split("\n\n")[:-1]
        assert len(tables) == len(shapes)
        return [[line.split() for line in table.split("\n")] for table in tables]

    return ask


def stage(index, ranks, stages_per_rank, rank=0):
    made = mock.MagicMock(stage_index=index, num_stages=ranks * stages_per_rank, group_rank=rank, group_size=ranks,
                          is_first=index == 0, device=torch.device("cpu"))  # fmt: skip
    made.is_last = index == made.num_stages - 1
    for operations in ("get_fwd_recv_ops", "get_fwd_send_ops", "get_bwd_recv_ops", "get_bwd_send_ops"):
        getattr(made, operations).return_value = []
    return made


def torchs_table(schedule, ranks, stages_per_rank, micro_batches):
    # Without a last pass that drops the idle steps of the schedules with one stage a rank, to add reductions.
    with mock.patch.object(torchs, "_add_reduce_grad", lambda actions, _: actions):
        if schedule in SINGLE:
            order = SINGLE[schedule](stage(0, ranks, 1), micro_batches, loss_fn=max).pipeline_order
        else:
            stages = [stage(i * ranks, ranks, stages_per_rank) for i in range(stages_per_rank)]
            order = MULTI[schedule](stages, micro_batches, loss_fn=max).pipeline_order
    return [["-" if action is None else str(action) for action in order[rank]] for rank in range(ranks)]


def run_by_torch(schedule, ranks, rank, micro_batches):
    """The actions that torch's own runner takes on this rank."""
    done = []
    its = stage(rank, ranks, 1, rank)
    its.forward_one_chunk.side_effect = lambda m, *_, **__: done.append(f"{rank}F{m}")
    its.backward_one_chunk.side_effect = lambda m, *_, **__: done.append(f"{rank}B{m}")
    runner = SINGLE[schedule](its, micro_batches)
    with mock.patch.object(runner, "_initialize_stage"), mock.patch.object(runner, "_update_losses"):
        runner._step_microbatches([()] * micro_batches, [{}] * micro_batches)
    return done


def sizes(seed, interleaved):
    chosen = random.Random(seed)
    ranks = chosen.randint(1, 9)
    if not interleaved:
        return ranks, 1, chosen.randint(ranks, 4 * ranks + 3)
    rounds = chosen.randint(1, 5)
    of_a_round = chosen.randint(1, 2 * ranks - 1) if rounds == 1 else ranks + chosen.randint(0, (ranks - 1) // rounds)
    return ranks, chosen.randint(1, 4), rounds * of_a_round


@pytest.mark.parametrize("schedule", [*SINGLE, *MULTI])
def test_tables_are_torchs(schedule, ours):
    shapes = [(schedule, *sizes(seed, schedule in MULTI)) for seed in range(150)]
    for shape, table in zip(shapes, ours(shapes), strict=True):
        expected = torchs_table(*shape)
        if schedule == "1F1B":
            # Torch's picture of the last rank counts its forwards from 1; its runner counts from 0, as the next test says.
            last = shape[1] - 1
            expected[last] = [f"{last}F{int(action.split('F')[1]) - 1}" if "F" in action else action for action in expected[last]]
        assert table == expected, shape


@pytest.mark.parametrize("schedule", SINGLE)
def test_torchs_own_runner_takes_the_same_actions(schedule, ours):
    shapes = [(schedule, *sizes(seed, False)) for seed in range(1000, 1030)]
    for shape, table in zip(shapes, ours(shapes), strict=True):
        for rank, row in enumerate(table):
            assert [action for action in row if action != "-"] == run_by_torch(schedule, shape[1], rank, shape[3]), (shape, rank)


@pytest.mark.parametrize("schedule", MULTI)
def test_what_torch_refuses_of_the_interleaved_ones_is_refused(schedule, bin_dir):
    with pytest.raises(ValueError, match="multiple of the number of rounds"):
        torchs_table(schedule, 4, 2, 9)
    done = subprocess.run([bin_dir / "schedule_parity_driver"], input=f"{schedule} 4 2 9\n", capture_output=True, text=True, timeout=120)
    assert done.returncode != 0 and "multiple" in done.stderr
