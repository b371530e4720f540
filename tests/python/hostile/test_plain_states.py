# SPDX-License-Identifier: BSD-3-Clause
"""Saved states hold plain values, so that nothing of a file need be run."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import torch_powersgd as tp
from support.on_ranks import on_ranks
from support.synthetic import SHAPES, from_bytes, gradients, make_compressed, step, to_bytes

OPTIONS = tp.Options.hook_defaults(start_powerSGD_iter=1, matrix_approximation_rank=2)
# Every option that changes what a state holds.
VARIANTS: list[dict[str, Any]] = [
    {},
    {"use_error_feedback": False},
    {"warm_start": False},
    {"wire_dtype": "int8"},
    {"wire_dtype": "int4"},
    {"wire_dtype": "bfloat16"},
    {"scope": "never"},
    {"start_powerSGD_iter": 100},
]
PLAIN = {dict, list, int, float, bool, str, type(None), torch.Tensor}


@on_ranks()
def test_a_state_of_every_option_is_read_without_code(rank: int) -> None:
    for variant in VARIANTS:
        ddp, compression = make_compressed(SHAPES, dataclasses.replace(OPTIONS, **variant))
        for i in range(3):
            step(ddp, gradients(SHAPES, rank, i))
        for per_rank in (False, True):
            state = compression.state_dict(per_rank)
            compression.load_state_dict(from_bytes(to_bytes(state)))  # by weights_only=True
            assert _types(state) <= PLAIN, variant


def _types(state: Any) -> set[type]:
    """The types of all values in a state."""
    if isinstance(state, dict):
        return {dict}.union(*map(_types, state.values()))
    if isinstance(state, (list, tuple)):
        return {type(state)}.union(*map(_types, state))
    return {torch.Tensor if isinstance(state, torch.Tensor) else type(state)}


class Payload:
    """An object whose unpickling would run code."""

    def __reduce__(self) -> Any:
        return (pytest.fail, ("code of a checkpoint has run",))


def test_a_state_with_code_is_not_read() -> None:
    """The documented way to load refuses it before ``load_state_dict`` sees anything."""
    data = to_bytes({"version": 1, "step": Payload()})
    with pytest.raises(Exception, match="[Ww]eights.only|Unsupported"):
        from_bytes(data)
