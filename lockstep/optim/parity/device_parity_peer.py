"""The PyTorch side of device_parity_test.py: the same network, weights, batches and optimizer, with PyTorch's DDP.

usage: device_parity_peer.py JOB OUTPUT WORLD_SIZE DEVICE BACKEND
"""

import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def work(rank, world_size, meeting, job_path, output, device, backend):
    if device == "cuda":  # of each rank's own
        device = f"cuda:{rank}"
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    dist.init_process_group(backend, init_method=f"file://{meeting}", rank=rank, world_size=world_size)
    job = torch.load(job_path)
    net = torch.nn.Sequential(torch.nn.Linear(6, 64), torch.nn.ReLU(), torch.nn.Linear(64, 3))
    with torch.no_grad():
        for parameter, weight in zip(net.parameters(), job["weights"]):
            parameter.copy_(weight)
    net.to(device)
    model = torch.nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.001)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler(device.partition(":")[0], init_scale=1024, enabled=job["half"])
    share, losses = job["inputs"].size(1) // world_size, []
    for inputs, targets in zip(job["inputs"], job["targets"]):
        x, y = (batch[rank * share:(rank + 1) * share].to(device) for batch in (inputs, targets))
        optimizer.zero_grad()
        with torch.autocast(device.partition(":")[0], dtype=torch.half, enabled=job["half"]):
            loss = torch.nn.functional.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    torch.save({"weights": [p.detach().cpu() for p in net.parameters()], "losses": losses}, f"{output}.{rank}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    job_path, output, world_size, device, backend = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        # Spawned: CUDA does not survive a fork.
        mp.start_processes(work, (int(world_size), f"{folder}/meeting", job_path, output, device, backend),
                           nprocs=int(world_size), start_method="spawn")
