"""Strangers at the ports of a job over hosts: random bytes, connections that say nothing, and beginnings of what is right.

What a stranger can do who goes on in the protocol of UCX or of the store says docs/security.md: neither asks who connects.
"""

import contextlib
import random
import re
import socket
import struct

import pytest
import support
from hosts import PretendedHosts

# What comes first on a connection to UCX (src/uct/tcp/tcp.h: UCT_TCP_MAGIC_NUMBER), then a request to connect: a header (the
# number of the message, its length), the event, flags, the address of the peer, and the number of the connection.
UCX_MAGIC = struct.pack("<Q", 0xCAFEBABE12345678)
UCX_REQUEST = 32
# What comes first on a connection to the store (TCPStoreBackend.hpp: QueryType::VALIDATE, validationMagicNumber).
STORE_MAGIC = struct.pack("<BI", 0, 0x3C85F7CE)
STORE_QUERIES = 20
LENGTHS = (0, 1, 1 << 20, (1 << 31) - 1, (1 << 40) + 1, (1 << 63) - 1, (1 << 64) - 1)
OPEN_CONNECTIONS = 40  # at each port, and each round
SECONDS = 10  # for a connection


def ucx_request(generator):
    address = socket.inet_aton("192.0.2.1")  # no host has this one (RFC 5737)
    peer = struct.pack("<H", socket.AF_INET) + struct.pack("!H", generator.randrange(1, 1 << 16)) + address + bytes(8)
    request = struct.pack("<IBQ", 1, 0, generator.randrange(8)) + peer
    return struct.pack("<BI", UCX_REQUEST, len(request)) + request


def noise(generator):
    return generator.randbytes(generator.choice([1, 5, 7, 8, 9, 64, 1000, 70_000]))


def beginning(generator):
    """Of what UCX wants to hear first, and then something else."""
    part = UCX_MAGIC[: generator.randrange(1, len(UCX_MAGIC))]
    return part + bytes([UCX_MAGIC[len(part)] ^ generator.randrange(1, 256)]) + noise(generator)


def half(generator):
    """A good beginning, and then nothing."""
    request = UCX_MAGIC + ucx_request(generator)
    return request[: generator.randrange(len(request) + 1)]


def half_of_store(generator):
    return STORE_MAGIC[: generator.randrange(len(STORE_MAGIC) + 1)]


def store_noise(generator):
    """Queries that there are and that there are not, with lengths of all sizes."""
    return STORE_MAGIC + bytes([generator.randrange(1, STORE_QUERIES)]) + struct.pack("<Q", generator.choice(LENGTHS)) + noise(
        generator)  # fmt: skip


AT_STORE = (noise, beginning, half_of_store, store_noise)
AT_WIRE = (noise, beginning, half, store_noise)


class Strangers:
    """Their connections. Those that stay open are closed in the end."""

    def __init__(self, seed):
        self.generator = random.Random(seed)
        self.open = contextlib.ExitStack()

    def come(self, addresses, forms, rounds):
        for number in range(rounds):
            for address in addresses:
                self._speak(address, forms[number % len(forms)](self.generator))
        for address in addresses:
            for _ in range(OPEN_CONNECTIONS):
                self._connect(address)

    def _connect(self, address):
        return self.open.enter_context(socket.create_connection(address, timeout=SECONDS))

    def _speak(self, address, said):
        stranger = self._connect(address)
        with contextlib.suppress(ConnectionError):  # the other end may close it in the midst
            stranger.sendall(said)
        how = self.generator.randrange(4)
        if how == 0:
            return  # it stays
        if how == 1:
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset in place of an end
        if how == 2:
            with contextlib.suppress(OSError):
                stranger.shutdown(socket.SHUT_WR)
            return
        stranger.close()


@pytest.fixture
def strangers(request):
    seed = request.param
    print("seed", seed)
    made = Strangers(seed)
    with made.open:
        yield made


SEEDS = [1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 12))]


def start(programs, net, layout, *options):
    children = programs.start_on(net, layout, "meeting_driver", *options)
    try:
        children[0].wait_for("has the sum")
    except AssertionError as error:
        if "needs UCX" not in str(error):
            raise
        pytest.skip("ranks on several hosts need UCX")
    return children


def complaints(stderr):
    """What was said, but for what torch's store says of a query that it does not understand, with its stack."""
    of_store = r"\[W.*\[c10d\] .*|Exception raised from .*|frame #\d+: .*|\s*"
    return [line for line in stderr.splitlines() if not re.fullmatch(of_store, line)]


@pytest.mark.parametrize("strangers", SEEDS, indirect=True)
def test_a_running_job_is_unharmed(programs, strangers, request):
    rounds = 150 if request.node.get_closest_marker("long") else 60
    with PretendedHosts(2) as net:
        children = start(programs, net, [2, 2], "--until-end")
        for child in children:
            child.wait_for(r"of 4 \(pid \d+\) has the sum 6")
        by_rank = [support.listening_sockets(child.pid) for child in children]
        store = {address for address in by_rank[0] if address[1] == master_port(children[0].pid)}
        wires = set().union(*by_rank) - store
        assert len(store) == 1 and len(wires) == 4, by_rank
        strangers.come(sorted(store), AT_STORE, rounds)
        strangers.come(sorted(wires), AT_WIRE, rounds)
        for child in children:
            result = child.finish()
            assert result.status == 0, result.text
            assert "all sums were right" in result.stdout, result.text
            assert complaints(result.stderr) == [], result.text


@pytest.mark.parametrize("strangers", SEEDS, indirect=True)
def test_ranks_meet_at_a_store_that_strangers_have_found(programs, strangers):
    port = support.free_port()
    place = {"WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    first = programs.start("meeting_driver", "--timeout", support.HANG, RANK=0, **place, LOCKSTEP_LOG="info")
    first.wait_for("store listens", "stderr")
    strangers.come([("127.0.0.1", port)], AT_STORE, 60)
    for child in (programs.start("meeting_driver", RANK=1, **place), first):
        result = child.finish()
        assert result.status == 0 and "has the sum 1" in result.stdout, result.text


def master_port(pid):
    with open(f"/proc/{pid}/environ") as environment:
        return int(re.search(r"(?:^|\0)MASTER_PORT=(\d+)", environment.read())[1])
