# SPDX-License-Identifier: BSD-3-Clause
"""The measurements of advise: the rehearsals on the group, and the agreement of all ranks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torch_powersgd as tp
from support import ranks
from support.groups import backend_of_world
from torch_powersgd._core import _C
from torch_powersgd.tools import advise
from torch_powersgd.tools.footprint import buckets_of, footprint_of
from torch_powersgd.tools.rehearsal import PASSES, Rehearsal, Rehearsed, UserStep, time_step

SHAPES = [[300, 200], [300], [200, 300], [7]]
WIRES = (torch.float32, "int8", "int4")

Calls = list[tuple[int, int]]  # number of the bucket, and elements
CPU = torch.device("cpu")


def test_buckets_are_ddps() -> None:
    # Gradients come in the order of backward. The first bucket ends at 1 MB, as DDP's does.
    layout = buckets_of([[4], [1 << 18], [1 << 18], [8], [1 << 18]])
    assert layout == [[[1 << 18]], [[8], [1 << 18], [1 << 18], [4]]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("wire", [None, torch.bfloat16, "int8", "int4"], ids=str)
def test_the_bytes_are_those_that_a_compressor_sends(
    dtype: torch.dtype, wire: torch.dtype | str | None
) -> None:
    options = tp.Options(matrix_approximation_rank=4, wire_dtype=wire)
    compressor = _C.BucketCompressor(SHAPES, options._core(), dtype, "cpu")
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


def _rehearsed(rank: int) -> tuple[Any, Calls, list[int], list[tuple[int, int]]]:
    calls: Calls = []

    def start(bucket: int, buffer: torch.Tensor) -> Any:
        calls.append((bucket, buffer.numel()))
        return dist.all_reduce(buffer, async_op=True)

    prepared: list[int] = []

    def prepare() -> Callable[[int, torch.Tensor], Any]:
        prepared.append(len(calls))
        return start

    reports: list[tuple[int, int]] = []
    rehearsal = Rehearsal([5, 300], CPU, backward=0.002)
    settings = [Rehearsed(lambda: None, False), Rehearsed(prepare, True)]
    samples = rehearsal.measure(settings, 0.0, lambda done, blocks: reports.append((done, blocks)))
    return samples, calls, prepared, reports


def test_a_rehearsal_averages_bucket_after_bucket() -> None:
    results = ranks.run(2, _rehearsed, backend="gloo")
    for samples, calls, prepared, reports in results:
        assert [len(passes) for passes in samples] == [PASSES[0]] * 2
        steps = [len(block) for passes in samples for block in passes]
        assert len(set(steps)) == 1
        assert min(s for passes in samples for block in passes for s in block) > 0
        step = [(0, 5), (1, 300)]
        with_warm_up = (2 + steps[0]) * PASSES[0]
        assert calls == with_warm_up * step
        assert len(prepared) == PASSES[0], "one at a time holds memory"
        assert reports[-1] == (2 * PASSES[0], 2 * PASSES[0])
    assert results[0][0] == results[1][0], "alike on all ranks"


def _measured(rank: int) -> tuple[advise.Measured, int, int, int]:
    model = torch.nn.Sequential(torch.nn.Linear(300, 200), torch.nn.Linear(200, 300))
    options = [
        tp.Options(matrix_approximation_rank=r, wire_dtype=wire, start_powerSGD_iter=0)
        for wire in WIRES
        for r in (1, 4)
    ]
    job = advise.job_of(model, UserStep(0.001, rest=0.5), options)
    before = backend_of_world().stats()["compressed_calls"]
    measured = advise.measure(job, CPU, budget=0.1)
    stats = backend_of_world().stats()
    return measured, before, stats["compressed_calls"], stats["skipped_steps"]


def test_one_wire_is_measured_beside_plain_and_the_others_are_predicted() -> None:
    results = ranks.run(2, _measured)
    for measured, before, compressed, skipped in results:
        assert [(t.name, t.predicted) for t in measured.timings] == [
            ("rank 1, float32", True),
            ("rank 4, float32", True),
            ("rank 1, int8", False),
            ("rank 4, int8", False),
            ("rank 1, int4", True),
            ("rank 4, int4", True),
        ]
        assert measured.plain.name == "plain all-reduce"
        assert measured.plain.sent_bytes == 4 * 120_500
        raw_and_counts = 500 + 2 + 1
        assert measured.timings[1].sent_bytes == 4 * (4 * 2 * 500 + raw_and_counts)
        sent = [timing.sent_bytes for timing in measured.timings]
        assert sent[1] > 2 * sent[3] > 2 * sent[5]
        timings = [measured.plain, *measured.timings]
        for passes in (measured.alone, *(timing.passes for timing in timings)):
            median = statistics.median(s for block in passes for s in block)
            assert median > 0.5, "the rest of the step counts"
        assert len({len(timing.passes) for timing in timings}) == 1
        assert before == 0
        assert compressed > 0
        assert skipped == 0
    assert results[0][0] == results[1][0], "alike on all ranks"


def test_a_users_step_is_timed_apart_from_its_backward_pass() -> None:
    weight = torch.ones(3, requires_grad=True)
    calls = []

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
            time.sleep(0.02)
            return gradient

    def step() -> None:
        calls.append(weight.grad)
        time.sleep(0.01)
        output = Slow.apply(weight)  # type: ignore[no-untyped-call]
        output.sum().backward()

    def clear() -> None:
        weight.grad = None

    original = torch.autograd.backward
    timed = time_step(step, clear, CPU, 5)
    assert torch.autograd.backward is original
    assert timed.backward >= 0.02
    assert timed.rest >= 0.01
    assert len(calls) == 5
    assert set(calls) == {None}, "gradients do not accumulate"


def _timed_on_both(rank: int) -> tuple[UserStep, int]:
    calls = []

    def step(model: torch.nn.Module) -> None:
        calls.append(1)
        time.sleep(0.05 * rank)
        model(torch.ones(1, 2)).sum().backward()

    timed = advise.time_on_all_ranks(torch.nn.Linear(2, 2), step, CPU)
    return timed, len(calls)


def test_the_slowest_ranks_step_counts_and_all_take_as_many_steps() -> None:
    (one, calls), (other, others_calls) = ranks.run(2, _timed_on_both)
    assert one == other
    assert one.rest >= 0.05
    assert one.backward > 0
    assert calls == others_calls


def test_a_step_without_a_backward_pass_is_an_error() -> None:
    with pytest.raises(ValueError, match="must call backward"):
        time_step(lambda: None, lambda: None, CPU, 1)


def _fails_on_one_rank(rank: int, failing: dict[int, Exception]) -> int | str:
    def make() -> int:
        if rank in failing:
            raise failing[rank]
        return rank

    try:
        return advise.on_every_rank(make)
    except advise.RanksError as error:
        return str(error)


def test_an_error_of_one_rank_ends_all() -> None:
    results = ranks.run(2, _fails_on_one_rank, {1: ValueError("no such file")})
    assert results == ["rank 1: no such file"] * 2
    results = ranks.run(2, _fails_on_one_rank, {0: MemoryError("full")})
    assert results == ["rank 0: MemoryError: full"] * 2
    same = ImportError("No module named 'x'")
    assert ranks.run(2, _fails_on_one_rank, {0: same, 1: same}) == [str(same)] * 2
    assert ranks.run(2, _fails_on_one_rank, {}) == [0, 1]


def _unlike_models(rank: int) -> None:
    with pytest.raises(advise.RanksError, match="rank 1 differ"):
        advise.job_of(torch.nn.Linear(2, 2 + rank), UserStep(0.1), [])
    with pytest.raises(advise.RanksError, match="no parameter"):
        advise.job_of(torch.nn.ReLU(), UserStep(0.1), [])


def test_ranks_with_unlike_models_are_named() -> None:
    ranks.run(2, _unlike_models)
