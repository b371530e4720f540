# SPDX-License-Identifier: BSD-3-Clause
"""Lets tests that are written for one GPU per rank run on the CPU.

Most of torch's tests of DDP name a GPU where any device would do. Here a tensor that asks for a GPU
is one of the CPU. A test that needs more of a GPU than its name fails, over gloo as well.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


def _is_gpu(device: Any) -> bool:
    if isinstance(device, bool) or device is None:
        return False
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, int) or (isinstance(device, str) and device.startswith("cuda"))


class _OnCpu(TorchFunctionMode):
    """Puts the CPU in the place of each GPU that a function of torch is asked for."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        kwargs = dict(kwargs or {})
        if _is_gpu(kwargs.get("device")):
            kwargs["device"] = CPU
        if func is torch.Tensor.to and len(args) > 1 and _is_gpu(args[1]):
            args = (args[0], CPU, *args[2:])
        return func(*args, **kwargs)


def open_gates(common_distributed: Any) -> None:
    """Lets the tests' decorators pass, before the module of the tests is imported."""
    common_distributed.skip_if_lt_x_gpu = lambda count, **_: lambda test: test
    common_distributed.skip_if_no_gpu = lambda test: test


def use() -> None:
    """Puts the CPU in the place of this process's GPUs, as long as it lives."""
    contextlib.ExitStack().enter_context(_OnCpu())
    for name in ("set_device", "synchronize", "manual_seed", "manual_seed_all"):
        setattr(torch.cuda, name, lambda *_, **__: None)
    torch.cuda.device_count = lambda: 8
    torch.cuda.current_device = lambda: 0

    move: Any = torch.nn.Module.to

    def to_cpu(self: Any, *args: Any, **kwargs: Any) -> Any:
        return move(self, *(CPU if _is_gpu(argument) else argument for argument in args), **kwargs)

    torch.nn.Module.to = to_cpu  # type: ignore[method-assign]
    construct = DistributedDataParallel.__init__

    @functools.wraps(construct)
    def without_devices(self: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **{**kwargs, "device_ids": None, "output_device": None})

    DistributedDataParallel.__init__ = without_devices  # type: ignore[method-assign]
