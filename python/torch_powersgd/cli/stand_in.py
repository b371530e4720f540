# SPDX-License-Identifier: BSD-3-Clause
"""A model with the parameters of another, and a backward pass of a given length."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

PRODUCT_SIZE = 192  # rows of square matrices, whose product takes a fraction of a millisecond
CALIBRATION_PRODUCTS = 20
CALIBRATIONS = 7


class StandIn(torch.nn.Module):
    """Matrix products that replace a model's backward pass and compete for cores just the same.

    The gradients come in the order of the parameters, from the last to the first.

    Args:
        model: the model, whose parameters get random gradients.
        seconds: the length of the backward pass.
        device: the device of the parameters.
    """

    def __init__(self, model: torch.nn.Module, seconds: float, device: torch.device) -> None:
        super().__init__()
        self.model = model
        self._factor = torch.randn(PRODUCT_SIZE, PRODUCT_SIZE, device=device)
        self._product = torch.empty_like(self._factor)
        self._trained = [p for p in model.parameters() if p.requires_grad]
        self._gradients = [torch.randn_like(p) for p in self._trained]
        self._multiply(CALIBRATION_PRODUCTS)  # starts threads, loads libraries
        each = statistics.median(self._calibrate() for _ in range(CALIBRATIONS))
        numels = list(itertools.accumulate((p.numel() for p in self._trained), initial=0))
        ends = [round(seconds / each * numel / max(numels[-1], 1)) for numel in numels]
        self._products = [end - begin for begin, end in itertools.pairwise(ends)]

    def forward(self) -> torch.Tensor:
        x = torch.zeros((), device=self._factor.device, requires_grad=True)
        for parts in zip(self._trained, self._gradients, self._products, strict=True):
            x = _Layer.apply(x, *parts, self._multiply)  # type: ignore[no-untyped-call]
        return x

    def _multiply(self, times: int) -> None:
        for _ in range(times):
            torch.mm(self._factor, self._factor, out=self._product)

    def _calibrate(self) -> float:
        """The seconds of one product."""
        start = time.perf_counter()
        self._multiply(CALIBRATION_PRODUCTS)
        if self._factor.is_cuda:
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / CALIBRATION_PRODUCTS


class _Layer(torch.autograd.Function):
    """Gives a parameter its gradient, after some products."""

    @staticmethod
    def forward(
        context: Any,
        x: torch.Tensor,
        _parameter: torch.Tensor,
        gradient: torch.Tensor,
        products: int,
        multiply: Callable[[int], None],
    ) -> torch.Tensor:
        context.gradient, context.products, context.multiply = gradient, products, multiply
        return x.clone()

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> Any:
        context.multiply(context.products)
        return gradients[0], context.gradient, None, None, None
