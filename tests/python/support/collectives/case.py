# SPDX-License-Identifier: BSD-3-Clause
"""A case: a function that uses a collective in a process group and returns comparable results."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass
class Peer:
    """One rank's side of a case; its random tensors differ by rank and by case."""

    group: dist.ProcessGroup
    rank: int
    size: int
    random: torch.Generator

    def tensor(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        if dtype.is_floating_point or dtype.is_complex:
            wide = torch.complex128 if dtype.is_complex else torch.float64
            return torch.randn(shape, generator=self.random, dtype=wide).to(dtype)
        return torch.randint(0, 5, shape, generator=self.random).to(dtype)

    @property
    def following(self) -> int:
        return (self.rank + 1) % self.size

    @property
    def preceding(self) -> int:
        return (self.rank - 1) % self.size


CASES: dict[str, Callable[[Peer], Any]] = {}


def case(function: Callable[[Peer], Any]) -> Callable[[Peer], Any]:
    CASES[function.__name__] = function
    return function


def run_case(name: str, group: dist.ProcessGroup) -> tuple[str, Any]:
    """Runs a case. Its results compare and pickle; an error counts as a result."""
    rank = dist.get_rank(group)
    seed = zlib.crc32(name.encode()) + rank
    peer = Peer(group, rank, dist.get_world_size(group), torch.Generator().manual_seed(seed))
    try:
        return ("returns", _digest(CASES[name](peer)))
    except Exception as error:  # an error is part of the behavior
        return ("raises", type(error).__name__)


def _digest(value: Any) -> Any:
    """Replaces tensors by dtype, shape and a hash of their bits: NaN equals itself, -0 is not 0."""
    if isinstance(value, torch.Tensor) and value.is_sparse:
        value = value.coalesce()
        return ("sparse", _digest(value.indices()), _digest(value.values()))
    if isinstance(value, torch.Tensor):
        bits = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return (str(value.dtype), tuple(value.shape), hashlib.sha256(bits).hexdigest())
    if isinstance(value, (list, tuple)):
        return [_digest(item) for item in value]
    return value


DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool),
    *(torch.complex64, torch.complex128),
]
