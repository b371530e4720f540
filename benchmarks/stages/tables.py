# SPDX-License-Identifier: BSD-3-Clause
"""The table of docs/performance.md about the stages, from records of bench_stages.py."""

from __future__ import annotations

from report import Record, Table

_MODELS = {
    "resnet18": "ResNet-18",
    "resnet50": "ResNet-50",
    "demo": "the demo's GPT",
    "gpt2": "GPT-2",
    "llama": "4 layers of Llama-7B",
}


def stages_by_rank(record: Record) -> Table:
    """Milliseconds of all stages with float32 gradients, and of torch's hook."""
    headings = ["gradients", "rank", "stages, ms", "torch's hook, ms", "break-even, Gbit/s"]
    rows = [
        [_MODELS[each["model"]], str(each["rank"])]
        + [_rounded(ms) for ms in (each["ours"]["ms"], each["hook"]["ms"])]
        + [_two_digits(8 * each["break_even_gbyte_per_s"])]
        for each in record["results"]
        if each["dtype"] == "float32"
    ]
    return headings, rows


def _rounded(ms: float) -> str:
    return f"{ms:.0f}" if ms >= 10 else f"{ms:.2f}"


def _two_digits(value: float) -> str:
    return f"{float(f'{value:.2g}'):,g}"
