"""The driver of the fuzzers: finds what is planted, saves it, and runs it again."""

import pathlib
import re

import pytest

FOUND, MISUSE = 1, 2
MISTAKE = b"count=18446744073709551615"
HOW = {
    "abort": r"by signal 6",
    "throw": r"by signal 6",
    "exit": r"ended the process with status 0",
    "kill": r"by signal 9",
    "hang": r"took longer than 1 s",
    "memory": r"by signal 6",
}


def fuzz(programs, *arguments, **variables):
    return programs.run("planted_fuzz", *arguments, **variables)


@pytest.mark.parametrize("mistake", HOW)
def test_a_mistake_is_found_saved_and_can_be_run_again(programs, tmp_path, mistake):
    done = fuzz(
        programs, "--runs", 100000, "--seed", 1, "--timeout", 1, "--artifacts", tmp_path / "found", PLANTED=mistake
    )
    assert done.status == FOUND and re.search(HOW[mistake], done.stderr), done.text
    saved = pathlib.Path(re.search(r"run it again: \S+ (\S+)", done.stderr)[1])
    assert saved.parent == tmp_path / "found" and MISTAKE in saved.read_bytes()
    hexadecimal = re.search(r"its bytes \(xxd -r -p\): (\w+)", done.stderr)[1]
    assert bytes.fromhex(hexadecimal) == saved.read_bytes()
    if mistake in ("abort", "throw", "kill", "memory"):
        assert fuzz(programs, saved, PLANTED=mistake).status < 0
    assert fuzz(programs, saved).status == 0  # mended


def test_an_unharmed_run_counts_its_inputs(programs, tmp_path):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "one").write_bytes(b"1")
    done = fuzz(programs, "--runs", 500, corpus)
    # two seeds, one file, and the empty input
    assert done.status == 0 and "4 inputs to start from" in done.stdout, done.text
    assert "504 inputs, none failed" in done.stdout, done.text


def test_a_seed_repeats_a_run(programs, tmp_path):
    found = set()
    for attempt in ("first", "second"):
        done = fuzz(programs, "--runs", 0, "--seed", 5, "--artifacts", tmp_path / attempt, PLANTED="abort")
        assert done.status == FOUND and "seed 5" in done.stdout, done.text
        found.update(path.read_bytes() for path in (tmp_path / attempt).iterdir())
    assert len(found) == 1


def test_files_of_a_corpus_run_unchanged(programs, tmp_path):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "bad").write_bytes(MISTAKE)
    done = fuzz(programs, "--runs", 1, "--artifacts", tmp_path / "found", corpus, PLANTED="abort")
    assert done.status == FOUND, done.text
    assert [path.read_bytes() for path in (tmp_path / "found").iterdir()] == [MISTAKE]


def test_misuse(programs):
    assert fuzz(programs, "--help").stdout.startswith("usage: planted_fuzz [options]")
    for arguments, words in (
        (["--runs", "many"], "--runs is 'many'; it takes a whole number"),
        (["--seed"], "--seed needs a value"),
        (["--walks", 3], "unknown option '--walks'"),
        (["absent"], "absent does not exist"),
    ):
        done = fuzz(programs, *arguments)
        assert done.status == MISUSE and words in done.stderr, done.text
