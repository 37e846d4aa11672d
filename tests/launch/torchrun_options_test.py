"""Each option of torchrun and torch.distributed.launch is taken by `lockstep run`, or refused with the reason: held against the
parsers of the installed torch."""

import pathlib
import re
import shutil
import sys

import pytest

MISUSE = 2
# Values other than the defaults; options without one are flags.
VALUES = {
    "nnodes": "2", "nproc_per_node": "3", "rdzv_backend": "c10d", "rdzv_endpoint": "localhost:1234", "rdzv_id": "job",
    "rdzv_conf": "join_timeout=7", "max_restarts": "4", "monitor_interval": "0.5", "start_method": "spawn",
    "event_log_handler": "console", "role": "teacher", "log_dir": "logs", "redirects": "1", "tee": "2",
    "local_ranks_filter": "0", "duplicate_stdout_filters": "a,b", "duplicate_stderr_filters": "c", "node_rank": "1",
    "master_addr": "localhost", "master_port": "1234", "local_addr": "127.0.0.1", "signals_to_handle": "SIGTERM",
    "shutdown_timeout": "7", "logs_specs": "mine", "numa_binding": "node",
}  # fmt: skip
NEEDED = {"node_rank": ["--nnodes", "2"], "nnodes": ["--rdzv-backend", "static"], "module": [], "run_path": []}
NEEDED["rdzv_backend"] = ["--rdzv-endpoint", "localhost:1234", "--nnodes", "2"]
NEEDED |= {name: ["--nnodes", "2"] for name in ("rdzv_endpoint", "rdzv_conf", "master_addr", "standalone")}
PROGRAM = {"no_python": "./train.py"}
NOT_THERE = {"logs_specs": "--log-dir"}
NO_VARIABLE = {"monitor_interval", "event_log_handler"}  # they have no meaning here
# What a dry run says of a value that makes no sense.
WRONG = {
    "nnodes": "--nnodes", "nproc_per_node": "--nproc-per-node", "max_restarts": "--max-restarts", "node_rank": "--node-rank",
    "master_port": "--master-port", "redirects": "--redirects", "tee": "--tee", "rdzv_conf": "--rdzv-conf has 'wrong'",
    "local_ranks_filter": "--local-ranks-filter has 'wrong'", "shutdown_timeout": "--grace-period",
    "signals_to_handle": "not wrong", "start_method": "--start-method",
}  # fmt: skip
# Any value makes sense, and a dry run tells none: see test_options_that_a_dry_run_does_not_tell_come_from_variables.
NOT_TOLD = {"log_dir", "duplicate_stdout_filters", "duplicate_stderr_filters", "local_addr"}


def torch_parsers():
    run = pytest.importorskip("torch.distributed.run")
    launch = pytest.importorskip("torch.distributed.launch")
    actions = [action for action in run.get_args_parser()._actions if action.option_strings]
    taken = []
    parser = run.get_args_parser()
    parser.parse_args = lambda args: taken.extend(parser._actions)
    former, launch.get_args_parser = launch.get_args_parser, lambda: parser
    try:
        launch.parse_args([])
    finally:
        launch.get_args_parser = former
    known = {action.dest for action in actions}
    return actions, [action for action in taken if action.option_strings and action.dest not in known]


def reads_variable(action):
    return type(action).__name__ in ("env", "check_env")


def dry_run(programs, *words, program="true", **variables):
    done = programs.run("lockstep", "run", "--dry-run", *words, program, LOCKSTEP_JOB_SECRET="0" * 32, **variables)
    done.skip_without_openssl()
    return done


def words_of(action, spelling):
    return [spelling] if action.nargs == 0 else [spelling, VALUES[action.dest]]


@pytest.mark.parametrize("flag, good", [("TRUE", True), ("n", True), ("Yes", True), ("maybe", False)])
def test_conf_is_read_as_torchrun_reads_it(programs, flag, good):
    conf = f" is_host = {flag} , join_timeout= 5 "
    done = dry_run(programs, "--nnodes", 2, "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:1234", "--rdzv-conf", conf)
    assert (done.status == 0) == good and ("is_host is 'maybe'" in done.stderr) != good, done.text


@pytest.mark.parametrize("place", [[], ["--nnodes", 2], ["-H", "host-a,host-b"]], ids=["one host", "an agent", "one command"])
def test_a_key_of_conf_that_is_none_is_named_once_with_those_that_there_are(programs, place):
    done = dry_run(programs, *place, "--rdzv-conf", "lost_afer=20,lease=9")
    said = re.findall(r"--rdzv-conf has no key (\w+), so the job starts without (\S+); its keys are (.*)", done.stderr)
    assert done.status == 0 and [words[:2] for words in said] == [("lost_afer", "lost_afer=20")], done.text
    keys = said[0][2].split(", ")
    assert "lost_after" in keys and "lost_afer" not in keys
    values = [f"{key}={'1' if key == 'is_host' else 10}" for key in keys]
    assert "has no key" not in dry_run(programs, *place, "--rdzv-conf", ",".join(values)).stderr


def test_keys_of_torchruns_conf_are_taken(programs):
    rendezvous = pytest.importorskip("torch.distributed.elastic.rendezvous")
    sources = [path.read_text() for path in pathlib.Path(rendezvous.__file__).parent.glob("*.py")]
    keys = {key for text in sources for key in re.findall(r'params\.get(?:_as_\w+)?\(\s*"(\w+)"', text)}
    keys |= {f"{key}_timeout" for text in sources for key in re.findall(r'_get_timeout\(params, "(\w+)"', text)} | {"rank"}
    assert {"is_host", "keep_alive_interval", "store_type", "close_timeout"} <= keys
    for key in sorted(keys):
        done = dry_run(programs, "--nnodes", 2, "--rdzv-conf", f"{key}=1" if key != "keep_alive_interval" else f"{key}=2")
        assert done.status == 0 and "has no key" not in done.stderr, (key, done.text)


@pytest.mark.long  # it starts the launcher a hundred times
def test_all_options_are_taken_in_each_spelling_and_from_variables(programs):
    actions, of_launch = torch_parsers()
    assert [action.dest for action in of_launch] == ["use_env"]
    (programs.folder / "train.py").write_text("#!/usr/bin/env python3\n")
    (programs.folder / "train.py").chmod(0o755)
    checked = 0
    for action in [*actions, *of_launch]:
        if action.dest == "help":
            continue
        needed = NEEDED.get(action.dest, [])
        for spelling in action.option_strings:
            done = dry_run(programs, *needed, *words_of(action, spelling))
            if action.dest in NOT_THERE:
                assert done.status == MISUSE and NOT_THERE[action.dest] in done.stderr, (spelling, done.text)
            else:
                assert done.status == 0, (spelling, done.text)
            checked += 1
        if not reads_variable(action) or action.dest in NO_VARIABLE:
            continue
        program = PROGRAM.get(action.dest, "true")
        by_option = dry_run(programs, *needed, *words_of(action, action.option_strings[-1]), program=program)
        name = f"PET_{action.dest.upper()}"
        by_variable = dry_run(programs, *needed, program=program, **{name: VALUES.get(action.dest, "1")})
        # What is passed on to processes differs by the variable itself alone.
        assert by_variable.status == 0 and by_variable.stdout == by_option.stdout, (name, by_variable.text, by_option.text)
        # An effect, or a value that makes no sense, shows that it was read at all.
        if action.dest in WRONG:
            wrong = dry_run(programs, *needed, **{name: "wrong"})
            assert wrong.status == MISUSE and WRONG[action.dest] in wrong.stderr, (name, wrong.text)
        elif action.dest not in NOT_TOLD:
            assert by_option.stdout != dry_run(programs, *needed, program=program).stdout, (name, by_option.text)
    assert checked > 50


def test_the_macro_for_the_local_rank_is_torchruns(programs):
    macros = pytest.importorskip("torch.distributed.elastic.utils").macros
    words = ["--out=${local_rank}.txt", "$local_rank", "$${local_rank} $$ ${local_rank}", "$$$local_rank$", "a$local_rank-b", "$local_ranks",
             "${local_rank", "${LOCAL_RANK}", "${${local_rank}", "$RANK ${local_rank}é", "", "$"]  # fmt: skip
    done = programs.run("lockstep", "run", "-n", 2, "sh", "-c", 'for word; do echo "<$word>"; done', "sh", *words, "$$")
    for rank in range(2):
        mark = f"[rank {rank}] "
        shown = [line[len(mark):] for line in done.stdout.splitlines() if line.startswith(mark)]
        assert shown == [f"<{word}>" for word in [*macros.substitute(words, str(rank)), "$$"]], done.text


def test_options_that_a_dry_run_does_not_tell_come_from_variables(programs):
    variables = {"TEE": "3", "LOG_DIR": "logs", "LOCAL_RANKS_FILTER": "1"}
    variables |= {"DUPLICATE_STDOUT_FILTERS": "out", "DUPLICATE_STDERR_FILTERS": "err"}
    script = "echo out $RANK; echo more; echo err $RANK >&2"
    done = programs.run("lockstep", "run", "-n", 2, "--no-prefix", "sh", "-c", script, **{f"PET_{k}": v for k, v in variables.items()})
    assert done.status == 0 and done.stdout == "out 1\nmore\n", done.text
    files = files_below(programs.folder / "logs")
    assert files["attempt_0/0/stdout.log"] == "out 0\nmore\n"
    assert files["attempt_0/filtered_stdout.log"] == "[default1]:out 1\n"
    assert files["attempt_0/filtered_stderr.log"] == "[default1]:err 1\n"
    script = 'echo "$LOCKSTEP_SOCKET_IFNAME"'
    done = programs.run("lockstep", "run", "--max-restarts", 1, "sh", "-c", script, PET_LOCAL_ADDR="127.0.0.9")
    assert done.stdout == "127.0.0.9\n" or "built without" in done.stderr, done.text


def files_below(folder):
    (run,) = folder.iterdir()
    assert re.fullmatch(r"[\w-]+_\w+", run.name)  # the id, of which torchrun makes its own on one host, and what makes it unique
    return {str(path.relative_to(run)): path.read_text() for path in run.rglob("*") if path.is_file()}


@pytest.mark.parametrize("shown", ["0,1", "1"])
def test_files_of_output_are_those_of_torchrun(programs, shown):
    torchrun = shutil.which("torchrun", path=pathlib.Path(sys.executable).parent)
    if not torchrun:
        pytest.skip("no torchrun beside this Python")
    script = 'echo "out $RANK"; echo "good news of $RANK, all"; printf "\\rout 10%%\\rout 20%%\\r\\n"; '
    script += 'echo "err $RANK" >&2; printf "no newline" >&2'
    options = ["--nproc-per-node", 2, "--rdzv-id", "job", "--tee", "0:3,1:1", "--redirects", "1:2", "--local-ranks-filter", shown]
    options += ["--duplicate-stdout-filters", "news,, no,news of 1,, all,out 0,%", "--duplicate-stderr-filters", "err"]
    seen = {}
    for name, launcher in (("of_torchrun", [torchrun]), ("of_lockstep", [programs.find("lockstep"), "run"])):
        words = [*launcher, *options, "--log-dir", name, "--no-python", "sh", "-c", script]
        done = programs.run(*words)
        assert done.status == 0, done.text
        seen[name] = files_below(programs.folder / name)
    for files in seen.values():
        for file in files:  # the order of two ranks' lines is that of their arrival
            if "filtered" in file:
                files[file] = sorted(files[file].splitlines())
    assert seen["of_lockstep"] == seen["of_torchrun"]
    lines = [["out 0", "out 10%", "out 20%"], ["good news of 1, all", "out 10%", "out 20%"]]
    expected = [f"[default{rank}]:{line}" for rank in map(int, shown.split(",")) for line in lines[rank]]
    assert seen["of_lockstep"]["attempt_0/filtered_stdout.log"] == sorted(expected)


def test_each_process_sees_one_gpu_as_its_first(programs):
    script = "echo $RANK $LOCAL_RANK $LOCAL_WORLD_SIZE \"${CUDA_VISIBLE_DEVICES-all}\""
    options = ["-n", 2, "--no-prefix", "--virtual-local-rank"]
    for visible, devices in (("5, 7,9", ("5", "7")), (None, ("0", "1")), ("5,", ("5", ""))):
        variables = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
        done = programs.run("lockstep", "run", *options, "sh", "-c", script, **variables)
        assert sorted(done.stdout.splitlines()) == [f"{rank} 0 2 {devices[rank]}" for rank in range(2)], done.text
    done = programs.run("lockstep", "run", *options, "sh", "-c", script, CUDA_VISIBLE_DEVICES="3")
    assert done.status == MISUSE and "CUDA_VISIBLE_DEVICES is '3'; it has to name a GPU for each" in done.stderr, done.text


def test_the_grace_period_is_that_of_torchruns_variable_too(programs):
    done = programs.run("lockstep", "run", "true", TORCH_ELASTIC_SHUTDOWN_TIMEOUT="soon")
    assert done.status == MISUSE and "TORCH_ELASTIC_SHUTDOWN_TIMEOUT" in done.stderr, done.text
    for options, variables, period in (
        ([], {}, 30),
        ([], {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "0"}, 0),
        (["--grace-period", "0.5"], {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "7"}, 0.5),
    ):
        done = dry_run(programs, *options, **variables)
        assert done.status == 0 and f"\ngrace period: {period} s\n" in done.stdout, done.text
