# SPDX-License-Identifier: BSD-3-Clause
"""The bytes and the memory of a step, from the shapes alone."""

from __future__ import annotations

import pytest
import torch

import torch_powersgd as tp
from torch_powersgd._core import _C
from torch_powersgd.cli.footprint import buckets_of, footprint_of
from torch_powersgd.options import to_core

SHAPES = [[300, 200], [300], [200, 300], [7]]


def test_buckets_are_ddps() -> None:
    # Gradients come in the order of backward. The first bucket ends at 1 MB, as DDP's does.
    layout = buckets_of([[4], [1 << 18], [1 << 18], [8], [1 << 18]])
    assert layout == [[[1 << 18]], [[8], [1 << 18], [1 << 18], [4]]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("wire", [None, torch.bfloat16, "int8", "int4"], ids=str)
def test_the_bytes_are_those_that_a_compressor_sends(
    dtype: torch.dtype, wire: torch.dtype | str | None
) -> None:
    options = tp.Options(matrix_approximation_rank=4, wire_dtype=wire)
    compressor = _C.BucketCompressor(SHAPES, to_core(options), dtype, "cpu")
    footprint = footprint_of([SHAPES], options, dtype)
    assert footprint.sent_bytes == compressor.payload_bytes
    assert footprint.gradient_bytes == compressor.gradient_bytes
    assert footprint.compressed == 2
    assert footprint.compressed_elements == 120_000


def test_buckets_share_the_workspaces() -> None:
    options = tp.Options(matrix_approximation_rank=4)
    small, large = [[64, 100]], [[400, 300]]
    one, both = footprint_of([large], options), footprint_of([small, large, small], options)
    assert both.workspace_bytes == one.workspace_bytes > 0
    assert both.table_bytes == one.table_bytes + 2 * footprint_of([small], options).table_bytes
    own = both.residual_bytes + both.factor_bytes + both.table_bytes
    assert both.memory_bytes == own + both.workspace_bytes


def test_a_bucket_without_a_matrix_goes_whole() -> None:
    options = tp.Options(matrix_approximation_rank=100, wire_dtype=torch.bfloat16)
    footprint = footprint_of([SHAPES], options)
    assert footprint.sent_bytes == footprint.gradient_bytes == 4 * 120_307
    assert footprint.residual_bytes == footprint.factor_bytes == footprint.compressed == 0
    assert footprint_of([SHAPES], None) == footprint
