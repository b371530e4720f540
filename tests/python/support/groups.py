# SPDX-License-Identifier: BSD-3-Clause
"""Process groups and their backends, and a compressed all-reduce.

For some of them, torch's annotations are too narrow.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import torch_powersgd as tp


def world() -> Any:
    """The default group."""
    group = dist.group.WORLD
    assert group is not None
    return group


def backend_of_world() -> Any:
    """The default group's backend for the CPU."""
    return world()._get_backend(torch.device("cpu"))


_gloo_groups: list[dist.ProcessGroup] = []


def gloo() -> dist.ProcessGroup:
    """An uncompressed group of all ranks. The first call is collective."""
    if not _gloo_groups:
        _gloo_groups.append(dist.new_group(backend="gloo"))
    return _gloo_groups[0]


def compress(tensor: torch.Tensor, **arguments: Any) -> Any:
    """An all-reduce that keeps its state from call to call."""
    with tp.scope("always"):
        return dist.all_reduce(tensor, **arguments)


def compressed_calls() -> int:
    calls: int = tp.stats()["compressed_calls"]
    return calls


def exception_of(work: dist.Work, otherwise: object) -> object:
    """work.exception(), or ``otherwise`` where torch (2.11) cannot convert it for Python."""
    try:
        return work.exception()
    except TypeError:
        return otherwise
