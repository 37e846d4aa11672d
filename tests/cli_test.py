"""The command line of `lockstep`: help, version, and what it refuses, each with the value and a way on."""

import os

import pytest

MISUSE = 2


@pytest.mark.parametrize("option", ["--help", "-h"])
def test_help_of_the_program_lists_its_commands(programs, option):
    done = programs.run("lockstep", option)
    assert done.status == 0 and done.stderr == "", done.text
    assert "Usage: lockstep " in done.stdout and "\n  run " in done.stdout, done.text


@pytest.mark.parametrize("option", ["--help", "-h"])
def test_help_of_run_shows_its_options_and_examples(programs, option):
    done = programs.run("lockstep", "run", option)
    assert done.status == 0 and done.stderr == "", done.text
    for word in ["Usage: lockstep run [OPTIONS] PROGRAM [ARGS...]", "--nproc-per-node", "--master-port", "Examples:"]:
        assert word in done.stdout, done.text


def test_version(programs):
    done = programs.run("lockstep", "--version")
    assert done.status == 0 and done.stdout.startswith("lockstep 0."), done.text


def test_without_arguments_the_help_is_shown(programs):
    done = programs.run("lockstep")
    assert done.status == MISUSE and "Usage: lockstep " in done.stdout, done.text


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["rnu"], ["'rnu'", "run", "lockstep --help"]),
        (["--bogus"], ["--bogus"]),
        (["run"], ["PROGRAM", "lockstep run --help"]),
        (["run", "--nproc-per-node", "2"], ["PROGRAM"]),
        (["run", "--bogus", "true"], ["--bogus"]),
        (["run", "--nproc-per-node"], ["--nproc-per-node"]),
        (["run", "--nproc-per-node", "0", "true"], ["--nproc-per-node", " 0"]),
        (["run", "--nproc-per-node", "-1", "true"], ["--nproc-per-node", "-1"]),
        (["run", "--nproc-per-node", "abc", "true"], ["--nproc-per-node", "'abc'", "auto"]),
        (["run", "--nproc-per-node", "2.5", "true"], ["--nproc-per-node", "'2.5'"]),
        (["run", "--nproc_per_node=0", "true"], ["--nproc-per-node", " 0"]),
        (["run", "--master-port", "65536", "true"], ["--master-port", "65536"]),
        (["run", "--grace-period", "-1", "true"], ["--grace-period", "-1"]),
        (["run", "no-such-program"], ["'no-such-program'", "PATH"]),
        (["run", "./no-such-program"], ["'./no-such-program'", "No such file"]),
        (["run", "/"], ["'/'", "directory"]),
    ],
    ids=lambda words: " ".join(words),
)
def test_misuse_is_named_and_the_help_pointed_at(programs, arguments, words):
    done = programs.run("lockstep", *arguments)
    assert done.status == MISUSE and done.stdout == "", done.text
    assert all(word in done.stderr for word in [*words, "--help"]), done.text


@pytest.mark.parametrize("name, remedy", [("train", "chmod +x"), ("train.py", "python")])
def test_a_file_that_is_not_executable_is_refused_with_the_remedy(programs, name, remedy):
    (programs.folder / name).write_text("print()\n")
    done = programs.run("lockstep", "run", f"./{name}")
    assert done.status == MISUSE and "not executable" in done.stderr and remedy in done.stderr, done.text


@pytest.mark.parametrize("spelling", ["--nproc-per-node", "--nproc_per_node"])
@pytest.mark.parametrize("glue", [" ", "="])
def test_both_spellings(programs, spelling, glue):
    options = f"{spelling}{glue}3".split()
    done = programs.run("lockstep", "run", *options, "sh", "-c", "echo $RANK of $WORLD_SIZE")
    assert done.status == 0, done.text
    assert sorted(done.stdout.splitlines()) == [f"[rank {rank}] {rank} of 3" for rank in range(3)]


@pytest.mark.parametrize("word", ["auto", "cpu"])
def test_auto_counts_the_cores_that_may_be_used(programs, word):
    done = programs.run(
        "lockstep", "run", "--nproc-per-node", word, "sh", "-c", "echo $WORLD_SIZE", CUDA_VISIBLE_DEVICES="-1"
    )
    cores = len(os.sched_getaffinity(0))
    assert done.status == 0 and len(done.stdout.splitlines()) == cores, done.text
    assert done.stdout.splitlines()[-1].endswith(str(cores))


def test_options_behind_the_program_belong_to_it(programs):
    done = programs.run("lockstep", "run", "echo", "--nproc-per-node", "7", "--help", "--", "-x")
    assert done.status == 0 and done.stdout == "--nproc-per-node 7 --help -- -x\n", done.text


def test_the_environment_gives_the_number_where_no_option_does(programs):
    command = ["sh", "-c", "echo $RANK of $WORLD_SIZE"]
    done = programs.run("lockstep", "run", "--no-prefix", *command, PET_NPROC_PER_NODE=2)
    assert sorted(done.stdout.splitlines()) == ["0 of 2", "1 of 2"], done.text
    done = programs.lockstep_run(1, *command, PET_NPROC_PER_NODE=2)
    assert done.stdout == "0 of 1\n", done.text
