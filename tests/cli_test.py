"""The command line of `lockstep`: help, version, and what it refuses, each with the value and a way on."""

import os
import re

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
    statuses = " ".join(done.stdout.partition("Exit status: ")[2].split())
    assert [int(number) for number in re.findall(r"\b\d+\b", statuses)] == [0, 0, 1, 2, 75, 75, 128, 130], done.text


def test_version(programs):
    done = programs.run("lockstep", "--version")
    assert done.status == 0 and done.stdout.startswith("lockstep 0."), done.text


def test_a_report_that_can_not_be_written_is_an_error(programs):
    words = ("inspect", "schedule", "1F1B", "--ranks", 2, "--micro-batches", 4)
    done = programs.run("sh", "-c", "exec \"$0\" \"$@\" > /dev/full", "lockstep", *words)
    assert done.status == 1 and "standard output can't be written" in done.stderr, done.text


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
        (["run", "-np", "0", "true"], ["--nproc-per-node", " 0"]),
        (["run", "--nnodes", "2:1", "true"], ["--nnodes", "'2:1'", "above the most"]),
        (["run", "-n", "2", "--"], ["PROGRAM"]),
        (["help", "rnu"], ["'lockstep rnu'", "run"]),
        (["help", "run", "rnu"], ["'lockstep run rnu'", "'lockstep run' has none"]),
        (["inspect"], ["flight", "checkpoint", "schedule", "trace"]),
        (["completion", "tcsh"], ["tcsh", "bash"]),
        (["top", "--interval", "0"], ["--interval", "0"]),
        (["top", "one", "two"], ["two"]),
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


def test_help_lists_the_commands_below_the_one_that_is_named(programs):
    done = programs.run("lockstep", "help", "inspect", "rnu")
    assert done.status == MISUSE and "'lockstep inspect rnu'" in done.stderr, done.text
    assert "flight" in done.stderr and "bench" not in done.stderr, done.text


@pytest.mark.parametrize("name, remedy", [("train", "chmod +x"), ("train.py", "python ./train.py")])
def test_a_file_that_is_not_executable_is_refused_with_the_remedy(programs, name, remedy):
    (programs.folder / name).write_text("print()\n")
    done = programs.run("lockstep", "run", "--no-python", f"./{name}")
    assert done.status == MISUSE and "not executable" in done.stderr and remedy in done.stderr, done.text


@pytest.mark.parametrize("spelling", ["--nproc-per-node", "--nproc_per_node"])
@pytest.mark.parametrize("glue", [" ", "="])
def test_both_spellings(programs, spelling, glue):
    options = f"{spelling}{glue}3".split()
    done = programs.run("lockstep", "run", *options, "sh", "-c", "echo $RANK of $WORLD_SIZE")
    assert done.status == 0, done.text
    assert sorted(done.stdout.splitlines()) == [f"[rank {rank}] {rank} of 3" for rank in range(3)]


@pytest.mark.parametrize(
    "options",
    ["-n 3", "-n3", "-np 3", "--np 3", "--np=3", "--standalone --nnodes 1 --nproc-per-node 3", "--nnodes=1:1 -np 3"],
)
@pytest.mark.parametrize("end", [[], ["--"]])
def test_habits_of_other_launchers(programs, options, end):
    done = programs.run("lockstep", "run", *options.split(), *end, "sh", "-c", "echo $RANK of $WORLD_SIZE")
    assert done.status == 0, done.text
    assert sorted(done.stdout.splitlines()) == [f"[rank {rank}] {rank} of 3" for rank in range(3)]


def test_only_words_before_the_program_are_read(programs):
    done = programs.run("lockstep", "run", "--no-prefix", "echo", "-np", "7", "--", "-n")
    assert done.status == 0 and done.stdout == "-np 7 -- -n\n", done.text
    done = programs.run("lockstep", "run", "-n", "1", "--", "echo", "--", "-np", "run")
    assert done.status == 0 and done.stdout == "-- -np run\n", done.text


def test_a_program_may_have_the_name_of_a_command(programs):
    for name in ["doctor", "help"]:
        program = programs.folder / name
        program.write_text("#!/bin/sh\necho $0 $*\n")
        program.chmod(0o755)
        done = programs.run("lockstep", "run", name, "--help", PATH=f"{programs.folder}:{os.environ['PATH']}")
        assert done.status == 0 and done.stdout == f"{program} --help\n", done.text


@pytest.mark.parametrize("command", [[], ["run"], ["inspect", "flight"], ["bench"]])
def test_help_of_a_command_is_what_its_option_prints(programs, command):
    done = programs.run("lockstep", "help", *command)
    assert done.status == 0 and done.stdout == programs.run("lockstep", *command, "--help").stdout, done.text
    assert done.stdout.count("Usage: ") == 1, done.text


@pytest.mark.parametrize(
    "words, expected",
    [
        (["ins"], ["inspect"]),
        (["inspect", ""], ["flight", "checkpoint", "schedule", "trace"]),
        (["inspect", "checkpoint", "--comp"], ["--compare"]),
        (["inspect", "trace", "--m"], ["--merge"]),
        (["top", "--int"], ["--interval"]),
        (["run", "--nproc"], ["--nproc-per-node"]),
        (["run", "-np", "2", "--grace"], ["--grace-period"]),
        (["run", "./tr"], []),
    ],
    ids=lambda words: " ".join(words),
)
def test_bash_completes_commands_and_options(programs, words, expected):
    complete = 'source <("$0" completion bash); COMP_WORDS=(lockstep "$@"); COMP_CWORD=$#; _lockstep'
    done = programs.run("bash", "-c", f'{complete}; echo "${{COMPREPLY[@]}}"', "lockstep", *words)
    assert done.status == 0 and done.stdout.split() == expected, done.text


def test_the_manual_page_has_the_help_of_every_command(programs):
    page = programs.run("lockstep", "man").stdout
    assert page.startswith(".TH LOCKSTEP 1"), page
    shown = page.replace("\\&", "").replace("\\e", "\\").replace("\\-", "-")
    for command in ["run", "inspect checkpoint", "doctor", "completion"]:
        assert f'.SH "lockstep {command}"' in shown
        assert programs.run("lockstep", *command.split(), "--help").stdout in shown


@pytest.mark.parametrize("word", ["auto", "cpu"])
def test_auto_counts_the_cores_that_may_be_used(programs, word):
    done = programs.run(
        "lockstep", "run", "--nproc-per-node", word, "sh", "-c", "echo $WORLD_SIZE", CUDA_VISIBLE_DEVICES="-1"
    )
    cores = len(os.sched_getaffinity(0))
    assert done.status == 0 and len(done.stdout.splitlines()) == cores, done.text
    assert done.stdout.splitlines()[-1].endswith(str(cores))


def test_options_after_the_program_belong_to_it(programs):
    done = programs.run("lockstep", "run", "echo", "--nproc-per-node", "7", "--help", "--", "-x")
    assert done.status == 0 and done.stdout == "--nproc-per-node 7 --help -- -x\n", done.text


def test_the_environment_gives_the_number_where_no_option_does(programs):
    command = ["sh", "-c", "echo $RANK of $WORLD_SIZE"]
    done = programs.run("lockstep", "run", "--no-prefix", *command, PET_NPROC_PER_NODE=2)
    assert sorted(done.stdout.splitlines()) == ["0 of 2", "1 of 2"], done.text
    done = programs.lockstep_run(1, *command, PET_NPROC_PER_NODE=2)
    assert done.stdout == "0 of 1\n", done.text
