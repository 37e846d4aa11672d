"""Times what the wire itself gives: each rank sends plain bytes to the next one over TCP and receives as many, at once.

Started by the suite `hosts`, one rank on each host. The command is `exchange BYTES`, with the number that each rank sends.
LOCKSTEP_BENCH_ADDRESS is the rank's own; all meet at rank 0 (MASTER_ADDR, MASTER_PORT).
"""

import json
import os
import socket
import threading
import time

import command_loop

START_SECONDS = 60


class Meeting:
    """A connection from each rank to rank 0."""

    def __init__(self, rank, size):
        self.rank, self.size = rank, size
        place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        if rank == 0:
            with listen(*place) as server:
                connections = [server.accept()[0] for _ in range(size - 1)]
        else:
            connections = [connect(place)]
        self.files = [connection.makefile("rw") for connection in connections]

    def all_gather(self, value):
        if self.rank > 0:
            self.tell([self.rank, value])
            return json.loads(self.files[0].readline())
        values = dict(json.loads(file.readline()) for file in self.files) | {0: value}
        answer = [values[rank] for rank in range(self.size)]
        self.tell(answer)
        return answer

    def tell(self, value):
        for file in self.files:
            file.write(json.dumps(value) + "\n")
            file.flush()

    def barrier(self):
        self.all_gather(None)


class Ring:
    """A connection to the next rank and one from the rank before."""

    def __init__(self, meeting):
        self.meeting = meeting
        with listen(os.environ["LOCKSTEP_BENCH_ADDRESS"], 0) as server:
            places = meeting.all_gather(server.getsockname()[:2])
            self.to_next = connect(tuple(places[(meeting.rank + 1) % meeting.size]))
            self.from_last, _ = server.accept()
        self.buffer = memoryview(bytearray(1 << 20))
        self.last_byte = 0

    def measure(self, operation, argument, iterations, warmup):
        if operation != "exchange":
            raise ValueError(f"there is no operation '{operation}'")
        data = memoryview(bytearray(int(argument)))

        def prepare(iteration):
            data[:] = bytes([iteration % 256]) * len(data)

        def check(iteration):
            if self.last_byte != iteration % 256:
                raise AssertionError(f"received {self.last_byte} instead of {iteration % 256}")

        return command_loop.timed(iterations, warmup, len(data), prepare, lambda: self.exchange(data), check,
                                  self.meeting.barrier)

    def exchange(self, data):
        sender = threading.Thread(target=self.to_next.sendall, args=(data,))
        sender.start()
        left = len(data)
        while left > 0:
            received = self.from_last.recv_into(self.buffer, min(left, len(self.buffer)))
            if received == 0:
                raise ConnectionError("the rank before has ended")
            left -= received
            self.last_byte = self.buffer[received - 1]
        sender.join()


def listen(address, port):
    return socket.create_server((address, port), family=socket.getaddrinfo(address, port)[0][0])


def connect(place):
    """The other side may not listen yet."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            return socket.create_connection(place)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


if __name__ == "__main__":
    RANK = int(os.environ["RANK"])
    command_loop.serve_rank(RANK, Ring(Meeting(RANK, int(os.environ["WORLD_SIZE"]))).measure)
