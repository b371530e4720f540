# SPDX-License-Identifier: BSD-3-Clause
"""States consist of plain values, which torch.load reads without unpickling code."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import torch_powersgd as tp
from support import ranks
from support.damaged_loads import plain_types
from support.fsdp_pairs import REPLICAS, SHARDS, backward, make_modules
from support.synthetic import SHAPES, from_bytes, gradients, make_attached, step, to_bytes

OPTIONS = tp.Options(start_powerSGD_iter=1, matrix_approximation_rank=2)
# Every option that changes what a state holds.
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no-feedback": {"use_error_feedback": False},
    "half-residual": {"residual_dtype": "float16"},
    "cold": {"warm_start": False},
    "noise": {"warm_start_noise": 0.5},
    "int8": {"wire_dtype": "int8"},
    "int4": {"wire_dtype": "int4"},
    "bfloat16": {"wire_dtype": "bfloat16"},
    "never": {"scope": "never"},
    "not-yet": {"start_powerSGD_iter": 100},
}
PLAIN = {dict, list, int, float, bool, str, type(None), torch.Tensor}


def _types(rank: int, variants: list[dict[str, Any]]) -> list[set[type]]:
    found = []
    for variant in variants:
        ddp = make_attached(SHAPES, dataclasses.replace(OPTIONS, **variant))
        for i in range(3):
            step(ddp, gradients(SHAPES, rank, i))
        for per_rank in (False, True):
            state = tp.state_dict(ddp, per_rank)
            read = from_bytes(to_bytes(state))  # by weights_only=True
            tp.load_state_dict(ddp, read)
            found.append(plain_types(state))
    return found


def test_a_state_of_every_option_is_read_without_code() -> None:
    for found in ranks.run(2, _types, [*VARIANTS.values()], timeout=180):
        assert len(found) == 2 * len(VARIANTS)
        for types in found:
            assert types <= PLAIN, types


def _types_of_shards(rank: int) -> list[set[type]]:
    module = make_modules(True)[0]
    for i in range(3):
        backward(module, rank, i)
    states = [tp.state_dict(module, per_rank) for per_rank in (False, True)]
    for state in states:
        tp.load_state_dict(module, from_bytes(to_bytes(state)))
    return [plain_types(state) for state in states]


def test_a_state_of_shards_is_read_without_code() -> None:
    for found in ranks.run(REPLICAS * SHARDS, _types_of_shards, backend="gloo", timeout=180):
        for types in found:
            assert types <= PLAIN, types


class Payload:
    """An object whose unpickling would run code."""

    def __reduce__(self) -> Any:
        return (pytest.fail, ("code of a checkpoint has run",))


def test_a_state_with_code_is_not_read() -> None:
    """The documented way to load refuses it before ``load_state_dict`` sees anything."""
    data = to_bytes({"version": 1, "step": Payload()})
    with pytest.raises(Exception, match="[Ww]eights.only|Unsupported"):
        from_bytes(data)
