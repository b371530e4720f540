# SPDX-License-Identifier: BSD-3-Clause
"""The rounds of local steps: when each fragment has one, and what it averages."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from torch_powersgd import log
from torch_powersgd.local_steps.exact import Buffers
from torch_powersgd.local_steps.fragment import Fragment, Tensors, reshard
from torch_powersgd.local_steps.schedule import Schedule
from torch_powersgd.options import Options


@dataclass(frozen=True)
class Found:
    """The parts of a model that take local steps."""

    group: dist.ProcessGroup
    model: torch.nn.Module  # inside of DDP
    trained: Tensors
    parts: list[Tensors]  # of these
    buffers: list[str]  # those to average
    shared: Tensors  # all that must be equal at the start


class Rounds:
    """The rounds of one model.

    Args:
        kind: Name of the class that takes the local steps, for messages.
        found: Model and its parts, the same on all processes.
        schedule: When rounds begin and end.
        options: Options of the compression, as in ``attach``.
        move: Function that moves the anchors of a fragment by the mean changes.
        density: As of ``Fragment``.

    Attributes:
        steps, rounds: Numbers since the start of training.
        taken, dropped: Numbers of the steps, and of the rounds that were dropped, of this object.
        moved: Whether the parameters may differ between the processes.
    """

    def __init__(
        self,
        kind: str,
        found: Found,
        schedule: Schedule,
        options: Options | Mapping[str, Any] | None,
        move: Callable[[Fragment, Tensors], None],
        density: float | None = None,
    ) -> None:
        self.kind, self.group, self.schedule = kind, found.group, schedule
        self.fragments = [
            Fragment(part, options, found.group, found.trained.keys(), density)
            for part in found.parts
        ]
        self.buffers = Buffers(found.model, found.buffers, found.group)
        self.steps = self.rounds = self.taken = self.dropped = 0
        self.moved = self._warned = False
        self._model, self._move = found.model, move
        self._trained = {*found.trained.values()}

    @property
    def begun(self) -> int:
        """The number of rounds, with those in flight."""
        return self.rounds + sum(fragment.in_flight for fragment in self.fragments)

    def take_step(self) -> None:
        """Counts a step, with the rounds that begin and end after it."""
        self.steps += 1
        self.taken += 1
        if self._warms_up:
            self.sync(exact=False)
            return
        begins, ends = self.schedule.due(self.steps)
        if begins is not None:
            self.begin([self.fragments[begins]], self.schedule.fragment_sync_delay > 0)
        if ends is not None:
            self.finish(self.fragments[ends])
            if ends + 1 == len(self.fragments):
                self.average_buffers()

    def sync(self, exact: bool) -> None:
        """Has a round of all fragments now, which sends all of the changes if it is exact."""
        self.finish_all()
        with contextlib.ExitStack() as paused:
            if exact:
                for fragment in self.fragments:
                    paused.enter_context(fragment.compression.paused())
            self.begin(self.fragments)
            self.finish_all(averages=exact)
        self.average_buffers(compressed=not exact)
        self.moved = any(fragment.kept for fragment in self.fragments)

    def begin(self, fragments: Sequence[Fragment], overlaps: bool = False) -> None:
        """Begins rounds. Local steps are taken before their end if it overlaps."""
        reshard(self._model)
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad and parameter.numel() and parameter not in self._trained:
                raise RuntimeError(
                    f"{name!r} was frozen or missing when {self.kind} was created but is trained "
                    f"now, so it is not averaged. Call detach() and create {self.kind} again"
                )
        for fragment in fragments:
            fragment.begin(overlaps, f"begun round {self.begun + 1} of {self.kind}")

    def finish(self, fragment: Fragment, averages: bool = False) -> None:
        """Ends the round in flight, if any. ``averages``: without an outer optimizer."""
        if not fragment.in_flight:
            return
        reshard(self._model)
        averages = averages or self._warms_up
        name, dropped = fragment.finish(Fragment.subtract if averages else self._move)
        if name:
            log.warning(
                f"{name!r} was not finite on rank {self.group.rank()}: this round is dropped, and "
                "all processes return to where the previous round left them"
            )
        self.dropped += dropped
        self.rounds += 1
        if fragment.recent.trouble and not self._warned:
            self._warned = True
            log.of(self.group).warning(f"{self.kind}: {fragment.recent.trouble}")

    def finish_all(self, averages: bool = False) -> None:
        """Ends the rounds in flight."""
        for fragment in self.fragments:
            self.finish(fragment, averages)

    def average_buffers(self, compressed: bool = True) -> None:
        """Averages the buffers after a round, which was compressed or not."""
        compressed = compressed and not self._warms_up
        self.buffers.average(f"round {self.rounds} of {self.kind}", compressed)

    @property
    def _warms_up(self) -> bool:
        return self.steps <= self.schedule.warmup_steps
