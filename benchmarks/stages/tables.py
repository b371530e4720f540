# SPDX-License-Identifier: BSD-3-Clause
"""The tables of docs/performance.md about the stages, from records of bench_stages.py.

`buckets_by_rank` takes one of bench_kernels.cu.
"""

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
_BUCKETS = {
    "gpt2": "25 MB of GPT-2",
    "gpt2x4": "100 MB of GPT-2",
    "embedding": "GPT-2's embedding, 154 MB",
    "llama": "a layer of Llama-7B, 495 MB",
}


def stages(record: Record) -> Table:
    """Milliseconds of the stages at rank 4, beside torch's hook and the floor."""
    headings = ["gradients", "dtype", *STAGES, "all, ms", "torch's hook, ms", "floor, ms"]
    headings += ["ours / floor", "hook / ours", "break-even, GB/s"]
    rows = []
    for each in record["results"]:
        if each["rank"] != 4 or each["residual_dtype"] != "float32":
            continue
        name = f"{_MODELS[each['model']]}, {each['elements'] / 1e6:.1f} M"
        times = [each["stage_ms"][stage] for stage in STAGES]
        times += [each["ours"]["ms"], each["hook"]["ms"], each["floor_ms"]]
        pays = f"{each['break_even_gbyte_per_s']:.0f}"
        ratios = [f"{each['ours_over_floor']:.2f}", f"{each['hook_over_ours']:.1f}", pays]
        rows.append([name, each["dtype"], *(f"{ms:.1f}" for ms in times), *ratios])
    return headings, rows


def stages_by_rank(record: Record) -> Table:
    """Milliseconds of all stages with float32 gradients, beside torch's hook and the floor."""
    headings = ["gradients", "rank", "all, ms", "torch's hook, ms", "floor, ms"]
    headings += ["ours / floor", "hook / ours"]
    rows = [
        [_MODELS[each["model"]], str(each["rank"])]
        + [_rounded(ms) for ms in (each["ours"]["ms"], each["hook"]["ms"], each["floor_ms"])]
        + [f"{each['ours_over_floor']:.1f}", f"{each['hook_over_ours']:.1f}"]
        for each in record["results"]
        if each["dtype"] == "float32"
    ]
    return headings, rows


def buckets_by_rank(record: Record) -> Table:
    """The four stages of a bucket over the floor, with float32 gradients."""
    found = {
        (each["model"], each["rank"]): each["ratio"]
        for each in record["results"]
        if each["kind"] == "float32"
    }
    ranks = sorted({rank for _, rank in found})
    rows = [
        [title, *(f"{found[model, rank]:.2f}" for rank in ranks)]
        for model, title in _BUCKETS.items()
    ]
    return ["bucket", *(f"rank {rank}" for rank in ranks)], rows


def _rounded(ms: float) -> str:
    return f"{ms:.0f}" if ms >= 10 else f"{ms:.2f}"
