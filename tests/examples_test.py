"""The examples do what their first lines promise, and refuse what they can't do."""

import re

import pytest

ACCURACY = r"test accuracy: ([01]\.\d{4})"


def test_all_reduce_sums_to_six_on_four_ranks(programs):
    done = programs.lockstep_run(4, "all_reduce")
    assert done.status == 0, done.text
    expected = [f"[rank {r}] rank {r} has [{r}, {r}]" for r in range(4)]
    expected += [f"[rank {r}] rank {r} now has [6, 6]" for r in range(4)]
    assert sorted(done.stdout.splitlines()) == sorted(expected)


def test_reduce_sums_to_six_on_the_destination_alone(programs):
    done = programs.lockstep_run(4, "reduce")
    assert done.status == 0, done.text
    expected = [f"[rank {r}] rank {r} has [{r}, {r}]" for r in range(4)] + ["[rank 0] rank 0 now has [6, 6]"]
    assert sorted(done.stdout.splitlines()) == sorted(expected)


@pytest.mark.parametrize("nprocs, total", [(4, '{"loss": 0.04, "num_samples": 6}'), (1, '{"loss": 0.01, "num_samples": 0}')])
def test_gather_counters_sums_on_rank_zero_then_on_all(programs, nprocs, total):
    done = programs.lockstep_run(nprocs, "--no-prefix", "gather_counters")
    assert done.status == 0, done.text
    expected = [f"rank 0 gather_object: {total}"]
    expected += [f"rank {r} all_gather_object: {total}" for r in range(nprocs)]
    assert sorted(done.stdout.splitlines()) == sorted(expected)


@pytest.mark.parametrize("nprocs", [1, 2, 3])
def test_one_step_prints_each_ranks_loss(programs, nprocs):
    done = programs.lockstep_run(nprocs, "--no-prefix", "one_step")
    assert done.status == 0, done.text
    losses = dict(re.findall(r"^rank (\d+) loss: ([\d.]+)$", done.stdout, re.M))
    assert set(losses) == {str(rank) for rank in range(nprocs)}, done.text
    assert all(0 < float(loss) < 100 for loss in losses.values())
    assert len(set(losses.values())) == nprocs, "each rank has its own samples"


def train(programs, data, *options, nprocs=2):
    return programs.lockstep_run(nprocs, "fashion_mnist", "--data", data, *options)


def outcome(done) -> tuple:
    """Losses and accuracies of a training, without its times."""
    assert done.status == 0, done.text
    losses = re.findall(r"^\[rank 0\] epoch (\d+/\d+): 100% .* loss=(\S+)\]$", done.stderr, re.M)
    epochs = re.findall(r"^\[rank 0\] epoch (\d+): .* test accuracy (\S+)$", done.stdout, re.M)
    assert len(losses) == len(epochs) > 0, done.text
    return losses, epochs, done.stdout.splitlines()[-1]


def test_fashion_mnist_learns_and_is_the_same_every_time(programs, fashion_mnist_data):
    done = train(programs, fashion_mnist_data, "--epochs", 1)
    again = train(programs, fashion_mnist_data, "--epochs", 1)
    assert outcome(done) == outcome(again)
    last = re.fullmatch(rf"\[rank 0\] {ACCURACY}", done.stdout.splitlines()[-1])
    assert last and float(last[1]) >= 0.80, done.text


def test_quickstarts_epochs_reach_its_accuracy(programs, fashion_mnist_data):
    done = train(programs, fashion_mnist_data, "--epochs", 15)
    last = re.fullmatch(rf"\[rank 0\] {ACCURACY}", done.stdout.splitlines()[-1])
    assert last and float(last[1]) >= 0.87, done.text


def test_output_comes_from_rank_zero_and_ends_with_the_accuracy(programs, small_data):
    done = train(programs, small_data, "--epochs", 2, "--batch-size", 64)
    assert all(line.startswith("[rank 0] ") for line in done.stdout.splitlines()), done.text
    assert len(outcome(done)[1]) == 2
    assert re.fullmatch(rf"\[rank 0\] {ACCURACY}", done.stdout.splitlines()[-1]), done.text
    assert "[rank 1]" not in done.stderr and re.search(r"\d+ images/s, loss=", done.stderr), done.text


def test_the_seed_decides(programs, small_data):
    options = ["--epochs", 2, "--batch-size", 64, "--seed"]
    first = outcome(train(programs, small_data, *options, 1))
    assert outcome(train(programs, small_data, *options, 1)) == first
    assert outcome(train(programs, small_data, *options, 2))[0] != first[0]


@pytest.mark.parametrize("nprocs", [1, 2, 4])
def test_the_cnn_trains_on_any_number_of_ranks(programs, small_data, nprocs):
    done = train(programs, small_data, "--model", "cnn", "--epochs", 3, "--batch-size", 64, nprocs=nprocs)
    assert done.status == 0, done.text
    last = re.search(ACCURACY + "$", done.stdout.splitlines()[-1])
    assert last and float(last[1]) > 0.5, done.text  # a guess would be right one time in ten


@pytest.mark.long
def test_the_cnn_learns_the_real_data(programs, fashion_mnist_data):
    done = train(programs, fashion_mnist_data, "--model", "cnn", "--epochs", 1)
    assert done.status == 0, done.text
    assert float(re.search(ACCURACY, done.stdout)[1]) >= 0.80, done.text


def test_data_that_is_not_there(programs, tmp_path):
    done = train(programs, tmp_path / "nothing")
    assert done.status == 1 and f"no Fashion-MNIST in directory '{tmp_path}/nothing'" in done.stderr, done.text
    assert "scripts/quickstart" in done.stderr  # the remedy


def test_data_that_is_cut_off(programs, small_data):
    images = small_data / "train-images-idx3-ubyte"
    images.write_bytes(images.read_bytes()[:-1])
    done = train(programs, small_data)
    assert done.status == 1 and str(images) in done.stderr, done.text


def test_a_batch_that_the_ranks_cannot_share(programs, small_data):
    done = train(programs, small_data, "--batch-size", 65)
    assert done.status == 1, done.text
    assert "--batch-size 65" in done.stderr and "2 ranks" in done.stderr, done.text


def test_a_data_set_too_small_for_one_batch(programs, small_data):
    """No step could be taken, so an accuracy would be a lie."""
    done = train(programs, small_data, "--batch-size", 1000)
    assert done.status == 1 and "1000" in done.stderr, done.text


@pytest.mark.parametrize(
    "options, words",
    [
        (["--model", "rnn"], ["--model", "rnn"]),
        (["--epochs", "0"], ["--epochs", "0"]),
        (["--batch-size", "-4"], ["--batch-size", "-4"]),
        (["--seed", "x"], ["--seed", "x"]),
        (["--bogus"], ["--bogus"]),
    ],
)
def test_bad_options_are_refused(programs, options, words):
    done = programs.run("fashion_mnist", *options)
    assert done.status > 0 and done.stdout == "", done.text
    assert all(word in done.stderr for word in words), done.text


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_data_parallel_trains_like_ddp_and_prints_both_speeds(programs, replicas):
    done = programs.run("data_parallel", "--replicas", replicas, "--steps", 20, "--batch-size", 48, "--hidden", 64)
    assert done.status == 0, done.text
    found = re.findall(r"^(\S.*): +(\d+) samples/s, loss (\d+\.\d{6})$", done.stdout, re.M)
    assert [name for name, _, _ in found] == [
        f"DistributedDataParallel, {replicas} processes",
        f"DataParallel, {replicas} replicas in threads",
        "the module alone, one thread",
    ], done.text
    losses = [float(loss) for _, _, loss in found]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-3) and losses[0] < 2.0, done.text  # ln 10 at the start
    ratio = re.search(r"^DistributedDataParallel is (\d+\.\d\d) times as fast as DataParallel$", done.stdout, re.M)
    speeds = [int(speed) for _, speed, _ in found]
    assert float(ratio[1]) == pytest.approx(speeds[0] / speeds[1], abs=0.01), done.text


def test_data_parallel_refuses_a_batch_that_does_not_divide(programs):
    done = programs.run("data_parallel", "--replicas", 3, "--batch-size", 8)
    assert done.status == 1 and "--batch-size 8" in done.stderr, done.text
