"""`lockstep doctor`, on this machine and within jobs, as a user and a script would call it."""

import json
import os
import pathlib
import re
import shlex
import shutil
import signal

import hosts
import pytest

MISUSE = 2
ROOT = pathlib.Path(__file__).resolve().parent.parent
LINE = re.compile(r"^(ok|note|warning|problem) +\S")


def findings(done, severity, check):
    """The messages of the lines with this severity and check."""
    lines = [line for line in done.stdout.splitlines() if line.startswith(severity.ljust(8) + check.ljust(12) + " ")]
    return " | ".join(line[21:] for line in lines)


def in_shell(programs, script, **variables):
    """`script`, in which $LOCKSTEP stands for the program."""
    return programs.run("sh", "-c", script, LOCKSTEP=programs.find("lockstep"), **variables)


def job(programs, nprocs, *options, script="", **variables):
    """`lockstep doctor --job` in each of nprocs ranks; `script` comes first in each rank's shell."""
    command = shlex.join([programs.find("lockstep"), "doctor", "--job", *options])
    return programs.run(
        "lockstep", "run", "--no-prefix", "--nproc-per-node", nprocs, "sh", "-c", f"{script}\nexec {command}", **variables
    )


def test_this_machine_is_fine(programs):
    done = programs.run("lockstep", "doctor")
    assert done.status == 0 and done.stderr == "", done.text
    *lines, last = done.stdout.splitlines()
    assert all(LINE.match(line) for line in lines), done.text
    assert re.fullmatch(r"0 problems, \d+ warnings?, \d+ notes?", last), done.text
    assert "gave the right values" in findings(done, "ok", "self-test"), done.text
    for line in lines:
        assert ("; do: " in line) == (not line.startswith("ok")), line


def test_nccl_is_tried_in_a_process_of_its_own(programs, tmp_path):
    library = pathlib.Path(programs.find("lockstep")).parent.parent / "lib/liblockstep_cuda.so"
    if not library.exists():
        pytest.skip("the component cuda is not built")
    done = programs.run("lockstep", "doctor", "--no-self-test", TORCH_NCCL_TRACE_BUFFER_SIZE=100, NCCL_BLOCKING_WAIT=1)
    assert done.status == 0, done.text
    found = findings(done, "ok", "nccl")
    assert found.startswith("NCCL 2.") and "with NCCL_BLOCKING_WAIT=1, TORCH_NCCL_TRACE_BUFFER_SIZE=100" in found, done.text
    assert "call it TORCH_NCCL_BLOCKING_WAIT" in findings(done, "warning", "variables"), done.text
    # A library that is not where it belongs.
    (tmp_path / "liblockstep.so").symlink_to(library.with_name("liblockstep.so"))
    done = programs.run("lockstep", "doctor", "--no-self-test", LD_PRELOAD=tmp_path / "liblockstep.so")
    lost = findings(done, "note", "nccl") + findings(done, "warning", "nccl")
    assert f"does not load: CUDA was asked for, but Lockstep's part for it can't be loaded: {tmp_path}/liblockstep_cuda.so" in lost, done.text


def test_json_for_scripts(programs):
    done = programs.run("lockstep", "doctor", "--json", "--no-self-test")
    report = json.loads(done.stdout)
    assert report["status"] == done.status == 0, done.text
    checks = {finding["check"] for finding in report["findings"]}
    assert checks >= {
        *("lockstep", "torch", "compiler", "ucx", "gpu", "kernel", "cores", "numa", "smt", "memory", "memfd", "fd passing"),
        *("pidfd", "/dev/shm", "nofile", "memlock", "nproc", "interfaces", "loopback", "hostname", "launcher", "threads"),
    }
    assert "self-test" not in checks
    counted = sum(report["counts"].values())
    assert counted == len(report["findings"])
    for finding in report["findings"]:
        assert set(finding) == {"severity", "check", "message", "remedy"}
        assert finding["message"] and bool(finding["remedy"]) == (finding["severity"] != "ok"), finding


def test_the_loaded_torch_is_told(programs):
    torch = pytest.importorskip("torch")
    done = programs.run("lockstep", "doctor", "--no-self-test")
    told = findings(done, "ok", "torch")
    assert torch.__version__.split("+")[0] in told, done.text
    kind = f"CUDA {torch.version.cuda} build" if torch.version.cuda else "CPU build"
    assert kind in told, done.text


def test_what_jobs_over_hosts_would_use_is_told(programs):
    done = programs.run("lockstep", "doctor", "--no-self-test", LOCKSTEP_SOCKET_IFNAME="lo")
    if "needs UCX" in findings(done, "note", "ucx"):
        pytest.skip("no UCX here")
    assert re.search(r"UCX [\d.]+ \(.*\btcp/lo\b", findings(done, "ok", "ucx") + findings(done, "note", "ucx")), done.text
    done = programs.run("lockstep", "doctor", "--no-self-test", LOCKSTEP_UCX_LIBRARY="/nonesuch/libucp.so.0")
    assert "/nonesuch/libucp.so.0" in findings(done, "note", "ucx") and done.status == 0, done.text


def test_the_self_test_alone(programs):
    done = programs.run("lockstep", "doctor", "--self-test")
    assert done.status == 0 and len(done.stdout.splitlines()) == 2, done.text
    assert findings(done, "ok", "self-test"), done.text
    assert programs.survivors() == []


def test_a_self_test_that_fails_is_a_problem(programs):
    done = programs.run("lockstep", "doctor", LOCKSTEP_FAILPOINTS="doctor_self_test=error(out of luck)")
    assert done.status == 1 and "out of luck" in findings(done, "problem", "self-test"), done.text
    assert "on purpose" in findings(done, "warning", "variables"), done.text


def test_a_self_test_that_hangs_ends_at_the_timeout(programs):
    done = programs.run(
        "lockstep", "doctor", "--self-test", "--timeout", "2", LOCKSTEP_FAILPOINTS="doctor_self_test=kill(19)"
    )
    assert done.status == 1 and "did not end within 2000 ms" in findings(done, "problem", "self-test"), done.text
    programs.wait_until_gone()


def test_warnings_fail_with_strict_only(programs):
    script = "ulimit -n 200; exec $LOCKSTEP doctor --no-self-test"
    done = in_shell(programs, script)
    assert done.status == 0 and "(ulimit -n): 200" in findings(done, "warning", "nofile"), done.text
    assert in_shell(programs, script + " --strict").status == 1


def test_problems_fail(programs):
    done = in_shell(programs, "ulimit -n 50; exec $LOCKSTEP doctor --no-self-test")
    assert done.status == 1 and "(ulimit -n): 50" in findings(done, "problem", "nofile"), done.text
    done = programs.run("lockstep", "doctor", "--no-self-test", LOCKSTEP_SEGMENT_MB="much")
    assert done.status == 1 and "'much'" in findings(done, "problem", "variables"), done.text
    assert "1 problem," in done.stdout, done.text


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_the_affinity_mask_is_seen(programs):
    core = min(os.sched_getaffinity(0))
    done = programs.run("taskset", "-c", core, programs.find("lockstep"), "doctor", "--no-self-test")
    assert done.status == 0 and "1 of " in findings(done, "note", "cores"), done.text


def test_variables_that_are_read_are_known():
    sources = [path for folder in ("lockstep", "cli") for path in (ROOT / folder).rglob("*.cc") if not path.stem.endswith("_test")]
    named = {path: set(re.findall(r'"(LOCKSTEP_[A-Z_]+)"', path.read_text())) for path in sources}
    (known,) = (names for path, names in named.items() if path.name == "judge_environment.cc")
    of_tests = {name for names in named.values() for name in names if name.startswith("LOCKSTEP_TEST_")}
    assert set.union(*named.values()) - of_tests <= known


def test_variables_that_the_documents_name_are_known(programs):
    text = "".join(page.read_text() for page in (ROOT / "docs").rglob("*.md"))
    named = set(re.findall(r"`(LOCKSTEP_[A-Z_]+)`", text)) - {"LOCKSTEP_FAILPOINTS"}  # an odd value ends the program
    assert "LOCKSTEP_SEGMENT_MB" in named
    done = programs.run("lockstep", "doctor", "--no-self-test", **{name: "1" for name in named})
    assert "does not read" not in done.stdout, done.text
    done = programs.run("lockstep", "doctor", "--no-self-test", LOCKSTEP_LOGS="debug")
    assert "does not read LOCKSTEP_LOGS; do: write LOCKSTEP_LOG," in findings(done, "warning", "variables"), done.text


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--job", "--self-test"], ["--self-test"]),
        (["--self-test", "--no-self-test"], ["--no-self-test"]),
        (["--program", "x"], ["--program", "--job"]),
        (["--timeout", "0"], ["--timeout"]),
        (["--timeout", "soon"], ["soon"]),
        (["everything"], ["everything"]),
        (["--job"], ["lockstep run"]),  # no launcher started a job
    ],
    ids=lambda words: " ".join(words),
)
def test_misuse(programs, arguments, words):
    done = programs.run("lockstep", "doctor", *arguments)
    assert done.status == MISUSE and done.stdout == "", done.text
    assert all(word in done.stderr for word in [*words, "lockstep doctor --help"]), done.text


def test_a_job_that_is_fine(programs):
    done = job(programs, 2)
    assert done.status == 0, done.text
    assert "2 rank(s) on " in findings(done, "ok", "hosts"), done.text
    assert "all 2 ranks" in findings(done, "ok", "all ranks"), done.text
    assert "1 of 1 pairs work" in findings(done, "ok", "pairs"), done.text
    assert done.stdout.count("0 problems") == 1, done.text


def test_a_job_as_json(programs):
    done = job(programs, 3, "--json")
    report = json.loads(done.stdout)
    assert done.status == report["status"] == 0, done.text
    assert sorted(pair["ranks"] for pair in report["pairs"]) == [[0, 1], [0, 2], [1, 2]]
    assert all(pair["errors"] == {} and min(pair["latency_seconds"]) > 0 for pair in report["pairs"])


def test_the_status_is_the_same_on_all_ranks(programs):
    broken = {"LOCKSTEP_FAILPOINTS": "doctor_pair_0_2=error(the wire is cut)"}
    for variables, status in (({}, 0), (broken, 1)):
        done = programs.run_ranks(range(3), "lockstep", "doctor", "--job", **variables)
        assert [each.status for each in done] == [status] * 3, "\n".join(each.text for each in done)
        assert done[1].stdout == done[2].stdout == ""
    told = findings(done[0], "problem", "pairs")
    assert "ranks 0 and 2: rank 0 says: " in told and "the wire is cut" in told, done[0].text


def test_a_slow_pair_is_named(programs):
    done = job(programs, 3, LOCKSTEP_FAILPOINTS="doctor_pair_1_2=delay(5)")
    assert done.status == 0 and "ranks 1 and 2: all_reduce of" in findings(done, "warning", "pairs"), done.text


def test_a_rank_that_dies_is_named(programs):
    done = job(programs, 3, script='test $RANK = 1 && export LOCKSTEP_FAILPOINTS="doctor_all=kill(9)"')
    assert done.status == 1 and "rank 1 (pid " in findings(done, "problem", "ranks"), done.text
    assert "signal 9" in findings(done, "problem", "all ranks"), done.text
    programs.wait_until_gone()


def test_a_rank_that_hangs_is_named_within_the_timeout(programs):
    script = 'test $RANK = 2 && export LOCKSTEP_FAILPOINTS="doctor_pair_1_2=kill(19)"'
    done = programs.run(
        *("lockstep", "run", "--no-prefix", "--grace-period", "1", "--nproc-per-node", "3", "sh", "-c"),
        f"{script}\nexec {programs.find('lockstep')} doctor --job --timeout 4",
    )
    assert done.status == 1, done.text
    told = findings(done, "problem", "ranks")
    assert "rank 2 (pid " in told and "did not answer within 4 s" in told, done.text
    assert "ranks 1 and 2" in findings(done, "problem", "pairs"), done.text
    programs.wait_until_gone()


def job_over(programs, net, layout, *options, **variables):
    """`lockstep doctor --job` where layout[h] ranks are on host h; rank 0's result."""
    ranks = programs.start_on(net, layout, programs.find("lockstep"), "doctor", "--job", *options, **variables)
    done = [rank.finish() for rank in ranks]
    if any("needs UCX" in each.text for each in done):
        pytest.skip("ranks on several hosts need UCX")
    assert len({each.status for each in done}) == 1, "\n".join(each.text for each in done)
    assert all(each.stdout == "" for each in done[1:]), "\n".join(each.text for each in done)
    return done[0]


def test_a_job_over_several_hosts(programs):
    done = job_over(programs, hosts.PretendedHosts(2), [2, 1])
    assert done.status == 0, done.text
    assert "host-a (ranks 0 and 1), host-b (rank 2)" in findings(done, "note", "hosts"), done.text
    assert "host-a, host-b: lo (127.0.0.1, MTU " in findings(done, "ok", "interfaces"), done.text
    assert "within " in findings(done, "ok", "clocks"), done.text
    assert findings(done, "ok", "wires") or findings(done, "warning", "wires"), done.text
    assert "lockstep doctor: wires between hosts, round 1 of 3\n" in done.stderr, done.text


def test_a_wire_that_does_not_answer_is_named(programs):
    broken = {"LOCKSTEP_FAILPOINTS": "doctor_wire_0_2=error(nothing comes)"}
    done = job_over(programs, hosts.PretendedHosts(3), [2, 1, 1], "--json", **broken)
    assert done.status == 1, done.text
    report = json.loads(done.stdout)
    (told,) = [finding for finding in report["findings"] if finding["severity"] == "problem"]
    assert told["check"] == "wires" and told["message"].startswith("host-a and host-b (ranks 0 and 2): "), done.text
    wires = {tuple(wire["hosts"]): wire for wire in report["wires"]}
    assert set(wires["host-a", "host-b"]["errors"]) <= {"0", "2"} and wires["host-a", "host-b"]["errors"], done.text
    assert min(wires["host-b", "host-c"]["forth"]["bytes_per_second"]) > 0, done.text
    # That no pair gets over it is told once.
    assert not {(0, 2), (1, 2)} & {tuple(pair["ranks"]) for pair in report["pairs"]}, done.text


def test_a_wire_that_is_slow_in_one_direction_is_named(programs, make_hosts):
    net = make_hosts(3, rate="200mbit")  # with which the processors keep pace
    net.add_slow_way(0, 2, "20mbit")
    done = job_over(programs, net, [1, 1, 1])
    assert done.status == 0, done.text
    told = findings(done, "warning", "wires")
    assert "host-a and host-c (ranks 0 and 2): " in told and "Mbit/s from host-a to host-c, " in told, done.text
    assert "times less than the median of all wires" in told and "from host-c to host-a, " not in told, done.text


def test_ctrl_c_leaves_nothing_behind(programs):
    child = programs.start(
        "lockstep", "run", "--no-prefix", "--nproc-per-node", 2, programs.find("lockstep"), "doctor", "--job",
        LOCKSTEP_FAILPOINTS="doctor_pair_0_1=delay(30000)",
    )  # fmt: skip
    child.wait_for("pairs of ranks, round 1", "stderr")
    child.kill(signal.SIGINT)
    done = child.finish()
    assert done.status != 0, done.text
    programs.wait_until_gone()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_two_ranks_on_one_core(programs):
    core = min(os.sched_getaffinity(0))
    done = job(programs, 2, script=f"taskset -p -c {core} $$ >/dev/null")
    assert done.status == 1 and f"share core {core}" in findings(done, "problem", "cores"), done.text


def test_more_ranks_than_cores(programs):
    cores = len(os.sched_getaffinity(0))
    if cores != os.cpu_count() or cores > 8:
        pytest.skip("needs a machine of its own with few cores")
    done = job(programs, cores + 1)
    assert done.status == 0 and f"{cores + 1} ranks on the {cores} core" in findings(done, "warning", "cores"), done.text


def test_variables_that_differ(programs):
    done = job(programs, 2, script="export UCX_TLS=tcp,$RANK")
    told = findings(done, "warning", "variables")
    assert done.status == 0 and "UCX_TLS differs: rank 0: 'tcp,0', rank 1: 'tcp,1'" in told, done.text


def test_versions_of_lockstep_that_differ(programs):
    other = programs.folder / "lockstep-other"
    shutil.copy(programs.find("lockstep"), other)
    with other.open("ab") as file:
        file.write(b"\0")
    done = job(programs, 2, script=f"test $RANK = 1 && exec {other} doctor --job")
    assert done.status == 1 and "the lockstep program differs" in findings(done, "problem", "versions"), done.text


def test_versions_of_the_program_that_differ(programs):
    for rank in range(2):
        (programs.folder / f"train{rank}").write_text(f"version {rank}")
    command = f"exec {programs.find('lockstep')} doctor --job --program"
    done = programs.lockstep_run(2, "sh", "-c", f"{command} {programs.folder}/train$RANK")
    assert done.status == 1 and "the program differs" in done.stdout, done.text
    done = programs.lockstep_run(2, "sh", "-c", f"{command} {programs.folder}/train0")
    assert done.status == 0 and "train0" in done.stdout, done.text


def test_a_temporary_folder_that_is_not_there_fails_the_self_test(programs):
    done = programs.run("lockstep", "doctor", "--self-test", TMPDIR=programs.folder / "missing")
    assert done.status == 1, done.text
    assert f"no folder can be made in {programs.folder}/missing" in findings(done, "problem", "self-test"), done.text
    assert "set TMPDIR" in findings(done, "problem", "self-test"), done.text
