"""What is compared: a table of jobs, run by parity_peer.py and by ddp_parity_driver.

A job is {"model", "dtype", and what it changes of DEFAULTS}. make_jobs() adds the weights and the data for a
number of ranks; the jobs are then pickled and read by both sides.
"""

import itertools

import torch

import parity_models

STEPS = 20
BATCH = 4  # a rank

DEFAULTS = {
    "options": {},  # of DistributedDataParallel, by its names; parameters by their names, dtypes as text
    "hook": "",  # see HOOKS in parity_peer.py
    "hook_options": {},
    "buffer_hook": "",  # "average before" or "average after" the forward
    "optimizer": "sgd",  # 0.05, momentum 0.9; "sgd plain" without momentum; "adam" 1e-3
    "in_backward": False,  # the optimizer runs in backward
    "accumulate": 1,  # backwards in an iteration, all but the last in no_sync()
    "set_to_none": True,  # of zero_grad()
    "gradient_penalty": False,  # a loss with a gradient in it: backward twice through the model
    "perturb": False,  # the other ranks begin with weights and buffers other than rank 0's
    "branch": "",  # "varies" by step and rank, or a number
    "join": "",  # ranks have unequal numbers of batches; "initial" or "effective" world size divides
    # What the tests know of the result:
    "ranks_agree": True,  # all ranks have the same parameters in the end
    "one_process": False,  # one process with the batches of all gets the same
    "buckets": False,  # PyTorch's buckets are compared, too
    "differs_from": "",  # a job whose result must be another one, with two ranks or more
}

MIXED = {"param_dtype": "bfloat16", "reduce_dtype": "bfloat16", "buffer_dtype": "bfloat16"}
POWER_SGD = {"matrix_approximation_rank": 1, "start_powerSGD_iter": 2, "min_compression_rate": 1}


def table():
    jobs = {}

    def add(name, model, dtype="float64", **changes):
        assert name not in jobs and set(changes) <= set(DEFAULTS), name
        jobs[name] = {"model": model, "dtype": dtype, **DEFAULTS, **changes}

    # Every model in both dtypes. The embedding's momentum would be sparse, which PyTorch's C++ SGD refuses.
    for dtype in ("float32", "float64"):
        same = dtype == "float64"
        add(f"mlp {dtype}", "mlp", dtype, one_process=same)
        add(f"mlp adam {dtype}", "mlp", dtype, optimizer="adam", one_process=same)
        add(f"cnn {dtype}", "cnn", dtype)
        add(f"cnn sync {dtype}", "cnn sync", dtype, one_process=True)
        add(f"transformer {dtype}", "transformer", dtype, one_process=same)
        add(f"sparse {dtype}", "sparse", dtype, optimizer="sgd plain", one_process=same)
        add(f"branches {dtype}", "branches", dtype, branch="varies", options={"find_unused_parameters": True})

    # Not in float32: the keys' bias has no gradient but rounding errors, and Adam makes steps of their signs, which
    # its epsilon hides in float64.
    add("transformer adam", "transformer", optimizer="adam", one_process=True)

    # Buckets.
    small = {"bucket_cap_mb": 0.002}
    add("bucket_cap_mb", "mlp", options=small, one_process=True, buckets=True)
    add("bucket_cap_mb, float32", "mlp", "float32", options=small, buckets=True)
    add("bucket_cap_mb_list", "transformer", options={"bucket_cap_mb_list": [0.001, 0.01, 0.004]}, buckets=True)
    add("bucket_cap_mb, sparse", "sparse", options={"bucket_cap_mb": 0.0005}, optimizer="sgd plain", one_process=True)
    add("gradient_as_bucket_view", "transformer", options={"gradient_as_bucket_view": True, **small}, one_process=True)
    add(
        "gradient_as_bucket_view, zeroed",
        "transformer",
        options={"gradient_as_bucket_view": True, **small},
        set_to_none=False,
        one_process=True,
    )
    add("zeroed", "transformer", options=small, set_to_none=False, one_process=True)

    # Buffers, and the state to begin with.
    add("forward_sync_buffers off", "cnn", options={"forward_sync_buffers": False}, differs_from="cnn float64")
    add("perturbed", "cnn", perturb=True)
    add(
        "perturbed, forward_sync_buffers off",
        "cnn",
        options={"forward_sync_buffers": False},
        perturb=True,
        differs_from="perturbed",
    )
    add(
        "perturbed, broadcast_buffers off",
        "cnn",
        options={"broadcast_buffers": False},
        perturb=True,
        differs_from="perturbed, forward_sync_buffers off",
    )
    add("init_sync off", "cnn", options={"init_sync": False})
    add(
        "perturbed, init_sync off",
        "mlp",
        options={"init_sync": False},
        perturb=True,
        ranks_agree=False,
        differs_from="mlp float64",
    )
    add("buffer hook before", "cnn", buffer_hook="average before", differs_from="cnn float64")
    add("buffer hook after", "cnn", buffer_hook="average after", differs_from="cnn float64")

    # Unused parameters, static graphs, gradients within gradients.
    unused = {"find_unused_parameters": True}
    varies = {"branch": "varies"}
    add("unused, small buckets", "branches", **varies, options={**unused, **small})
    add("unused, zeroed", "branches", **varies, options=unused, set_to_none=False, differs_from="branches float64")
    add("unused, view", "branches", **varies, options={**unused, "gradient_as_bucket_view": True})
    add("unused, accumulated", "branches", **varies, options=unused, accumulate=2)
    add("unused, always the same", "branches", branch="1", options=unused, one_process=True)
    add(
        "skip_all_reduce_unused_params",
        "branches",
        branch="1",
        options={**unused, "skip_all_reduce_unused_params": True},
        one_process=True,
    )
    add("unused, adam, float32", "branches", "float32", branch="5", options=unused, optimizer="adam")
    add("unused, not needed", "mlp", options=unused, one_process=True)
    static = {"static_graph": True}
    add("static_graph", "branches", branch="5", options=static, one_process=True)
    add("static_graph, small buckets", "branches", branch="7", options={**static, **small}, one_process=True)
    add("checkpointed", "checkpointed", branch="1", one_process=True)
    add("checkpointed twice", "checkpointed", branch="2", options=static, one_process=True)
    add(
        "checkpointed twice, view",
        "checkpointed",
        branch="2",
        options={**static, "gradient_as_bucket_view": True},
        one_process=True,
    )
    add("gradient penalty", "mlp", gradient_penalty=True, one_process=True, differs_from="mlp float64")

    # What is reduced later, elsewhere, or not at all.
    add(
        "delay_all_reduce_named_params",
        "mlp",
        "float32",  # PyTorch's buffer for them is float32
        options={
            "delay_all_reduce_named_params": ["fc2.weight", "fc3.bias"],
            "param_to_hook_all_reduce": "fc1.weight",
        },
    )
    add(
        "parameters_to_ignore",
        "cnn",
        options={"parameters_to_ignore": ["conv2.weight", "bn1.running_mean"]},
        perturb=True,
        ranks_agree=False,
        differs_from="perturbed",
    )
    add("process_group", "mlp", options={"process_group": "pairs"}, ranks_agree=False)
    add("no_sync", "mlp", accumulate=3, one_process=True, differs_from="mlp float64")
    add("no_sync, cnn", "cnn", accumulate=2, differs_from="cnn float64")
    add("no_sync, zeroed, view", "mlp", accumulate=2, options={"gradient_as_bucket_view": True}, set_to_none=False)
    add("join, initial", "mlp", join="initial", differs_from="mlp float64")
    add("join, effective", "mlp", join="effective", options=small, differs_from="join, initial")
    add("join, cnn", "cnn", join="initial")
    # Without momentum: PyTorch's ranks without inputs add up the others' maps of used parameters from one iteration to
    # the next, so a parameter that no rank used gets a gradient of zeros there, and momentum would move it.
    add("join, unused", "branches", **varies, options=unused, join="effective", optimizer="sgd plain")
    add("join, no_sync", "mlp", join="initial", accumulate=2)

    # Mixed precision.
    add("mixed_precision", "mlp", "float32", options={"mixed_precision": MIXED}, differs_from="mlp float32")
    add("mixed_precision, buffers", "cnn", "float32", options={"mixed_precision": MIXED}, differs_from="cnn float32")
    add(
        "mixed_precision, float16, reduced in float32",
        "mlp",
        "float32",
        options={"mixed_precision": {"param_dtype": "float16", "reduce_dtype": "float32", "buffer_dtype": "float32"}},
        differs_from="mixed_precision",
    )
    add(
        "mixed_precision, reduced in float16",
        "mlp",
        "float32",
        options={"mixed_precision": {"param_dtype": "bfloat16", "reduce_dtype": "float16"}},
        differs_from="mixed_precision",
    )

    # The optimizer in backward.
    add("in backward", "mlp", in_backward=True, one_process=True)
    add("in backward, adam, small buckets", "mlp", in_backward=True, optimizer="adam", options=small, one_process=True)
    add("in backward, view", "mlp", in_backward=True, options={"gradient_as_bucket_view": True}, one_process=True)

    # Hooks. Those that round would let one last bit of a difference become a whole step of rounding. The sums of
    # float64 gradients can differ in the last bit, but the rounding's input is a rank's own gradient, which is
    # bit for bit the same on both sides as long as the weights are.
    add("allreduce hook", "mlp", hook="allreduce", options=small, one_process=True)
    for kind in ("fp16", "bf16"):
        add(f"{kind} hook", "mlp", "float32", hook=kind, differs_from="mlp float32")
        add(f"{kind} wrapper", "mlp", "float32", hook=f"{kind} wrapper", differs_from="mlp float32")
        add(f"{kind} hook, float64", "mlp", hook=kind, differs_from="mlp float64")
    for kind in ("per tensor", "per channel"):
        add(f"int8 {kind}", "mlp", "float32", hook=f"int8 {kind}", differs_from="mlp float32")
        add(f"int8 {kind}, transformer", "transformer", hook=f"int8 {kind}", differs_from="transformer float64")

    def power(name, model="mlp", hook="powersgd", like="mlp float64", dtype="float64", options={}, **changes):
        differs = {"differs_from": like} if like else {}
        add(name, model, dtype, hook=hook, hook_options={**POWER_SGD, **changes}, options=options, **differs)

    power("powersgd")
    power("powersgd, rank 3, small buckets", matrix_approximation_rank=3, options=small, like="powersgd")
    power("powersgd, epsilon, batched shapes", "transformer", like="transformer float64", matrix_approximation_rank=2,
          orthogonalization_epsilon=1e-8, batch_tensors_with_same_shape=True)
    power("powersgd, no warm start", warm_start=False, like="powersgd")
    power("powersgd, no error feedback", use_error_feedback=False, like="powersgd")
    power("powersgd, neither, other seed", use_error_feedback=False, warm_start=False, start_powerSGD_iter=0,
          random_seed=7, like="powersgd")
    power("powersgd, float32", dtype="float32", like="mlp float32")
    power("batched powersgd", hook="batched powersgd", like="powersgd")
    power("batched powersgd, rank 2, small buckets", hook="batched powersgd", matrix_approximation_rank=2,
          options=small, like="batched powersgd")
    power("fp16 wrapper around powersgd", hook="fp16 wrapper powersgd", dtype="float32", like="mlp float32",
          orthogonalization_epsilon=1e-3)

    local = {"start_localSGD_iter": 5, "post_local_gradient_allreduce": True, "period": 4}
    alone = {**local, "post_local_gradient_allreduce": False}
    add("post-local SGD", "mlp", hook="post_local_sgd", hook_options=local, ranks_agree=False)
    add("post-local SGD, alone", "mlp", hook="post_local_sgd", hook_options=alone, ranks_agree=False,
        differs_from="mlp float64")
    add("noop hook", "mlp", hook="noop", ranks_agree=False, differs_from="mlp float64")
    add("own hook", "mlp", hook="doubling", differs_from="mlp float64")
    return jobs


def pair_of(rank, world_size):
    """The ranks of the "pairs" group that this rank is in."""
    first = rank - rank % 2
    return list(range(first, min(first + 2, world_size)))


def branches_of(job, world_size):
    """steps x ranks: what each iteration's forward uses."""
    shape = (STEPS * job["accumulate"], world_size)
    if job["branch"] != "varies":
        return torch.full(shape, int(job["branch"] or 0))
    branches = torch.randint(8, shape, generator=torch.Generator().manual_seed(3))
    branches[4] = 0  # iterations in which no rank takes a branch, or all do
    branches[7] = 7
    branches[9] = torch.arange(world_size)
    return branches


def make_jobs(world_size):
    jobs = table()
    data = {}  # shared by the jobs that can

    def tensors(kind, dtype, batches):
        key = (kind, dtype, batches)
        if key not in data:
            generator = torch.Generator().manual_seed(5)
            count = (batches, world_size * BATCH)
            if kind == "tokens":
                inputs = torch.randint(parity_models.VOCABULARY, (*count, parity_models.TOKENS), generator=generator)
                targets = (inputs * 3 + 1) % parity_models.VOCABULARY
            else:
                inputs = torch.randn(*count, parity_models.FEATURES, dtype=dtype, generator=generator)
                targets = inputs[..., : parity_models.CLASSES].argmax(-1)
            data[key] = (inputs, targets)
        return data[key]

    for name, job in jobs.items():
        dtype = getattr(torch, job["dtype"])
        torch.manual_seed(11)
        job["weights"] = dict(parity_models.MODELS[job["model"]]().to(dtype).state_dict())
        kind = "tokens" if job["model"] in parity_models.TOKEN_MODELS else "images"
        job["inputs"], job["targets"] = tensors(kind, dtype, STEPS * job["accumulate"])
        job["branches"] = branches_of(job, world_size)
        # Rank 0 is neither the first nor the last to run out of data.
        short = [3, 8, 0, 5] if job["join"] else [0]
        job["steps"] = torch.tensor([STEPS - n for n in itertools.islice(itertools.cycle(short), world_size)])
    return jobs
