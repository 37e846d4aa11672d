"""`lockstep run` takes torchrun's command lines: Python programs, files of output, options given twice."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
from ports import free_port

MISUSE = 2
PRINT = "import os, sys; print('rank', os.environ['RANK'], sys.argv[1:])\n"


def log_folder(result) -> pathlib.Path:
    """Where the run kept what its processes wrote."""
    return pathlib.Path(result.stderr.split("is kept in ", 1)[1].split("\n", 1)[0])


def written(folder) -> dict:
    """What lies below an attempt's folder, by path."""
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("words", [["train.py"], ["-m", "train"], ["--module", "train"], ["--run-path", "train"]])
def test_a_python_program_is_started_by_python(programs, words):
    (programs.folder / ("train" if "--run-path" in words else "train.py")).write_text(PRINT)
    done = programs.run("lockstep", "run", "-n", 2, *words, "--epochs", "3", PYTHON_EXEC=sys.executable)
    assert done.status == 0, done.text
    assert sorted(done.stdout.splitlines()) == [f"[rank {rank}] rank {rank} ['--epochs', '3']" for rank in range(2)]


def test_no_python_starts_the_file_itself(programs):
    script = programs.folder / "train.py"
    script.write_text("#!/bin/sh\necho by sh\n")
    script.chmod(0o755)
    done = programs.run("lockstep", "run", "--no-python", "./train.py")
    assert done.status == 0 and done.stdout == "by sh\n", done.text
    done = programs.run("lockstep", "run", "--no-python", "-m", "train")
    assert done.status == MISUSE and "contradict" in done.stderr, done.text


def test_of_an_option_that_stands_twice_the_last_one_counts(programs):
    options = ["--nproc-per-node", 3, "--max-restarts", 2, "-n", 1, "--max-restarts=0", "--role", "a", "--role", "b"]
    done = programs.run("lockstep", "run", *options, "sh", "-c", "echo $WORLD_SIZE $TORCHELASTIC_MAX_RESTARTS $ROLE_NAME")
    assert done.status == 0 and done.stdout == "1 0 b\n", done.text


@pytest.fixture(params=[[], ["--max-restarts", 1]], ids=["alone", "agent"])
def one_host(programs, request):
    """Runs a shell script on one host, without an agent and with one; what it has printed."""

    def run(options, script, **variables):
        done = programs.run("lockstep", "run", *request.param, *options, "sh", "-c", script, **variables)
        done.skip_without_openssl()
        assert done.status == 0, done.text
        return done.stdout.strip()

    return run


@pytest.mark.parametrize("nnodes", ["2", "1:4"])
def test_standalone_is_one_host(one_host, nnodes):
    assert one_host(["--standalone", "--nnodes", nnodes], "echo $GROUP_WORLD_SIZE") == "1"


STEP = {"SLURM_JOB_ID": "12", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NODEID": "0"}
STEP |= {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "localhost"}


@pytest.mark.parametrize("options, nodes", [([], "1"), (["--standalone"], "2"), (["--nnodes", 1], "2")])
def test_in_a_step_of_slurm_one_host_stays_one_host(one_host, options, nodes):
    step = STEP | {"SLURM_STEP_NUM_TASKS": nodes, "SLURM_STEP_NUM_NODES": nodes}
    assert one_host(["-n", 2, "--no-prefix", *options], "echo $WORLD_SIZE", **step) == "2\n2"


def test_the_store_is_at_the_port_that_was_given(one_host):
    port = free_port()
    assert one_host(["--master-port", port], "echo $MASTER_PORT") == str(port)


def test_workers_that_start_again_meet_at_the_same_port(programs):
    port = free_port()
    script = "echo $MASTER_PORT $TORCHELASTIC_RESTART_COUNT; test $TORCHELASTIC_RESTART_COUNT = 1"
    done = programs.run("lockstep", "run", "--max-restarts", 1, "--master-port", port, "sh", "-c", script)
    done.skip_without_openssl()
    assert done.status == 0 and done.stdout == f"{port} 0\n{port} 1\n", done.text


@pytest.mark.parametrize("options", ["", "--max-restarts 1"], ids=["alone", "agent"])
def test_standard_streams_that_are_closed_are_nothing_of_the_launchers_own(programs, options):
    """What the launcher opens first would get their numbers, and workers would read and write it."""
    script = "readlink /proc/$PPID/fd/0 /proc/$PPID/fd/1 /proc/$PPID/fd/2 > streams; echo out; echo err >&2"
    run = f"{programs.find('lockstep')} run {options} sh -c '{script}' <&- >&- 2>&-"
    programs.run("lockstep", "run", *options.split(), "true").skip_without_openssl()
    assert programs.run("sh", "-c", run).status == 0
    assert (programs.folder / "streams").read_text() == "/dev/null\n" * 3


def test_a_run_has_a_name_of_its_own_or_the_given_one(one_host):
    first, second = (one_host([], "echo $TORCHELASTIC_RUN_ID") for _ in range(2))
    assert len({first, second, "none", ""}) == 4
    assert one_host(["--rdzv-id", "night"], "echo $TORCHELASTIC_RUN_ID ${LOCKSTEP_AGENT_STORE##*/}") == "night night"


def test_one_host_needs_no_interface(one_host):
    assert one_host([], "echo $NCCL_SOCKET_IFNAME", NCCL_SOCKET_IFNAME="none0") == "none0"
    assert one_host([], "echo \"$LOCKSTEP_SOCKET_IFNAME\"", LOCKSTEP_SOCKET_IFNAME="") == ""


def test_the_agents_limit_on_open_files_is_not_the_workers(programs):
    script = "ulimit -Sn; grep 'Max open files' /proc/$PPID/limits"
    run = f"ulimit -Sn 200; exec {programs.find('lockstep')} run --max-restarts 1 sh -c \"$0\""
    done = programs.run("sh", "-c", run, script)
    done.skip_without_openssl()
    assert done.status == 0, done.text
    worker, agent = done.stdout.splitlines()
    soft, hard = agent.split()[3:5]
    assert worker == "200" and soft == hard, done.text


def test_processes_stay_on_the_cores_of_a_list(one_host):
    core = str(max(os.sched_getaffinity(0)))
    script = "grep Cpus_allowed_list /proc/self/status"
    assert one_host(["--cpu-list", core], script).split() == ["Cpus_allowed_list:", core]
    assert one_host(["--cpu-list", f"{core}-{core}", "-n", "cpu"], "echo $WORLD_SIZE") == "1"


@pytest.mark.parametrize("cores, error", [("1023", "'1023', which has cores that"), ("a", "--cpu-list is 'a'; it takes cores as 0-3,8"), ("1-0", "'1-0'")])
def test_cores_that_are_not_there_start_nothing(programs, cores, error):
    done = programs.run("lockstep", "run", "--cpu-list", cores, "touch", "started")
    assert done.status == MISUSE and error in done.stderr, done.text
    assert not (programs.folder / "started").exists()


def described(done) -> dict:
    """What a dry run has printed, by name: its lines, and the variables that the processes get."""
    assert done.status == 0, done.text
    lines = [re.fullmatch(r" *([A-Za-z_ ]+)(?:: |=)(.*)", line) for line in done.stdout.splitlines()]
    return {line[1]: line[2] for line in lines if line}


@pytest.mark.parametrize("words", [["--gpu-list="], ["--gpu-list", ""], ["--gpu-list", "7", "--gpu_list="]], ids=" ".join)
def test_an_empty_list_hides_all_cards(one_host, words):
    script = 'echo "<${CUDA_VISIBLE_DEVICES-all}> $WORLD_SIZE"'
    assert one_host([*words, "--no-prefix", "-n", 2], script, CUDA_VISIBLE_DEVICES="3") == "<> 2\n<> 2"
    assert one_host(["--no-prefix", *words], script, CUDA_VISIBLE_DEVICES="3") == "<> 1"


def test_after_the_program_words_that_end_in_an_equals_sign_stay(programs):
    done = programs.run("lockstep", "run", "--role=", "echo", "--gpu-list=", "--role=")
    assert done.status == 0 and done.stdout == "--gpu-list= --role=\n", done.text


def test_a_dry_run_says_what_would_run_and_starts_nothing(programs):
    words = ["-n", 2, "--role", "night", "--log-dir", "logs", "sh", "-c", "echo it's > started"]
    done = programs.run("lockstep", "run", "--dry-run", *words, OMP_NUM_THREADS="3", MASTER_ADDR="127.0.0.1")
    said = described(done)
    assert said["hosts"] == "1" and said["processes"] == "2", done.text
    assert said["command"] == r"sh -c 'echo it'\''s > started'", done.text
    assert said["RANK"] == "(0 to 1)" and said["WORLD_SIZE"] == "2" and said["ROLE_NAME"] == "night", done.text
    assert said["MASTER_PORT"] == "(a free port)", done.text
    assert not {"OMP_NUM_THREADS", "MASTER_ADDR", "PATH"} & set(said), "which are as they were"
    assert list(programs.folder.iterdir()) == [], "neither logs nor what the program writes"


def test_what_a_dry_run_says_is_what_processes_get(programs):
    port = free_port()
    options = ["-n", 2, "--master-port", port, "--rdzv-id", "night", "--local-ranks-filter", 1, "--no-prefix"]
    said = described(programs.run("lockstep", "run", "--dry-run", *options, "env"))
    done = programs.run("lockstep", "run", *options, "env")
    got = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    assert set(got) - set(programs.environment()) <= set(said), got
    for name, value in said.items():
        if name.isupper() and not value.startswith("("):
            assert got[name] == value, name


def test_a_dry_run_over_hosts_says_the_roles_and_no_secret(programs):
    hosts = ["--nnodes", 2, "--node-rank", 1, "--master-addr", "node-a", "--max-restarts", 3]
    done = programs.run("lockstep", "run", "--dry-run", *hosts, "env", LOCKSTEP_JOB_SECRET="0123456789abcdef" * 4)
    done.skip_without_openssl()
    assert done.stdout.startswith(
        "hosts: 2\nrestarts: 3\nthis host: number 1\nendpoint: node-a port 29500\nsecret: given\nprocesses: 1\ncommand: env\n"
    ), done.text
    assert "LOCKSTEP_JOB_SECRET (not passed on)" in done.stdout and "0123456789abcdef" not in done.text
    done = programs.run("lockstep", "run", "--dry-run", *hosts, "no-such-program")
    assert done.status == MISUSE and "no such program" in done.stderr, done.text


@pytest.mark.parametrize("endpoint, understood", [
    ("[fe80::1]:29401", "fe80::1 port 29401"),
    ("[fe80::1]", "fe80::1 port 29400"),
    ("fe80::1:29401", None),
    ("::1", None),
    ("[fe80::1]29401", None),
])  # fmt: skip
def test_an_endpoint_by_an_ipv6_address_stands_in_brackets(programs, endpoint, understood):
    hosts = ["--nnodes", 2, "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint]
    done = programs.run("lockstep", "run", "--dry-run", *hosts, "env")
    done.skip_without_openssl()
    if understood:
        assert f"endpoint: {understood}\n" in done.stdout, done.text
    else:
        assert done.status == MISUSE and "an IPv6 address in brackets: [ADDRESS]:PORT" in done.stderr, done.text


def test_processes_that_ask_for_another_start_have_not_failed(programs):
    done = programs.run("lockstep", "run", "-n", 2, "sh", "-c", "exit 75")
    assert done.status == 75 and "failed" not in done.stderr, done.text
    assert "lockstep run: the processes ended with status 75, which asks for another start\n" in done.stderr, done.text


def test_what_means_nothing_here_is_taken(programs):
    options = "--monitor-interval 5 --event-log-handler null --use-env --signals-to-handle SIGTERM,SIGINT"
    done = programs.run("lockstep", "run", *options.split(), "echo", "started")
    assert done.status == 0 and done.stdout == "started\n", done.text


@pytest.mark.parametrize("words, told", [
    ([], "SIGTERM,SIGINT,SIGHUP,SIGQUIT"),
    (["--signals-to-handle", "SIGTERM,SIGUSR1"], "SIGTERM,SIGUSR1"),
])  # fmt: skip
def test_processes_are_told_the_signals_to_handle(programs, words, told):
    command = ["sh", "-c", "echo $TORCHELASTIC_SIGNALS_TO_HANDLE"]
    done = programs.run("lockstep", "run", *words, *command, TORCHELASTIC_SIGNALS_TO_HANDLE="an outer torchrun's")
    assert done.status == 0 and done.stdout == f"{told}\n", done.text


SPEAK = "echo out $RANK; echo err $RANK >&2"


@pytest.mark.parametrize(
    "options, files, stdout, stderr",
    [
        (["--redirects", "3"], ["0 out", "0 err", "1 out", "1 err"], [], []),
        (["-r", "1"], ["0 out", "1 out"], [], [0, 1]),
        (["-t", "3"], ["0 out", "0 err", "1 out", "1 err"], [0, 1], [0, 1]),
        (["--tee", "1", "-r", "2"], ["0 out", "0 err", "1 out", "1 err"], [0, 1], []),
        (["--redirects", "0:1,1:2"], ["0 out", "1 err"], [1], [0]),
        (["--tee", "3", "--local-ranks-filter", "1"], ["0 out", "0 err", "1 out", "1 err"], [1], [1]),
        (["--local_ranks_filter=0"], [], [0], [0]),
        (["--local-ranks-filter", "1,7"], [], [1], [1]),
    ],
    ids=str,
)
def test_output_goes_to_files_and_is_shown(programs, options, files, stdout, stderr):
    done = programs.run("lockstep", "run", "-n", 2, "--log-dir", "logs/here", *options, "sh", "-c", SPEAK)
    assert done.status == 0, done.text
    assert sorted(done.stdout.splitlines()) == [f"[rank {rank}] out {rank}" for rank in stdout]
    errors = [line for line in done.stderr.splitlines() if line.startswith("[rank")]
    assert sorted(errors) == [f"[rank {rank}] err {rank}" for rank in stderr]
    run = log_folder(done)
    assert run.is_absolute()  # a program may change its folder before it writes there
    assert run.parent == programs.folder.resolve() / "logs" / "here" and run.name.startswith("none_")
    expected = {}
    for file in files:
        rank, stream = file.split()
        expected[f"attempt_0/{rank}/std{stream}.log"] = f"{stream} {rank}\n"
    assert written(run) == expected


def test_each_attempt_has_files_of_its_own(programs):
    script = 'echo start $TORCHELASTIC_RESTART_COUNT; echo "{}" > $TORCHELASTIC_ERROR_FILE; test $TORCHELASTIC_RESTART_COUNT = 1'
    done = programs.run("lockstep", "run", "--max-restarts", 1, "--log-dir", "logs", "-t", "1", "sh", "-c", script)
    done.skip_without_openssl()
    assert done.status == 0, done.text
    expected = {}
    for attempt in range(2):
        expected[f"attempt_{attempt}/0/stdout.log"] = f"start {attempt}\n"
        expected[f"attempt_{attempt}/0/error.json"] = "{}\n"
    assert written(programs.folder / log_folder(done)) == expected


def test_a_report_quotes_what_went_to_a_file(programs):
    done = programs.run("lockstep", "run", "-r", 3, "sh", "-c", "echo the cause >&2; exit 7")
    assert done.status == 1 and "    the cause\n" in done.stderr, done.text
    assert written(log_folder(done))["attempt_0/0/stderr.log"] == "the cause\n"


@pytest.mark.parametrize("lines", [200_000, pytest.param(3_000_000, marks=pytest.mark.long)], ids=["11 MB", "200 MB"])
def test_no_line_is_torn_or_lost(programs, lines):
    """Both streams of three ranks at once, as fast as they can write."""
    script = f"seq 1 {lines} & seq -f 'line %.0f' 1 {lines} >&2; wait"
    run = f'exec {programs.find("lockstep")} run -n 3 --log-dir logs -t 3 sh -c "$0" > stdout 2> stderr'
    assert programs.run("sh", "-c", run, script).status == 0
    expected = {"stdout": [str(n) for n in range(1, lines + 1)], "stderr": [f"line {n}" for n in range(1, lines + 1)]}
    for stream, wanted in expected.items():
        shown = (programs.folder / stream).read_text().splitlines()
        for rank in range(3):
            (file,) = programs.folder.glob(f"logs/*/attempt_0/{rank}/{stream}.log")
            assert file.read_text().splitlines() == wanted
            mark = f"[rank {rank}] "
            assert [line[len(mark) :] for line in shown if line.startswith(mark)] == wanted


def test_a_slow_reader_tears_no_line(programs):
    lines = 100_000
    run = f'{programs.find("lockstep")} run -n 2 seq 1 {lines} | {{ sleep 1; cat; }}'
    shown = programs.run("sh", "-c", run).stdout.splitlines()
    for rank in range(2):
        mark = f"[rank {rank}] "
        assert [line[len(mark) :] for line in shown if line.startswith(mark)] == list(map(str, range(1, lines + 1)))


def test_a_full_disk_harms_no_process(programs, tmp_path):
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode or not shutil.which("mount"):
        pytest.skip("a small disk needs root")
    (tmp_path / "disk").mkdir()
    run = f"{programs.find('lockstep')} run --log-dir disk -r 1 sh -c 'seq 1 100000; echo done >&2'"
    script = f"mount -t tmpfs -o size=64k none disk && {run} && cat disk/*/attempt_0/0/stdout.log"
    done = programs.run("unshare", "--mount", "sh", "-c", script)
    assert done.status == 0 and "done\n" in done.stderr, done.text
    assert done.stderr.count("No space left on device") == 1, done.text
    assert done.stdout.startswith("".join(f"{n}\n" for n in range(1, 1001))), done.text[:1000]


@pytest.mark.parametrize(
    "options, words",
    [
        (["--redirects", "4"], ["--redirects is '4'", "1: standard output"]),
        (["--tee", "0:1,x:2"], ["--tee is '0:1,x:2'"]),
        (["--log-dir", "/dev/null/logs"], ["/dev/null/logs", "Not a directory", "--log-dir"]),
        (["--local-ranks-filter", "x"], ["--local-ranks-filter has 'x'", "from 0"]),
        (["--nnodes", "many"], ["--nnodes has 'many'", "number from 1"]),
        (["--master-port", "65536"], ["--master-port: ", "65535"]),
        (["--grace-period", "nan"], ["--grace-period is nan, and takes seconds"]),
        (["--signals-to-handle", "SIGUSR2"], ["error: --signals-to-handle: ", "not SIGUSR2"]),
        (["--logs-specs", "mine"], ["error: --logs-specs names a class"]),
        (["--numa-binding", "core"], ["--numa-binding: core not in {node,socket,exclusive,core-complex}"]),
        (["-x", "NAME=value"], ["-x is for -H"]),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused(programs, options, words):
    done = programs.run("lockstep", "run", *options, "true")
    assert done.status == MISUSE and all(word in done.stderr for word in words), done.text


def test_variables_set_the_same(programs):
    variables = {"PET_TEE": "1", "PET_LOG_DIR": "logs", "PET_ROLE": "trainer", "PET_MODULE": "1", "PYTHON_EXEC": "/bin/echo"}
    done = programs.run("lockstep", "run", "train", **variables)
    assert done.status == 0 and done.stdout == "-u -m train\n", done.text
    assert written(programs.folder / log_folder(done)) == {"attempt_0/0/stdout.log": "-u -m train\n"}


@pytest.mark.parametrize("make", ["mkdir $FILE", "mkfifo $FILE", "cp large $FILE"], ids=["folder", "pipe", "too large"])
def test_an_error_file_that_is_none_changes_no_report(programs, make):
    (programs.folder / "large").write_text('{"message": "' + "x" * (1 << 20) + '"}')
    script = f"FILE=$TORCHELASTIC_ERROR_FILE; {make}; exit 3"
    done = programs.run("lockstep", "run", "sh", "-c", script)
    assert done.status == 1 and "failed first: exited with status 3\n  it wrote nothing" in done.stderr, done.text[:2000]


def test_an_error_file_is_kept(programs):
    error = json.dumps({"message": "too warm"})
    script = f"echo '{error}' > $TORCHELASTIC_ERROR_FILE; exit 1"
    done = programs.run("lockstep", "run", "--log-dir", "logs", "sh", "-c", script)
    assert done.status == 1 and "too warm" in done.stderr, done.text
    assert json.loads(written(programs.folder / log_folder(done))["attempt_0/0/error.json"]) == json.loads(error)
