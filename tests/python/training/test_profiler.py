# SPDX-License-Identifier: BSD-3-Clause
"""Spans of torch.profiler: each stage of each bucket, wherever it runs."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import torch_powersgd as tp
from support import ranks
from support.on_ranks import on_ranks

STAGES = ("project", "reduce_p", "orthogonalize", "back_project", "reduce_q", "reconstruct")
RANK = 2
Event = dict[str, Any]


def _model(attached: bool, wire: str | None) -> DistributedDataParallel:
    torch.manual_seed(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(300, 300) for _ in range(3)))
    # Each layer's gradients have 361,200 bytes and fill a bucket.
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.3)
    if attached:
        tp.attach(ddp, _options(wire))
    return ddp


def _options(wire: str | None) -> tp.Options:
    return tp.Options.hook_defaults(
        matrix_approximation_rank=RANK, start_powerSGD_iter=0, wire_dtype=wire, min_numel=1000
    )


def _trace(
    file: Path, attached: bool, wire: str | None, shapes: bool
) -> tuple[list[Event], dict[str, int]]:
    """The spans of one step, and the counts of that step."""
    ddp = _model(attached, wire)

    def step() -> None:
        ddp(torch.randn(4, 300)).sum().backward()

    for _ in range(4):
        step()
    before = tp.stats()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=shapes) as profiler:
        step()
    stats = tp.stats()
    step()  # A profiler that has ended is no longer called.
    profiler.export_chrome_trace(str(file))
    events = json.loads(file.read_text())["traceEvents"]
    counts = ("compressed_calls", "bytes_before", "bytes_after")
    return (
        [event for event in events if event.get("ph") == "X"],
        {name: stats[name] - before[name] for name in counts},
    )


def _own(spans: list[Event]) -> list[Event]:
    return [span for span in spans if span["name"].startswith("powersgd::")]


@pytest.mark.parametrize("wire", [None, "int8"])
@pytest.mark.parametrize("attached", [True, False], ids=["attached", "flat"])
@on_ranks(2, backend=None)
def test_a_trace_has_each_stage_of_each_bucket(
    rank: int, attached: bool, wire: str | None, tmp_path: Path
) -> None:
    ranks.init_group("cpu:powersgd", _options(wire))
    spans, stats = _trace(tmp_path / f"trace.{rank}", attached, wire, True)
    own, buckets = _own(spans), stats["compressed_calls"]
    assert buckets >= 3
    for stage in STAGES:
        named = [span for span in own if span["name"] == f"powersgd::{stage}"]
        assert sorted(span["args"]["bucket"] for span in named) == [*range(buckets)]
        assert {span["args"]["matrix_approximation_rank"] for span in named} == {RANK}
        if "reduce" not in stage:
            assert sum(span["args"]["bytes"] for span in named) == stats["bytes_before"]
    reduced = [span for span in own if "reduce" in span["name"]]
    assert sum(span["args"]["bytes"] for span in reduced) == stats["bytes_after"]
    # One thread computes. Two others wait for P and Q, for one bucket after the other.
    computed = {span["tid"] for span in own if "reduce" not in span["name"]}
    waited = {span["tid"] for span in reduced}
    assert (len(computed), len(waited), len(computed | waited)) == (1, 2, 3)
    for thread in waited:
        waits = sorted((s["ts"], s["ts"] + s["dur"]) for s in reduced if s["tid"] == thread)
        assert all(end <= begin for (_, end), (begin, _) in pairwise(waits))
    forward = [s for s in spans if s["name"] == "DistributedDataParallel.forward"]
    assert forward
    assert not (computed | waited) & {span["tid"] for span in forward}


@on_ranks(2)
def test_spans_without_shapes_have_no_arguments(rank: int, tmp_path: Path) -> None:
    own = _own(_trace(tmp_path / f"trace.{rank}", True, None, False)[0])
    assert {span["name"] for span in own} == {f"powersgd::{stage}" for stage in STAGES}
    assert not any("bucket" in span["args"] for span in own)
