# SPDX-License-Identifier: BSD-3-Clause
"""FSDP2's units that a step uses in part, not at all, or before the others."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

import torch_powersgd as tp
from support.fsdp_pairs import WORLD_SIZE, Sharded, both, make_pair, on_mesh, passes, step
from support.log_records import LogRecords
from support.paired_training import OPTIONS, STEPS
from support.synthetic import gradient
from support.tensors import same
from torch_powersgd.targets.fsdp_units import only_subset

# torch 2.11 does not have it, and its own FSDP2 fails where a unit goes backward in two passes.
needs_recent_torch = pytest.mark.skipif(
    not hasattr(FSDPModule, "set_reduce_scatter_unused_params"), reason="torch is too old"
)


@both
@pytest.mark.parametrize("wire", [None, "int4"])
@on_mesh
def test_a_unit_that_some_steps_do_not_reduce(rank: int, wire: str | None, native: bool) -> None:
    pair = make_pair(replace(OPTIONS, wire_dtype=wire), native)
    pair.train(lambda module, i: passes(module, i, skip=0 if i % 3 == 1 else None))
    pair.check()


@needs_recent_torch
@both
@on_mesh
def test_a_unit_that_goes_backward_in_two_passes(rank: int, native: bool) -> None:
    """A loss of pieces, which goes backward through the output layer before the other layers.

    As in torchtitan's chunked loss, the layer's gradients are reduced with those of the last piece.
    """

    def backward(module: Sharded, i: int) -> list[torch.Tensor]:
        hidden = module(gradient((6, 25), "input", rank, i), headless=True)
        leaf = hidden.detach().requires_grad_()
        module.out.set_requires_gradient_sync(False, recurse=False)
        module.out.unshard()
        pieces = leaf.chunk(2)
        for piece in pieces:
            module.out.set_requires_gradient_sync(piece is pieces[-1], recurse=False)
            module.out(piece).square().mean().backward()
        module.out.reshard()
        hidden.backward(leaf.grad)
        return [hidden, leaf.grad]

    pair = make_pair(native=native, units=[["blocks.1", "out"]])
    pair.train(backward)
    pair.check()
    assert pair.compression.stats()["steps"] == STEPS


@needs_recent_torch
@both
@pytest.mark.parametrize("one_unit", [False, True])
@on_mesh
def test_unused_parameters_are_exact_unless_the_size_tells_which(
    rank: int, one_unit: bool, native: bool
) -> None:
    """Leaves a block unused, or one of the root's own parameters.

    FSDP2's hooks do not learn which. As a part of one unit, the block is as large as another.
    """
    pair = make_pair(native=native, units=() if one_unit else None)
    arguments: dict[str, Any] = {"skip": 0} if one_unit else {"gained": False}
    # The unused block has no residual: its gradient is zero with compression or without.
    unknown, unused = (["blocks.1.weight", "out.weight"], ["blocks.0.weight"])
    records = LogRecords(logging.WARNING)
    for told in (False, True):
        for module in pair.modules:
            module.set_reduce_scatter_unused_params(told)
        for i in range(STEPS):
            for module in pair.modules:
                step(module, i, **arguments)
        found, wanted = pair.gradients(0), pair.gradients(1)
        exact = [n for n, g in found.items() if "weight" in n and same([g], [wanted[n]])]
        assert exact == ((unused if told else unknown) if one_unit else [])
    warnings = records.matching("set_reduce_scatter_unused_params")
    assert len(warnings) == (one_unit and rank < WORLD_SIZE // 2)  # the first of each group
    assert pair.compression.stats()["steps"] == 2 * STEPS


@both
@on_mesh
def test_parameters_unfrozen_after_attach_are_exact_until_attached_again(
    rank: int, native: bool
) -> None:
    pair = make_pair(native=native, prepare=lambda block: block.requires_grad_(False))
    attached = pair.modules[0]
    records = LogRecords(logging.WARNING)

    def exact_after_training() -> list[str]:
        for i in range(STEPS):
            for module in pair.modules:
                step(module, i)
        found, wanted = pair.gradients(0), pair.gradients(1)
        return [n for n, g in found.items() if "weight" in n and same([g], [wanted[n]])]

    assert exact_after_training() == []
    for module in pair.modules:
        module.blocks.requires_grad_(True)
    assert exact_after_training() == ["blocks.0.weight", "blocks.1.weight"]
    warnings = records.matching("attach again after you unfreeze parameters")
    assert len(warnings) == (rank < WORLD_SIZE // 2)  # the first of each group
    compression = pair.compression
    state = compression.state_dict()
    compression.detach()
    again = tp.attach(attached, group=None if native else compression.group)
    again.load_state_dict(state)
    assert exact_after_training() == []
    assert again.stats()["steps"] == 3 * STEPS


def test_a_part_of_a_unit_is_known_by_its_size_if_no_other_part_has_it() -> None:
    assert only_subset([5, 3, 9], 17) == [0, 1, 2]
    assert only_subset([5, 3, 9], 14) == [0, 2]
    assert only_subset([5, 3, 9], 7) == []
    assert only_subset([5, 3, 8], 8) == []  # the first two, or the last
    assert only_subset([4, 4, 9], 13) == []
    assert only_subset([4, 4, 9], 8) == [0, 1]
    assert only_subset([1] * 17, 17) == list(range(17))
    assert only_subset([2**i for i in range(17)], 1) == []  # too many to try
