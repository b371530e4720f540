# SPDX-License-Identifier: BSD-3-Clause
"""Modules that are wrapped in DDP again. The residual belongs to one wrapper's compression."""

from __future__ import annotations

from weakref import WeakKeyDictionary, finalize

import torch
from torch.nn.parallel import DistributedDataParallel

from torch_powersgd import log
from torch_powersgd._core import _C


class Wrapper:
    """What the next wrapper must know about the residual of an attached one."""

    def __init__(
        self, ddp: DistributedDataParallel, reducer: _C.BucketReducer, described: list[str]
    ) -> None:
        self.described = described  # the gradients
        self._reducer: _C.BucketReducer | None = reducer
        self._saved_at = -1
        self._had_residual = False
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
        self._reducer, self._had_residual = None, False

    def has_residual(self) -> bool:
        """True if steps have left a residual that ``state_dict`` has not returned since."""
        if self._reducer is None:
            return self._had_residual
        states = self._reducer.states
        return (
            states.options.use_error_feedback
            and states.step > states.options.start_powerSGD_iter
            and states.step != self._saved_at
            and states.compresses
        )

    def _let_go(self) -> None:
        """Keeps only the answer of ``has_residual`` once the wrapper is gone."""
        self._had_residual = self.has_residual()
        self._reducer = None


# The last wrapper of each module.
_wrappers: WeakKeyDictionary[torch.nn.Module, Wrapper] = WeakKeyDictionary()


def note_wrapper(
    ddp: DistributedDataParallel,
    reducer: _C.BucketReducer,
    described: list[str],
    previous: Wrapper | None,
) -> Wrapper:
    """Notes that a wrapper is attached, and warns if it replaces one with a residual.

    The residual of ``previous`` goes on in the new one.
    """
    before = _wrappers.get(ddp.module)
    _wrappers[ddp.module] = wrapper = Wrapper(ddp, reducer, described)
    if before is None or before is previous:
        return wrapper
    if before.has_residual():
        log.of(ddp.process_group).warning(
            f"{type(ddp.module).__name__} was wrapped again, so the gradients that the old wrapper "
            "has not sent yet (its residuals) are lost. To keep them, "
            + (
                "pass its Compression: attach(new_wrapper, previous=compression)"
                if before.described == described
                else "use state_dict and load_state_dict, because the parameters have changed"
            )
        )
    return wrapper
