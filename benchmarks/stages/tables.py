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
    milliseconds = {
        **{stage: r["stage_ms"][stage] for stage in STAGES},
        "all": ours["ms"],
        "queued": ours["queued_ms"],
        "hook": hook["ms"],
        "floor": r["floor_ms"],
    }
    return {
        "model": f"{r['model']} ({r['elements'] / 1e6:.1f} M)",
        "rank": str(r["rank"]),
        "gradient": r["dtype"],
        "residual": r["residual_dtype"],
        **{name: f"{ms:.3f}" for name, ms in milliseconds.items()},
        "/ floor": f"{r['ours_over_floor']:.2f}",
        "hook / all": f"{r['hook_over_ours']:.1f}",
        **_cells_by_device(r),
        "launches": f"{ours['launches'] / r['buckets']:.1f}" if ours["launches"] else "-",
        "memory": f"{ours['memory_bytes'] / r['gradient_bytes']:.2f}",
        "hook's": f"{hook['memory_bytes'] / r['gradient_bytes']:.2f}",
    }


def _cells_by_device(r: Record) -> dict[str, str]:
    if "gpu_ms" not in r["ours"]:
        return {"GB/s": f"{r['break_even_gbyte_per_s']:.0f}"}
    return {
        "host": f"{r['hook_over_ours_host_ms']:.1f}",
        "GPU": f"{r.get('hook_over_ours_gpu_ms', 0):.1f}",
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
