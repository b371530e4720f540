# SPDX-License-Identifier: BSD-3-Clause
"""Beside an attached module, every other all-reduce of its group has the bits of plain Gloo.

A case takes one step in a group and returns what it has reduced, in the group of the attached
module and over Gloo.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
from torch.distributed import ReduceOp
from torch.nn.parallel import DistributedDataParallel

import torch_powersgd as tp
from support.backward import in_backward
from support.ddp import make_ddp, step, weights_of
from support.log_records import LogRecords
from support.models import SyncedNorm
from support.on_ranks import on_ranks
from support.synthetic import Synthetic, gradient, gradients
from support.tensors import Shapes, same

STEPS = 4  # a flat gradient would be compressed from its third pass on
MIN_NUMEL = 4096
NUMEL = 1 << 17  # the features of a contrastive loss
WIDE = 66_000  # channels of a batch norm, whose statistics are larger than MIN_NUMEL
SHAPES = {"weight": (60, 80), "bias": (80,)}  # of the attached model


@dataclass
class Peer:
    """One rank's side of a case in one group.

    Attributes:
        attaches: Whether the group compresses, so that its modules are attached.
        ddp: A module that trains in the group, or None once it is gone.
        compression: That of the module, where it is attached.
        trained: The steps of modules that were to be attached.
        kept: The objects that the case keeps from step to step.
    """

    rank: int
    group: dist.ProcessGroup
    attaches: bool
    ddp: DistributedDataParallel | None = None
    compression: tp.Compression | None = None
    trained: int = 0
    kept: dict[str, Any] = field(default_factory=dict)

    def keep(self, name: str, make: Callable[[], Any]) -> Any:
        if name not in self.kept:
            self.kept[name] = make()
        return self.kept[name]

    def tensor(self, i: int, *shape: int) -> torch.Tensor:
        return gradient(shape, "beside", self.rank, i)

    def wrap(self, shapes: Shapes, attach: bool) -> DistributedDataParallel:
        ddp = make_ddp(shapes, process_group=self.group)
        if attach and self.attaches:
            self.compression = tp.attach(ddp)
        return ddp

    def train(self, i: int) -> None:
        """Takes a step of the module, if it is still there."""
        if self.ddp is not None:
            step(self.ddp, gradients(SHAPES, self.rank, i))
            self.trained += 1

    def reduced_in_backward(self, tensor: torch.Tensor, op: Any = ReduceOp.SUM) -> torch.Tensor:
        in_backward(lambda: dist.all_reduce(tensor, op, group=self.group))
        return tensor


Case = Callable[[Peer, int], list[torch.Tensor]]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


@case
def features_of_a_contrastive_loss(peer: Peer, i: int) -> list[torch.Tensor]:
    features = peer.tensor(i, NUMEL).requires_grad_()
    total = differentiable.all_reduce(features * 1, group=peer.group)
    (total * peer.tensor(i + 100, NUMEL)).sum().backward()
    assert features.grad is not None
    return [features.grad]


@case
def average_in_backward(peer: Peer, i: int) -> list[torch.Tensor]:
    return [peer.reduced_in_backward(peer.tensor(i, NUMEL), ReduceOp.AVG)]


@case
def as_large_as_the_bucket(peer: Peer, i: int) -> list[torch.Tensor]:
    numel = 60 * 80 + 80
    return [peer.reduced_in_backward(peer.tensor(i, numel))]


@case
def coalesced_in_backward(peer: Peer, i: int) -> list[torch.Tensor]:
    tensors = [peer.tensor(i, NUMEL), peer.tensor(i + 100, NUMEL)]
    in_backward(lambda: dist.all_reduce_coalesced(tensors, group=peer.group))
    return tensors


@case
def outside_of_backward(peer: Peer, i: int) -> list[torch.Tensor]:
    tensors = [peer.tensor(i, NUMEL), peer.tensor(i, 300, 200), peer.tensor(i), peer.tensor(i, 8)]
    for tensor in tensors:
        dist.all_reduce(tensor, group=peer.group)
    dist.all_reduce(tensors[0], ReduceOp.AVG, group=peer.group)
    works = [dist.all_reduce(tensor, group=peer.group, async_op=True) for tensor in tensors]
    for work in works:
        assert work is not None
        work.wait()
    return tensors


@case
def wide_batch_norm(peer: Peer, i: int) -> list[torch.Tensor]:
    norm = peer.keep("norm", lambda: SyncedNorm(WIDE, peer.group))
    x = peer.tensor(i, 3, WIDE).requires_grad_()
    (norm(x) * peer.tensor(i + 100, 3, WIDE)).sum().backward()
    assert x.grad is not None
    return [x.grad]


@case
def delayed_parameters_of_ddp(peer: Peer, i: int) -> list[torch.Tensor]:
    """DDP all-reduces these in one buffer, in a hook of another parameter's gradient."""

    def make() -> DistributedDataParallel:
        weights = {"first": torch.zeros(60, 80), "late": torch.zeros(200, 80)}
        module = Synthetic(weights)
        ddp = DistributedDataParallel(
            module,
            process_group=peer.group,
            delay_all_reduce_named_params=[("weights.late", module.weights["late"])],
            param_to_hook_all_reduce=module.weights["first"],
        )
        if peer.attaches:
            tp.attach(ddp)
        return ddp

    ddp = peer.keep("ddp", make)
    ddp.zero_grad(set_to_none=False)
    ddp({"first": peer.tensor(i, 60, 80), "late": peer.tensor(i, 200, 80)}).backward()
    peer.trained += 1
    dist.barrier(peer.group)  # DDP drops the Work of this all-reduce; Gloo's barrier waits for it
    late = weights_of(ddp)["late"].grad
    assert late is not None
    return [late.clone()]


@case
def module_that_is_not_attached(peer: Peer, i: int) -> list[torch.Tensor]:
    shapes = {"weight": (60, 80)}
    ddp = peer.keep("ddp", lambda: peer.wrap(shapes, attach=False))
    return [*step(ddp, {"weight": peer.tensor(i, 60, 80)}).values()]


@case
def after_the_module_is_gone(peer: Peer, i: int) -> list[torch.Tensor]:
    """Ranks do not drop a module at the same time, so that this switches nothing."""
    peer.ddp = None
    gc.collect()
    return [peer.reduced_in_backward(peer.tensor(i, NUMEL))]


@case
def after_detach(peer: Peer, i: int) -> list[torch.Tensor]:
    if peer.compression is not None and not peer.compression.ended:
        peer.compression.detach()
    return [peer.reduced_in_backward(peer.tensor(i, NUMEL))]


@pytest.mark.parametrize("name", CASES)
@on_ranks(2, backend="gloo")
def test_what_is_not_attached_is_exact(rank: int, name: str) -> None:
    options = tp.Options.hook_defaults(start_powerSGD_iter=0, min_numel=MIN_NUMEL)
    ours = dist.new_group(backend="cpu:powersgd", pg_options=options)
    mine = Peer(rank, ours, attaches=True)
    plain = Peer(rank, dist.new_group(backend="gloo"), attaches=False)
    warnings = LogRecords(logging.WARNING)
    for peer in (mine, plain):
        peer.ddp = peer.wrap(SHAPES, attach=True)
    for i in range(STEPS):
        results = []
        for peer in (mine, plain):
            peer.train(i)
            results.append(CASES[name](peer, i))
        assert same(*results), f"step {i}"
    assert warnings.seen == []
    counts = tp.stats(ours)
    assert counts["compressed_calls"] > 0, "the module itself is compressed"
    assert counts["steps"] == mine.trained
