# SPDX-License-Identifier: BSD-3-Clause
"""The default process group and its backend, and a compressed all-reduce.

For the first two, torch's annotations are too narrow.
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


def compress(tensor: torch.Tensor, **arguments: Any) -> Any:
    """An all-reduce that keeps its state from call to call."""
    with tp.scope("always"):
        return dist.all_reduce(tensor, **arguments)
