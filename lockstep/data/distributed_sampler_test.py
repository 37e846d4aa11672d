"""Samplers and loader against PyTorch's own, over random configurations: the same indices, in the same order."""

import random
import subprocess

import pytest
import torch
import torch.utils.data

CONFIGURATIONS = 400


def answers(bin_dir, lines):
    """The driver's answer to each line."""
    driver = bin_dir / "data_sampler_driver"
    done = subprocess.run([driver], input="\n".join(lines) + "\n", capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    got = done.stdout.splitlines()
    assert len(got) == len(lines)
    return got


def python_indices(size, num_replicas, rank, shuffle, seed, drop_last, epoch):
    sampler = torch.utils.data.DistributedSampler(
        range(size), num_replicas=num_replicas, rank=rank, shuffle=shuffle, seed=seed, drop_last=drop_last
    )
    sampler.set_epoch(epoch)
    return list(sampler)


def random_configuration(rng):
    num_replicas = rng.choice([1, 2, 3, 4, 7, 8, 16, 64])
    size = rng.choice([0, 1, 2, 5, num_replicas - 1, num_replicas, num_replicas + 1, rng.randrange(3000), 60000])
    seed = rng.choice([0, 1, 42, -1, -12345, 2**31, 2**40 + 7, 2**63 - 1, rng.randrange(2**32)])
    epoch = rng.choice([0, 1, 2, rng.randrange(1000)])
    return size, num_replicas, rng.randrange(num_replicas), rng.random() < 0.7, seed, rng.random() < 0.5, epoch


def test_distributed_sampler_gives_pythons_indices(bin_dir):
    rng = random.Random(20240917)
    configurations = [random_configuration(rng) for _ in range(CONFIGURATIONS)]
    lines = ["distributed " + " ".join(str(int(value)) for value in c) for c in configurations]
    for configuration, answer in zip(configurations, answers(bin_dir, lines), strict=True):
        assert not answer.startswith("error"), (configuration, answer)
        assert [int(word) for word in answer.split()] == python_indices(*configuration), configuration


def test_ranks_share_the_counter_sample(bin_dir):
    """Two ranks, no shuffle: even and odd numbers."""
    got = answers(bin_dir, ["distributed 6 2 0 0 0 0 0", "distributed 6 2 1 0 0 0 0"])
    assert [line.split() for line in got] == [["0", "2", "4"], ["1", "3", "5"]]


@pytest.mark.parametrize("num_replicas, rank", [(4, 4), (4, -1), (1, 7)])
def test_a_rank_outside_is_refused_in_pythons_words(bin_dir, num_replicas, rank):
    with pytest.raises(ValueError) as python:
        python_indices(10, num_replicas, rank, True, 0, False, 0)
    (answer,) = answers(bin_dir, [f"distributed 10 {num_replicas} {rank} 1 0 0 0"])
    assert answer == f"error: {python.value}"


def python_batches(size, batch_size, shuffle, seed, drop_last, epochs, manual_seed):
    """The loader's batches per epoch, and what the default generator gives afterwards."""
    torch.manual_seed(manual_seed)
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    loader = torch.utils.data.DataLoader(
        range(size), batch_size, shuffle=shuffle, drop_last=drop_last, generator=generator, collate_fn=list
    )
    batches = [list(loader) for _ in range(epochs)]
    return batches, torch.empty((), dtype=torch.int64).random_().item()


def test_data_loader_gives_pythons_order_and_leaves_the_generators_alike(bin_dir):
    rng = random.Random(7)
    configurations = []
    for _ in range(CONFIGURATIONS // 4):
        seed = rng.choice([None, 0, 5, rng.randrange(2**40)])
        configurations.append(
            (rng.randrange(1, 300), rng.choice([1, 3, 64, 500]), rng.random() < 0.7, seed, rng.random() < 0.5, 3)
            + (rng.randrange(1000),)
        )
    lines = []
    for size, batch_size, shuffle, seed, drop_last, epochs, manual_seed in configurations:
        seed_word = "none" if seed is None else seed
        workers = rng.randrange(2)
        lines.append(
            f"loader {size} {batch_size} {int(shuffle)} {seed_word} {int(drop_last)} {workers} {epochs} {manual_seed}"
        )
    for line, configuration, answer in zip(lines, configurations, answers(bin_dir, lines), strict=True):
        assert not answer.startswith("error"), (line, answer)
        *epochs, after = answer.split("|")
        got = [[[int(word) for word in batch.split()] for batch in epoch.split(",")[:-1]] for epoch in epochs]
        assert (got, int(after)) == python_batches(*configuration), line
