"""Tests of scripts/offline-kit: what it packs, and that a tree sets itself up and builds from it without a network."""

import gzip
import importlib.util
import os
import pathlib
import shutil
import struct
import subprocess
import tarfile

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
# In the namespace nothing but a loopback interface exists, which the tests of several ranks need.
OFFLINE = ["unshare", "-n", "bash", "-c", "ip link set lo up; exec \"$@\"", "offline"]

spec = importlib.util.spec_from_file_location("shorten_idx", ROOT / "scripts/lib/shorten_idx.py")
shorten_idx = importlib.util.module_from_spec(spec)
spec.loader.exec_module(shorten_idx)


def run(command, folder, timeout, **environment):
    clean = {key: value for key, value in os.environ.items()
             if not key.startswith(("LOCKSTEP_", "PIP_")) and key not in ("CMAKE_PREFIX_PATH", "VIRTUAL_ENV", "CMAKE_LIBRARY_PATH")}
    clean["PATH"] = ":".join(part for part in clean["PATH"].split(":") if not part.startswith(str(ROOT)))
    done = subprocess.run([str(word) for word in command], cwd=folder, env=clean | environment, text=True, timeout=timeout,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
    return done.returncode, done.stdout


def given_torch():
    import torch

    return str(pathlib.Path(torch.__file__).parent)


@pytest.mark.parametrize("items, count, left", [(5, 2, 2), (2, 5, 2), (0, 3, 0)])
def test_idx_files_are_cut_between_items(items, count, left):
    images = b"\0\0\x08\3" + struct.pack(">3I", items, 2, 3) + bytes(range(6 * items))
    assert shorten_idx.shorten(images, count) == b"\0\0\x08\3" + struct.pack(">3I", left, 2, 3) + bytes(range(6 * left))


@pytest.mark.parametrize("arguments, part", [([], "it takes a folder"), (["a", "b"], "one folder"), (["--fast"], "'--fast'"),
                                             (["."], "is there and is no kit")])
def test_misuse(arguments, part):
    status, output = run([ROOT / "scripts/offline-kit", *arguments], ROOT, 60)
    assert status == 1 and part in output and "; do: " in output, output


@pytest.mark.parametrize("environment, part", [
    ({"LOCKSTEP_OFFLINE_KIT": "/nonesuch"}, "there is no offline kit in it"),
    ({"LOCKSTEP_OFFLINE_KIT": "KIT"}, "holds no torch"),
])
def test_a_kit_that_can_not_be_used(tmp_path, environment, part):
    for name in ("system.tar.gz", "requirements.txt"):
        (tmp_path / name).touch()
    environment = {key: value.replace("KIT", str(tmp_path)) for key, value in environment.items()}
    status, output = run(["bash", "-c", ". scripts/lib/setup.sh; find_given_torch; find_offline_kit"], ROOT, 60,
                         program="test", **environment)
    assert status == 1 and part in output, output


@pytest.fixture(scope="module")
def kit(tmp_path_factory):
    for tool in ("apt-get", "dpkg-deb", "unshare", "ip"):
        if not shutil.which(tool):
            pytest.skip(f"there is no {tool}, with which a kit is made or tested")
    if subprocess.run([*OFFLINE, "true"], capture_output=True).returncode != 0:
        pytest.skip("this user may not make a network namespace")
    folder = tmp_path_factory.mktemp("kit") / "kit"
    status, output = run([ROOT / "scripts/offline-kit", folder], ROOT, 600)
    if status != 0 and "check the network" in output:
        pytest.skip("a kit is made of what the network has, and there is none")
    assert status == 0, output
    return folder


@pytest.fixture
def clone(tmp_path):
    """The tree as it is, without what was built in it."""
    listed = subprocess.run(["git", "ls-files", "-coz", "--exclude-standard"], cwd=ROOT, check=True, capture_output=True).stdout
    for name in listed.decode().split("\0"):
        if name and (ROOT / name).is_file():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def test_the_kit_is_small_and_has_2000_images_of_each_split(kit):
    assert sum(path.stat().st_size for path in kit.rglob("*") if path.is_file()) <= 40 << 20
    for part in ("train", "t10k"):
        images = gzip.decompress((kit / f"fashion-mnist/{part}-images-idx3-ubyte.gz").read_bytes())
        assert struct.unpack_from(">3I", images, 4) == (2000, 28, 28) and len(images) == 16 + 2000 * 28 * 28


def test_no_link_in_the_kit_leads_out_of_it(kit):
    with tarfile.open(kit / "system.tar.gz") as archive:
        names = set(archive.getnames())
        for member in archive.getmembers():
            if member.issym():
                target = os.path.normpath(os.path.join(os.path.dirname(member.name), member.linkname))
                assert not member.linkname.startswith("/") and target in names, (member.name, member.linkname)


def test_sets_up_and_builds_without_a_network(kit, clone):
    """Of the build only what does not wait for the library: a fuzzer's driver, and headers of the kit's packages."""
    steps = ("set_up tests \"${packages_build[@]}\"; configure release; build release planted_fuzz; ensure_data ''; "
             "echo \"data in $data\"; python -m pytest --version")
    status, output = run([*OFFLINE, "bash", "-c", f". scripts/lib/setup.sh; start_log; {steps}"], clone, 900, program="test",
                         LOCKSTEP_OFFLINE_KIT=str(kit), LOCKSTEP_TORCH=given_torch(), LOCKSTEP_DATASETS="/nonesuch")
    assert status == 0, output
    assert f"data in {kit}/fashion-mnist" in output and "pytest " in output, output
    assert (clone / "build/release/bin/planted_fuzz").exists()
    cache = (clone / "build/release/CMakeCache.txt").read_text()
    for name in ("GTest_DIR", "nlohmann_json_DIR", "CLI11_DIR", "LOCKSTEP_XXHASH_LIBRARY", "LOCKSTEP_ISAL_LIBRARY",
                 "LOCKSTEP_UCX_INCLUDE_DIR"):
        found = next(line.split("=", 1)[1] for line in cache.splitlines() if line.startswith(f"{name}:"))
        assert found.startswith(f"{clone}/build/offline-kit/"), (name, found)


@pytest.mark.long
def test_tests_run_without_a_network(kit, clone):
    status, output = run([*OFFLINE, "scripts/test", "--only", "base"], clone, 3600, LOCKSTEP_OFFLINE_KIT=str(kit),
                         LOCKSTEP_TORCH=given_torch())
    assert status == 0 and " 0 failed" in output, output[-5000:]
