"""The stores at which torch.distributed's env://, tcp:// and file:// meet: torch's TCPStore and FileStore, opened otherwise.

- Rank 0 listens at the address that it is given, on loopback for localhost; torch listens on all interfaces.
- Rank 0 serves the store where a program sets MASTER_ADDR or MASTER_PORT itself, as most tutorials do. Under a launcher
  torch makes every rank a client of the launcher's store, whatever the address (TORCHELASTIC_USE_AGENT_STORE): at an address
  that the program chose nothing listens, and all ranks would wait there for the whole timeout. `lockstep run` says in
  LOCKSTEP_AGENT_STORE, "HOST:PORT/RUN_ID", where its store is, and torchrun in the variables with which the process was
  started; rank 0 serves one at any other port.
- The launcher's store outlives the groups of its workers. A rank that initialises again finds nothing of its earlier groups
  there, as all ranks then do so: see of_this_meeting().
- What is wrong with the address, the port or the file is an error in the end, also where torch would read for ever.
"""

import importlib
import os
import pathlib
from urllib.parse import urlparse

from torch.distributed import PrefixStore

from lockstep import _C

rendezvous = importlib.import_module("torch.distributed.rendezvous")  # torch.distributed.rendezvous is its function
_torchs_meeting_at_file = rendezvous._file_rendezvous_handler
_meetings_at_agent = 0  # of this process


def _variables_at_start():
    """As the process was started with, whatever it has set since."""
    try:
        entries = pathlib.Path("/proc/self/environ").read_bytes().decode(errors="surrogateescape").split("\0")
    except OSError:
        return {}
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def _agent_place(host, port):
    """(host, port) at which ranks reach the launcher's store; None where rank 0 is to serve one.

    See look_for_agent in lockstep/rendezvous/launch_environment.cc. Here the launcher's port is always the launcher's store,
    whatever the program calls the host.
    """
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    store = os.environ.get("LOCKSTEP_AGENT_STORE", "")
    if not store.endswith(f"/{run_id}"):  # torchrun's
        first = _variables_at_start()
        if first.get("MASTER_PORT", str(port)) != str(port):
            return None
        return first.get("MASTER_ADDR", host), port
    agent_host, _, agent_port = store.removesuffix(f"/{run_id}").rpartition(":")
    if str(port) in (agent_port, os.environ.get("LOCKSTEP_AGENT_PORT")):
        return agent_host, int(agent_port)
    return None


def _create_tcp_store(hostname, port, rank, world_size, timeout, use_libuv=True):
    if not 0 <= port < 2**16:
        raise ValueError(f"port must have value from 0 to 65535 but was {port}.")
    agent = _agent_place(hostname, port) if rendezvous._torchelastic_use_agent_store() else None
    if agent is not None:
        global _meetings_at_agent
        _meetings_at_agent += 1
        return _C.join_tcp_store(*agent, "the launcher's agent", rank, timeout)
    if rank == 0:
        return _C.serve_tcp_store(hostname, port, world_size, use_libuv, timeout)
    return _C.join_tcp_store(hostname, port, "rank 0", rank, timeout)


def of_this_meeting(store):
    """The store of a group with keys that the groups of earlier meetings at the launcher's store did not have. torch itself
    names groups anew after destroy_process_group() as it did before."""
    return PrefixStore(f"lockstep/meeting_{_meetings_at_agent}", store) if _meetings_at_agent > 1 else store


def _meet_at_file(url, timeout=rendezvous.default_pg_timeout, **named):
    path = urlparse(url).path
    query = rendezvous._query_to_dict(urlparse(url).query)
    if not path or "rank" not in query or "world_size" not in query:
        yield from _torchs_meeting_at_file(url, **named)  # says what is missing
    rank, world_size = int(query["rank"]), int(query["world_size"])
    yield _C.open_file_store(path, world_size, timeout), rank, world_size
    raise RuntimeError("Unable to perform rerendezvous using file:// method")


def install():
    """From now on torch.distributed's env://, tcp:// and file:// do so. May be called again."""
    rendezvous._create_c10d_store = _create_tcp_store
    rendezvous._rendezvous_handlers["file"] = _meet_at_file
