"""Builds what scripts/quickstart builds, installs that, and builds and runs scripts/consumer, a project of its own, against it."""

import os
import pathlib
import re
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUILD = pathlib.Path(os.environ.get("LOCKSTEP_BUILD_DIR", ROOT / "build/release"))


def run(*command, **environment):
    """Runs a tool of .venv or the system without what set-up gave this process; returns (status, output)."""
    clean = {key: value for key, value in os.environ.items()
             if key not in ("LOCKSTEP_TORCH", "CMAKE_PREFIX_PATH", "LD_LIBRARY_PATH", "GTEST_FILTER")}
    clean["PATH"] = f"{ROOT}/.venv/bin:{clean['PATH']}"
    result = subprocess.run([str(word) for word in command], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                            env=clean | {key: str(value) for key, value in environment.items()}, timeout=300)
    return result.returncode, result.stdout


# Stands where ccache stands: takes an object file from the build that is there, where it has it.
LAUNCHER = """#!/usr/bin/env bash
words=("$@")
for ((i = 0; i < $#; ++i)); do
  case ${words[i]} in -o) object=${words[i + 1]} ;; -MF) dependencies=${words[i + 1]} ;; esac
done
[[ -e BUILD/$object ]] || exec "$@"
cp "BUILD/$object" "$object" && echo "$object:" >"$dependencies"
"""


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    """The folder that Lockstep was installed to, of a build of its own of the targets of scripts/quickstart, configured as there."""
    if not (BUILD / "cmake_install.cmake").exists():
        pytest.fail(f"there is no build in {BUILD}; do: scripts/test, or set LOCKSTEP_BUILD_DIR")
    targets = re.search(r"^  build release (.+)$", (ROOT / "scripts/quickstart").read_text(), re.MULTILINE).group(1).split()
    options = re.search(r"-D(\w+)\{([A-Z,]+)\}=OFF", (ROOT / "scripts/lib/build.sh").read_text())
    torch = re.search(r"-isystem (\S+)/include/torch/csrc/api/include", (BUILD / "compile_commands.json").read_text()).group(1)
    build, launcher = tmp_path_factory.mktemp("build"), tmp_path_factory.mktemp("launcher") / "launcher"
    launcher.write_text(LAUNCHER.replace("BUILD", str(BUILD)))
    launcher.chmod(0o755)
    status, output = run("cmake", "-S", ROOT, "-B", build, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release",
                         *(f"-D{options.group(1)}{part}=OFF" for part in options.group(2).split(",")),
                         f"-DLOCKSTEP_TORCH={torch}", f"-DCMAKE_CXX_COMPILER_LAUNCHER={launcher}",
                         # Of an offline kit.
                         "-DCMAKE_INSTALL_RPATH_USE_LINK_PATH=ON", CMAKE_PREFIX_PATH=os.environ.get("CMAKE_PREFIX_PATH", ""))
    assert status == 0, output
    status, output = run("ninja", "-C", build, *targets)
    assert status == 0, output
    folder = tmp_path_factory.mktemp("installed")
    status, output = run("cmake", "--install", build, "--prefix", folder)
    assert status == 0, output
    return folder


def configure(source, build, prefix, **environment):
    options = [f"-DCMAKE_CXX_COMPILER_LAUNCHER={shutil.which('ccache')}"] if shutil.which("ccache") else []
    return run("cmake", "-S", source, "-B", build, "-G", "Ninja", f"-DCMAKE_PREFIX_PATH={prefix}", *options, **environment)


def test_headers_and_program_are_installed_but_no_test_harness(prefix):
    assert (prefix / "include/lockstep/lockstep.h").exists()
    assert (prefix / "include/lockstep/base/deadline.h").exists()
    assert not list((prefix / "include").rglob("testing"))
    headers = list((prefix / "include").rglob("*.h"))
    assert not [header for header in headers if "<ucp/" in header.read_text()], "UCX's headers are for the build alone"
    assert len(list(prefix.rglob("LICENSE"))) == 1
    [page] = prefix.rglob("docs/troubleshooting.md")  # as messages name it
    assert page.read_text() == (ROOT / "docs/troubleshooting.md").read_text()
    assert (prefix / "share/man/man1/lockstep.1").read_text().startswith(".TH LOCKSTEP 1")
    assert "complete " in (prefix / "share/bash-completion/completions/lockstep").read_text()
    installed = [path.relative_to(prefix) for path in prefix.rglob("*") if path.is_file()]
    assert not [path for path in installed if path.suffix == ".cc" or path.name == "CMakeLists.txt"]
    assert not list(prefix.rglob("__pycache__")) and not list(prefix.rglob("*.py")), "the Python package is pip's to install"
    status, output = run(prefix / "bin/lockstep", "--help")
    assert status == 0 and "run" in output, output


def test_consumer_builds_and_runs(prefix, tmp_path):
    status, output = configure(ROOT / "scripts/consumer", tmp_path, prefix)
    assert status == 0, output
    status, output = run("cmake", "--build", tmp_path)
    assert status == 0, output
    status, output = run(tmp_path / "consumer")
    assert status == 0 and "sum: 4" in output, output
    if list(prefix.rglob("liblockstep_image.so")):
        status, output = run(tmp_path / "image_consumer")
        assert status == 0 and "transformed: [3, 3, 3]" in output and "neither a JPEG nor a PNG" in output, output
    if list(prefix.rglob("liblockstep_cuda.so")):
        status, output = run(tmp_path / "cuda_consumer")
        assert status == 0 and "NCCL: 2." in output and "built: 1" in output, output
        status, output = run("ldd", tmp_path / "consumer")
        assert status == 0 and "libtorch_cuda" not in output, output
    if list(prefix.rglob("liblockstep_mlflow.so")):
        status, output = run(tmp_path / "mlflow_consumer")
        assert status == 0 and "refused: MlflowWriter: the tracking URI is one of sqlite://" in output, output


def test_no_library_needs_openssl(prefix):
    """lockstep run over hosts does, and programs that are linked with the libraries are to be free of it."""
    libraries = list(prefix.rglob("liblockstep*.so"))
    assert libraries
    for library in libraries:
        status, output = run("readelf", "-d", library, LC_ALL="C")
        needed = re.findall(r"\(NEEDED\) .*\[(.*)\]", output)
        assert status == 0 and "libtorch_cpu.so" in needed, output
        assert not [name for name in needed if name.startswith(("libssl", "libcrypto"))], (library, needed)


def test_a_component_that_was_not_built_is_named(prefix, tmp_path):
    source = (ROOT / "scripts/consumer/CMakeLists.txt").read_text().replace("OPTIONAL_COMPONENTS cuda image mlflow", "COMPONENTS brains")
    (tmp_path / "CMakeLists.txt").write_text(source)
    (tmp_path / "main.cc").touch()
    status, output = configure(tmp_path, tmp_path / "build", prefix)
    assert status != 0 and "built without its component 'brains'" in " ".join(output.split()), output


PARQUET_CONSUMER = """
cmake_minimum_required(VERSION 3.25)
project(ParquetConsumer LANGUAGES CXX)
find_package(Lockstep 0.1 REQUIRED COMPONENTS parquet)
add_executable(rows main.cc)
target_link_libraries(rows PRIVATE Lockstep::parquet)
"""
PARQUET_MAIN = """
#include <iostream>
#include <lockstep/parquet/parquet_dataset.h>
int main(int, char** argv) { std::cout << "rows: " << lockstep::data::ParquetDataset(argv[1]).get(0).rows() << '\\n'; }
"""


def test_a_component_is_found_by_its_name(prefix, tmp_path):
    """Its library finds Arrow's by itself, and nothing else of Lockstep's needs them."""
    pyarrow = pytest.importorskip("pyarrow", reason="the component parquet is built from pyarrow's Arrow C++")
    parquet = pytest.importorskip("pyarrow.parquet")
    (tmp_path / "CMakeLists.txt").write_text(PARQUET_CONSUMER)
    (tmp_path / "main.cc").write_text(PARQUET_MAIN)
    status, output = configure(tmp_path, tmp_path / "build", prefix)
    assert status == 0, output
    status, output = run("cmake", "--build", tmp_path / "build")
    assert status == 0, output
    parquet.write_table(pyarrow.table({"x": [1, 2, 3]}), tmp_path / "x.parquet")
    status, output = run(tmp_path / "build/rows", tmp_path / "x.parquet")
    assert status == 0 and "rows: 3" in output, output
    status, output = run("ldd", *prefix.rglob("liblockstep.so"))
    assert status == 0 and "libarrow" not in output and "libtorch_cpu" in output, output


def test_a_component_that_was_not_built_is_refused(prefix, tmp_path):
    (tmp_path / "CMakeLists.txt").write_text(PARQUET_CONSUMER.replace("COMPONENTS parquet", "COMPONENTS tea"))
    (tmp_path / "main.cc").touch()
    status, output = configure(tmp_path, tmp_path / "build", prefix)
    assert status != 0 and "was built without its component 'tea'" in " ".join(output.split()), output


@pytest.mark.parametrize("version, message", [("0.0.1", "0.0.1"), ("99.0", "99.0")])
def test_other_versions_are_refused(prefix, tmp_path, version, message):
    source = (ROOT / "scripts/consumer/CMakeLists.txt").read_text().replace("Lockstep 0.1", f"Lockstep {version}")
    assert version in source
    (tmp_path / "CMakeLists.txt").write_text(source)
    (tmp_path / "main.cc").touch()
    status, output = configure(tmp_path, tmp_path / "build", prefix)
    assert status != 0 and message in output, output


def test_another_torch_is_refused(prefix, tmp_path):
    for name in ("lib/libtorch_cpu.so", "include/torch/csrc/distributed/c10d/Backend.hpp"):
        (tmp_path / "torch" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "torch" / name).touch()
    header = tmp_path / "torch/include/torch/headeronly/version.h"
    header.parent.mkdir(parents=True)
    header.write_text("#define TORCH_VERSION_MAJOR 2\n#define TORCH_VERSION_MINOR 11\n#define TORCH_VERSION_PATCH 7\n")
    status, output = configure(ROOT / "scripts/consumer", tmp_path / "build", prefix, LOCKSTEP_TORCH=tmp_path / "torch")
    output = " ".join(output.split())
    assert status != 0 and "This Lockstep was built with torch" in output and "is 2.11.7" in output, output
