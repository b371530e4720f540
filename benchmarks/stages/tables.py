# SPDX-License-Identifier: BSD-3-Clause
"""The tables of records of bench_stages.py, for its output and for docs/performance.md."""

from __future__ import annotations

from report import Record, Table

from stages.contestants import STAGES

_MODELS = {
    "resnet18": "ResNet-18",
    "resnet50": "ResNet-50",
    "demo": "the demo's GPT",
    "gpt2": "GPT-2",
    "llama": "4 layers of Llama-7B",
}


def results(record: Record) -> Table:
    """Everything that was measured of each configuration."""
    rows = [_cells(result) for result in record["results"]]
    return [*rows[0]], [[*row.values()] for row in rows]


def _cells(r: Record) -> dict[str, str]:
    """A row of the table, by its headings."""
    ours, hook = r["ours"], r["hook"]
    milliseconds = {stage: r["stage_ms"][stage] for stage in STAGES}
    milliseconds |= {"all": ours["ms"], "queued": ours["queued_ms"]}
    milliseconds |= {"hook": hook["ms"], "floor": r["floor_ms"]}
    cells = {
        "model": f"{r['model']} ({r['elements'] / 1e6:.1f} M)",
        "rank": str(r["rank"]),
        "gradient": r["dtype"],
        "residual": r["residual_dtype"],
        **{name: f"{ms:.3f}" for name, ms in milliseconds.items()},
        "/ floor": f"{ours['queued_ms'] / r['floor_ms']:.2f}",
        "hook / all": f"{hook['ms'] / ours['ms']:.1f}",
    }
    if "gpu_ms" not in ours:
        return {**cells, "break-even, Gbit/s": f"{_break_even(r):.0f}"}
    of_gpu = f"{hook['gpu_ms'] / ours['gpu_ms']:.1f}" if ours["gpu_ms"] else "-"
    return {**cells, "host": f"{hook['host_ms'] / ours['host_ms']:.1f}", "GPU": of_gpu}


def _break_even(r: Record) -> float:
    """The Gbit/s above which an all-reduce, which moves each byte twice, takes less time."""
    return float(2 * 8 * r["gradient_bytes"] / (r["ours"]["queued_ms"] * 1e6))


def stages_by_rank(record: Record) -> Table:
    """Milliseconds of all stages with float32 gradients, and of torch's hook, on a CPU."""
    headings = ["gradients", "rank", "stages, ms", "torch's hook, ms", "break-even, Gbit/s"]
    return headings, [
        [*_times(each, "ms"), f"{float(f'{_break_even(each):.2g}'):,g}"]
        for each in _in_float32(record)
    ]


def stages_on_gpu(record: Record) -> Table:
    """The same on a GPU, of the device and of the host."""
    found = _in_float32(record)
    if not all(each["ours"].get("gpu_ms") for each in found):  # not measured
        headings = ["gradients", "rank", "stages, ms", "torch's hook, ms"]
        return headings, [_times(each, "ms") for each in found]
    headings = ["gradients", "rank", "stages, GPU ms", "torch's hook, GPU ms"]
    headings += ["stages, host ms", "torch's hook, host ms"]
    return headings, [_times(each, "gpu_ms", "host_ms") for each in found]


def _in_float32(record: Record) -> list[Record]:
    return [each for each in record["results"] if each["dtype"] == "float32"]


def _times(each: Record, *names: str) -> list[str]:
    """The model, the rank, and each time of ours and of the hook."""
    times = [each[contestant][name] for name in names for contestant in ("ours", "hook")]
    cells = (f"{ms:.0f}" if ms >= 10 else f"{ms:.2f}" for ms in times)
    return [_MODELS[each["model"]], str(each["rank"]), *cells]
