# SPDX-License-Identifier: BSD-3-Clause
"""The identity: the sum of outputs + the mean residual = the sum of mean gradients."""

from __future__ import annotations

from collections.abc import Mapping

import torch

import torch_powersgd as tp
from support.states import own_part
from support.tensors import Tensors, add_to, relative_error

# Bounds on the error of "sum of outputs + mean residual = sum of mean gradients". Each step rounds
# M, the factors and the output once. In float32 that is an error of about 6e-8 * |M|, where |M| is
# a few times the gradient's norm. About ten steps add such errors at random. The bound for float64
# is proportional to its rounding error.
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-13}


def residuals_of(compression: tp.Compression) -> Tensors:
    """The mean residual of each compressed parameter, in float64 and without the loss scale.

    Collective.
    """
    state = own_part(compression.state_dict())
    return {
        name.removeprefix("weights."): saved["residual"].cpu().double() / state["grad_scale"]
        for name, saved in state["parameters"].items()
    }


def own_residuals_of(compression: tp.Compression) -> Tensors:
    """This process's residual of each parameter that has one, in float64: of factors, as [n, m]."""
    saved = own_part(compression.state_dict(per_rank=True))["parameters"]
    found = {}
    for name, state in saved.items():
        if (residual := state.get("residual", state.get("memory"))) is None:
            continue
        found[name.removeprefix("weights.")] = residual.cpu().double()
        if "memory" in state:
            sent = state["p_hat"].cpu().double() @ state["q_local"].cpu().double()
            found[name.removeprefix("weights.")] -= sent
    return found


class Ledger:
    """Checks the identity: the sum of outputs + the mean residual = the sum of mean gradients."""

    def __init__(self) -> None:
        self.outputs: Tensors = {}  # the sums so far, by parameter
        self.means: Tensors = {}

    def add(self, outputs: Mapping[str, torch.Tensor], means: Mapping[str, torch.Tensor]) -> None:
        add_to(self.outputs, outputs)
        add_to(self.means, means)

    def errors(self, residuals: Mapping[str, torch.Tensor] | None = None) -> dict[str, float]:
        """The errors of the identity, relative to the sum of the mean gradients, by parameter."""
        return {
            name: relative_error(self.outputs[name] + (residuals or {}).get(name, 0), mean)
            for name, mean in self.means.items()
        }

    def check(
        self,
        compression: tp.Compression,
        tolerance: float = TOLERANCE[torch.float32],
        **tolerances: float,
    ) -> None:
        """Asserts the identity, with separate tolerances for some parameters. Collective."""
        for name, error in self.errors(residuals_of(compression)).items():
            assert error < tolerances.get(name, tolerance), (name, error)
