"""The examples do what their first lines promise, and refuse what they can't do."""

import pathlib
import re
import socket

import pytest
import support
import torch

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


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_spawn_trains_where_the_program_itself_sets_the_address(programs, world_size):
    options = ["--world-size", world_size, "--epochs", 3, "--master-port", support.free_port()]
    done = programs.run("spawn", *options)
    assert done.status == 0, done.text
    losses = re.findall(r"^epoch (\d): loss (\d\S*)$", done.stdout, re.M)
    assert [epoch for epoch, _ in losses] == ["1", "2", "3"], done.text
    assert float(losses[2][1]) < float(losses[0][1]), done.text


def test_spawn_passes_a_failed_process_on(programs):
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        port = stranger.getsockname()[1]
        done = programs.run("spawn", "--master-port", port)
    assert done.status == 1 and f"port {port} is in use" in done.stderr, done.text


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
    words = ["-n", 2, "fashion_mnist", "--data", fashion_mnist_data, "--epochs", 15]
    done = programs.start("lockstep", "run", *words).finish(limit=10 * support.HANG)  # it computes for half a minute
    last = re.fullmatch(rf"\[rank 0\] {ACCURACY}", done.stdout.splitlines()[-1])
    assert last and float(last[1]) >= 0.87, done.text


def test_output_comes_from_rank_zero_and_ends_with_the_accuracy(programs, small_data):
    done = train(programs, small_data, "--epochs", 2, "--batch-size", 64)
    assert all(line.startswith("[rank 0] ") for line in done.stdout.splitlines()), done.text
    assert len(outcome(done)[1]) == 2
    assert re.fullmatch(rf"\[rank 0\] {ACCURACY}", done.stdout.splitlines()[-1]), done.text
    assert "[rank 1]" not in done.stderr and re.search(r"\d+ images/s, \d+% waiting for data, loss=", done.stderr), done.text


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


@pytest.mark.parametrize("nprocs, precision", [(1, "float32"), (3, "bfloat16"), (2, "float16")])
def test_fsdp_trains_and_saves_what_python_reads(programs, small_data, tmp_path, nprocs, precision):
    options = ["--data", small_data, "--epochs", 4, "--batch-size", 30, "--precision", precision, "--save", tmp_path / "net.pt"]
    done = programs.lockstep_run(nprocs, "fsdp", *options)
    assert done.status == 0, done.text
    assert float(re.search(ACCURACY + "$", done.stdout.splitlines()[-1])[1]) > 0.5, done.text
    weights = torch.load(tmp_path / "net.pt", weights_only=True)
    assert {name: tuple(tensor.shape) for name, tensor in weights.items()} == {
        "fc1.weight": (256, 784), "fc1.bias": (256,), "fc2.weight": (10, 256), "fc2.bias": (10,),
    }
    assert all(tensor.dtype == torch.float32 for tensor in weights.values())


def test_large_model_learns_beyond_half_of_the_memory(programs, tmp_path):
    done = programs.lockstep_run(2, "large_model", "--memory-mib", 16, "--width", 128, "--steps", 12, "--learning-rate", 0.001,
                                 "--offload", tmp_path)
    assert done.status == 0, done.text
    assert "18 blocks, 2375424 parameters: weights in full precision are 0.57 of the memory\n" in done.stdout, done.text
    losses = [float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+)$", done.stdout, re.M)]
    assert len(losses) == 12 and losses[-1] < 0.7 * losses[0], done.text
    assert not list(tmp_path.iterdir()), "the files go with the processes"
    done = programs.lockstep_run(2, "large_model", "--memory-mib", 1, "--width", 32, "--offload", tmp_path / "nothing")
    assert done.status == 1 and f"cpu_offload can't make a file of" in done.text and f"{tmp_path}/nothing/" in done.text, done.text
    done = programs.run("large_model", "--layers", 0)
    assert done.status != 0 and "--layers" in done.text, done.text


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


@pytest.mark.parametrize("example", ["fashion_mnist", "mixed_precision", "trainer"])
def test_without_data_the_folder_is_that_of_debians_package(programs, example):
    done = programs.run(example, "--help")
    assert done.status == 0 and "/usr/share/datasets/fashion-mnist" in done.stdout, done.text


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


MIXED_EPOCH = r"^epoch (\d+): (\d+) images/s, test accuracy ([01]\.\d{4}), scale (\S+), skipped steps (\d+)$"


def mixed_precision(programs, data, dtype, epochs, *options):
    """(accuracies, scales, skipped steps) by epoch"""
    words = ["--no-prefix", "mixed_precision", "--data", data, "--dtype", dtype, "--epochs", epochs, *options]
    child = programs.start("lockstep", "run", "--nproc-per-node", 2, *words)
    for epoch in range(1, epochs + 1):
        child.wait_for(rf"epoch {epoch}:")  # each has its own time limit
    done = child.finish()
    assert done.status == 0, done.text
    found = re.findall(MIXED_EPOCH, done.stdout, re.M)
    assert [int(epoch[0]) for epoch in found] == list(range(1, epochs + 1)), done.text
    assert all(int(epoch[1]) > 0 for epoch in found), done.text
    assert done.stdout.splitlines()[-1] == f"test accuracy: {found[-1][2]}", done.text
    return [float(e[2]) for e in found], [float(e[3]) for e in found], [int(e[4]) for e in found]


@pytest.mark.parametrize("dtype", ["float32", "bf16"])
def test_mixed_precision_learns_with_autocast(programs, small_data, dtype):
    accuracies, scales, skipped = mixed_precision(programs, small_data, dtype, 3, "--batch-size", 32)
    assert accuracies[-1] > 0.5  # a guess would be right one time in ten
    assert scales == [1, 1, 1] and skipped == [0, 0, 0], "no scaler is needed"


def test_mixed_precision_skips_the_steps_that_overflow_in_float16(programs, small_data):
    options = ["--batch-size", 32, "--init-scale", 2.0**32]
    accuracies, scales, skipped = mixed_precision(programs, small_data, "fp16", 3, *options)
    assert skipped[0] >= 5 and scales[-1] == 2.0 ** (32 - skipped[-1])
    assert skipped[-1] < 25 and accuracies[-1] > 0.5, "once the scale fits, it learns"


@pytest.mark.long
def test_mixed_precision_is_as_accurate_as_float32(programs, fashion_mnist_data):
    full = mixed_precision(programs, fashion_mnist_data, "float32", 3)[0][-1]
    mixed = mixed_precision(programs, fashion_mnist_data, "bf16", 3)[0][-1]
    assert full > 0.85 and mixed > full - 0.005, (full, mixed)


def test_mixed_precision_refuses_what_it_cannot_do(programs, small_data):
    done = programs.run("mixed_precision", "--dtype", "float64")
    assert done.status > 0 and "--dtype" in done.stderr and "float64" in done.stderr, done.text
    done = programs.lockstep_run(2, "mixed_precision", "--data", small_data, "--batch-size", 65)
    assert done.status == 1 and "--batch-size 65" in done.stderr, done.text


@pytest.mark.parametrize("nprocs, steps", [(1, 3), (2, 4), (2, 1)])
def test_accumulation_makes_the_steps_of_one_large_batch(programs, nprocs, steps):
    done = programs.lockstep_run(nprocs, "--no-prefix", "accumulation", "--steps", steps, "--updates", 10)
    assert done.status == 0, done.text
    found = re.findall(r"^(.*): +(\d+) samples a forward, (\d+) reductions, (\d+\.\d\d) MB reduced$", done.stdout, re.M)
    assert [f[:3] for f in found] == [("one large batch", str(16 * steps), "10"), ("micro-batches", "16", "10")], done.text
    assert found[0][3] == found[1][3] and float(found[0][3]) > 0.5, done.text
    saved = re.search(r"would take (\d+) reductions: (\d+)% are saved", done.stdout)
    assert (int(saved[1]), int(saved[2])) == (10 * steps, round(100 * (1 - 1 / steps))), done.text
    difference = float(re.search(r"^largest difference of a weight: (\S+)$", done.stdout, re.M)[1])
    assert difference < 1e-12 and (steps == 1 or difference > 0), done.text


@pytest.mark.parametrize("device, words", [("cuda", "cuda:0"), ("cuda:7", "cuda:7"), ("tpu", "it takes auto, cpu, cuda")])
def test_a_device_that_is_not_there_is_refused_with_a_reason(programs, small_data, device, words):
    if device != "tpu" and any(pathlib.Path(node).exists() for node in ("/dev/nvidiactl", "/dev/dxg")):
        pytest.skip("this machine has a GPU")
    done = programs.run("fashion_mnist", "--data", small_data, "--device", device)
    assert done.status > 0 and words in done.stderr, done.text


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [1, 2], ids=["one rank", "two ranks on one card"])
def test_examples_train_on_a_card(programs, small_data, ranks):
    done = programs.lockstep_run(ranks, "--no-prefix", "fashion_mnist", "--data", small_data, "--epochs", 3,
                                 "--batch-size", 32, "--device", "cuda:0")
    assert done.status == 0, done.text
    on_cpu = programs.lockstep_run(ranks, "--no-prefix", "fashion_mnist", "--data", small_data, "--epochs", 3,
                                   "--batch-size", 32, "--device", "cpu")
    accuracy, expected = (float(re.findall(r"^test accuracy: (\S+)$", each.stdout, re.M)[0]) for each in (done, on_cpu))
    assert abs(accuracy - expected) < 0.05, (accuracy, expected)
    done = programs.lockstep_run(ranks, "--no-prefix", "mixed_precision", "--data", small_data, "--dtype", "fp16",
                                 "--epochs", 3, "--batch-size", 32, "--device", "cuda:0")
    assert done.status == 0, done.text
