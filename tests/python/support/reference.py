# SPDX-License-Identifier: BSD-3-Clause
"""The algorithm of PowerSGD for one matrix on simulated ranks, in float64: the tests' reference.

It follows the description of the algorithm and shares no code with the core. Its orthonormal basis
comes from Householder QR, the core's from Cholesky QR. The outputs depend on the span of the basis
alone, so they can be compared; the factors cannot.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Matrix = npt.NDArray[np.float64]


class PowerSGD:
    """One gradient matrix of n x m elements on every rank, compressed at rank r.

    Args:
        start: [m, r], the factor Q of the first step.
        error_feedback: keep what a step does not send, and add it to the next gradient.
        warm_start: begin a step with the factor Q of the last one.
    """

    def __init__(
        self,
        world_size: int,
        start: Matrix,
        *,
        error_feedback: bool = True,
        warm_start: bool = True,
    ) -> None:
        self._q = start
        self._residuals = [np.zeros(()) for _ in range(world_size)]
        self._error_feedback = error_feedback
        self._warm_start = warm_start

    def step(self, gradients: Sequence[Matrix], start: Matrix) -> Matrix:
        """The average that every rank gets for its gradients.

        Args:
            gradients: one per rank, each [n, m].
            start: [m, r], a random Q that replaces the last one without warm start.
        """
        if not self._warm_start:
            self._q = start
        matrices = [g + e for g, e in zip(gradients, self._residuals, strict=True)]

        # Project. An all-reduce adds the ranks' factors P.
        p = sum_of([matrix @ self._q for matrix in matrices])

        # Orthogonalize. The columns of p_hat span what the columns of P span.
        p_hat = np.linalg.qr(p).Q

        # Back-project. An all-reduce adds the ranks' factors q.
        local_q = [matrix.T @ p_hat for matrix in matrices]
        self._q = sum_of(local_q)
        if self._error_feedback:
            self._residuals = [m - p_hat @ q.T for m, q in zip(matrices, local_q, strict=True)]

        # Reconstruct.
        return p_hat @ self._q.T / len(matrices)

    def mean_residual(self) -> Matrix:
        return sum_of(self._residuals) / len(self._residuals)


def sum_of(matrices: Sequence[Matrix]) -> Matrix:
    """The sum over the ranks, in their order."""
    total: Matrix = np.sum(matrices, axis=0)
    return total
