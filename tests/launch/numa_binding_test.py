"""`lockstep run --numa-binding` with a driver and a kernel that tell of two cards on two nodes."""

import os
import shutil
import subprocess

import pytest

MISUSE = 2
DRIVER = r"""
#include <stdio.h>
#include <stdlib.h>
int cuInit(unsigned flags) { return getenv("FAKE_CUDA_BROKEN") ? 100 : flags; }
int cuDeviceGetCount(int* count) { *count = 2; return 0; }
int cuDeviceGetPCIBusId(char* address, int room, int device) { return snprintf(address, room, "0000:%02X:00.0", 10 + device) < room ? 0 : 1; }
"""
KERNEL = """
set -e
mount -t tmpfs none /sys/bus/pci
mount -t tmpfs none /sys/devices/system/node
for card in 0 1; do
  mkdir -p /sys/bus/pci/devices/0000:0$(echo ab | cut -c $((card + 1))):00.0 /sys/devices/system/node/node$card
  echo $((1 - card)) > /sys/bus/pci/devices/0000:0$(echo ab | cut -c $((card + 1))):00.0/numa_node
done
echo $1 > /sys/devices/system/node/node0/cpulist
echo $2 > /sys/devices/system/node/node1/cpulist
shift 2
exec "$@"
"""


@pytest.fixture
def driver(tmp_path):
    folder = tmp_path / "driver"
    folder.mkdir()
    (folder / "cuda.c").write_text(DRIVER)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", folder / "libcuda.so.1", folder / "cuda.c"], check=True)
    return f"{folder}:{os.environ.get('LD_LIBRARY_PATH', '')}"


@pytest.fixture
def in_its_place():
    """The words of a command with such a kernel, by the cores of its nodes."""
    if subprocess.run(["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/sys/bus/pci"], capture_output=True).returncode:
        pytest.skip("another /sys needs root")
    return lambda *cores: ["unshare", "--mount", "sh", "-c", KERNEL, "sh", *cores]


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_each_process_stays_near_its_card(programs, driver, in_its_place, method):
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("this machine has one core")
    # Those that may start again are forked, however many cores there are.
    run = [programs.find("lockstep"), "run", "-n", 2, "--max-restarts", 1, f"--start-method={method}", "--numa-binding=node"]
    kernel = in_its_place(cores[0], cores[-1])
    done = programs.run(*kernel, *run, programs.find("process_probe"), LD_LIBRARY_PATH=driver)
    if "built without" in done.stderr:
        pytest.skip("built without OpenSSL")
    assert done.status == 0, done.text
    for rank, core in enumerate((cores[-1], cores[0])):
        assert f"[rank {rank}] is on cores {core}\n" in done.stdout, done.text
        assert f"[rank {rank}] {'executed' if method == 'spawn' else 'forked'}\n" in done.stdout, done.text


def test_what_is_missing_is_named(programs, driver, in_its_place):
    run = [programs.find("lockstep"), "run", "--numa-binding", "node"]
    if not shutil.which("nvidia-smi"):
        none = programs.run(*run, "true")
        assert none.status == MISUSE and "NVIDIA's driver library is not here" in none.stderr, none.text
    broken = programs.run(*run, "true", LD_LIBRARY_PATH=driver, FAKE_CUDA_BROKEN=1)
    assert broken.status == MISUSE and "cuInit returns 100" in broken.stderr, broken.text
    many = programs.run(*in_its_place(0, 0), *run, "-n", 3, "true", LD_LIBRARY_PATH=driver)
    assert many.status == MISUSE and "local rank 2 has no card: this host shows 2" in many.stderr, many.text
    elsewhere = programs.run(*in_its_place(0, 5000), *run, "true", LD_LIBRARY_PATH=driver)
    assert elsewhere.status == MISUSE and "NUMA node 1 of card 0 (0000:0a:00.0) has no core that may be used" in elsewhere.stderr, elsewhere.text
