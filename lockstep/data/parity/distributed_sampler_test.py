"""Samplers and loader against PyTorch's own, over random configurations: the same indices, in the same order."""

import random
import warnings

import pytest
import torch
import torch.utils.data

CONFIGURATIONS = 400


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


def test_distributed_sampler_gives_pythons_indices(ask_driver):
    rng = random.Random(20240917)
    configurations = [random_configuration(rng) for _ in range(CONFIGURATIONS)]
    lines = ["distributed " + " ".join(str(int(value)) for value in c) for c in configurations]
    for configuration, answer in zip(configurations, ask_driver("data_sampler_driver", lines), strict=True):
        assert not answer.startswith("error"), (configuration, answer)
        assert [int(word) for word in answer.split()] == python_indices(*configuration), configuration


def test_ranks_share_the_counter_sample(ask_driver):
    """Two ranks, no shuffle: even and odd numbers."""
    got = ask_driver("data_sampler_driver", ["distributed 6 2 0 0 0 0 0", "distributed 6 2 1 0 0 0 0"])
    assert [line.split() for line in got] == [["0", "2", "4"], ["1", "3", "5"]]


@pytest.mark.parametrize("num_replicas, rank", [(4, 4), (4, -1), (1, 7)])
def test_a_rank_outside_is_refused_in_pythons_words(ask_driver, num_replicas, rank):
    with pytest.raises(ValueError) as python:
        python_indices(10, num_replicas, rank, True, 0, False, 0)
    (answer,) = ask_driver("data_sampler_driver", [f"distributed 10 {num_replicas} {rank} 1 0 0 0"])
    assert answer == f"error: {python.value}"


def python_batches(size, batch_size, shuffle, seed, drop_last, epochs, manual_seed, **options):
    """The loader's batches per epoch, and what the default generator gives afterwards."""
    torch.manual_seed(manual_seed)
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    loader = torch.utils.data.DataLoader(
        range(size), batch_size, shuffle=shuffle, drop_last=drop_last, generator=generator, collate_fn=list,
        **options
    )
    batches = [list(loader) for _ in range(epochs)]
    return batches, torch.empty((), dtype=torch.int64).random_().item()


def test_data_loader_gives_pythons_order_and_leaves_the_generators_alike(ask_driver):
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
        workers = rng.choice([0, 1, 3])
        lines.append(
            f"loader {size} {batch_size} {int(shuffle)} {seed_word} {int(drop_last)} {workers} 0 {epochs} {manual_seed}"
        )
    # Of persistent workers Python draws the seed once.
    lines += ["loader 50 4 1 none 0 2 1 3 5", "loader 50 4 1 8 0 2 1 3 5"]
    *got, persistent, seeded = ask_driver("data_sampler_driver", lines)
    for line, configuration, answer in zip(lines, configurations, got):
        assert parse_batches(answer) == python_batches(*configuration), line
    options = {"num_workers": 1, "persistent_workers": True}
    assert parse_batches(persistent) == python_batches(50, 4, True, None, False, 3, 5, **options)
    assert parse_batches(seeded) == python_batches(50, 4, True, 8, False, 3, 5, **options)


def parse_batches(answer):
    """As python_batches() answers."""
    assert not answer.startswith("error"), answer
    *epochs, after = answer.split("|")
    return [[[int(word) for word in batch.split()] for batch in epoch.split(",")[:-1]] for epoch in epochs], int(after)


def generator_of(seed):
    return None if seed is None else torch.Generator().manual_seed(seed)


def word(value):
    return "none" if value is None else str(int(value) if isinstance(value, bool) else value)


def outcome(make):
    """Two epochs of the sampler that make() gives, or the error's message."""
    try:
        sampler = make()
        return [list(sampler), list(sampler)]
    except ValueError as error:
        return f"error: {error}"


def python_random(size, replacement, num_samples, seed):
    return torch.utils.data.RandomSampler(range(size), replacement, num_samples, generator_of(seed))


def python_subset(size, seed):
    return torch.utils.data.SubsetRandomSampler([3 + 7 * i for i in range(size)], generator_of(seed))


def python_weighted(size, num_samples, replacement, seed):
    weights = [i % 3 for i in range(size)]
    return torch.utils.data.WeightedRandomSampler(weights, num_samples, replacement, generator_of(seed))


def python_batch(size, batch_size, drop_last, seed):
    order = torch.utils.data.RandomSampler(range(size), generator=generator_of(seed))
    return torch.utils.data.BatchSampler(order, batch_size, drop_last)


def parse_epochs(answer):
    epochs = [epoch.strip() for epoch in answer.split("|")[:-1]]
    if "," in answer:
        return [[[int(n) for n in batch.split()] for batch in epoch.split(",")[:-1]] for epoch in epochs]
    return [[int(n) for n in epoch.split()] for epoch in epochs]


def test_samplers_give_pythons_indices(ask_driver):
    rng = random.Random(99)
    cases = []
    for _ in range(60):
        size, seed = rng.choice([1, 2, 31, 32, 33, 100, 5000]), rng.choice([None, 0, 7, 2**40 + 1])
        num_samples = rng.choice([None, 1, 32, 33, 100, 2 * size, 3 * size + 1])
        cases.append((python_random, "random", (size, rng.random() < 0.5, num_samples, seed)))
        cases.append((python_subset, "subset", (rng.choice([0, size]), seed)))
        replacement = rng.random() < 0.5
        drawn = rng.randrange(1, 200) if replacement else rng.randrange(1, max(2, size // 2))
        cases.append((python_weighted, "weighted", (max(size, 3), drawn, replacement, seed)))
    cases.append((python_random, "random", (10, False, 0, None)))
    cases.append((python_random, "random", (10, True, -3, None)))
    cases.append((python_weighted, "weighted", (10, 0, True, None)))
    lines = [" ".join([kind, *map(word, arguments), "17"]) for _, kind, arguments in cases]
    batches = [(rng.choice([1, 10, 64]), rng.choice([1, 3, 10, 64]), rng.random() < 0.5, 5) for _ in range(20)]
    lines += ["batch " + " ".join(map(word, arguments)) for arguments in batches]
    got = ask_driver("data_sampler_driver", lines)
    for (make, _, arguments), line, answer in zip(cases, lines, got):
        torch.manual_seed(17)
        expected = outcome(lambda: make(*arguments))
        assert (answer if answer.startswith("error") else parse_epochs(answer)) == expected, line
    for arguments, answer in zip(batches, got[len(cases):], strict=True):
        expected = outcome(lambda: python_batch(*arguments))
        assert parse_epochs(answer) == expected, arguments


def test_random_split_gives_pythons_parts(ask_driver):
    fractions = [[0.5, 0.5], [0.3, 0.3, 0.4], [0.1] * 10, [1.0], [0.999, 0.001], [0.7, 0.2, 0.1], [0.25, 0.75, 0.0]]
    cases = [(size, lengths, seed) for size in (0, 1, 9, 10, 101) for lengths in fractions for seed in (None, 3)]
    cases += [(10, [3, 7], None), (10, [10], 5), (10, [0, 10, 0], 5), (30, [10, 11, 9], 1), (9, [1], 1), (9, [0, 1], 1)]
    lines = [f"split {size} {word(seed)} 23 " + " ".join(map(str, lengths)) for size, lengths, seed in cases]
    lines += ["split 10 none 23 3 8", "split 10 none 23 1.5 -0.5"]
    *got, wrong_sum, wrong_fraction = ask_driver("data_sampler_driver", lines)
    for (size, lengths, seed), answer in zip(cases, got, strict=True):
        torch.manual_seed(23)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parts = torch.utils.data.random_split(range(size), lengths, generator_of(seed) or torch.default_generator)
        assert parse_epochs(answer) == [list(part.indices) for part in parts], (size, lengths, seed)
    with pytest.raises(ValueError) as python:
        torch.utils.data.random_split(range(10), [3, 8])
    assert wrong_sum.startswith(f"error: {python.value}")
    with pytest.raises(ValueError) as python:
        torch.utils.data.random_split(range(10), [1.5, -0.5])
    assert wrong_fraction == f"error: {python.value}"
