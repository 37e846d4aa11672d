"""Says on what the GPU tests ran, in one line for each card and one for the software; the last step of scripts/test --gpu.

Cards and driver are nvidia-smi's, which asks the driver without making a CUDA context; without it, torch's.
"""

import platform
import subprocess

QUERY = ("index", "name", "memory.total", "driver_version")


def cards_of(csv):
    """[(card, driver)] out of nvidia-smi's CSV, a line for each card."""
    cards = []
    for line in csv.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != len(QUERY):
            continue
        index, name, memory, driver = fields
        cards.append((f"card {index}: {name}, {memory}", driver))
    return cards


def ask_nvidia_smi():
    try:
        done = subprocess.run(["nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader"],
                              capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return cards_of(done.stdout) if done.returncode == 0 else []


def ask_torch(torch):
    """The same from torch, which does not know the driver's version."""
    if not torch.cuda.is_available():
        return []
    cards = []
    for index in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(index)
        cards.append((f"card {index}: {card.name}, {card.total_memory // 2**20} MiB", "of unknown version"))
    return cards


def versions(torch, driver):
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.version.cuda and torch.distributed.is_nccl_available() else "none"
    return (f"ran on: driver {driver}, torch {torch.__version__}, CUDA {torch.version.cuda or 'none'}, NCCL {nccl}, "
            f"Linux {platform.release()}")


def describe(cards, torch):
    """The lines to quote in docs/gpu.md."""
    if not cards:
        return ["ran on: no card that nvidia-smi or torch can see"]
    return [*(f"ran on: {card}" for card, _ in cards), versions(torch, cards[0][1])]


def main():
    import torch

    print("\n".join(describe(ask_nvidia_smi() or ask_torch(torch), torch)))


if __name__ == "__main__":
    main()
