"""Makes the calls of gloo_parity_table.py with Gloo.

python gloo_parity_peer.py JOBS OUTPUT WORLD_SIZE; rank r's outcomes go to OUTPUT.r: {"blob": its memory after all
cases, "errors": [text or ""], "returned": [numbers]}.
"""

import datetime
import os
import socket
import sys
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from gloo_parity_cases import view

ATTEMPTS = 10


def reduce_op(case):
    if case["reduce"] == "PREMUL_SUM":
        return dist._make_nccl_premul_sum(case["factor"])
    return getattr(dist.ReduceOp, case["reduce"])


def run_steps(steps, tensors, group):
    """send, recv, isend, irecv in order, then waits for all."""
    returned, works = [], []
    for step in steps:
        kind, peer, tag = step["kind"], step["peer"], step["tag"]
        target = tensors[step["tensor"]]
        peer = None if peer < 0 else peer
        if kind == "send":
            dist.send(target, peer, group, tag)
        elif kind == "recv":
            returned.append(dist.recv(target, peer, group, tag))
        elif kind == "isend":
            works.append(dist.isend(target, peer, group, tag))
        else:
            work = dist.irecv(target, peer, group, tag)
            if step.get("wait"):
                work.wait()
                returned.append(work.source_rank() if peer is None else peer)
            else:
                works.append(work)
    for work in works:
        work.wait()
    return returned


def call(case, rank, inputs, outputs, group):
    """Makes the case's call on this rank; returns what it returned."""
    mine, op, reduce = case["ranks"][rank], case["op"], reduce_op(case)
    if op == "broadcast":
        dist.broadcast(inputs[0], mine["root"], group)
    elif op == "all_reduce":
        dist.all_reduce(inputs[0], reduce, group)
    elif op == "all_reduce_coalesced":
        dist.all_reduce_coalesced(inputs, reduce, group)
    elif op == "reduce":
        dist.reduce(inputs[0], mine["root"], reduce, group)
    elif op == "all_gather":
        dist.all_gather(outputs, inputs[0], group)
    elif op == "all_gather_into_tensor":
        dist.all_gather_into_tensor(outputs[0], inputs[0], group)
    elif op == "all_gather_coalesced":
        count = len(inputs)
        dist.all_gather_coalesced([outputs[i : i + count] for i in range(0, len(outputs), count)], inputs, group)
    elif op == "all_gather_into_tensor_coalesced":
        group.allgather_into_tensor_coalesced(outputs, inputs).wait()
    elif op == "gather":
        dist.gather(inputs[0], outputs or None, mine["root"], group)
    elif op == "scatter":
        dist.scatter(outputs[0], inputs or None, mine["root"], group)
    elif op == "reduce_scatter":
        dist.reduce_scatter(outputs[0], inputs, reduce, group)
    elif op == "reduce_scatter_tensor":
        dist.reduce_scatter_tensor(outputs[0], inputs[0], reduce, group)
    elif op == "reduce_scatter_tensor_coalesced":
        options = dist.distributed_c10d.ReduceScatterOptions()
        options.reduceOp = reduce
        group.reduce_scatter_tensor_coalesced(outputs, inputs, options).wait()
    elif op == "all_to_all":
        dist.all_to_all(outputs, inputs, group)
    elif op == "all_to_all_single":
        receive, send = mine["output_splits"] or None, mine["input_splits"] or None
        dist.all_to_all_single(outputs[0], inputs[0], receive, send, group)
    elif op == "p2p":
        return run_steps(mine["steps"], inputs + outputs, group)
    elif op == "sparse_all_reduce":
        sparse = torch.sparse_coo_tensor(inputs[0], inputs[1], size=outputs[0].shape)
        dist.all_reduce(sparse, reduce, group)
        outputs[0].copy_(sparse.to_dense())
    elif op == "barrier":
        dist.barrier(group)
    elif op == "monitored_barrier":
        dist.monitored_barrier(group, datetime.timedelta(milliseconds=case["gloo_timeout_ms"]), mine["wait_all_ranks"])
    else:
        raise AssertionError(op)
    return []


def outcome(case, rank, blob, group):
    """(what the call raised or "", what it returned)"""
    mine = case["ranks"][rank]
    if mine.get("absent"):
        return "", []
    inputs = [view(blob, spec) for spec in mine["inputs"]]
    outputs = [view(blob, spec) for spec in mine["outputs"]]
    try:
        return "", call(case, rank, inputs, outputs, group)
    except Exception as error:  # noqa: BLE001: which one is the outcome
        return f"{type(error).__name__}: {error}", []


class Groups:
    """A group for each case: the last one as long as nothing failed in it."""

    def __init__(self, store, rank, world_size):
        self.store, self.rank, self.world_size = store, rank, world_size
        self.group, self.good, self.made = None, False, 0

    def next(self, case):
        if not self.good or may_fail(case):
            self.group = self.make(datetime.timedelta(milliseconds=case["gloo_timeout_ms"]))
        return self.group

    def make(self, timeout):
        """A new group. Making it falls under its timeout, too, which may be too short for it on a busy machine: then once
        more, on all ranks."""
        for attempt in range(ATTEMPTS):
            self.made += 1
            try:
                group = dist.new_group(timeout=timeout, backend="gloo")
            except RuntimeError as error:
                group, reason = None, error
            if self.all_say(f"made/{self.made}", group is not None):
                return group
        raise RuntimeError(f"no group in {ATTEMPTS} attempts") from (reason if group is None else None)

    def done(self, case, number, failed):
        """Meets the others; remembers whether all succeeded."""
        self.good = self.all_say(f"done/{number}", not failed) and not may_fail(case)

    def all_say(self, what, mine):
        """Whether `mine` is true on all ranks."""
        self.store.set(f"{what}/{self.rank}", str(mine))
        return all([self.store.get(f"{what}/{rank}") == b"True" for rank in range(self.world_size)])


def may_fail(case):
    return case["misuse"] or case["gloo_timeout_ms"] != case["timeout_ms"]


def work(rank, world_size, port, jobs_path, output):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=datetime.timedelta(seconds=60))
    dist.init_process_group("gloo", store=dist.PrefixStore("groups", store), rank=rank, world_size=world_size)
    jobs = torch.load(jobs_path)
    blob = jobs["blobs"][rank]
    groups = Groups(dist.PrefixStore("meetings", store), rank, world_size)
    errors, returned = [], []
    for number, case in enumerate(jobs["cases"]):
        if "gloo" in case["leave_out"]:
            errors.append("left out")
            returned.append([])
            continue
        error, numbers = outcome(case, rank, blob, groups.next(case))
        errors.append(error)
        returned.append(numbers)
        groups.done(case, number, bool(error))
    torch.save({"blob": blob, "errors": errors, "returned": returned}, f"{output}.{rank}")
    # Not destroy_process_group() and a return: now and then Gloo's threads abort the process on its way out.
    dist.barrier()
    os._exit(0)


def main(jobs_path, output, world_size):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        store = dist.TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        mp.spawn(work, (world_size, port, jobs_path, output), nprocs=world_size)
        del store


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
