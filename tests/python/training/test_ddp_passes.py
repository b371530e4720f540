# SPDX-License-Identifier: BSD-3-Clause
"""A backward pass of attached DDP: the parameters that it uses, and the ways in which it ends."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import torch_powersgd as tp
from support.ddp import make_compressed, outputs_of, step, train, weights_of
from support.ledger import TOLERANCE, Ledger, residuals_of
from support.on_ranks import on_ranks
from support.states import own_part
from support.synthetic import Synthetic, gradients, mean_gradients
from support.tensors import Tensors, add_to, same

OPTIONS = tp.Options.hook_defaults(start_powerSGD_iter=0, matrix_approximation_rank=2)

# The branches that each rank uses, by pass. A rank zeroes the gradients of those that it will use,
# as optimizers of a GAN or of several tasks do.
BRANCHES = {"a": (20, 30), "b": (25, 40), "bias": (16,)}
USES = [("ab", "ab"), ("b", "b"), ("b", "b"), ("ab", "b"), ("b", "b"), ("a", "ab"), ("b", "b")]
STALE: dict[str, tuple[tp.Options, dict[str, Any]]] = {
    "copies": (OPTIONS, {}),
    "views": (OPTIONS, {"gradient_as_bucket_view": True}),
    "int8": (replace(OPTIONS, wire_dtype="int8"), {}),
    "bfloat16_residual": (replace(OPTIONS, residual_dtype="bfloat16"), {}),
    "no_feedback": (replace(OPTIONS, use_error_feedback=False), {}),
    "not_finite": (OPTIONS, {}),
    "exact_first_steps": (replace(OPTIONS, start_powerSGD_iter=4), {}),
}


@pytest.mark.parametrize("name", STALE)
@on_ranks(2)
def test_an_old_gradient_of_a_parameter_that_no_rank_uses_changes_nothing(
    rank: int, name: str
) -> None:
    # DDP puts it into the bucket and drops the output, so that neither may count.
    options, arguments = STALE[name]
    ddp, compression = make_compressed(BRANCHES, options, find_unused_parameters=True, **arguments)
    weights, ledger = weights_of(ddp), Ledger()
    last: Tensors = {}  # outputs, which ranks add to unless they zero them
    for i, by_rank in enumerate(USES * 2):
        used = {branch for uses in by_rank for branch in uses}
        for branch in by_rank[rank]:
            weights[branch].grad = None if i % 2 else torch.zeros(BRANCHES[branch])
        if name == "not_finite":
            for branch in set(BRANCHES) - used:  # as a scaler leaves them after an overflow
                weights[branch].grad = torch.full(BRANCHES[branch], float("nan"))
                last.pop(branch, None)  # where another rank goes on with it, it counts as zero
        before = _of_unused(weights, compression, used)
        ddp(gradients({n: BRANCHES[n] for n in by_rank[rank]}, rank, i)).backward()
        assert same(before.values(), _of_unused(weights, compression, used).values()), i
        means: Tensors = {}
        for other, uses in enumerate(by_rank):
            new = gradients({n: BRANCHES[n] for n in uses}, other, i)
            add_to(means, {n: new.get(n, last.get(n, torch.zeros(()))) / 2 for n in used})
        outputs = {n: outputs_of(ddp)[n] for n in used}
        last |= {n: output.clone() for n, output in outputs.items()}
        ledger.add(outputs, means)
    if options.use_error_feedback:
        # Each step rounds M to 8 bits.
        rounded = name == "bfloat16_residual"
        ledger.check(compression, len(USES) * 2**-8 if rounded else TOLERANCE[torch.float32])


def _of_unused(
    weights: torch.nn.ParameterDict, compression: tp.Compression, used: set[str]
) -> Tensors:
    """This rank's gradients and states of the branches that no rank uses."""
    unused = {name: weight.grad for name, weight in weights.items() if name not in used}
    found = {f"{name}.grad": grad.clone() for name, grad in unused.items() if grad is not None}
    for name, entry in own_part(compression.state_dict(per_rank=True))["parameters"].items():
        if name.removeprefix("weights.") not in used:
            tensors = {f: t for f, t in entry.items() if isinstance(t, torch.Tensor)}
            found |= {f"{name}.{field}": tensor for field, tensor in tensors.items()}
    return found


@pytest.mark.parametrize("looks", [False, True])
@on_ranks(2)
def test_a_gradient_of_zeros_is_one_like_any_other(rank: int, looks: bool) -> None:
    """After three steps the gradient of a parameter is zero on all ranks, which do use it."""
    ddp, compression = make_compressed(BRANCHES, OPTIONS, find_unused_parameters=looks)
    ledger, norms = Ledger(), []
    for i in range(20):
        mine, means = gradients(BRANCHES, rank, i), mean_gradients(BRANCHES, 2, i)
        if i >= 3:
            mine["a"] = means["a"] = torch.zeros(BRANCHES["a"])
        ledger.add(step(ddp, mine), means)
        norms.append(residuals_of(compression)["a"].norm().item())
    ledger.check(compression)
    # Rank 2 of at most 20: what the first steps left is delivered by the zeros.
    assert norms[3] < norms[2]
    assert norms[-1] < 1e-5 * norms[2]


# Each has a bucket of its own. DDP reduces that of "first" last.
LAYERS = {"first": (30, 40), "second": (35, 25), "third": (20, 33)}


@on_ranks(2)
def test_a_step_counts_though_ddp_skips_its_last_bucket(rank: int) -> None:
    """DDP leaves out the buckets of parameters that no rank uses, the last one at times."""
    ddp, compression = make_compressed(
        LAYERS,
        replace(OPTIONS, start_powerSGD_iter=2),
        bucket_cap_mb=1e-4,
        find_unused_parameters=True,
        skip_all_reduce_unused_params=True,
    )
    ledger, exact, compressed = Ledger(), 0, 0
    for i in range(8):
        used = {name: LAYERS[name] for name in list(LAYERS)[i % 3 :]}
        ledger.add(step(ddp, gradients(used, rank, i)), mean_gradients(used, 2, i))
        if i < 2:
            exact += len(used)
        else:
            compressed += len(used)
        stats = compression.stats()
        assert stats["steps"] == i + 1
        assert (stats["exact_calls"], stats["compressed_calls"]) == (exact, compressed)
    ledger.check(compression)


@on_ranks(2)
def test_the_first_pass_of_a_static_graph_is_a_step(rank: int) -> None:
    """DDP gives the buckets, one for each dtype, the same number in that pass."""
    half = torch.bfloat16
    dtypes = {"first": torch.float32, "second": half, "third": half}
    parameters = {name: torch.zeros(LAYERS[name], dtype=dtypes[name]) for name in LAYERS}
    ddp = DistributedDataParallel(Synthetic(parameters), static_graph=True)
    compression = tp.attach(ddp, OPTIONS)
    ledger = Ledger()
    for i in range(5):
        mine = {n: g.to(dtypes[n]) for n, g in gradients(LAYERS, rank, i).items()}
        ledger.add(step(ddp, mine), mean_gradients(LAYERS, 2, i))
        stats = compression.stats()
        assert (stats["steps"], stats["compressed_calls"]) == (i + 1, 2 * (i + 1))
    rounded = torch.finfo(half).eps / 2  # the gradients and the outputs
    ledger.check(compression, second=2 * rounded, third=2 * rounded)


@pytest.mark.parametrize("by_python", [False, True])
@on_ranks(2)
def test_a_pass_that_fails_after_some_buckets_loses_nothing_of_them(
    rank: int, by_python: bool
) -> None:
    """A pass fails on all ranks once two buckets of three have been reduced."""
    ddp, compression = make_compressed(LAYERS, OPTIONS, by_python=by_python, bucket_cap_mb=1e-4)

    def fail(_: torch.Tensor) -> None:
        raise ArithmeticError

    train(ddp, range(3), ledger := Ledger())
    hook = weights_of(ddp)["first"].register_hook(fail)
    with pytest.raises(ArithmeticError):
        train(ddp, [3])
    hook.remove()
    ddp.reducer._reset_state()
    compression.stats()  # waits for the steps in flight, which use DDP's buckets
    # The next steps deliver those gradients that were reduced.
    means = mean_gradients(LAYERS, 2, 3)
    ledger.add({}, {name: means[name] for name in ("second", "third")})
    if by_python:
        compression.step_skipped()  # at once, instead of at the next step
    reported = ledger.errors(residuals_of(compression))
    assert (max(reported.values()) < TOLERANCE[torch.float32]) is by_python, reported
    train(ddp, range(4, 7), ledger)
    ledger.check(compression)
    assert compression.stats()["steps"] == 7


@pytest.mark.parametrize("by_python", [False, True])
@on_ranks(2)
def test_another_group_than_the_attached_one_is_an_error(rank: int, by_python: bool) -> None:
    ddp, _compression = make_compressed(LAYERS, OPTIONS, by_python=by_python)
    train(ddp, [0])
    ddp._update_process_group(dist.new_group([0, 1], backend="gloo"))
    with pytest.raises(RuntimeError, match="group of this DDP module has changed since attach"):
        train(ddp, [1])
    dist.barrier()  # a rank must not end before the other has connected to it
