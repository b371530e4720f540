# SPDX-License-Identifier: BSD-3-Clause
"""The floor of a step's stages: the time for the bytes that no step can avoid, at copy speed.

project reads the gradient and the residual's memory and writes the memory, back_project reads the
memory, reconstruct writes the gradient. benchmarks/kernels/cases.h has the same definition.
"""

from __future__ import annotations

from typing import Any

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def floor_bytes(elements: int, dtype: str, residual_dtype: str) -> int:
    """The bytes that the stages must read and write. Dtypes are given by name."""
    return elements * (2 * _BYTES[dtype] + 3 * _BYTES[residual_dtype])


def floor_ms(result: dict[str, Any]) -> float:
    """The floor of a result of bench_stages.py, at the copy speed of its run."""
    moved = floor_bytes(result["elements"], result["dtype"], result["residual_dtype"])
    return moved / (float(result["copy_gbyte_per_s"]) * 1e6)
