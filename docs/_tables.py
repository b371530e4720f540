# SPDX-License-Identifier: BSD-3-Clause
"""Prints docs/PAGE.md with new tables from benchmarks/results. --write writes all such pages.

A table stands between two comments: <!-- table: NAME of FILE --> and <!-- end of table -->. NAME
may have arguments: <!-- table: front language lstm of convergence.json -->.

    python docs/_tables.py performance
    python docs/_tables.py --write
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from convergence import tables as of_convergence  # noqa: E402
from endurance import tables as of_endurance  # noqa: E402
from faults import tables as of_faults  # noqa: E402
from floor import floor_ms  # noqa: E402
from other_suites import TABLES as OF_OTHER_SUITES  # noqa: E402
from scaling import tables as of_scaling  # noqa: E402
from text_tables import Table  # noqa: E402

PAGES = ("performance", "convergence", "scaling", "reliability")
Record = dict[str, Any]
_TABLE = re.compile(
    r"(<!-- table: (\w+)((?: \S+)*?) of (\S+) -->\n).*?(<!-- end of table -->)", flags=re.DOTALL
)
_RATES = {"mbit": "Mbit/s", "gbit": "Gbit/s"}
_MODELS = {
    "resnet18": "ResNet-18",
    "resnet50": "ResNet-50",
    "demo": "the demo's GPT",
    "gpt2": "GPT-2",
    "llama": "4 layers of Llama-7B",
}
_STAGES = ("project", "orthogonalize", "back_project", "reconstruct")


def main() -> None:
    if sys.argv[1:] != ["--write"]:
        (page,) = sys.argv[1:]
        sys.stdout.write(_remade(_path(page)))
        return
    for page in PAGES:
        _path(page).write_text(_remade(_path(page)))


def _path(page: str) -> Path:
    return Path(__file__).with_name(f"{page}.md")


def _remade(page: Path) -> str:
    return _TABLE.sub(_made, page.read_text())


def _made(found: re.Match[str]) -> str:
    record = json.loads((BENCHMARKS / "results" / found[4]).read_text())
    return f"{found[1]}\n{TABLES[found[2]](record, *found[3].split())}\n{found[5]}"


def _markdown(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "".join(re.sub(r"\|  (?=\|)", "| ", f"| {' | '.join(line)} |\n") for line in lines)


def links(record: Record) -> str:
    """Milliseconds of a step on each link, with quartiles, and megabytes sent."""
    settings = record["settings"]
    headings = ["method", "sent per step, MB", *(f"{_link(each)}, ms" for each in settings)]
    rows = [
        [record["titles"][method], _sent(settings, method)]
        + [_step(each["methods"].get(method)) for each in settings]
        for method in _methods(record)
    ]
    return _markdown(headings, rows)


def learning(record: Record) -> str:
    """The loss after as many steps, and the seconds to the loss that all are compared at."""
    settings = record["settings"]
    steps, loss = settings[0]["learning_steps"], settings[0]["loss"]
    headings = ["method", f"loss after {steps} steps"]
    headings += [f"seconds to a loss of {loss:.2f}, {_link(each)}" for each in settings]
    rows = []
    for method in _methods(record):
        figures = [each["methods"].get(method, {}) for each in settings]
        if figures[0].get("final_loss") is not None:
            seconds = [_seconds(each, f"not within {steps} steps") for each in figures]
            rows.append([record["titles"][method], f"{figures[0]['final_loss']:.3f}", *seconds])
    return _markdown(headings, rows)


def on_the_way(record: Record) -> str:
    """The seconds to plain's losses on the way at 1 Gbit/s, and how many times sooner that is."""
    (setting,) = (each for each in record["settings"] if each["rate"] == "1gbit")
    steps = [round(share * setting["learning_steps"]) for share in setting["mark_shares"]]
    headings = ["method", *(f"seconds to plain's loss at step {step}" for step in steps)]
    rows = [
        [record["titles"][method], *(_seconds(mark, "not reached") for mark in figures["marks"])]
        for method, figures in setting["methods"].items()
        if figures.get("marks")
    ]
    return _markdown(headings, rows)


def stages(record: Record) -> str:
    """Milliseconds of the stages at rank 4, beside torch's hook and the floor."""
    headings = ["gradients", "dtype", *_STAGES, "all, ms", "torch's hook, ms", "floor, ms"]
    headings += ["ours / floor", "hook / ours", "break-even, GB/s"]
    rows = []
    for each in record["results"]:
        if each["rank"] != 4 or each["residual_dtype"] != "float32":
            continue
        name = f"{_MODELS[each['model']]}, {each['elements'] / 1e6:.1f} M"
        times = [f"{each['stage_ms'][stage]:.1f}" for stage in _STAGES]
        floor = floor_ms(each)
        wholes = [each["ours"]["ms"], each["hook"]["ms"], floor]
        ratios = [f"{each['ours']['queued_ms'] / floor:.2f}", f"{each['hook_over_ours']:.1f}"]
        pays = f"{each['break_even_gbyte_per_s']:.0f}"
        rows.append([name, each["dtype"], *times, *(f"{ms:.1f}" for ms in wholes), *ratios, pays])
    return _markdown(headings, rows)


def stages_by_rank(record: Record) -> str:
    """Milliseconds of all stages with float32 gradients, beside torch's hook and the floor."""
    headings = ["gradients", "rank", "all, ms", "torch's hook, ms", "floor, ms"]
    headings += ["ours / floor", "hook / ours"]
    rows = [
        [_MODELS[each["model"]], str(each["rank"])]
        + [_rounded(ms) for ms in (each["ours"]["ms"], each["hook"]["ms"], floor_ms(each))]
        + [f"{each['ours']['queued_ms'] / floor_ms(each):.1f}", f"{each['hook_over_ours']:.1f}"]
        for each in record["results"]
        if each["dtype"] == "float32"
    ]
    return _markdown(headings, rows)


def _rounded(ms: float) -> str:
    return f"{ms:.0f}" if ms >= 10 else f"{ms:.2f}"


def buckets_by_rank(record: Record) -> str:
    """The four stages of a bucket over the floor, with float32 gradients."""
    titles = {
        "gpt2": "25 MB of GPT-2",
        "gpt2x4": "100 MB of GPT-2",
        "embedding": "GPT-2's embedding, 154 MB",
        "llama": "a layer of Llama-7B, 495 MB",
    }
    found = {
        (each["model"], each["rank"]): each["ratio"]
        for each in record["results"]
        if each["kind"] == "float32"
    }
    ranks = sorted({rank for _, rank in found})
    rows = [
        [title, *(f"{found[model, rank]:.2f}" for rank in ranks)] for model, title in titles.items()
    ]
    return _markdown(["bucket", *(f"rank {rank}" for rank in ranks)], rows)


def _in_markdown(table: Callable[..., Table]) -> Callable[..., str]:
    return lambda record, *arguments: _markdown(*table(record, *arguments))


_OF_BENCHMARKS: tuple[Callable[..., Table], ...] = (
    of_convergence.front,
    of_convergence.losses,
    of_convergence.curve,
    of_convergence.noise,
    of_convergence.shadow,
    of_faults.faults,
    *of_scaling.TABLES,
    *of_endurance.TABLES,
    *OF_OTHER_SUITES,
)

TABLES: dict[str, Callable[..., str]] = {
    **{
        made.__name__: made
        for made in (links, learning, on_the_way, stages, stages_by_rank, buckets_by_rank)
    },
    **{made.__name__: _in_markdown(made) for made in _OF_BENCHMARKS},
}


def _methods(record: Record) -> list[str]:
    """The methods that ran on any link."""
    settings = record["settings"]
    return [name for name in record["titles"] if any(name in each["methods"] for each in settings)]


def _link(setting: Record) -> str:
    number, unit = re.fullmatch(r"(\d+)(\w+)", setting["rate"]).groups()  # type: ignore[union-attr]
    return f"{number} {_RATES[unit]}"


def _seconds(figures: Record, never: str) -> str:
    """The seconds to a loss, with the times that they are fewer than plain's."""
    seconds, sooner = figures.get("seconds_to_loss"), figures.get("times_sooner")
    if seconds is None:
        return never
    if not sooner or sooner == 1:  # plain itself, or a seed that never comes to the loss
        return f"{seconds:.1f}"
    return f"{seconds:.1f} ({sooner:.1f} times sooner)"


def _sent(settings: Sequence[Record], method: str) -> str:
    """The least of all links, since a slow link sends some packets again."""
    found = [each["methods"].get(method, {}).get("tx_bytes_per_step") for each in settings]
    least = min((sent for sent in found if sent is not None), default=0)
    return "" if least < 1000 else f"{least / 1e6:.2f}"


def _step(figures: Record | None) -> str:
    if not figures or figures.get("step_ms") is None:
        return ""
    times = [each for turn in figures["milliseconds"] for each in turn]
    first, _, third = statistics.quantiles(times, n=4, method="inclusive")
    return f"{figures['step_ms']:.0f} ({first:.0f} to {third:.0f})"


if __name__ == "__main__":
    main()
