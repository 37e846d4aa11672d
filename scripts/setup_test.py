"""Tests of set-up: each way in which it can fail ends in one line that says what to do, and nothing is done twice.

The scripts run in a copy of the tree's scripts, with a PATH that holds a few real tools and fakes of the rest.
"""

import os
import pathlib
import shutil
import signal
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
TOOLS = """awk basename bash cat cp cut date dirname env grep head id ln mkdir mv nproc paste readlink realpath rm rmdir sed
           sha256sum sleep sort tail tee touch tr true uname df c++ ls stat""".split()

# A Python that fails where FAKE_PYTHON says, and else is the one that runs this test.
FAKE_PYTHON = """
[[ " $FAKE_PYTHON " == *" old "* && $* == *version_info* ]] && exit 1
[[ " $FAKE_PYTHON " == *" old "* && $* == *python_version* ]] && echo 3.8.10 && exit
[[ " $FAKE_PYTHON " == *" no-memfd "* && $1 == - ]] && exit 1
[[ " $FAKE_PYTHON " == *" no-venv "* && $* == *ensurepip* ]] && exit 1
exec {python} "$@"
"""
# What a virtual environment's python does here: pip's calls are counted, and fail with the words in FAKE_PIP.
FAKE_VENV_PYTHON = """
if [[ $* == "-m pip install"* ]]; then
  echo "$@" >>"$FAKE_CALLS"
  while (($#)); do [[ $1 != --log ]] || log=$2; [[ $1 != -r ]] || cat "$2" >>"$FAKE_CALLS"; shift; done
  [[ -z $FAKE_PIP ]] || {{ echo "$FAKE_PIP" >>"$log"; exit 1; }}
  exit 0
elif [[ $* == "-m pip --version" ]]; then exit 0
elif [[ $* == "-m pip config list" ]]; then echo "$FAKE_PIP_CONFIG"; exit
elif [[ $* == *purelib* ]]; then dirname "$0"; exit
fi
exec {python} "$@"
"""


class Tree:
    """A copy of the scripts, and a PATH for them."""

    def __init__(self, folder):
        self.root = folder / "tree"
        self.bin = folder / "bin"
        self.calls = folder / "calls"
        self.root.mkdir()
        self.bin.mkdir()
        shutil.copytree(ROOT / "scripts", self.root / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
        for list_of_packages in ROOT.glob("requirements*.txt"):
            shutil.copy(list_of_packages, self.root)
        for tool in TOOLS:
            if shutil.which(tool):
                (self.bin / tool).symlink_to(shutil.which(tool))
        self.fake("python3", FAKE_PYTHON.format(python=sys.executable))
        self.fake("dpkg-query", "shift 3; printf '%s ii \\n' \"$@\"")
        self.fake("apt-get", "exit 1")
        self.fake("any-g++", "cat >/dev/null")  # reads its input, or its writer may be ended by SIGPIPE
        self.environment = {"PATH": str(self.bin), "HOME": str(folder), "FAKE_CALLS": str(self.calls), "FAKE_PIP": "",
                            "FAKE_PIP_CONFIG": "",
                            "FAKE_PYTHON": ""}

    def fake(self, name, body):
        path = self.bin / name
        path.unlink(missing_ok=True)
        path.write_text(f"#!{shutil.which('bash')}\n{body}\n")
        path.chmod(0o755)

    def fake_venv(self, complete=False):
        """A .venv whose python is a fake."""
        bin_folder = self.root / ".venv/bin"
        bin_folder.mkdir(parents=True, exist_ok=True)
        (bin_folder / "python").write_text(f"#!{shutil.which('bash')}\n" + FAKE_VENV_PYTHON.format(python=sys.executable))
        (bin_folder / "python").chmod(0o755)
        if complete:
            self.run("find_given_torch; choose_python; ensure_venv tests")
            self.calls.unlink()

    def run(self, functions=None, *arguments, **environment):
        """Runs quickstart, or some of the functions of its libraries."""
        command = ["bash", "scripts/quickstart", *arguments]
        if functions:
            command = ["bash", "-c", f"program=quickstart; . scripts/lib/setup.sh; start_log; {functions}"]
        return subprocess.run(command, cwd=self.root, env=self.environment | environment, text=True, capture_output=True,
                              stdin=subprocess.DEVNULL, timeout=60)


@pytest.fixture
def tree(tmp_path):
    return Tree(tmp_path)


def assert_one_line(result, *parts):
    lines = result.stderr.splitlines()
    assert result.returncode == 1, result.stdout + result.stderr
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("quickstart: error: ") and "; do: " in lines[0]
    for part in parts:
        assert part in lines[0]


@pytest.mark.parametrize("arguments, parts", [
    (["--epochs", "0"], ["--epochs is '0'"]),
    (["--epochs"], ["--epochs needs a value"]),
    (["--model", "resnet"], ["--model is 'resnet'", "mlp or cnn"]),
    (["--nproc", "two"], ["--nproc is 'two'"]),
    (["--frobnicate"], ["unknown option '--frobnicate'"]),
])
def test_misused_options(tree, arguments, parts):
    assert_one_line(tree.run(None, *arguments), *parts, "quickstart --help")


def test_help_does_nothing_else(tree):
    result = tree.run(None, "--help")
    assert result.returncode == 0 and "--epochs" in result.stdout
    assert not (tree.root / "log").exists()


def test_unwritable_log(tree):
    (tree.root / "log").write_text("in the way")
    assert_one_line(tree.run(), "cannot write to")


def test_not_debian_lists_what_is_needed(tree):
    (tree.bin / "dpkg-query").unlink()
    assert_one_line(tree.run(), "neither Debian nor Ubuntu", "g++", "libcli11-dev", "LOCKSTEP_SKIP_PACKAGES=1")


def test_missing_packages_without_root(tree):
    tree.fake("dpkg-query", "echo 'g++ ii '; echo 'mold rc '")
    tree.fake("id", "echo 1000")
    result = tree.run()
    assert_one_line(result, "no root or sudo", "apt-get install ccache mold zlib1g-dev")
    assert "g++" not in result.stderr


@pytest.mark.parametrize("words, part", [
    ("Temporary failure resolving 'deb.debian.org'", "check the network"),
    ("You don't have enough free space in /var/cache/apt/archives/.", "free some space"),
    ("E: Unable to locate package mold", "apt-get could not install"),
])
def test_apt_get_fails(tree, words, part):
    tree.fake("dpkg-query", "exit 1")
    tree.fake("id", "echo 0")
    tree.fake("apt-get", f'echo "{words}" >&2; exit 100')
    result = tree.run()
    assert_one_line(result, part, "details: ")
    assert words in result.stdout


def test_installs_only_missing_packages_with_sudo(tree):
    tree.fake("id", "echo 1000")
    tree.fake("dpkg-query", "echo 'g++ ii '")
    tree.fake("sudo", '[[ $1 == -n ]] && shift; exec "$@"')
    tree.fake("apt-get", 'echo "$@" >>"$FAKE_CALLS"')
    result = tree.run("ensure_packages g++ mold")
    assert result.returncode == 0, result.stderr
    install = tree.calls.read_text().splitlines()[-1]
    assert install.endswith("install -y --no-install-recommends mold")


def test_python_too_old(tree):
    assert_one_line(tree.run("choose_python", LOCKSTEP_PYTHON="python3", FAKE_PYTHON="old"), "python3 is 3.8.10",
                    "3.10 or newer", "LOCKSTEP_PYTHON")


def test_no_memfd(tree):
    assert_one_line(tree.run(FAKE_PYTHON="no-memfd"), "memfd_create")


def test_memfd_works_here(tree):
    assert tree.run("choose_python; check_memfd").returncode == 0


def test_python_without_venv(tree):
    assert_one_line(tree.run(FAKE_PYTHON="no-venv"), "has no venv module", "-venv")


def test_no_disk(tree):
    tree.fake("df", "echo head; echo 'disk 100 50 3145728 50% /'")
    for card, needed in ((False, 5), (True, 12)):
        result = tree.run(f"has_card() {{ {str(card).lower()}; }}; find_given_torch; choose_python; ensure_venv training")
        assert_one_line(result, "3 GiB are free", f"needs {needed}", "free some space")


@pytest.mark.parametrize("words, part", [
    ("OSError: [Errno 28] No space left on device", "free some space"),
    ("NewConnectionError: Failed to establish a new connection: [Errno -2]", "check the network"),
    ("ERROR: No matching distribution found", "read why in the log"),
])
def test_pip_fails(tree, words, part):
    tree.fake_venv()
    assert_one_line(tree.run(FAKE_PIP=words), part)
    # Cut short, so the next run must not trust what lies there.
    assert (tree.root / ".venv/.installing").exists()


@pytest.mark.parametrize("config, status, by_uv, by_pip", [
    ("", 0, True, False), ("", 2, True, True), ("global.timeout='60'", 0, True, False),
    ("global.index-url='https://mirror'", 0, False, True), (":env:.proxy='http://proxy:3128'", 0, False, True)])
def test_uv_installs_where_pip_has_no_settings_of_its_own(tree, config, status, by_uv, by_pip):
    tree.fake_venv()
    uv = tree.root / ".venv/bin/uv"
    uv.write_text(f'#!{shutil.which("bash")}\necho "uv $*" >>"$FAKE_CALLS"\nexit {status}\n')
    uv.chmod(0o755)
    result = tree.run("find_given_torch; choose_python; ensure_venv tests", FAKE_PIP_CONFIG=config)
    assert result.returncode == 0 and not result.stderr
    calls = tree.calls.read_text()
    assert ("uv pip install" in calls) == by_uv
    assert ("\ntorch==" in calls) == by_pip, "the list that pip was given"
    assert "\nuv==" not in calls, "no list has uv, which not every index has"


def test_complete_environment_is_left_alone(tree):
    tree.fake_venv(complete=True)
    result = tree.run("find_given_torch; choose_python; ensure_venv tests")
    assert result.returncode == 0 and not tree.calls.exists() and "==" not in result.stdout


def test_changed_requirements_are_installed(tree):
    tree.fake_venv(complete=True)
    with open(tree.root / "requirements.txt", "a") as file:
        file.write("rich==1.0\n")
    assert tree.run("find_given_torch; choose_python; ensure_venv tests").returncode == 0
    assert "rich==1.0" in tree.calls.read_text()


def test_training_without_a_card_leaves_out_what_only_cards_need(tree):
    tree.fake_venv()
    training = "find_given_torch; choose_python; ensure_venv training"
    assert tree.run(f"has_card() {{ false; }}; {training}").returncode == 0
    installed = tree.calls.read_text()
    assert "torch==" in installed and "nvidia-cuda-cupti==" in installed and "--no-deps" in installed
    assert "pytest==" not in installed and "mlflow==" not in installed
    tree.calls.unlink()
    assert tree.run(f"has_card() {{ true; }}; {training}").returncode == 0
    installed = tree.calls.read_text()
    assert "torch==" in installed and "--no-deps" not in installed and "nvidia-" not in installed


def test_an_environment_for_tests_serves_training_but_not_the_reverse(tree):
    tree.fake_venv()
    for purpose, installs in (("training", True), ("training", False), ("tests", True), ("training", False), ("tests", False)):
        tree.calls.unlink(missing_ok=True)
        assert tree.run(f"find_given_torch; choose_python; ensure_venv {purpose}").returncode == 0
        assert tree.calls.exists() == installs, purpose
        assert not installs or ("pytest==" in tree.calls.read_text()) == (purpose == "tests")


def test_interrupted_install_is_made_anew(tree):
    tree.fake_venv(complete=True)
    (tree.root / ".venv/.installing").touch()
    (tree.root / ".venv/half").touch()
    result = tree.run("find_given_torch; choose_python; ensure_venv tests", FAKE_PYTHON="no-venv")
    assert_one_line(result, "has no venv module")  # it wanted to make a new one
    result = tree.run("install_requirements() { :; }; install_lone_requirements() { :; }; find_given_torch; choose_python; ensure_venv tests")
    assert result.returncode == 0, result.stderr
    assert not (tree.root / ".venv/half").exists() and not (tree.root / ".venv/.installing").exists()


def make_torch(folder, version="2.11.0"):
    """Just enough of a torch package for the find-module."""
    for header in ("headeronly/version.h", "csrc/distributed/c10d/Backend.hpp"):
        (folder / "include/torch" / header).parent.mkdir(parents=True)
        (folder / "include/torch" / header).touch()
    words = zip(("MAJOR", "MINOR", "PATCH"), version.split("."))
    (folder / "include/torch/headeronly/version.h").write_text(
        "".join(f"#define TORCH_VERSION_{name} {number}\n" for name, number in words))
    (folder / "lib").mkdir()
    (folder / "lib/libtorch_cpu.so").touch()
    return folder


def test_given_torch_is_not_installed(tree, tmp_path):
    torch = make_torch(tmp_path / "libtorch")
    for environment in ({"LOCKSTEP_TORCH": str(torch)}, {"CMAKE_PREFIX_PATH": f"/nowhere:{tmp_path}"}):
        tree.fake_venv()
        tree.calls.unlink(missing_ok=True)
        (tree.root / ".venv/.lockstep-stamp").unlink(missing_ok=True)
        result = tree.run('find_given_torch; choose_python; ensure_venv tests; echo "given $given_torch"', **environment)
        assert result.returncode == 0, result.stderr
        assert f"given {torch}" in result.stdout
        assert "torch==" not in tree.calls.read_text() and "cmake==" in tree.calls.read_text()
    tree.calls.unlink()
    assert tree.run("find_given_torch; choose_python; ensure_venv tests").returncode == 0
    assert "torch==" in tree.calls.read_text()


def test_given_torch_is_not_there(tree, tmp_path):
    assert_one_line(tree.run(LOCKSTEP_TORCH=str(tmp_path)), f"LOCKSTEP_TORCH is {tmp_path}", "libtorch_cpu.so", "unset it")


def test_wrong_compiler(tree):
    assert_one_line(tree.run("check_compiler", CXX="nonesuch-g++"), "no C++ compiler 'nonesuch-g++'", "g++ 11")
    tree.fake("old-g++", '[[ $1 == -dumpversion ]] && echo 9 || exit 1')
    assert_one_line(tree.run("check_compiler", CXX="old-g++"), "'old-g++' (9) cannot compile C++20")


def test_cmake_error_is_told(tree):
    tree.fake_venv(complete=True)
    tree.fake("cmake", r"printf 'CMake Error at a.cmake:1 (message):\n  Could NOT\n  find it\n\nmore\n' >&2; exit 1")
    assert_one_line(tree.run("find_given_torch; purpose=tests; configure release", CXX="any-g++"), "could not configure: Could NOT find it;")


@pytest.mark.parametrize("words, part", [
    ("c++: fatal error: Killed signal terminated program cc1plus", "LOCKSTEP_JOBS=1"),
    ("No space left on device", "free some space"),
    ("a.cc:1:1: error: expected unqualified-id", "find the first 'error:'"),
])
def test_build_fails(tree, words, part):
    tree.fake("ninja", f"echo '{words}' >&2; exit 1")
    assert_one_line(tree.run("configure() { :; }; build release"), part)


@pytest.mark.parametrize("tool, body, status, word", [
    ("cmake", "kill -INT $$", 130, "interrupted"),
    ("cmake", "kill -TERM $$", 143, "terminated"),
    ("ninja", "kill -INT $$", 130, "interrupted"),
    ("ninja", "kill -TERM $$", 143, "terminated"),
    ("ninja", "echo 'ninja: build stopped: interrupted by user.'; exit 2", 130, "interrupted"),
])
def test_a_signal_to_a_tool_alone_is_no_error(tree, tool, body, status, word):
    tree.fake(tool, body)
    functions = "find_given_torch; purpose=tests; configure release" if tool == "cmake" else "configure() { :; }; build release"
    result = tree.run(functions, CXX="any-g++")
    assert result.returncode == status, result.stderr
    assert f"quickstart: {word}; run it again to go on where it stopped" in result.stderr.splitlines() and "error" not in result.stderr


def test_a_tool_that_was_killed_is_an_error(tree):
    tree.fake("cmake", "kill -KILL $$")
    result = tree.run("find_given_torch; purpose=tests; configure release", CXX="any-g++")
    assert result.returncode == 1 and "could not configure" in result.stderr.splitlines()[-1], result.stderr


def test_configures_once_for_each_compiler_and_torch(tree):
    tree.fake("cmake", 'echo "$@" >>"$FAKE_CALLS"; mkdir -p build/release; touch build/release/{build.ninja,CMakeCache.txt}')
    for compiler in ("any-g++", "any-g++", "env any-g++", "env any-g++"):
        result = tree.run("find_given_torch; purpose=tests; configure release", CXX=compiler)
        assert result.returncode == 0, result.stderr
    calls = tree.calls.read_text().splitlines()
    assert len(calls) == 2 and "--fresh" not in calls[0] and "--fresh" in calls[1]


def test_data_that_is_named_must_be_there(tree, tmp_path):
    assert_one_line(tree.run(f"ensure_data {tmp_path}"), "does not hold Fashion-MNIST's four files", "--data")


FILES = [f"{part}-{kind}-ubyte.gz" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]


def test_data_is_unpacked_without_root(tree, tmp_path):
    tree.fake("apt-get", "touch dataset-fashion-mnist_1_all.deb")
    tree.fake("dpkg-deb", "folder=$3/usr/share/datasets/fashion-mnist; mkdir -p $folder; for f in "
              + " ".join(FILES) + "; do echo x >$folder/$f; done")
    for _ in range(2):
        result = tree.run('ensure_data; echo "in $data"', LOCKSTEP_DATASETS=str(tmp_path))
        assert result.returncode == 0, result.stderr
        assert f"in {tree.root}/data/fashion-mnist" in result.stdout
        (tree.bin / "apt-get").unlink(missing_ok=True)  # the second time needs none
    assert sorted(os.listdir(tree.root / "data")) == ["fashion-mnist"]


def test_data_without_network(tree, tmp_path):
    tree.fake("dpkg-deb", "exit 1")
    assert_one_line(tree.run("ensure_data", LOCKSTEP_DATASETS=str(tmp_path)), "could not be downloaded", "network")


def test_training_that_fails_or_says_nothing(tree):
    program = tree.root / "build/release/bin/lockstep"
    program.parent.mkdir(parents=True)
    for body, part in (("exit 3", "failed with status 3"), ("exit 143", "terminated"), ("exit 0", "without a line 'test accuracy"),
                       ("echo '[rank 0] test accuracy: 0.8812'", None)):
        program.write_text(f"#!{shutil.which('bash')}\n{body}\n")
        program.chmod(0o755)
        result = subprocess.run(
            ["bash", "-c", "sed '$d' scripts/quickstart >scripts/functions; . scripts/functions; start_log; "
             "epochs=5 model=mlp nproc=2 data=/d; train"],
            cwd=tree.root, env=tree.environment | {"program": "quickstart"}, text=True, capture_output=True, timeout=60)
        if part == "terminated":
            assert result.returncode == 143 and "quickstart: terminated; run it again" in result.stderr, result.stderr
        elif part:
            assert_one_line(result, part)
        else:
            assert result.returncode == 0 and "test accuracy 0.8812 after 5 epochs" in result.stdout


@pytest.mark.parametrize("number, status, word", [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")])
def test_ends_cleanly_on_signals(tree, number, status, word):
    tree.fake("apt-get", "echo ready; sleep 60")
    tree.fake("dpkg-query", "exit 1")
    tree.fake("id", "echo 0")
    process = subprocess.Popen(["bash", "scripts/quickstart"], cwd=tree.root, env=tree.environment, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    while process.stdout.readline().strip() != "ready":
        assert process.poll() is None
    os.killpg(process.pid, number)  # as a terminal does
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == status
    # Of a child that SIGTERM ended, bash itself says so on a line before.
    assert stderr.splitlines()[-1] == f"quickstart: {word}; run it again to go on where it stopped"


def find_libtorch(tmp_path, *definitions):
    script = tmp_path / "find.cmake"
    script.write_text(f'list(PREPEND CMAKE_MODULE_PATH "{ROOT}/cmake")\nfind_package(LibTorch 2.11)\n'
                      'message("found=${LibTorch_FOUND} version=${LibTorch_VERSION} at=${LibTorch_DIR_FOUND}")\n')
    # Targets can't be made in script mode: the test is of what comes before.
    shutil.copytree(ROOT / "cmake", tmp_path / "cmake", dirs_exist_ok=True)
    module = tmp_path / "cmake/FindLibTorch.cmake"
    module.write_text(module.read_text().split("if(LibTorch_FOUND AND NOT TARGET")[0])
    script.write_text(script.read_text().replace(f"{ROOT}/cmake", f"{tmp_path}/cmake"))
    environment = {key: value for key, value in os.environ.items() if key not in ("LOCKSTEP_TORCH", "CMAKE_PREFIX_PATH")}
    cmake = shutil.which("cmake", path=f"{ROOT}/.venv/bin:{os.environ['PATH']}")
    result = subprocess.run([cmake, *definitions, "-P", str(script)], env=environment, text=True, capture_output=True)
    return " ".join((result.stdout + result.stderr).split())


def test_find_libtorch_takes_every_kind_of_folder(tmp_path):
    torch = make_torch(tmp_path / "env/lib/python3.11/site-packages/torch", "2.11.2")
    (torch / "share/cmake").mkdir(parents=True)
    for folder in (torch, torch.parent, tmp_path / "env", torch / "share/cmake"):
        for variable in ("LOCKSTEP_TORCH", "CMAKE_PREFIX_PATH"):
            assert f"found=TRUE version=2.11.2 at={torch}" in find_libtorch(tmp_path, f"-D{variable}={folder}")


def test_find_libtorch_names_where_it_looked(tmp_path):
    said = find_libtorch(tmp_path, f"-DLOCKSTEP_TORCH={tmp_path}")
    assert "found=FALSE" in said and f"no torch with C++ headers in {tmp_path}" in said
    assert "Set LOCKSTEP_TORCH to" in said


def test_find_libtorch_refuses_an_old_one(tmp_path):
    torch = make_torch(tmp_path / "torch", "2.5.1")
    said = find_libtorch(tmp_path, f"-DLOCKSTEP_TORCH={torch}")
    assert "found=FALSE" in said and f"{torch} is torch 2.5.1." in said and "2.11 or newer" in said


def test_find_libtorch_prefers_the_named_one(tmp_path):
    old, new = make_torch(tmp_path / "old/torch", "2.5.1"), make_torch(tmp_path / "new/torch", "2.12.0")
    assert f"found=TRUE version=2.12.0 at={new}" in find_libtorch(
        tmp_path, f"-DLOCKSTEP_TORCH={new}", f"-DCMAKE_PREFIX_PATH={old}")
