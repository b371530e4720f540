# SPDX-License-Identifier: BSD-3-Clause
"""Checks, at the steps of optimizers, that the gradients they apply were averaged over the ranks.

DDP averages nothing if the loss is computed with the module inside of it, and it never averages a
parameter that was frozen when it wrapped the module. The ranks then drift apart without an error,
with any backend. The first rank of a group warns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from torch_powersgd import log
from torch_powersgd._core import _C
from torch_powersgd.ddp import named_parameters_of
from torch_powersgd.proposal import Module

# An optimizer's steps between two looks at a module, and the steps without an average that are too
# many. Gradient accumulation steps the optimizer only after the pass that is averaged.
INTERVAL = 20

_SHOWN = 3  # names in a warning


class _Check:
    """The check of one attached module, which does not keep the module alive.

    Args:
        module: Attached module.
        model: Core's side of the module.
    """

    def __init__(self, module: Module, model: _C.AttachedModel) -> None:
        self.model = model
        is_ddp = isinstance(module, DistributedDataParallel)
        assert isinstance(module, torch.nn.Module)
        # The reducer keeps its parameters, and FSDP2 its shards, so that no other has their ids.
        self.averaged = {
            id(parameter)
            for parameter in (
                _C.reduced_parameters(module.reducer) if is_ddp else module.parameters()
            )
        }
        self.steps: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        # The model's step at the first step of each optimizer. None: an average was seen.
        self.first: WeakKeyDictionary[Optimizer, int] | None = WeakKeyDictionary()
        self.named: set[str] = set()

    def after_step(self, module: Module, optimizer: Optimizer) -> None:
        """Counts a step of an optimizer, which may hold the parameters of other modules."""
        self.steps[optimizer] = count = self.steps.get(optimizer, 0) + 1
        if self.first is not None:
            self._look_for_an_average(module, optimizer)
        if count % INTERVAL == 0 and isinstance(module, DistributedDataParallel):
            trained = (p for p in _parameters_of(optimizer) if p.grad is not None)
            self.name_what_is_not_averaged(module, trained)

    def _look_for_an_average(self, module: Module, optimizer: Optimizer) -> None:
        assert self.first is not None
        step = self.model.step
        if not self.model.active or step != self.first.setdefault(optimizer, step):
            self.first = None
        elif self.steps[optimizer] > INTERVAL and self._holds(optimizer):
            self.first = None
            name = type(getattr(module, "module", module)).__name__
            log.warning(
                f"the gradients of {name} were not averaged in {INTERVAL} steps of its optimizer, "
                "so that the ranks drift apart. Compute the loss with the wrapper (ddp) and not "
                "with the module inside of it (ddp.module), and leave no_sync() before a step"
            )

    def _holds(self, optimizer: Optimizer) -> bool:
        return any(id(parameter) in self.averaged for parameter in _parameters_of(optimizer))

    def name_what_is_not_averaged(
        self, ddp: DistributedDataParallel, trained: Iterable[torch.Tensor]
    ) -> None:
        """Warns of those among the parameters that DDP should average and does not."""
        missed = {id(p) for p in trained if p.requires_grad and id(p) not in self.averaged}
        if not missed:
            return
        names = [
            name
            for name, parameter in named_parameters_of(ddp)
            if id(parameter) in missed and name not in self.named
        ]
        if names:
            self.named.update(names)
            shown = ", ".join(f"'{name}'" for name in names[:_SHOWN])
            shown += ", ..." if len(names) > _SHOWN else ""
            log.warning(
                f"DDP does not average the gradients of {shown}, so that the ranks drift apart: "
                "they were frozen, or were not there, when DDP wrapped the module. Wrap it anew "
                "and attach the new wrapper"
            )


_checks: WeakKeyDictionary[Module, _Check] = WeakKeyDictionary()
_registered = False


def check(module: Module, model: _C.AttachedModel) -> None:
    """Checks an attached module now, and from now on at each step of its optimizers."""
    global _registered
    if not _registered:
        register_optimizer_step_post_hook(_after_step)
        _registered = True
    _checks[module] = _Check(module, model)
    if isinstance(module, DistributedDataParallel):
        _checks[module].name_what_is_not_averaged(module, module.parameters())


def _after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if torch.compiler.is_compiling():  # A compiled step of an optimizer leaves the checks out.
        return
    for module, of_module in list(_checks.items()):
        of_module.after_step(module, optimizer)


def _parameters_of(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
