# SPDX-License-Identifier: BSD-3-Clause
"""Notices that ``load_state_dict`` changed a model between two of its local steps."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from torch_powersgd import schema
from torch_powersgd.agreement import agree, equality_of
from torch_powersgd.local_steps.fragment import Tensors


class Loads:
    """What ``load_state_dict`` of a model has done since its last step.

    An evaluation may load averaged weights and then the model's own, on one process alone. That is
    no load. One that loads what the model has is, because other processes may have had others.

    Args:
        model: Module whose ``load_state_dict`` is watched.
        parameters: Parameters of it that take local steps.
    """

    def __init__(self, model: torch.nn.Module, parameters: Tensors) -> None:
        self._parameters = parameters
        self._before: int | None = None  # the checksum before the first load since the last step
        self._left = False  # whether a load since then has changed the parameters
        self._watches = True
        self.pending = False  # whether the model was loaded, and not for an evaluation
        _watched[model] = self
        # The hooks are functions of this module, so that the model can be copied and pickled.
        self._hooks = [
            model.register_load_state_dict_pre_hook(_before_load),
            model.register_load_state_dict_post_hook(_after_load),
        ]

    def checksum(self) -> int:
        return schema.checksum(self._parameters)

    def agree(self, kind: str, group: dist.ProcessGroup) -> None:
        """Raises a ValueError unless all processes of a class's group hold the same. Collective."""
        compare = equality_of(
            f"the models that are loaded after {kind} was created, without a state of {kind},"
        )
        mine = {"checksum of the parameters": self.checksum()}
        agree(group, f"load_state_dict of the model of {kind}", lambda: (None, mine), compare)

    def begin(self) -> None:
        """Forgets what was loaded before a step."""
        self._before, self._left, self._watches, self.pending = None, False, True, False

    def ignore(self) -> None:
        """Forgets what was loaded, and what will be until the next step."""
        self.begin()
        self._watches = False

    def end(self) -> None:
        """Stops watching."""
        for hook in self._hooks:
            hook.remove()

    def before_load(self) -> None:
        if self._before is None and self._watches:
            self._before = self.checksum()

    def after_load(self) -> None:
        if self._watches:
            changed = self.checksum() != self._before
            self.pending = changed or not self._left
            self._left |= changed


_watched: WeakKeyDictionary[torch.nn.Module, Loads] = WeakKeyDictionary()


def _before_load(module: torch.nn.Module, *_: Any) -> None:
    if (loads := _watched.get(module)) is not None:
        loads.before_load()


def _after_load(module: torch.nn.Module, _: Any) -> None:
    if (loads := _watched.get(module)) is not None:
        loads.after_load()
