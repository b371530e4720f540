# SPDX-License-Identifier: BSD-3-Clause
"""Processes that share one GPU. NCCL treats each as its own host and connects them by sockets."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

import torch_powersgd as tp
from support import ranks

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

WORLD_SIZE = 2
BACKEND = "cpu:gloo,cuda:powersgd"
INNERS = ("auto", "gloo")  # auto: NCCL, ordered by streams; Gloo runs on the engine's thread


def options_of(inner: str = "auto", **fields: Any) -> tp.Options:
    fields = {"start_powerSGD_iter": 0, "matrix_approximation_rank": 2, **fields}
    return tp.Options.hook_defaults(inner=inner, **fields)


def become_host(name: str) -> None:
    """Makes this process a host of its own to NCCL, on the first GPU."""
    os.environ.update(
        NCCL_HOSTID=name,
        NCCL_SOCKET_IFNAME="lo",
        NCCL_IB_DISABLE="1",
        GLOO_SOCKET_IFNAME="lo",
    )
    torch.cuda.set_device(0)


def _main(
    rank: int, function: Any, backend: str, options: Any, hosts: str, args: tuple[Any, ...]
) -> Any:
    become_host(str(rank))
    if hosts:
        os.environ["POWERSGD_HOST"] = hosts[rank]
    ranks.init_group(backend, options)
    result = function(rank, *args)
    torch.cuda.synchronize()
    return result


def run(
    function: Any,
    *args: Any,
    options: tp.Options | None = None,
    backend: str = BACKEND,
    world_size: int = WORLD_SIZE,
    hosts: str = "",
    timeout: float = 25,  # GPU time is short, and a hang must leave time for the other tests
) -> list[Any]:
    """Calls function(rank, *args) on each rank; returns the results by rank.

    For this package, rank r is on host ``hosts[r]``, or all are on one.
    """
    arguments = (function, backend, options or options_of(), hosts, args)
    return ranks.run(world_size, _main, *arguments, backend=None, timeout=timeout)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
