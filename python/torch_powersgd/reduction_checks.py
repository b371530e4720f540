# SPDX-License-Identifier: BSD-3-Clause
"""Checks at each optimizer step that the gradients it applies were averaged over the ranks.

DDP averages nothing if the loss is computed with the module inside it, and averages too late for an
optimizer that steps within the backward pass. It never averages a parameter that was frozen when it
wrapped the module, and stops averaging one that is converted later. The ranks then drift apart
silently, with any backend.
"""

from __future__ import annotations

from collections.abc import Iterable
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from torch_powersgd import log
from torch_powersgd._core import _C
from torch_powersgd.optimizer_steps import parameters_of, watch
from torch_powersgd.targets.ddp import conversion_error, in_local_steps, named_parameters_of

# Warn after more optimizer steps than this without an average, and look this often for parameters
# that are not averaged. Gradient accumulation is no false alarm, as it steps only after an average.
INTERVAL = 20

_SHOWN = 3  # names in a warning


class _Check:
    """The check of one attached module. It keeps neither the module nor its core alive.

    Args:
        module: Attached module.
        reducer: Reducer of its buckets.
        group: Group that averages. Its first rank warns. Errors are raised on every rank.
    """

    def __init__(
        self, module: torch.nn.Module, reducer: _C.BucketReducer, group: dist.ProcessGroup
    ) -> None:
        self.module, self.reducer, self.log = ref(module), ref(reducer), log.of(group)
        # The reducer keeps its parameters alive, and FSDP2 its shards, so these ids aren't reused.
        self.averaged = {id(parameter) for parameter in _averaged_parameters(module)}
        self.passes = 0  # synchronized passes at the last check that found no error
        self.steps: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        # The step at the first step of each optimizer. None: an average was seen.
        self.first: WeakKeyDictionary[Optimizer, int] | None = WeakKeyDictionary()
        self.named: set[str] = set()
        self.in_backward = False  # whether an optimizer has stepped within the backward pass

    def before_step(self, optimizer: Optimizer) -> None:
        """Raises a RuntimeError if DDP should have averaged gradients that it no longer gets."""
        ddp = self.module()
        if not isinstance(ddp, DistributedDataParallel) or ddp in in_local_steps:
            return
        if torch._C._current_graph_task_id() >= 0:
            self._warn_in_backward(ddp, optimizer)
        passes = _C.synchronized_passes(ddp.reducer)
        if passes != self.passes:
            if error := conversion_error(ddp):
                raise RuntimeError(error)
            self.passes = passes

    def _warn_in_backward(self, ddp: DistributedDataParallel, optimizer: Optimizer) -> None:
        # The overlapped ZeroRedundancyOptimizer steps within the pass as well, after the average.
        hooked = any(
            getattr(p, "_post_accumulate_grad_hooks", None) for p in parameters_of(optimizer)
        )
        if not self.in_backward and hooked and self._holds(optimizer):
            self.in_backward = True
            self.log.warning(
                f"an optimizer of {type(ddp.module).__name__} steps within the backward pass, "
                "before DDP has averaged the gradients, so the ranks drift apart. Call "
                "optimizer.step() after the backward pass"
            )

    def after_step(self, optimizer: Optimizer) -> None:
        """Counts a step of an optimizer, which may hold the parameters of other modules."""
        module, reducer = self.module(), self.reducer()
        if not self.log.speaks or module is None or reducer is None:
            return
        self.steps[optimizer] = count = self.steps.get(optimizer, 0) + 1
        if self.first is not None:
            self._look_for_an_average(module, reducer, optimizer)
        if count % INTERVAL == 0 and isinstance(module, DistributedDataParallel):
            trained = (p for p in parameters_of(optimizer) if p.grad is not None)
            self.name_what_is_not_averaged(module, trained)

    def _look_for_an_average(
        self, module: torch.nn.Module, reducer: _C.BucketReducer, optimizer: Optimizer
    ) -> None:
        assert self.first is not None
        step = reducer.states.step
        if not reducer.active or step != self.first.setdefault(optimizer, step):
            self.first = None
        elif self.steps[optimizer] > INTERVAL and self._holds(optimizer):
            self.first = None
            name = type(getattr(module, "module", module)).__name__
            self.log.warning(
                f"the gradients of {name} were not averaged in {INTERVAL} optimizer steps, so the "
                "ranks drift apart. Compute the loss with the wrapper (ddp) rather than "
                "ddp.module, and leave no_sync() before each step"
            )

    def _holds(self, optimizer: Optimizer) -> bool:
        return any(id(parameter) in self.averaged for parameter in parameters_of(optimizer))

    def name_what_is_not_averaged(
        self, ddp: DistributedDataParallel, trained: Iterable[torch.Tensor]
    ) -> None:
        """Warns of the parameters among these that DDP should average but doesn't."""
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
            self.log.warning(
                f"DDP does not average the gradients of {shown}, so the ranks drift apart: they "
                "were frozen or missing when DDP wrapped the module. Wrap it again and attach the "
                "new wrapper"
            )


# Keyed by the module inside DDP, so that a new wrapper's check replaces the old one's.
_checks: WeakKeyDictionary[torch.nn.Module, _Check] = WeakKeyDictionary()


def check(module: torch.nn.Module, reducer: _C.BucketReducer, group: dist.ProcessGroup) -> None:
    """Checks an attached module now, and from now on at each step of its optimizers."""
    of_module = _Check(module, reducer, group)
    watch(of_module)
    if isinstance(module, DistributedDataParallel):
        _checks[module.module] = of_module
        of_module.name_what_is_not_averaged(module, module.parameters())
    else:
        _checks[module] = of_module


def _averaged_parameters(module: torch.nn.Module) -> Iterable[torch.Tensor]:
    if isinstance(module, DistributedDataParallel):
        return _C.reduced_parameters(module.reducer)
    return module.parameters()
