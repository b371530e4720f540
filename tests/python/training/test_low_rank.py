# SPDX-License-Identifier: BSD-3-Clause
"""Gradients of less than the matrix rank: rows without a gradient, and ranks that grow later."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import torch_powersgd as tp
from support.ledger import TOLERANCE, Ledger, residuals_of
from support.on_ranks import all_agree, on_ranks
from support.states import from_bytes, to_bytes
from support.synthetic import gradient
from support.tensors import digest, same

OPTIONS = tp.Options.hook_defaults(start_powerSGD_iter=0, matrix_approximation_rank=8)
WIRES = (None, "bfloat16", "int8", "int4")
# Three ranks send the payload of this raw segment, and the factors with it, two-shot.
LARGE = (70_000,)

# Two processes gather the packets of a wire that rounds, and three may exchange them two-shot.
with_schedules = pytest.mark.parametrize(
    ("wire", "world_size"), [*zip(WIRES, (3, 2, 3, 2), strict=True), ("int4", 3)]
)


class _Tokens(torch.nn.Module):
    """Half of the vocabulary never occurs."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(60, 40, padding_idx=0)
        self.head = torch.nn.Linear(40, 50)
        self.large = torch.nn.Parameter(torch.zeros(LARGE))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.embedding(tokens)).logsumexp(-1).mean()
        return out + self.large.mean()


@with_schedules
@on_ranks()
def test_rows_without_gradients_do_not_move(rank: int, world_size: int, wire: str | None) -> None:
    """Steps of the sign of the gradient, as Lion's, make any movement large."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(_Tokens())
    compression = tp.attach(ddp, replace(OPTIONS, wire_dtype=wire))
    weight = ddp.module.embedding.weight
    before = weight.detach().clone()
    seen = torch.zeros(60, dtype=torch.bool)
    for i in range(20):
        # The padding and a new token on each rank, and from all the tokens so far one.
        tokens = [
            [0, 1 + i % 15 * 2, 1 + (i * 7 + r) % (1 + i % 15) * 2] for r in range(world_size)
        ]
        seen[torch.tensor(tokens)] = True
        ddp(torch.tensor(tokens[rank])).backward()
        with torch.no_grad():
            for parameter in ddp.parameters():
                assert parameter.grad is not None
                parameter.sub_(1e-3 * parameter.grad.sign())
                parameter.grad = None
    seen[0] = False
    moved = (weight != before).any(1)
    assert torch.equal(moved, seen)
    residual = residuals_of(compression)["embedding.weight"]
    assert torch.equal(residual[~seen], torch.zeros_like(residual[~seen]))


# The rank of each step's mean gradient, at matrix rank 8. A row of Q that is zero is drawn anew.
RANKS = (1, 1, 1, 1, 3, 3, 3, 0, 3, 6, 6, 6)
DISCARDED, LATER, SAVED = 2, 3, 5
# What the span of P loses to rounding, as in test_reference.
EXACT = 2e-5


def _of_rank(r: int, rank: int, i: int) -> torch.Tensor:
    """Rank r over all processes together. Rows and columns of zeros lie between the others."""
    left, right = gradient((60, r), "left", r, i // 4), gradient((r, 80), "right", rank, i)
    left[::3], right[:, ::4] = 0, 0
    # Products of small integers are exact, so the rank is.
    return left.mul(4).round() @ right.mul(4).round()


@with_schedules
@on_ranks()
def test_a_rank_that_grows_is_learned(rank: int, world_size: int, wire: str | None) -> None:
    """Also across steps that are discarded, delivered later, or without a gradient, and a save."""
    empty = {"w": torch.zeros(60, 80), "large": torch.zeros(LARGE)}
    compression = tp.attach(empty, replace(OPTIONS, wire_dtype=wire, allow_discard=True))
    loaded = tp.attach(empty, replace(OPTIONS, wire_dtype=wire, allow_discard=True))
    ledger, outputs = Ledger(), []
    for i, r in enumerate(RANKS):
        by_rank = [_of_rank(r, other, i) for other in range(world_size)]
        out = {"w": by_rank[rank].clone(), "large": torch.zeros(LARGE)}
        compression.all_reduce(out).wait()
        outputs.append(out["w"])
        assert out["w"][::3].count_nonzero() == out["w"][:, ::4].count_nonzero() == 0, i
        if i == DISCARDED:
            compression.discard_step()
            continue
        if i == LATER:
            compression.step_skipped()
        delivered = torch.zeros_like(out["w"]) if i == LATER else out["w"]
        ledger.add({"w": delivered}, {"w": torch.stack(by_rank).double().mean(0)})
        residual = residuals_of(compression)
        assert ledger.errors(residual)["w"] < TOLERANCE[torch.float32]
        if wire is None and i != LATER:
            assert ledger.errors()["w"] < EXACT, (i, ledger.errors())
        if i > SAVED:
            again = {"w": by_rank[rank].clone(), "large": torch.zeros(LARGE)}
            loaded.all_reduce(again).wait()
            assert same([again["w"]], [out["w"]])
        if i == SAVED:
            loaded.load_state_dict(from_bytes(to_bytes(compression.state_dict(per_rank=True))))
    assert all_agree(digest(outputs))
