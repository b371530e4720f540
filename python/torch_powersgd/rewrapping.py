# SPDX-License-Identifier: BSD-3-Clause
"""Modules that are wrapped in DDP anew. The residual belongs to the wrapper and is lost with it."""

from __future__ import annotations

from weakref import WeakKeyDictionary, finalize

import torch
from torch.nn.parallel import DistributedDataParallel

from torch_powersgd import log
from torch_powersgd._core import _C


class _Wrapper:
    """The residual of one attached wrapper, as far as the next one must know of it."""

    def __init__(self, reducer: _C.BucketReducer) -> None:
        self.reducer: _C.BucketReducer | None = reducer
        self.saved_at = -1
        self.had_residual = False

    def has_residual(self) -> bool:
        """True if steps have left a residual that ``state_dict`` has not returned since."""
        if self.reducer is None:
            return self.had_residual
        states = self.reducer.states
        return (
            states.options.use_error_feedback
            and states.step > states.options.start_powerSGD_iter
            and states.step != self.saved_at
            and states.compresses
        )

    def let_go(self) -> None:
        """Keeps the fact alone, once the wrapper is gone."""
        self.had_residual = self.has_residual()
        self.reducer = None


# The last wrapper of each module.
_wrappers: WeakKeyDictionary[torch.nn.Module, _Wrapper] = WeakKeyDictionary()


def note_wrapper(ddp: DistributedDataParallel, reducer: _C.BucketReducer) -> None:
    """Notes that a wrapper is attached, and warns if it takes the place of one with a residual."""
    before = _wrappers.get(ddp.module)
    _wrappers[ddp.module] = wrapper = _Wrapper(reducer)
    finalize(ddp, wrapper.let_go).atexit = False
    if before is not None and before.has_residual() and ddp.process_group.rank() == 0:
        log.warning(
            f"{type(ddp.module).__name__} was wrapped anew, and the part of its gradients that the "
            "old wrapper has not sent yet is lost. To keep it, pass state_dict() of the old "
            "compression to load_state_dict() of the new one"
        )


def note_detached(ddp: DistributedDataParallel, reducer: _C.BucketReducer) -> None:
    """Forgets a wrapper whose residual was given up by ``detach``."""
    wrapper = _wrappers.get(ddp.module)
    if wrapper is not None and wrapper.reducer is reducer:
        del _wrappers[ddp.module]


def note_saved(ddp: DistributedDataParallel, reducer: _C.BucketReducer) -> None:
    """Notes that ``state_dict`` has returned the residual of a wrapper."""
    wrapper = _wrappers.get(ddp.module)
    if wrapper is not None and wrapper.reducer is reducer:
        wrapper.saved_at = reducer.states.step
