# SPDX-License-Identifier: BSD-3-Clause
"""The statistics of a handle and of a group: bytes, calls, steps, seconds, residuals."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import torch_powersgd as tp
from support.backward import reduce_in_backward
from support.ddp import make_compressed, step, train
from support.ledger import residuals_of
from support.on_ranks import on_ranks
from support.synthetic import gradient, gradients

# At rank 2 there are a 128 x 64 weight, its bias, a 32 x 144 convolution, and a weight too small to
# pay.
SHAPES = {"weight": (128, 64), "bias": (128,), "conv": (32, 16, 3, 3), "small": (8, 8)}
NUMEL = 128 * 64 + 128 + 32 * 144 + 64
# Factors, raw elements, the use of each matrix, and the count of ranks that are not finite.
SENT = 2 * (128 + 64) + 2 * (32 + 144) + 128 + 64 + 2 + 1

STAGES = {"project", "reduce_p", "orthogonalize", "back_project", "reduce_q", "reconstruct"}
COUNTS = {
    *("steps", "skipped_steps", "differences"),
    *("compressed_calls", "exact_calls", "bytes_before", "bytes_after"),
}
KEYS = COUNTS | {"compressing", "starts_at", "ratio", "compressed_ratio", "seconds"}
KEYS |= {"residual_norms"}

OPTIONS = tp.Options.hook_defaults(start_powerSGD_iter=2, matrix_approximation_rank=2)


@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 4), (torch.bfloat16, 2)], ids=str)
@on_ranks(options=OPTIONS)
def test_bytes_of_an_attached_model(rank: int, dtype: torch.dtype, width: int) -> None:
    ddp, compression = make_compressed(SHAPES, dtype=dtype)
    fresh = compression.stats()
    assert fresh.keys() == KEYS
    assert tp.stats().keys() == KEYS - {"residual_norms"}
    assert fresh["residual_norms"] == {f"weights.{name}": 0 for name in SHAPES}
    assert fresh["seconds"] == dict.fromkeys(STAGES, 0)
    assert fresh["ratio"] == fresh["compressed_ratio"] == 1
    assert (fresh["compressing"], fresh["starts_at"]) == (False, 2)
    assert {fresh[key] for key in COUNTS} == {0}
    exact = 0
    for i in range(7):
        step(ddp, gradients(SHAPES, rank, i, dtype))
        now = compression.stats()
        if i < 2:  # warm-up sends all of it
            exact = now["exact_calls"]
            assert exact > 0
            assert now["bytes_after"] == now["bytes_before"] == (i + 1) * NUMEL * width
    assert now["steps"] == 7
    assert now["skipped_steps"] == 0
    assert now["compressed_calls"] == 5
    assert now["exact_calls"] == exact
    before, after = 7 * NUMEL * width, 2 * NUMEL * width + 5 * SENT * 4
    assert (now["bytes_before"], now["bytes_after"]) == (before, after)
    assert now["ratio"] == pytest.approx(before / after, rel=1e-12)
    factors = NUMEL * width / (SENT * 4)
    assert now["compressed_ratio"] == pytest.approx(factors, rel=1e-12)
    assert now["seconds"].keys() == STAGES
    assert all(seconds > 0 for seconds in now["seconds"].values())


@on_ranks(options=OPTIONS)
def test_flat_stats_are_scalars(rank: int) -> None:
    ddp, compression = make_compressed(SHAPES)
    step(ddp, gradients(SHAPES, rank, 0))
    nested, flat = compression.stats(), compression.stats(flat=True)
    assert all(isinstance(value, float) for value in flat.values())
    assert flat["steps"] == 1
    assert flat["seconds/project"] == nested["seconds"]["project"]
    assert flat["residual_norms/weights.weight"] == nested["residual_norms"]["weights.weight"]
    leaves = sum(len(value) if isinstance(value, dict) else 1 for value in nested.values())
    assert len(flat) == leaves
    assert tp.stats(flat=True).keys() == {name for name in flat if "residual_norms" not in name}


@on_ranks(options=tp.Options.hook_defaults(start_powerSGD_iter=1, min_numel=1))
def test_bytes_of_flat_tensors(rank: int) -> None:
    # 250 x 250 elements are a matrix. One less than 4 x 4 is 5 x 3, which does not pay, so it is no
    # gradient at all.
    for i in range(4):  # two of them are exact until the buckets have settled
        reduce_in_backward([gradient([62_500], rank, i), gradient([15], rank, i)])
    now = tp.stats()
    assert (now["steps"], now["compressed_calls"], now["exact_calls"]) == (4, 2, 2)
    assert now["bytes_before"] == 4 * 4 * 62_500
    assert now["bytes_after"] == 2 * 4 * 62_500 + 2 * 4 * (250 + 250 + 2)
    dist.all_reduce(torch.ones(100_000))
    assert tp.stats()["bytes_before"] == now["bytes_before"], "not a gradient"


@on_ranks(options=tp.Options.hook_defaults(start_powerSGD_iter=0, matrix_approximation_rank=2))
def test_bytes_of_several_buckets(rank: int) -> None:
    ddp, compression = make_compressed(SHAPES, bucket_cap_mb=1e-6)  # one for each parameter
    train(ddp, range(4))
    before = compression.stats()
    step(ddp, gradients(SHAPES, rank, 4))
    now = compression.stats()
    assert now["steps"] - before["steps"] == 1
    assert now["compressed_calls"] - before["compressed_calls"] == 2
    assert now["exact_calls"] - before["exact_calls"] == 2
    assert now["bytes_before"] - before["bytes_before"] == 4 * NUMEL
    # Each of the two compressed tensors has a count.
    assert now["bytes_after"] - before["bytes_after"] == 4 * (SENT + 1)


@on_ranks(options=tp.Options.hook_defaults(start_powerSGD_iter=0, matrix_approximation_rank=2))
def test_residual_norms(rank: int) -> None:
    ddp, compression = make_compressed(SHAPES)
    same = {name: gradient(shape, name) for name, shape in SHAPES.items()}
    outputs = step(ddp, same)
    # Ranks with the same gradients have the same residuals: the gradients less the outputs.
    norms = compression.stats()["residual_norms"]
    assert norms.keys() == {f"weights.{name}" for name in SHAPES}
    for name in ("weight", "conv"):
        expected = (same[name] - outputs[name]).norm().item()
        assert norms[f"weights.{name}"] == pytest.approx(expected, rel=1e-4)
        assert expected > 1
    assert norms["weights.bias"] == norms["weights.small"] == 0
    assert "residual_norms" not in compression.stats(residual_norms=False)
    # In the units of the loss scale.
    compression.grad_scale = 8.0
    for name, norm in compression.stats()["residual_norms"].items():
        assert norm == pytest.approx(8 * norms[name], rel=1e-6)
    compression.grad_scale = 1.0
    for name, residual in residuals_of(compression).items():
        assert norms[f"weights.{name}"] == pytest.approx(residual.norm().item(), rel=1e-4)


@on_ranks(options=tp.Options.hook_defaults(start_powerSGD_iter=0))
def test_each_model_has_counts_of_its_own_and_the_group_has_all(rank: int) -> None:
    other = {"weight": (40, 50)}
    (first, of_first), (second, of_second) = make_compressed(SHAPES), make_compressed(other)
    fresh = of_second.stats()
    train(first, range(2))
    assert of_first.stats()["compressed_calls"] == of_first.stats()["steps"] == 2
    assert of_first.stats()["residual_norms"]["weights.weight"] > 0
    assert of_second.stats() == fresh
    step(second, gradients(other, rank, 0))
    assert of_first.stats()["steps"] == 2
    assert of_second.stats()["steps"] == of_second.stats()["compressed_calls"] == 1
    assert of_second.stats()["residual_norms"].keys() == {"weights.weight"}
    group = tp.stats()
    assert group["steps"] == group["compressed_calls"] == 3
    for name in ("bytes_before", "bytes_after"):
        assert group[name] == of_first.stats()[name] + of_second.stats()[name]
    of_first.reset_stats()
    anew = of_first.stats()
    assert anew["seconds"] == dict.fromkeys(STAGES, 0)
    assert anew["ratio"] == 1
    assert {anew[key] for key in COUNTS - {"steps"}} == {0}
    assert (anew["starts_at"], anew["compressing"], anew["steps"]) == (0, True, 2)
    assert of_second.stats()["compressed_calls"] == 1
    assert tp.stats() == group


def test_without_a_process_group() -> None:
    with pytest.raises(ValueError, match="init_process_group"):
        tp.stats()
