# SPDX-License-Identifier: BSD-3-Clause
"""The tables of docs/performance.md about the stages, from records of bench_stages.py."""

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
    """Milliseconds of all stages with float32 gradients, and of torch's hook, on a CPU."""
    headings = ["gradients", "rank", "stages, ms", "torch's hook, ms", "break-even, Gbit/s"]
    return headings, [
        [*_times(each, "ms"), _two_digits(8 * each["break_even_gbyte_per_s"])]
        for each in _in_float32(record)
    ]


def stages_on_gpu(record: Record) -> Table:
    """The same on a GPU, of the device and of the host."""
    if not all(each["ours"].get("gpu_ms") for each in _in_float32(record)):  # not measured
        headings = ["gradients", "rank", "stages, ms", "torch's hook, ms"]
        return headings, [_times(each, "ms") for each in _in_float32(record)]
    headings = ["gradients", "rank", "stages, GPU ms", "torch's hook, GPU ms"]
    headings += ["stages, host ms", "torch's hook, host ms"]
    return headings, [_times(each, "gpu_ms", "host_ms") for each in _in_float32(record)]


def _in_float32(record: Record) -> list[Record]:
    return [each for each in record["results"] if each["dtype"] == "float32"]


def _times(each: Record, *names: str) -> list[str]:
    """The model, the rank, and each time of ours and of the hook."""
    times = [each[contestant][name] for name in names for contestant in ("ours", "hook")]
    return [_MODELS[each["model"]], str(each["rank"]), *map(_rounded, times)]


def _rounded(ms: float) -> str:
    return f"{ms:.0f}" if ms >= 10 else f"{ms:.2f}"


def _two_digits(value: float) -> str:
    return f"{float(f'{value:.2g}'):,g}"
