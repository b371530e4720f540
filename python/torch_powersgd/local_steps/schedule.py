# SPDX-License-Identifier: BSD-3-Clause
"""When the rounds of local steps are, and which parameters each of them averages."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch_powersgd.local_steps.fragment import Tensors
from torch_powersgd.option_values import is_bool, require
from torch_powersgd.options import Options

# In a round, a matrix rank is worth more than precision.
_DEFAULTS = {"matrix_approximation_rank": 32, "wire_dtype": "int4"}


@dataclass(frozen=True)
class Schedule:
    """When rounds begin and end, by the arguments of ``LocalSGD``."""

    sync_every: int
    fragments: int = 1
    fragment_sync_delay: int = 0
    warmup_steps: int = 0

    def check(self) -> None:
        """Raises a ValueError that names a field, its value and what is allowed."""
        for name, least in (
            ("sync_every", 1),
            ("warmup_steps", 0),
            ("fragments", 1),
            ("fragment_sync_delay", 0),
        ):
            value = getattr(self, name)
            fits = isinstance(value, int) and not is_bool(value) and value >= least
            require(fits, name, f"an integer >= {least}", value)
        whole, period = self.sync_every, f"sync_every={self.sync_every}"
        require(whole % self.fragments == 0, "fragments", f"a divisor of {period}", self.fragments)
        delay = self.fragment_sync_delay
        require(delay < whole, "fragment_sync_delay", f"less than {period}", delay)

    def due(self, step: int) -> tuple[int | None, int | None]:
        """Returns the fragments whose rounds begin and end after a step, counted from 1."""
        begins = step > self.warmup_steps
        return self._ends(step + self.fragment_sync_delay) if begins else None, self._ends(step)

    def _ends(self, step: int) -> int | None:
        number, place = divmod(step - self.warmup_steps, self.sync_every // self.fragments)
        return (number - 1) % self.fragments if number > 0 and place == 0 else None


def split(parameters: Tensors, count: int) -> list[Tensors]:
    """Splits the parameters, in order, into ``count`` parts of about as many elements each."""
    named = list(parameters.items())
    reached = list(itertools.accumulate(parameter.numel() for _, parameter in named))
    parts, begin = [], 0
    for part in range(1, count + 1):
        end, last = begin + 1, len(named) - (count - part)  # leaves one for each later part
        while end < last and (part == count or reached[end - 1] * count < reached[-1] * part):
            end += 1
        parts.append(dict(named[begin:end]))
        begin = end
    return parts


def lay_under(options: Any, warmup_steps: int, of_group: Options) -> Any:
    """Returns the options of ``attach``, with the defaults of local steps.

    They take the place of defaults of the group. Compression starts after the warm-up.
    """
    if options is not None and not isinstance(options, Mapping):
        return options
    usual = Options()
    defaults = {
        name: value
        for name, value in _DEFAULTS.items()
        if getattr(of_group, name) == getattr(usual, name)
    }
    return {**defaults, "start_powerSGD_iter": warmup_steps, **(options or {})}
