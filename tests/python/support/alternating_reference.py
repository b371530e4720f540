# SPDX-License-Identifier: BSD-3-Clause
"""The reference of the mode that sends P and Q in turns, P first."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from support.reference import Matrix, sum_of


class AlternatingPowerSGD:
    """One gradient matrix of n x m elements on every rank, compressed at rank r.

    Args:
        start: [m, r], whose columns span what the first step projects onto.
    """

    def __init__(self, world_size: int, start: Matrix) -> None:
        self._q = np.linalg.qr(start).Q
        self._p: Matrix | None = None  # None: P is sent next
        self._residuals = [np.zeros(()) for _ in range(world_size)]

    def step(self, gradients: Sequence[Matrix]) -> Matrix:
        """The average that every rank gets for its gradients, one per rank, each [n, m]."""
        matrices = [g + e for g, e in zip(gradients, self._residuals, strict=True)]
        if self._p is None:
            sent = [matrix @ self._q for matrix in matrices]
            outputs = [p @ self._q.T for p in sent]
            self._p = np.linalg.qr(sum_of(sent)).Q
        else:
            sent = [matrix.T @ self._p for matrix in matrices]
            outputs = [self._p @ q.T for q in sent]
            self._q, self._p = np.linalg.qr(sum_of(sent)).Q, None
        self._residuals = [m - output for m, output in zip(matrices, outputs, strict=True)]
        return sum_of(outputs) / len(outputs)

    def mean_residual(self) -> Matrix:
        return sum_of(self._residuals) / len(self._residuals)
