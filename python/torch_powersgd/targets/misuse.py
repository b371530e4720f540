# SPDX-License-Identifier: BSD-3-Clause
"""Watches how an attached module is used, for mistakes that training hides.

DDP averages nothing if the loss is computed with the module inside it, and averages too late for an
optimizer that steps within the backward pass. It never averages a parameter that was frozen when it
wrapped the module, and stops averaging one that is converted later. The ranks then drift apart
silently, with any backend. A module that is wrapped in DDP again loses its residual, which belongs
to one wrapper's compression.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from weakref import WeakKeyDictionary, finalize, ref

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


class _Averages:
    """Checks that each step of an optimizer applies averages. Keeps neither module nor core alive.

    Args:
        module: Attached module.
        reducer: Reducer of its buckets.
        group: Group that averages. Its first rank warns. Errors are raised on every rank.
    """

    def __init__(
        self, module: torch.nn.Module, reducer: _C.BucketReducer, group: dist.ProcessGroup
    ) -> None:
        self.module, self.reducer, self.log = ref(module), ref(reducer), log.of(group)
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
        if not self.in_backward and hooked and _trains(optimizer, ddp):
            self.in_backward = True
            self.log.warning(
                f"an optimizer of {type(ddp.module).__name__} steps within the backward pass, "
                "before DDP has averaged the gradients, so the ranks drift apart. Call "
                "optimizer.step() after the backward pass"
            )

    def after_step(self, optimizer: Optimizer) -> None:
        """Counts a step of an optimizer, which may hold the parameters of other modules."""
        module, reducer = self.module(), self.reducer()
        if not self.log.speaks or module is None or reducer is None or module in in_local_steps:
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
        elif self.steps[optimizer] > INTERVAL and _trains(optimizer, module):
            self.first = None
            name = type(getattr(module, "module", module)).__name__
            self.log.warning(
                f"the gradients of {name} were not averaged in {INTERVAL} optimizer steps, so the "
                "ranks drift apart. Compute the loss with the wrapper (ddp) rather than "
                "ddp.module, and leave no_sync() before each step"
            )

    def name_what_is_not_averaged(
        self, ddp: DistributedDataParallel, trained: Iterable[torch.Tensor]
    ) -> None:
        """Warns of the parameters among these that DDP should average but doesn't."""
        missed = {p for p in trained if p.requires_grad} - _averaged_by(ddp)
        if not missed:
            return
        names = [
            name
            for name, parameter in named_parameters_of(ddp)
            if parameter in missed and name not in self.named
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


def _trains(optimizer: Optimizer, module: torch.nn.Module) -> bool:
    return not _averaged_by(module).isdisjoint(parameters_of(optimizer))


def _averaged_by(module: torch.nn.Module) -> set[torch.Tensor]:
    if isinstance(module, DistributedDataParallel):
        return {*_C.reduced_parameters(module.reducer)}
    return {*module.parameters()}


class Residual:
    """What the next wrapper of a module must know about the residual of this one."""

    def __init__(
        self, ddp: DistributedDataParallel, reducer: _C.BucketReducer, described: list[str]
    ) -> None:
        self.described = described  # the gradients
        self._reducer: _C.BucketReducer | None = reducer
        self._saved_at = -1
        self._was_unsaved = False
        finalize(ddp, self._let_go).atexit = False

    def note_moved(self, reducer: _C.BucketReducer) -> None:
        """Notes that the residual is now with this reducer, in another group."""
        self._reducer = reducer

    def note_saved(self) -> None:
        """Notes that ``state_dict`` has returned the residual."""
        if self._reducer is not None:
            self._saved_at = self._reducer.states.step

    def note_ended(self) -> None:
        """Notes that ``detach`` has dropped the residual, or another compression has taken it."""
        self._reducer, self._was_unsaved = None, False

    def is_unsaved(self) -> bool:
        """True if steps have left a residual that ``state_dict`` has not returned since."""
        if self._reducer is None:
            return self._was_unsaved
        states = self._reducer.states
        return (
            states.options.use_error_feedback
            and states.step > states.options.start_powerSGD_iter
            and states.step != self._saved_at
            and states.compresses
        )

    def _let_go(self) -> None:
        """Keeps only the answer of ``is_unsaved`` once the wrapper is gone."""
        self._was_unsaved = self.is_unsaved()
        self._reducer = None


@dataclass(frozen=True)
class _Watched:
    """What is watched of a module: of its last DDP wrapper, or of an FSDP2 module."""

    residual: Residual | None
    averages: _Averages | None


# Keyed by the module inside DDP, so that a new wrapper replaces the old one.
_watched: WeakKeyDictionary[torch.nn.Module, _Watched] = WeakKeyDictionary()


def watch_use(
    module: torch.nn.Module,
    reducer: _C.BucketReducer,
    group: dist.ProcessGroup,
    described: list[str],
    previous: Residual | None,
) -> Residual | None:
    """Watches the use of an attached module from now on. Returns the residual of a DDP wrapper.

    Args:
        module: Attached module.
        reducer: Reducer of its gradients.
        group: Group that averages.
        described: The gradients in words.
        previous: Residual that goes on in this one.
    """
    ddp = module if isinstance(module, DistributedDataParallel) else None
    model = module if ddp is None else ddp.module
    residual = None if ddp is None else Residual(ddp, reducer, described)
    before = _watched[model].residual if model in _watched else None
    if ddp is not None and before is not None and before is not previous:
        _warn_of_loss(ddp, before, described)
    averages = _Averages(module, reducer, group) if group.size() > 1 else None
    if averages is not None:
        watch(averages)
        if ddp is not None:
            averages.name_what_is_not_averaged(ddp, ddp.parameters())
    _watched[model] = _Watched(residual, averages)
    return residual


def _warn_of_loss(ddp: DistributedDataParallel, before: Residual, described: list[str]) -> None:
    if before.is_unsaved():
        log.of(ddp.process_group).warning(
            f"{type(ddp.module).__name__} was wrapped again, so the gradients that the old wrapper "
            "has not sent yet (its residuals) are lost. To keep them, "
            + (
                "pass its Compression: attach(new_wrapper, previous=compression)"
                if before.described == described
                else "use state_dict and load_state_dict, because the parameters have changed"
            )
        )
