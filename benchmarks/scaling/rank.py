# SPDX-License-Identifier: BSD-3-Clause
"""One process of a run. It attaches, takes steps, and measures what they cost.

The model has parameters but computes nothing, and its gradients are random numbers. Nothing reads
or writes the parameters, so the system gives them no memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import process
import shapes
import torch
import torch.distributed as dist
from launcher.ranks import Rank
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import torch_powersgd as tp
from scaling.model import EXACT_STEPS, RANK, WIRES, cap_of, options_of

STEPS = 2  # counted
_COLLECTIVE_SECONDS = 300


class _Drawn(torch.autograd.Function):
    """A scalar whose gradient with respect to the parameter is random."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor) -> Tensor:
        ctx.shape = parameter.shape
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Tensor:
        return torch.empty(ctx.shape).uniform_(-1, 1)


class _Model(nn.Module):
    """The parameters of a model. forward() returns a loss whose gradients are random."""

    def __init__(self, name: str) -> None:
        super().__init__()
        tensors = (torch.empty(shape) for shape in shapes.MODELS[name]())
        self.weights = nn.ParameterList(map(nn.Parameter, tensors))

    def forward(self) -> Tensor:
        apply = cast(Callable[[Tensor], Tensor], _Drawn.apply)
        return torch.stack([apply(weight) for weight in self.weights]).sum()


def measure(rank: Rank, model: str, method: str) -> dict[str, int]:
    """Runs the rank, and returns its own figures."""
    torch.manual_seed(rank.number)
    before = process.touched_memory()
    backend = "cpu:powersgd" if method in WIRES else "gloo"
    with rank.group(backend, _COLLECTIVE_SECONDS):
        # The DDP module is destroyed before the group, or plain Gloo may hang.
        figures = _trained(model, method)
    return {**figures, "memory_bytes": figures["memory_bytes"] - before}


def _trained(model: str, method: str) -> dict[str, int]:
    """The figures of a DDP module, which is destroyed at the end."""
    ddp = DistributedDataParallel(
        _Model(model),
        gradient_as_bucket_view=True,
        init_sync=False,
        bucket_cap_mb=cap_of(method),
    )
    if method in WIRES:
        tp.attach(ddp, options_of(method))
    elif method == "hook":
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=RANK, start_powerSGD_iter=EXACT_STEPS
        )
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    _take_steps(ddp, 2 + EXACT_STEPS)  # after two compressed ones, receives are posted ahead
    dist.barrier()
    memory, sent = process.touched_memory(), process.bytes_written()
    _take_steps(ddp, STEPS)
    return {
        "sent_bytes": (process.bytes_written() - sent) // STEPS,
        "memory_bytes": memory,
        "threads": process.threads(),
        "sockets": process.sockets(),
    }


def _take_steps(ddp: DistributedDataParallel, count: int) -> None:
    for _ in range(count):
        ddp.zero_grad(set_to_none=True)
        ddp().backward()
