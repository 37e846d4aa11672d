"""The package as users get it: what the wheel holds, that it runs where there is no compiler, and what it refuses.

Most tests pack the build that scripts/test made; one compiles a wheel, as `pip install ./python` does.
"""

import email
import importlib.util
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import venv
import zipfile

import pytest

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("LOCKSTEP_BUILD_DIR") or REPOSITORY / "build" / "release")
DEADLINE = 120  # seconds; importing torch takes some on a busy machine
TWO_RANKS = """
import os, sys
import lockstep, torch, torch.distributed as dist
child = os.fork()
rank = 0 if child else 1
dist.init_process_group("lockstep", init_method="file://" + sys.argv[1], rank=rank, world_size=2)
tensor = torch.full((3,), rank + 1.0)
dist.all_reduce(tensor)
assert tensor.tolist() == [3.0, 3.0, 3.0], tensor
dist.destroy_process_group()
if rank == 0:
    assert os.waitpid(child, 0)[1] == 0
    print(lockstep.__file__)
"""


def run(*command, cwd="/", timeout=DEADLINE, **variables):
    """(status, output) of a program that gets only these variables and a few that say nothing of Lockstep or Python;
    kills it and what it started when the deadline is over."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR", "LANG", "CCACHE_DIR") if name in os.environ}
    given = {"OMP_NUM_THREADS": "1"} | {name: str(value) for name, value in variables.items()}
    process = subprocess.Popen([str(word) for word in command], cwd=cwd, env=kept | given, text=True,
                               stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                               start_new_session=True)
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"{command} did not end within {timeout} s:\n{output}")
    return process.returncode, output


def succeed(*command, **options):
    status, output = run(*command, **options)
    assert status == 0, output
    return output


def pip(*arguments, **options):
    return run(sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments, **options)


def make_wheel(folder, *options, **keywords):
    """The wheel of this repository's python/, made without the network."""
    status, output = pip("wheel", "--no-deps", "--no-index", "--no-build-isolation", "-w", folder, *options,
                         REPOSITORY / "python", **keywords)
    assert status == 0, output
    [wheel] = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="session")
def stage(tmp_path_factory):
    """What cmake installs of the build as component "python"."""
    if not (BUILD / "cmake_install.cmake").exists():
        pytest.fail(f"there is no build in {BUILD}; do: scripts/test, or set LOCKSTEP_BUILD_DIR", pytrace=False)
    folder = tmp_path_factory.mktemp("stage")
    succeed("cmake", "--install", BUILD, "--component", "python", "--prefix", folder)
    return folder


@pytest.fixture(scope="session")
def wheel(stage, tmp_path_factory):
    return make_wheel(tmp_path_factory.mktemp("wheel"), "-C", f"prebuilt={stage}")


@pytest.fixture(scope="session")
def fresh(wheel, tmp_path_factory):
    """The python of a new environment that holds the wheel, sees this one's torch, and has nothing else in PATH."""
    folder = tmp_path_factory.mktemp("fresh")
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    status, output = pip("--python", python, "install", "--no-deps", "--no-index", wheel)
    assert status == 0, output
    site = pathlib.Path(succeed(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    torch = pathlib.Path(importlib.util.find_spec("torch").origin).parent
    # Only now, for there is a lockstep beside torch, which pip would take for this environment's.
    (site / "torch_of_the_tests.pth").write_text(f"{torch.parent}\n")
    return python


def path_of(python):
    return {"PATH": str(python.parent)}


# ---- What the wheel holds


def dynamic_section(path):
    """[(tag, value)] of an ELF file, as readelf shows them."""
    return re.findall(r"\((\w+)\)\s+[^\[\n]*\[(.*)\]", succeed("readelf", "-d", path, LC_ALL="C"))


def check_wheel(wheel, folder):
    tag = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    assert re.fullmatch(rf"lockstep-\d+\.\d+\.\d+-{tag}-{tag}-linux_\w+\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    [information] = folder.glob("*.dist-info")
    python_files = {f"lockstep/{path.name}" for path in (REPOSITORY / "python" / "lockstep").glob("*.py")}
    python_files |= {f"lockstep_sweep/{path.name}" for path in (REPOSITORY / "python" / "lockstep_sweep").glob("*.py")}
    python_files |= {f"lockstep/{path.relative_to(REPOSITORY)}" for path in (REPOSITORY / "docs").rglob("*.md")}
    [extension] = {name for name in names if name.startswith("lockstep/_C.") and name.endswith(".so")}
    assert names == python_files | {extension, "lockstep/liblockstep.so", "lockstep/_build.py", "lockstep/py.typed",
                                    "lockstep/lockstep", "_lockstep_autoload.py", "_lockstep_command.py"}
    for name in (extension, "lockstep/liblockstep.so", "lockstep/lockstep"):
        section = dynamic_section(folder / name)
        paths = [entry for tag, value in section if tag in ("RPATH", "RUNPATH") for entry in value.split(":")]
        assert paths == ["$ORIGIN", "$ORIGIN/../torch/lib"], "paths of this machine mean nothing on another"
        needed = [value for tag, value in section if tag == "NEEDED"]
        assert {"libtorch_cpu.so", "liblockstep.so"} & set(needed) and not [value for value in needed if "/" in value]
        # The program needs OpenSSL where the C++ build has found it.
        assert name == "lockstep/lockstep" or not [value for value in needed if value.startswith(("libssl", "libcrypto"))]
    return information


def torch_minor():
    version = importlib.util.find_spec("torch").origin.replace("__init__.py", "version.py")
    return tuple(map(int, re.search(r"__version__ = '(\d+)\.(\d+)", pathlib.Path(version).read_text()).groups()))


def test_wheel_holds_the_package_and_nothing_of_this_machine(wheel, tmp_path):
    information = check_wheel(wheel, tmp_path)
    metadata = email.message_from_string((information / "METADATA").read_text())
    major, minor = torch_minor()
    required, *of_sweep = metadata.get_all("Requires-Dist")
    assert [line.partition(";")[0] for line in of_sweep] == ["optuna==5.0.0", "plotly==7.1.0"]
    assert set(required.removeprefix("torch").split(",")) == {f">={major}.{minor}", f"<{major}.{minor + 1}"}
    version = re.search(r"project\(Lockstep VERSION (\S+)", (REPOSITORY / "CMakeLists.txt").read_text())[1]
    assert metadata["Version"] == version
    assert f'VERSION = "{version}"' in (tmp_path / "lockstep" / "_build.py").read_text()
    assert metadata["License-Expression"] == "BSD-3-Clause"
    assert (information / "licenses" / "LICENSE").read_text() == (REPOSITORY / "LICENSE").read_text()
    assert "lockstep = _lockstep_autoload:autoload" in (information / "entry_points.txt").read_text()


@pytest.mark.long  # compiles the library anew
def test_a_wheel_is_compiled_without_the_tests_and_examples(tmp_path):
    wheel = make_wheel(tmp_path / "wheel", "-C", f"build-dir={tmp_path / 'build'}", timeout=1500)
    check_wheel(wheel, tmp_path / "content")
    assert [path.name for path in (tmp_path / "build" / "bin").iterdir()] == ["lockstep"]
    output = succeed(tmp_path / "build" / "bin" / "lockstep", "inspect", "--help")
    assert "flight" in output and "checkpoint" not in output


# ---- How it runs


def test_it_runs_where_there_is_no_compiler(fresh, tmp_path):
    (tmp_path / "two_ranks.py").write_text(TWO_RANKS)
    output = succeed(fresh, tmp_path / "two_ranks.py", tmp_path / "meeting", **path_of(fresh))
    assert output.strip().startswith(str(fresh.parents[1]))


SUM_OF_RANKS = """
import lockstep, torch, torch.distributed as dist
dist.init_process_group("lockstep")
tensor = torch.full((3,), dist.get_rank() + 1.0)
dist.all_reduce(tensor)
if dist.get_rank() == 0:
    print("sum", tensor.tolist())
dist.destroy_process_group()
"""


@pytest.mark.parametrize("interpreter", [[], ["python"]])
def test_the_command_starts_a_python_program(fresh, tmp_path, interpreter):
    (tmp_path / "train.py").write_text(SUM_OF_RANKS)
    command = fresh.parent / "lockstep"
    output = succeed(command, "run", "--nproc-per-node", 2, *interpreter, tmp_path / "train.py", **path_of(fresh))
    assert "[rank 0] sum [3.0, 3.0, 3.0]" in output


@pytest.mark.parametrize("former", [{}, {"LD_LIBRARY_PATH": "/libraries/of/the/caller"}])
def test_the_command_keeps_torchs_libraries_to_itself(fresh, former):
    variables = path_of(fresh) | former
    show = "import os; print([entry for entry in os.environ.items() if 'LD_LIBRARY_PATH' in entry[0]])"
    output = succeed(fresh.parent / "lockstep", "run", "--no-prefix", "python", "-c", show, **variables)
    assert output.strip() == str(list(former.items()))


def test_a_sweep_runs_by_the_command_and_keeps_torchs_libraries_from_its_trials(fresh, tmp_path):
    pytest.importorskip("optuna")
    words = ["--param", "x=int:1:9", "--metric", "loss", "--regex", "loss=loss: (.*)", "--trials", 1]
    succeed(fresh.parent / "lockstep", "sweep", *words, "--", "sh", "-c", "echo loss: {x}; echo libraries: $LD_LIBRARY_PATH",
            cwd=tmp_path, PATH=f"{fresh.parent}:{os.environ['PATH']}")
    [output] = tmp_path.glob("sweep/trials/*/output.log")
    assert re.fullmatch(r"loss: \d\nlibraries: ?\n", output.read_text())


def test_the_command_starts_itself_again(fresh):
    """The doctor's two ranks are processes of the program in the package, not of the script in PATH."""
    output = succeed(fresh.parent / "lockstep", "doctor", "--self-test", **path_of(fresh))
    assert "two ranks: all_reduce" in output


def test_the_command_of_the_package_beside_torch():
    command = pathlib.Path(sys.executable).parent / "lockstep"
    version = re.search(r"project\(Lockstep VERSION (\S+)", (REPOSITORY / "CMakeLists.txt").read_text())[1]
    assert succeed(command, "--version").strip() == f"lockstep {version}"


def test_the_folder_of_the_library_is_not_taken_for_the_package(fresh):
    assert (REPOSITORY / "lockstep").is_dir()
    output = succeed(fresh, "-m", "lockstep", "--help", cwd=REPOSITORY, **path_of(fresh))
    assert "python -m lockstep" in output


@pytest.mark.parametrize("value, state", [("1", "lockstep loaded, gloo replaced"), ("0", "lockstep not loaded"),
                                          (None, "lockstep not loaded")])
def test_import_torch_replaces_gloo_only_if_the_variable_is_set(fresh, value, state):
    code = """
import sys, torch
loaded = "lockstep" in sys.modules
import lockstep
print("lockstep", "loaded," if loaded else "not loaded", "gloo replaced" if lockstep.gloo_is_replaced() else "")
"""
    variables = path_of(fresh) | ({"LOCKSTEP_REPLACE_GLOO": value} if value else {})
    assert succeed(fresh, "-c", code, **variables).strip() == state


def test_the_variable_also_works_when_lockstep_is_imported_first(fresh):
    code = "import lockstep; print(lockstep.gloo_is_replaced())"
    assert succeed(fresh, "-c", code, LOCKSTEP_REPLACE_GLOO=1, **path_of(fresh)).strip() == "True"


def test_the_pages_that_messages_name_are_where_the_help_says(fresh):
    output = succeed(fresh, "-m", "lockstep", "--help", **path_of(fresh))
    [folder] = re.findall(r"lie in (/.*/docs)\.$", output, re.MULTILINE)
    assert (pathlib.Path(folder) / "troubleshooting.md").read_text() == (REPOSITORY / "docs/troubleshooting.md").read_text()


def test_uninstalling_leaves_nothing(wheel, tmp_path):
    venv.create(tmp_path, symlinks=True)
    python = tmp_path / "bin" / "python"
    before = set(tmp_path.rglob("*"))
    for command in (("install", "--no-deps", "--no-index", wheel), ("uninstall", "-y", "lockstep")):
        status, output = pip("--python", python, *command)
        assert status == 0, output
    assert set(tmp_path.rglob("*")) - before <= {path for path in tmp_path.rglob("__pycache__")}


# ---- Whom it refuses


def last_line(output):
    return output.strip().splitlines()[-1]


def test_another_torch_is_refused_in_one_line(fresh, tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text('__version__ = "2.11.0+cpu"\n')
    status, output = run(fresh, "-c", "import lockstep", PYTHONPATH=tmp_path, **path_of(fresh))
    assert status == 1
    major, minor = torch_minor()
    assert re.match(rf"ImportError: lockstep \S+ was built for torch {major}\.{minor}; this is torch 2\.11\.0",
                    last_line(output)), output
    assert f"pip install 'torch>={major}.{minor},<{major}.{minor + 1}'" in last_line(output)


def test_the_command_refuses_another_torch_as_the_package_does(fresh, tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text('__version__ = "2.11.0+cpu"\n')
    status, output = run(fresh.parent / "lockstep", "--version", PYTHONPATH=tmp_path, **path_of(fresh))
    assert status == 1
    assert re.fullmatch(r"lockstep: error: lockstep \S+ was built for torch .*; this is torch 2\.11\.0.*\n", output), output


def test_without_torch_one_line_says_so(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    status, output = run(sys.executable, "-S", "-c", "import lockstep", PYTHONPATH=tmp_path)
    assert status == 1
    message = r"ImportError: lockstep \S+ needs torch \d+\.\d+, and there is none: pip install"
    assert re.match(message, last_line(output)), output


# ---- The build backend


@pytest.fixture
def backend(monkeypatch):
    """python/build_backend.py, in the state in which pip calls it."""
    monkeypatch.chdir(REPOSITORY / "python")
    monkeypatch.delenv("LOCKSTEP_TORCH", raising=False)
    spec = importlib.util.spec_from_file_location("lockstep_build_backend", "build_backend.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def fake_torch(folder, version):
    for name in ("version.py", "lib/libtorch_python.so", "include/torch/csrc/distributed/c10d/Backend.hpp"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    (folder / "version.py").write_text(f"__version__ = '{version}'\n")
    return folder


@pytest.mark.parametrize("place", ["torch", "", "lib/python3.11/site-packages/torch"])
def test_a_given_torch_is_what_the_wheel_requires(backend, monkeypatch, tmp_path, place):
    fake_torch(tmp_path / place, "2.14.1+cu130")
    monkeypatch.setenv("LOCKSTEP_TORCH", str(tmp_path))
    assert backend.dynamic_metadata({}, {})["dependencies"] == ["torch>=2.14,<2.15"]
    assert backend.get_requires_for_dynamic_metadata({}) == []


@pytest.mark.parametrize("version, message", [("2.10.0", "is torch 2.10, and Lockstep needs 2.11 or newer"),
                                              ("unknown", "names no version")])
def test_a_torch_that_does_not_do_is_refused(backend, monkeypatch, tmp_path, version, message):
    monkeypatch.setenv("LOCKSTEP_TORCH", str(fake_torch(tmp_path, version)))
    with pytest.raises(SystemExit, match=rf"^lockstep: error: .*{message}; do: .*pip install torch=="):
        backend.dynamic_metadata({}, {})


def test_a_given_folder_without_torch_is_refused(backend, monkeypatch, tmp_path):
    monkeypatch.setenv("LOCKSTEP_TORCH", str(tmp_path))
    with pytest.raises(SystemExit, match=rf"LOCKSTEP_TORCH is {tmp_path}, and that is no Python torch .*; do: "):
        backend.get_requires_for_build_wheel()


def test_where_there_is_no_torch_pip_shall_install_one(backend, monkeypatch):
    monkeypatch.setattr(backend, "target_torch", lambda: None)
    [requirement] = backend.get_requires_for_dynamic_metadata({})
    assert requirement in (REPOSITORY / "requirements.txt").read_text().splitlines()
    monkeypatch.setattr(backend, "required_torch", lambda: None)
    with pytest.raises(SystemExit, match="there is no torch to build against; do: pip install torch"):
        backend.dynamic_metadata({}, {})


def test_build_isolation_does_not_hide_the_torch_of_the_environment(backend, monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", str(fake_torch(tmp_path / "torch", "2.12.0").parent))
    (tmp_path / "torch" / "__init__.py").touch()
    assert backend.target_torch() == pathlib.Path(importlib.util.find_spec("torch").origin).parent.resolve()


def test_prebuilt_names_a_folder_without_the_package(backend, tmp_path):
    with pytest.raises(SystemExit, match="is missing there; do: cmake --install BUILD --component python"):
        backend.build_wheel(str(tmp_path), {"prebuilt": str(tmp_path)})


def test_a_source_distribution_is_refused(backend, tmp_path):
    with pytest.raises(SystemExit, match="no source distribution of lockstep"):
        backend.build_sdist(str(tmp_path))


def test_a_missing_compiler_has_the_last_word(tmp_path):
    status, output = pip("wheel", "--no-deps", "--no-index", "--no-build-isolation", "-w", tmp_path, "-C",
                         f"build-dir={tmp_path / 'build'}", REPOSITORY / "python", CXX="/nonexistent/c++")
    assert status != 0
    assert "lockstep: error: there is no C++ compiler '/nonexistent/c++'; do: install g++" in output


@pytest.mark.parametrize("header, message", [
    ("semaphore", "cannot compile C++20"), ("Python.h", "apt-get install python3-dev"),
    ("zlib.h", "apt-get install zlib1g-dev"), ("nlohmann/json_fwd.hpp", "apt-get install nlohmann-json3-dev"),
    ("CLI/Version.hpp", "apt-get install libcli11-dev")])
def test_a_missing_header_is_named(backend, monkeypatch, tmp_path, header, message):
    compiler = tmp_path / "c++"
    compiler.write_text(f"#!{shutil.which('bash')}\n! grep -q 'include <{header}>'\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    assert message in " ".join(backend.explain_failure())


def test_a_build_that_fails_against_a_torch_newer_than_ours_says_so(backend, monkeypatch, tmp_path):
    monkeypatch.setattr(backend, "PROBES", ())
    monkeypatch.setenv("LOCKSTEP_TORCH", str(fake_torch(tmp_path, "2.99.0")))
    message, remedy = backend.explain_failure()
    assert f"{tmp_path} is torch 2.99, and Lockstep is known to compile up to torch {backend.NEWEST_TORCH}" in message
    assert f"pip install torch=={backend.NEWEST_TORCH}" in remedy


def test_nothing_is_said_to_be_missing_where_all_is_there(backend):
    assert backend.explain_failure() is None
