"""examples/char_gpt learns from a text, and writes some of its own."""

import gzip
import re
import shutil
import subprocess

import pytest
from support import HANG

SMALL = ["--block-size", 32, "--layers", 1, "--heads", 2, "--width", 32, "--sample", 60]


@pytest.fixture(scope="session")
def genesis() -> str:
    """The first three chapters of the King James Bible."""
    if not shutil.which("bible"):
        pytest.skip("no program `bible`; Debian's package bible-kjv has it")
    return subprocess.run(["bible", "gen1:1-3:24"], capture_output=True, text=True, check=True).stdout


def train(programs, data, *options, nprocs=2, batch_size=16):
    words = ["-n", nprocs, "--no-prefix", "char_gpt", "--data", data, *SMALL, "--batch-size", batch_size, *options]
    return programs.start("lockstep", "run", *words).finish(limit=10 * HANG)  # it computes for up to a minute on a busy machine


def parts(done):
    """([(step, loss, norm, learning rate)], the last loss, the sample)"""
    assert done.status == 0, done.text
    steps = re.findall(r"^step (\d+)/\d+: loss ([\d.]+), gradient norm ([\d.]+), learning rate ([\d.]+), \d+ characters/s$",
                       done.stdout, re.M)
    end = re.search(r"^loss: ([\d.]+)\nsample:\n(.*)\n\Z", done.stdout, re.M | re.S)
    assert end, done.text
    return [(int(step), *map(float, numbers)) for step, *numbers in steps], float(end[1]), end[2]


def test_it_learns_and_writes_in_the_characters_of_the_text(programs, tmp_path, genesis):
    (tmp_path / "kjv.txt").write_text(genesis)
    options = ["--steps", 200, "--warm-up", 20, "--learning-rate", 0.01]
    done = train(programs, tmp_path / "kjv.txt", *options)
    steps, loss, sample = parts(done)
    assert [step for step, *_ in steps] == list(range(20, 201, 20)), done.text
    losses = [each[1] for each in steps]
    assert losses[0] > 3 and losses[-1] == loss < 2.3 and loss < losses[4], done.text  # ln 58 = 4.06 at the start
    rates = [each[3] for each in steps]
    # The twentieth step is the last of the warm-up; the cosine begins with the next, and ends at a tenth.
    assert rates[0] == pytest.approx(0.01 * (0.01 + 0.99 * 19 / 20), abs=1e-6), done.text
    assert rates[1:] == sorted(rates[1:], reverse=True) and 0.001 <= rates[-1] < 0.0011 < rates[-2], done.text
    assert len(sample) == 61 and sample[0] == "\n" and set(sample) <= set(genesis), done.text
    assert " " in sample.strip() and re.search("[a-z]{2}", sample), done.text
    assert f"{len(genesis)} characters of text, {len(set(genesis))} different ones" in done.stdout, done.text
    again = parts(train(programs, tmp_path / "kjv.txt", *options))
    assert (again[1], again[2]) == (loss, sample)  # the same every time


def test_one_model_on_the_host_learns_as_one_for_each_rank(programs, tmp_path):
    (tmp_path / "text").write_text("In shards, as a whole.\n" * 200)
    options = ["--steps", 50, "--warm-up", 5, "--learning-rate", 0.01]
    ddp = parts(train(programs, tmp_path / "text", *options, "--strategy=ddp", nprocs=3, batch_size=18))
    fsdp = parts(train(programs, tmp_path / "text", *options, "--strategy=fsdp", nprocs=3, batch_size=18))
    assert len(ddp[0]) == 10 and ddp[1] < ddp[0][0][1] / 2
    for ours, theirs in zip(fsdp[0], ddp[0], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-3)


def test_a_pipeline_learns_and_writes(programs, tmp_path):
    (tmp_path / "text").write_text("In stages, part by part.\n" * 200)
    options = ["--steps", 50, "--warm-up", 5, "--learning-rate", 0.01, "--strategy=pipeline", "--layers", 3, "--micro-batches", 6]
    done = train(programs, tmp_path / "text", *options, nprocs=3, batch_size=18)
    steps, loss, sample = parts(done)
    assert len(steps) == 10 and loss < steps[0][1] / 2, done.text
    assert set(sample) <= set("In stages, part by part.\n"), done.text


def test_it_learns_bytes_and_takes_gzip(programs, tmp_path):
    (tmp_path / "text.gz").write_bytes(gzip.compress("Füße, Füße, Füße. ".encode() * 300))
    done = train(programs, tmp_path / "text.gz", "--bytes", "--steps", 60, "--warm-up", 0, "--learning-rate", 0.01,
                 "--prompt", "Fü", nprocs=1)
    steps, loss, sample = parts(done)
    assert len(steps) == 10 and loss < 1 < steps[0][1], done.text
    assert "256 different ones" in done.stdout and re.match("Füße[,.] Fü", sample), done.text


@pytest.mark.parametrize(
    "options, words",
    [
        (["--batch-size", 15], "--batch-size 15 is for the whole job"),
        (["--strategy=pipeline"], "--layers 1 can't be shared out over 2 ranks"),
        (["--strategy=pipeline", "--layers", 2, "--micro-batches", 3], "must be a multiple of --micro-batches 3"),
        (["--heads", 3], "--width 32 must be a multiple of --heads 3"),
        (["--steps", 10, "--warm-up", 10], "--warm-up 10 must be less than --steps 10"),
        (["--prompt", "z"], "the character 'z' at byte 0 is not in the vocabulary"),
        (["--prompt", ""], "--prompt is empty"),
        (["--batch-size", 1000], "don't fill one batch of 1000"),
        (["--block-size", 99999], "too short for block_size 99999"),
    ],
)
def test_what_cannot_be_is_refused(programs, tmp_path, options, words):
    (tmp_path / "text").write_text("abcdefg, " * 200 + "\n")
    done = train(programs, tmp_path / "text", *options)
    assert done.status == 1 and words in done.stderr, done.text


def test_help_tells_where_a_text_is(programs):
    done = programs.run("char_gpt", "--help")
    assert done.status == 0 and "bible-kjv" in done.stdout, done.text
    assert programs.run("char_gpt").status > 0
