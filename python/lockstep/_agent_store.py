"""Lets rank 0 serve the store where a program sets MASTER_ADDR or MASTER_PORT itself, as most tutorials do.

Under a launcher torch makes every rank a client of the launcher's store, whatever the address (TORCHELASTIC_USE_AGENT_STORE).
At an address that the program chose nothing listens, and all ranks would wait there for the whole timeout. `lockstep run`
says in LOCKSTEP_AGENT_STORE, "HOST:PORT/RUN_ID", where its store is; rank 0 serves one at any other port.
"""

import importlib
import os

from torch.distributed import TCPStore

rendezvous = importlib.import_module("torch.distributed.rendezvous")  # torch.distributed.rendezvous is its function
_create_store = rendezvous._create_c10d_store


def _agent_host(host, port):
    """The host at which ranks reach the launcher's store; None where rank 0 is to serve one.

    See look_for_agent in lockstep/rendezvous/launch_environment.cc. Here the launcher's port is always the launcher's store,
    whatever the program calls the host: torch's own server listens on all interfaces, so that rank 0 can't serve there.
    """
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    store = os.environ.get("LOCKSTEP_AGENT_STORE", "")
    if not store.endswith(f"/{run_id}"):  # another launcher's
        return host
    place = f":{port}/{run_id}"
    return store.removesuffix(place) if store.endswith(place) else None


def _create_store_where_it_is_served(hostname, port, rank, world_size, timeout, use_libuv=True):
    host = _agent_host(hostname, port) if rendezvous._torchelastic_use_agent_store() else hostname
    if host is not None:
        return _create_store(host, port, rank, world_size, timeout, use_libuv)
    return TCPStore(host_name=hostname, port=port, world_size=world_size, is_master=rank == 0, timeout=timeout,
                    multi_tenant=True, use_libuv=use_libuv)


def install():
    """From now on torch.distributed's env:// and tcp:// do so. May be called again."""
    rendezvous._create_c10d_store = _create_store_where_it_is_served
