# SPDX-License-Identifier: BSD-3-Clause
"""What recent rounds have shown of a model that learns slowly or wrongly."""

from __future__ import annotations

import math
from collections import deque

MANY = 10  # rounds. Fewer may repeat much at the start of training.
REPEATED = 0.5  # mean share of the residual that is kept
CANCELED = 0.25  # mean agreement. Independent numbers have 1.


class RecentRounds:
    """The latest compressed rounds of some parameters.

    Args:
        sparse: Whether they send the largest changes in place of factors.
    """

    def __init__(self, sparse: bool) -> None:
        self._sparse = sparse
        self._measures: deque[float] = deque(maxlen=MANY)

    def add(self, measure: float) -> None:
        """Adds a round, by the share of its residual that is kept.

        If it sends the largest changes, by the agreement of ``InFlight.receive``. Of NaN, nothing
        follows.
        """
        if math.isfinite(measure):
            self._measures.append(measure)

    @property
    def trouble(self) -> str:
        """What the rounds have shown, and what to do, or nothing."""
        if len(self._measures) < MANY:
            return ""
        mean = sum(self._measures) / MANY
        if not self._sparse and mean > REPEATED:
            return (
                f"in {MANY} rounds, "
                "the local steps have mostly repeated what the factors had left out, so the model "
                "learns slowly. Use a higher matrix_approximation_rank, or a smaller sync_every"
            )
        if self._sparse and mean < CANCELED:
            return (
                f"in {MANY} rounds, "
                "what the processes have sent has mostly canceled, as if their data were unlike, "
                "so the model may end in the wrong place. Leave density out, to send factors"
            )
        return ""
