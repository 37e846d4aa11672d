"""examples/trainer.cc: it learns, writes for TensorBoard, saves, and goes on when it is started again."""

import re

EPOCH = re.compile(r"^\[rank 0\] epoch (\d+): loss ([\d.]+), test accuracy ([\d.]+)$", re.M)


def test_it_learns_and_goes_on_where_it_was(programs, small_data, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def train(run, epochs):
        done = programs.lockstep_run(
            2, "trainer", "--data", small_data, "--run", tmp_path / run, "--epochs", epochs, "--batch-size", 32
        )
        assert done.status == 0, done.text
        return EPOCH.findall(done.stdout)

    whole = train("whole", 3)
    assert [epoch for epoch, _, _ in whole] == ["1", "2", "3"]
    assert float(whole[-1][2]) > 0.9
    names = sorted(path.name for path in (tmp_path / "whole" / "checkpoints").glob("step-*"))
    assert names == ["step-00000040", "step-00000060"], "the last two, of which the last is the best"

    events = EventAccumulator(str(tmp_path / "whole" / "tensorboard"))
    events.Reload()
    scalars = set(events.Tags()["scalars"])
    assert {"epoch/loss", "epoch/lr", "validation/loss", "validation/accuracy", "train/loss", "train/grad_norm"} <= scalars
    assert [event.step for event in events.Scalars("validation/loss")] == [20, 40, 60]
    assert abs(events.Scalars("validation/accuracy")[-1].value - float(whole[-1][2])) < 1e-4

    assert train("whole", 3) == [], "nothing is left to do"
