"""--numa-binding against torchrun's: the same cores for each process, on hosts of all shapes."""

import builtins
import os
import random
import types

import pytest

binding = pytest.importorskip("torch.numa.binding", reason="compares with torchrun's --numa-binding")
MODES = ["node", "socket", "exclusive", "core-complex"]


class Host:
    """A random host: sockets of NUMA nodes of cache complexes of physical cores, and cards; written as sysfs(5) tells of it."""

    def __init__(self, folder, seed):
        self.folder, draw = folder, random.Random(seed)
        sockets, nodes = draw.randint(1, 2), draw.randint(1, 3)
        complexes, physical, threads = draw.randint(1, 3), draw.randint(1, 4), draw.randint(1, 2)
        total = sockets * nodes * complexes * physical
        numbers = list(range(total))
        if draw.random() < 0.3:
            draw.shuffle(numbers)  # as some firmware numbers them
        members = {}  # of each node
        first = 0
        for node in range(sockets * nodes):
            for _ in range(complexes):
                cores = numbers[first : first + physical]
                first += physical
                sharing = [core + total * thread for core in cores for thread in range(threads)]
                for core in cores:
                    siblings = [core + total * thread for thread in range(threads)]
                    for number in siblings:
                        self.write_core(number, node // nodes, siblings, sharing)
                members.setdefault(node, []).extend(sharing)
        for node, cores in members.items():
            self.write(f"devices/system/node/node{node}/cpulist", as_list(cores))
        self.write("devices/system/node/possible", as_list(members))
        self.cards = []
        for card in range(draw.randint(1, 6)):
            self.cards.append((card // 2, 16 * card + 3, draw.randint(0, 31)))
            node = draw.randrange(sockets * nodes)
            self.write(f"bus/pci/devices/{self.address(card)}/numa_node", str(-1 if sockets * nodes == 1 else node))
        every = [core for cores in members.values() for core in cores]
        # torch asks each node for a core that may be used, also for the socket of another one.
        kept = {draw.choice(cores) for cores in members.values()}
        self.allowed = kept | {core for core in every if draw.random() < draw.choice([0.6, 1])}

    def write(self, path, text):
        file = self.folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")

    def write_core(self, number, socket, siblings, sharing):
        folder = f"devices/system/cpu/cpu{number}"
        self.write(f"{folder}/topology/physical_package_id", str(socket))
        self.write(f"{folder}/topology/thread_siblings_list", as_list(siblings))
        for index, (level, kind, cores) in enumerate(
            [(1, "Data", siblings), (1, "Instruction", siblings), (2, "Unified", siblings), (3, "Unified", sharing), (4, "Instruction", [number])]
        ):
            for name, text in (("level", str(level)), ("type", kind), ("shared_cpu_list", as_list(cores))):
                self.write(f"{folder}/cache/index{index}/{name}", text)

    def address(self, card):
        return "{:04x}:{:02x}:{:02x}.0".format(*self.cards[card])

    def torchs_cores(self, monkeypatch, mode, card):
        def here(path):
            return f"{self.folder}{path[4:]}" if isinstance(path, str) and path.startswith("/sys/") else path

        def properties(index):
            return types.SimpleNamespace(**dict(zip(("pci_domain_id", "pci_bus_id", "pci_device_id"), self.cards[index])))

        with monkeypatch.context() as patch:
            patch.setattr(binding, "open", lambda path, *rest: builtins.open(here(path), *rest), raising=False)
            listdir = os.listdir
            patch.setattr(binding.os, "listdir", lambda path: listdir(here(path)))
            patch.setattr(binding.os, "sched_getaffinity", lambda _: set(self.allowed))
            patch.setattr(binding.torch.cuda, "device_count", lambda: len(self.cards))
            patch.setattr(binding.torch.cuda, "get_device_properties", properties)
            options = binding.NumaOptions(binding.AffinityMode(mode))
            try:
                cores = binding._get_logical_cpus_to_bind_to(gpu_index=card, numa_options=options)
            except RuntimeError as error:
                assert "physical cores" in str(error)
                return "refused"
            return binding._get_ranges_str_from_ints(cores)


def as_list(cores):
    return binding._get_ranges_str_from_ints(cores)


@pytest.mark.parametrize("seed", range(8))
def test_cores_are_those_of_torchrun(run_driver, tmp_path, monkeypatch, seed):
    for host in (Host(tmp_path / str(number), 100 * seed + number) for number in range(5)):
        cards = [host.address(card) for card in range(len(host.cards))]
        done = run_driver("numa_binding_driver", host.folder, as_list(host.allowed), *cards)
        for card, line in enumerate(done.stdout.splitlines()):
            expected = [host.torchs_cores(monkeypatch, mode, card) for mode in MODES]
            assert line.split() == expected, (card, done.stderr)


def test_what_can_not_be_bound_is_refused_with_the_reason(run_driver, tmp_path):
    host = Host(tmp_path, 3)
    none = run_driver("numa_binding_driver", tmp_path, "4000", host.address(0))
    assert none.stdout.split() == ["refused"] * 4
    assert f"of card 0 ({host.address(0)}) has no core that may be used (4000 may" in none.stderr
    unknown = run_driver("numa_binding_driver", tmp_path, "0", "0000:ff:00.0")
    assert "/bus/pci/devices/0000:ff:00.0/numa_node near which cores card 0 is" in unknown.stderr
