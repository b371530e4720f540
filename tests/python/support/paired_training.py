# SPDX-License-Identifier: BSD-3-Clause
"""Trains an attached module and a plain one over Gloo or NCCL side by side in one job.

Before each step, the parameters and buffers of the attached module are copied to the plain one. Its
gradients are then exactly those that the attached module would have without compression.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import torch_powersgd as tp
from support.ledger import TOLERANCE, Ledger, residuals_of
from support.on_ranks import all_agree
from support.tensors import Tensors, digest, same
from torch_powersgd.group_backends import PLAIN_BACKENDS
from torch_powersgd.matrices import as_reals

STEPS = 6
WARM_UP = 2  # steps that are exact
OPTIONS = tp.Options.hook_defaults(start_powerSGD_iter=WARM_UP, matrix_approximation_rank=2)

# Runs the passes of a step, given a module and the step's number. Returns tensors that compression
# leaves as they are, such as the loss and the gradients of the inputs.
Backward = Callable[[Any, int], Iterable[torch.Tensor | None]]


class TrainingPair:
    """The two modules, which start with the same parameters.

    Attributes:
        modules: The attached module and the plain one. Either may be wrapped by DDP.
        compression: That of the attached module.
        ledger: The gradients of both.
        steps: Number of steps so far.
    """

    def __init__(self, attached: nn.Module, plain: nn.Module, compression: tp.Compression) -> None:
        self.modules: tuple[Any, Any] = (attached, plain)
        self.compression = compression
        self.ledger = Ledger()
        self.steps = 0
        self._replica: list[str] = []  # the digest of gradients and parameters after each step
        # Saved now: with tensor parallelism, DDP's forward pass replaces them.
        self._parameters = [dict(_inner(module).named_parameters()) for module in self.modules]

    def equalize(self) -> None:
        """Copies the attached module's parameters and buffers to the plain one."""
        with torch.no_grad():
            for mine, other in zip(self._state(1), self._state(0), strict=True):
                mine.copy_(other)

    def gradients(self, which: int) -> Tensors:
        """This rank's gradients of the attached module (0) or the plain one (1), by name."""
        return {
            name: _numbers(parameter.grad).clone()
            for name, parameter in self._parameters[which].items()
            if parameter.grad is not None
        }

    def record(self) -> None:
        """Ends a step. Gradients must be equal during warm-up, and different afterwards."""
        found, wanted = self.gradients(0), self.gradients(1)
        assert found.keys() == wanted.keys()
        self.ledger.add(found, wanted)
        equal = same(found.values(), wanted.values())
        assert equal is (self.steps < WARM_UP), f"the gradients of step {self.steps}"
        self._replica.append(digest([*found.values(), *self._numbers_of(0).values()]))
        self.steps += 1

    def descend(self) -> None:
        """Applies the attached module's gradients to it."""
        gradients = self.gradients(0)
        with torch.no_grad():
            for name, numbers in self._numbers_of(0).items():
                if name in gradients:
                    numbers.sub_(gradients[name], alpha=0.05)

    def train(self, backward: Backward, steps: int = STEPS) -> None:
        """Trains both with SGD, and checks that compression changes nothing but the gradients."""
        for i in range(steps):
            self.equalize()
            seen = []
            for module, parameters in zip(self.modules, self._parameters, strict=True):
                for parameter in parameters.values():
                    parameter.grad = None
                torch.manual_seed(100 * i + dist.get_rank())
                seen.append([*backward(module, i), *module.buffers()])
            assert same(*seen), f"the forward pass of step {i}"
            self.record()
            self.descend()

    def residuals(self) -> Tensors:
        """The mean residuals of this rank's shards, without their padding. Collective."""
        shards = self._numbers_of(0)
        residuals = residuals_of(self.compression)
        return {name: residual[: len(shards[name])] for name, residual in residuals.items()}

    def check(
        self,
        tolerances: Mapping[str, float] | None = None,
        default: float = TOLERANCE[torch.float32],
        scale: float = 1,
    ) -> None:
        """Asserts that no gradient is lost, and that all replicas are equal. Collective.

        Args:
            tolerances: Error bounds of some parameters.
            default: The error bound of all others.
            scale: The factor by which the averaged gradients were finally multiplied.
        """
        residuals = {name: scale * residual for name, residual in self.residuals().items()}
        assert residuals, "nothing was compressed"
        for name, error in self.ledger.errors(residuals).items():
            assert error < (tolerances or {}).get(name, default), (name, error)
        assert all_agree(self._replica, self.compression.group)
        assert len(set(self._replica)) == len(self._replica), "the parameters do change"

    def _numbers_of(self, which: int) -> Tensors:
        return {name: _numbers(p.detach()) for name, p in self._parameters[which].items()}

    def _state(self, which: int) -> list[torch.Tensor]:
        return [*self._numbers_of(which).values(), *self.modules[which].buffers()]


def _inner(module: nn.Module) -> nn.Module:
    return module.module if isinstance(module, DistributedDataParallel) else module


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    """A rank's part of a tensor as it is reduced: dense, with complex numbers as pairs."""
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    return as_reals(tensor.to_dense() if tensor.is_sparse else tensor.detach())


def ddp_pair(
    make: Callable[[dist.ProcessGroup], nn.Module], device: str = "cpu", **ddp_arguments: Any
) -> TrainingPair:
    """A pair of DDP modules.

    Args:
        make: Makes the module for a process group.
        ddp_arguments: Keyword arguments of DDP.
    """
    world, plain = dist.group.WORLD, dist.new_group(backend=PLAIN_BACKENDS[device])
    assert world is not None
    assert isinstance(plain, dist.ProcessGroup)
    modules = []
    for group in (world, plain):
        torch.manual_seed(0)
        module = make(group).to(device)
        modules.append(DistributedDataParallel(module, process_group=group, **ddp_arguments))
    attached, plain = modules
    return TrainingPair(attached, plain, tp.attach(attached, OPTIONS))
