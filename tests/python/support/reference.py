# SPDX-License-Identifier: BSD-3-Clause
"""PowerSGD with a local residual on simulated ranks, in float64 numpy: what the core must do.

It follows the description of the algorithm, not the core's code: an orthonormal basis comes from
Householder QR where the core has Cholesky-QR. The outputs depend on the basis by its span alone, so
that they can be compared; the factors cannot.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class PowerSGD:
    """One matrix on several ranks.

    Args:
        start: [m, r], the Q of the first step.
        lazy: keep M and the step's factors and subtract when the next step reads it, as the core
            does, instead of keeping E = M - P^ q^T.
    """

    def __init__(
        self,
        world_size: int,
        start: np.ndarray,
        *,
        error_feedback: bool = True,
        warm_start: bool = True,
        lazy: bool = False,
    ) -> None:
        self._world_size = world_size
        self._q = np.asarray(start, dtype=np.float64)
        self._error_feedback = error_feedback
        self._warm_start = warm_start
        self._lazy = lazy
        # What a rank remembers: a matrix, and a product that is yet to be subtracted from it.
        self._memory: list[tuple[np.ndarray | float, np.ndarray | float]]
        self._memory = [(0.0, 0.0) for _ in range(world_size)]

    def step(self, gradients: Sequence[np.ndarray], start: np.ndarray | None = None) -> np.ndarray:
        """The average that every rank gets for these gradients, one per rank, each [n, m].

        Args:
            start: this step's random Q; needed without warm start.
        """
        assert len(gradients) == self._world_size
        if not self._warm_start:
            assert start is not None
            self._q = np.asarray(start, dtype=np.float64)
        # 1 project
        m = [np.float64(g) + e for g, e in zip(gradients, self.residuals(), strict=True)]
        p = sum(m_of_rank @ self._q for m_of_rank in m)
        # 2 orthogonalize
        p_hat, _ = np.linalg.qr(p)
        # 3 back-project
        q_local = [m_of_rank.T @ p_hat for m_of_rank in m]
        self._q = sum(q_local)
        if self._error_feedback:
            sent = [p_hat @ q.T for q in q_local]
            if self._lazy:
                self._memory = list(zip(m, sent, strict=True))
            else:
                self._memory = [(a - b, 0.0) for a, b in zip(m, sent, strict=True)]
        # 4 reconstruct
        return p_hat @ self._q.T / self._world_size

    def residuals(self) -> list[np.ndarray | float]:
        return [memory - pending for memory, pending in self._memory]

    def mean_residual(self) -> np.ndarray:
        return sum(self.residuals()) / self._world_size


class AlternatingPowerSGD:
    """The same for the mode that sends P and Q in turns, P first.

    Args:
        start: [m, r], whose columns span what the first step projects onto.
    """

    def __init__(self, world_size: int, start: np.ndarray) -> None:
        self._q = np.linalg.qr(np.asarray(start, dtype=np.float64))[0]
        self._p: np.ndarray | None = None  # None: P is sent next
        self._residuals: list[np.ndarray | float] = [0.0] * world_size

    def step(self, gradients: Sequence[np.ndarray]) -> np.ndarray:
        """The average that every rank gets for these gradients, one per rank, each [n, m]."""
        m = [np.float64(g) + e for g, e in zip(gradients, self._residuals, strict=True)]
        if self._p is None:
            sent = [m_of_rank @ self._q for m_of_rank in m]
            outputs = [p @ self._q.T for p in sent]
            self._p = np.linalg.qr(sum(sent))[0]
        else:
            sent = [m_of_rank.T @ self._p for m_of_rank in m]
            outputs = [self._p @ q.T for q in sent]
            self._q, self._p = np.linalg.qr(sum(sent))[0], None
        self._residuals = [a - b for a, b in zip(m, outputs, strict=True)]
        return sum(outputs) / len(outputs)

    def mean_residual(self) -> np.ndarray:
        return sum(self._residuals) / len(self._residuals)


def as_matrix(tensor: np.ndarray) -> np.ndarray:
    """A contiguous weight as compression sees it: shape[0] x the rest, a vector as one row."""
    return tensor.reshape(tensor.shape[0] if tensor.ndim > 1 else 1, -1)
