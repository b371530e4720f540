# SPDX-License-Identifier: BSD-3-Clause
"""A backward pass of attached DDP: the parameters that it uses, and the ways in which it ends."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import torch_powersgd as tp
from support import paired_training, ranks
from support.synthetic import (
    Ledger,
    Synthetic,
    Tensors,
    add_to,
    gradients,
    make_compressed,
    make_ddp,
    mean_gradients,
    outputs_of,
    own_part,
    residuals_of,
    step,
    weights_of,
)

OPTIONS = tp.Options.hook_defaults(start_powerSGD_iter=0, matrix_approximation_rank=2)
TOLERANCE = 1e-5  # float32, as in test_identity


def _unused(rank: int, ddp_arguments: dict[str, Any]) -> tuple[dict[str, float], set[str]]:
    shapes = {"always": (20, 30), "sometimes": (25, 40), "never": (30, 22)}
    ddp, compression = make_compressed(
        shapes, OPTIONS, find_unused_parameters=True, **ddp_arguments
    )
    ledger = Ledger()
    left = set()
    for i in range(8):
        used = ("always", "sometimes") if rank == 0 or i % 2 else ("always",)
        outputs = step(ddp, gradients({name: shapes[name] for name in used}, rank, i))
        left |= set(shapes) - set(outputs)
        by_rank = [gradients(shapes, other, i) for other in (0, 1)]
        if i % 2 == 0:
            by_rank[1]["sometimes"] = torch.zeros(25, 40)
        ledger.add(outputs, {n: (by_rank[0][n] + by_rank[1][n]) / 2 for n in outputs})
    return ledger.errors(residuals_of(compression)), left


@pytest.mark.parametrize("views", [False, True])
def test_unused_parameters(views: bool) -> None:
    # A parameter that this rank does not use contributes 0. One that no rank uses stays without a
    # gradient.
    for errors, left in ranks.run(2, _unused, {"gradient_as_bucket_view": views}):
        assert left == {"never"}
        assert set(errors) == {"always", "sometimes"}
        assert max(errors.values()) < TOLERANCE, errors


def _unused_on_all_ranks(rank: int) -> dict[str, float]:
    shapes = {"always": (20, 30), "sometimes": (25, 40)}
    ddp, compression = make_compressed(shapes, OPTIONS, find_unused_parameters=True)
    ledger = Ledger()
    for i in range(9):
        used = shapes if i % 3 == 0 else {"always": shapes["always"]}
        outputs = step(ddp, gradients(used, rank, i))
        assert set(outputs) == set(used)
        ledger.add(outputs, mean_gradients(used, 2, i))
    return ledger.errors(residuals_of(compression))


def test_a_parameter_that_no_rank_uses_loses_nothing() -> None:
    # DDP throws away the bucket's output for it. The residual keeps what is thrown away.
    for errors in ranks.run(2, _unused_on_all_ranks):
        assert max(errors.values()) < TOLERANCE, errors


# The branches that each rank uses, by pass. A rank zeroes the gradients of those that it will use,
# as optimizers of a GAN or of several tasks do.
BRANCHES = {"a": (20, 30), "b": (25, 40), "bias": (16,)}
USES = [("ab", "ab"), ("b", "b"), ("b", "b"), ("ab", "b"), ("b", "b"), ("a", "ab"), ("b", "b")]
STALE: dict[str, tuple[tp.Options, dict[str, Any]]] = {
    "copies": (OPTIONS, {}),
    "views": (OPTIONS, {"gradient_as_bucket_view": True}),
    "int8": (dataclasses.replace(OPTIONS, wire_dtype="int8"), {}),
    "bfloat16_residual": (dataclasses.replace(OPTIONS, residual_dtype="bfloat16"), {}),
    "no_feedback": (dataclasses.replace(OPTIONS, use_error_feedback=False), {}),
    "not_finite": (OPTIONS, {}),
    "exact_first_steps": (dataclasses.replace(OPTIONS, start_powerSGD_iter=4), {}),
}


def _stale(rank: int, name: str) -> tuple[list[str], dict[str, float]]:
    """Leaves the gradients of a branch that this rank does not use as they are.

    Returns:
        What differs after a pass in which no rank used it, and the errors of the identity.
    """
    options, arguments = STALE[name]
    ddp, compression = make_compressed(BRANCHES, options, find_unused_parameters=True, **arguments)
    weights, ledger, changed = weights_of(ddp), Ledger(), []
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
        after = _of_unused(weights, compression, used)
        changed += [
            f"{field} in {i}"
            for field, tensor in before.items()
            if not paired_training.same([tensor], [after[field]])
        ]
        means: Tensors = {}
        for other, uses in enumerate(by_rank):
            new = gradients({n: BRANCHES[n] for n in uses}, other, i)
            add_to(means, {n: new.get(n, last.get(n, torch.zeros(()))) / 2 for n in used})
        outputs = {n: outputs_of(ddp)[n] for n in used}
        last |= {n: output.clone() for n, output in outputs.items()}
        ledger.add(outputs, means)
    residuals = residuals_of(compression) if options.use_error_feedback else None
    return changed, ledger.errors(residuals)


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


def _all_stale(rank: int) -> dict[str, tuple[list[str], dict[str, float]]]:
    return {name: _stale(rank, name) for name in STALE}


def test_an_old_gradient_of_a_parameter_that_no_rank_uses_changes_nothing() -> None:
    # DDP puts it into the bucket and drops the output, so that neither may count.
    for facts in ranks.run(2, _all_stale):
        for name, (changed, errors) in facts.items():
            assert changed == [], name
            if name == "bfloat16_residual":
                # Each step rounds M to 8 bits.
                assert max(errors.values()) < len(USES) * 2**-8, name
            elif name != "no_feedback":
                assert max(errors.values()) < TOLERANCE, (name, errors)


def _zeros(rank: int, ddp_arguments: dict[str, Any]) -> tuple[dict[str, float], list[float]]:
    """After three steps the gradient of a parameter is zero on all ranks, which do use it."""
    ddp, compression = make_compressed(BRANCHES, OPTIONS, **ddp_arguments)
    ledger, norms = Ledger(), []
    for i in range(20):
        mine = gradients(BRANCHES, rank, i)
        means = mean_gradients(BRANCHES, 2, i)
        if i >= 3:
            mine["a"] = torch.zeros(BRANCHES["a"])
            means["a"] = torch.zeros(BRANCHES["a"])
        ledger.add(step(ddp, mine), means)
        norms.append(residuals_of(compression)["a"].norm().item())
    return ledger.errors(residuals_of(compression)), norms


@pytest.mark.parametrize("looks", [False, True])
def test_a_gradient_of_zeros_is_one_like_any_other(looks: bool) -> None:
    for errors, norms in ranks.run(2, _zeros, {"find_unused_parameters": looks}):
        assert max(errors.values()) < TOLERANCE, errors
        # Rank 2 of at most 20: what the first steps left is delivered by the zeros.
        assert norms[3] < norms[2]
        assert norms[-1] < 1e-5 * norms[2]


# Each has a bucket of its own. DDP reduces that of "first" last.
LAYERS = {"first": (30, 40), "second": (35, 25), "third": (20, 33)}


def _skipped_buckets(rank: int) -> tuple[dict[str, float], list[tuple[int, int, int]]]:
    """DDP leaves out the buckets of parameters that no rank uses, the last one at times."""
    options = dataclasses.replace(OPTIONS, start_powerSGD_iter=2)
    ddp, compression = make_compressed(
        LAYERS,
        options,
        bucket_cap_mb=1e-4,
        find_unused_parameters=True,
        skip_all_reduce_unused_params=True,
    )
    ledger, counts = Ledger(), []
    for i in range(8):
        used = {name: LAYERS[name] for name in list(LAYERS)[i % 3 :]}
        ledger.add(step(ddp, gradients(used, rank, i)), mean_gradients(used, 2, i))
        stats = compression.stats()
        counts.append((stats["steps"], stats["exact_calls"], stats["compressed_calls"]))
    return ledger.errors(residuals_of(compression)), counts


def test_a_step_counts_though_ddp_skips_its_last_bucket() -> None:
    for errors, counts in ranks.run(2, _skipped_buckets):
        assert max(errors.values()) < TOLERANCE, errors
        reduced = [3 - i % 3 for i in range(8)]
        assert counts == [
            (i + 1, sum(reduced[: min(i + 1, 2)]), sum(reduced[2 : i + 1])) for i in range(8)
        ]


def _static_dtypes(rank: int) -> tuple[dict[str, float], list[tuple[int, int]]]:
    """A static graph with a bucket for each dtype, which DDP gives one number in the first pass."""
    dtypes = {"first": torch.float32, "second": torch.float64, "third": torch.float64}
    parameters = {name: torch.zeros(LAYERS[name], dtype=dtypes[name]) for name in LAYERS}
    ddp = DistributedDataParallel(Synthetic(parameters), static_graph=True)
    compression = tp.attach(ddp, OPTIONS)
    ledger, counts = Ledger(), []
    for i in range(5):
        mine = {n: g.to(dtypes[n]) for n, g in gradients(LAYERS, rank, i).items()}
        ledger.add(step(ddp, mine), mean_gradients(LAYERS, 2, i))
        stats = compression.stats()
        counts.append((stats["steps"], stats["compressed_calls"]))
    return ledger.errors(residuals_of(compression)), counts


def test_the_first_pass_of_a_static_graph_is_a_step() -> None:
    for errors, counts in ranks.run(2, _static_dtypes):
        assert max(errors.values()) < TOLERANCE, errors
        assert counts == [(i + 1, 2 * (i + 1)) for i in range(5)]


def _failed_pass(rank: int, by_python: bool) -> tuple[dict[str, float], dict[str, float], int]:
    """A pass that fails on all ranks once two buckets of three have been reduced.

    Returns:
        The errors of the identity after the pass, if it was reported, and at the end; the steps.
    """
    ddp = make_ddp(LAYERS, bucket_cap_mb=1e-4)
    compression = tp.attach(ddp, OPTIONS, register_hook=not by_python)
    if by_python:
        ddp.register_comm_hook(None, compression.comm_hook)

    def fail(_: torch.Tensor) -> None:
        raise ArithmeticError

    ledger = Ledger()
    for i in range(7):
        means = mean_gradients(LAYERS, 2, i)
        if i != 3:
            ledger.add(step(ddp, gradients(LAYERS, rank, i)), means)
            continue
        hook = weights_of(ddp)["first"].register_hook(fail)
        with pytest.raises(ArithmeticError):
            step(ddp, gradients(LAYERS, rank, i))
        hook.remove()
        ddp.reducer._reset_state()
        compression.stats()  # waits for the steps in flight, which use DDP's buckets
        # The next steps deliver those gradients that were reduced.
        ledger.add({}, {name: means[name] for name in ("second", "third")})
        if by_python:
            compression.step_skipped()
        reported = ledger.errors(residuals_of(compression))
    return reported, ledger.errors(residuals_of(compression)), compression.stats()["steps"]


@pytest.mark.parametrize("by_python", [False, True])
def test_a_pass_that_fails_after_some_buckets_loses_nothing_of_them(by_python: bool) -> None:
    for reported, errors, steps in ranks.run(2, _failed_pass, by_python):
        assert (max(reported.values()) < TOLERANCE) is by_python, reported
        assert max(errors.values()) < TOLERANCE, errors
        assert steps == 7


def _another_group(rank: int, by_python: bool) -> str:
    ddp = make_ddp(LAYERS)
    compression = tp.attach(ddp, OPTIONS, register_hook=not by_python)
    if by_python:
        ddp.register_comm_hook(None, compression.comm_hook)
    step(ddp, gradients(LAYERS, rank, 0))
    ddp._update_process_group(dist.new_group([0, 1], backend="gloo"))
    with pytest.raises(RuntimeError) as raised:
        step(ddp, gradients(LAYERS, rank, 1))
    dist.barrier()  # a rank must not end before the other has connected to it
    return str(raised.value)


@pytest.mark.parametrize("by_python", [False, True])
def test_another_group_than_the_attached_one_is_an_error(by_python: bool) -> None:
    for message in ranks.run(2, _another_group, by_python):
        assert "process group of this DDP module has changed since attach" in message
