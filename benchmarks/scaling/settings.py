# SPDX-License-Identifier: BSD-3-Clause
"""The runs of bench_scaling.py, and what they require."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from shapes import demo_gpt, gpt, gpt2

import torch_powersgd as tp
from torch_powersgd.tools.footprint import (
    BUCKET_BYTES,
    Footprint,
    Layout,
    buckets_of,
    elements_of,
    footprint_of,
)

RANK = 16  # of the matrices
EXACT_STEPS = 2  # the minimum for torch's hook
WIRES = ("float32", "bfloat16", "int8", "int4")
METHODS = ("plain", "hook", *WIRES)  # a wire dtype stands for this project with it
TITLES = {
    "plain": "plain all-reduce",
    "hook": "torch's PowerSGD hook, one bucket",
    **{wire: f"ours, {wire}" for wire in WIRES},
}
ONE_BUCKET = 1 << 20  # MiB
_PROCESS_BYTES = 200 << 20  # that a process needs in any case
_SPARE_BYTES = 2 << 30

# GPTs. Only their shapes are used.
MODELS = {
    "tiny": gpt(1, 96, 64, 64, bias=False),
    "1 M": gpt(3, 160, 128, 128, bias=False),
    "10 M": demo_gpt(),
    "100 M": gpt2(),
    "1 B": gpt(18, 2048, 50257, 1024),
}


@dataclass(frozen=True)
class Setting:
    """A run.

    Attributes:
        part: the part of the benchmark: "ranks", "parameters" or "buckets".
        world: the number of ranks.
        model: the name of the model.
        method: the averaging method.
        cap: DDP's bucket_cap_mb; None: DDP's default.
        dtype: the dtype of the parameters.
    """

    part: str
    world: int
    model: str
    method: str
    cap: int | None = None
    dtype: str = "float32"

    @property
    def title(self) -> str:
        cap = f", buckets of {self.cap} MiB" if self.cap and self.cap != ONE_BUCKET else ""
        return f"{self.world} ranks, {self.model} {self.dtype}, {TITLES[self.method]}{cap}"

    @property
    def options(self) -> tp.Options | None:
        """This project's options, or None if another method averages."""
        return options_of(self.method) if self.method in WIRES else None

    @property
    def shapes(self) -> list[list[int]]:
        return [list(shape) for shape in MODELS[self.model]]

    @property
    def layout(self) -> Layout:
        return layout_of(self.model, self.cap, self.dtype)

    @property
    def footprint(self) -> Footprint:
        """The prediction of `plan`. For torch's hook, that of a plain all-reduce."""
        dtype = getattr(torch, self.dtype)
        return footprint_of(self.layout, self.options, dtype, self.world)

    def needs(self) -> int:
        """The bytes of memory that all ranks need together. Parameters need none (rank.py)."""
        footprint, largest = self.footprint, max(map(elements_of, self.layout))
        gradients = footprint.gradient_bytes
        hook = 2 * gradients if self.method == "hook" else 0
        of_rank = gradients + footprint.memory_bytes + 4 * largest + hook + _PROCESS_BYTES
        return self.world * of_rank + _SPARE_BYTES

    def state_bytes(self) -> int:
        """The approximate bytes of a rank's checkpoint."""
        return self.footprint.residual_bytes + self.footprint.factor_bytes


def options_of(wire: str) -> tp.Options:
    return tp.Options(
        matrix_approximation_rank=RANK,
        start_powerSGD_iter=EXACT_STEPS,
        wire_dtype=None if wire == "float32" else wire,
    )


def layout_of(model: str, cap: int | None, dtype: str = "float32") -> Layout:
    """DDP's buckets. An explicit cap also applies to the first bucket."""
    limits = BUCKET_BYTES if cap is None else [cap << 20]
    shapes = [list(shape) for shape in MODELS[model]]
    return buckets_of(shapes, getattr(torch, dtype), limits)


def runs_of(
    part: str, worlds: Sequence[int], models: Sequence[str], caps: Sequence[int], quick: bool
) -> list[Setting]:
    """The runs of a part, the smallest first."""
    if part == "ranks":
        model = "tiny" if quick else "10 M"
        methods = ("plain", "hook", "int8") if quick else METHODS
        caps_of = {"hook": ONE_BUCKET}
        return [
            Setting(part, world, model, method, caps_of.get(method))
            for world in worlds
            for method in methods
        ]
    if part == "parameters":
        return [
            Setting(part, 2, model, method, dtype="bfloat16" if model == "1 B" else "float32")
            for model in models
            for method in ("plain", "int8")
        ]
    model = "tiny" if quick else "100 M"
    return [Setting(part, 2, model, method, cap) for cap in caps for method in ("plain", "int8")]
