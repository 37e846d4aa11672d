"""examples/pipeline.cc and examples/model_parallel.cc: modules on several devices train as on one."""

import re

import pytest

ACCURACY = r"^test accuracy: ([01]\.\d{4})$"


def accuracy(done) -> float:
    assert done.status == 0, done.text
    return float(re.search(ACCURACY, done.stdout, re.M)[1])


@pytest.mark.parametrize("options", [[], ["--balance", 2, 3, 2, "--devices", "cpu", "cpu", "cpu", "--chunks", 3]])
def test_the_pipeline_trains_as_the_plain_module(programs, small_data, options):
    common = ["--data", small_data, "--epochs", 3, "--batch-size", 30]
    piped = programs.run("pipeline", *common, *options)
    plain = programs.run("pipeline", *common, "--plain")
    assert accuracy(piped) > 0.9, piped.text  # a guess would be right one time in ten
    assert abs(accuracy(piped) - accuracy(plain)) <= 0.02, piped.text + plain.text
    assert piped.stdout.startswith("balance: [2, 3, 2]" if options else "balance: [4, 3]"), piped.text


def test_the_pipeline_names_both_faults_of_the_printed_balance(programs, small_data):
    done = programs.run("pipeline", "--data", small_data, "--faulty")
    assert done.status == 1 and done.stdout == "", done.text
    for words in ["adds up to 6, but the module has 7 layers", "makes 3 partitions, but there are 2 devices", "[4, 3]"]:
        assert words in done.stderr, done.text


@pytest.mark.parametrize("by", ["time", "size"])
def test_the_pipeline_finds_a_balance(programs, small_data, by):
    done = programs.run("pipeline", "--data", small_data, "--epochs", 1, "--batch-size", 64, "--balance-by", by)
    assert done.status == 0, done.text
    balance = [int(count) for count in re.search(r"^balance: \[(\d+), (\d+)\]$", done.stdout, re.M).groups()]
    assert sum(balance) == 7, done.text
    assert by == "time" or balance == [1, 6], "the first of the layers has most of the parameters"


@pytest.mark.long
def test_the_pipeline_is_as_accurate_as_the_plain_module_on_the_real_data(programs, fashion_mnist_data):
    piped, plain = (
        accuracy(programs.run("pipeline", "--data", fashion_mnist_data, "--epochs", 2, *options))
        for options in ([], ["--plain"])
    )
    assert piped > 0.84 and abs(piped - plain) < 0.01, (piped, plain)


def test_the_pipeline_refuses_what_is_not_there(programs, small_data):
    done = programs.run("pipeline", "--data", small_data, "--devices", "cpu", "somewhere")
    assert done.status == 1 and "somewhere" in done.stderr, done.text
    done = programs.run("pipeline", "--data", small_data, "--balance-by", "colour")
    assert done.status > 0 and "--balance-by" in done.stderr, done.text


def loss(done) -> float:
    assert done.status == 0, done.text
    return float(re.search(r"loss after \d+ steps: (\S+)$", done.stdout, re.M)[1])


@pytest.mark.parametrize("ranks", [2, 3])
def test_model_parallel_trains_with_data_parallelism_as_alone(programs, ranks):
    alone = loss(programs.run("model_parallel"))
    together = loss(programs.lockstep_run(ranks, "model_parallel", "--ddp", "--devices", "cpu", "cpu"))
    assert alone < 0.1 and together == pytest.approx(alone, rel=1e-9)


def test_model_parallel_trains_on_two_devices_as_on_the_cpu(programs):
    """The example linked with the simulated device, whose results are the CPU's."""
    if not (programs.bin_dir / "model_parallel_on_device").is_file():
        pytest.skip("model_parallel_on_device is not built")
    on_devices = ["model_parallel_on_device", "--devices", "privateuseone:0", "privateuseone:1"]
    wanted = pytest.approx(loss(programs.run("model_parallel")), rel=1e-9)
    assert loss(programs.run(*on_devices)) == wanted
    assert loss(programs.lockstep_run(2, *on_devices, "--ddp")) == wanted


def test_model_parallel_refuses_what_it_cannot_do(programs):
    done = programs.run("model_parallel", "--devices", "cpu", "cpu", "cpu")
    assert done.status == 1 and "3 devices" in done.stderr, done.text
    done = programs.lockstep_run(2, "model_parallel", "--ddp", "--batch-size", 3)
    assert done.status == 1 and "--batch-size 3" in done.stderr, done.text
