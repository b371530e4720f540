# SPDX-License-Identifier: BSD-3-Clause
"""Writes the summary: what passed, what failed, and the ratios, in at most 40 lines."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runner import Verdict

MOST_LINES = 40
WIDTH = 100
_MOST_FAILED_TESTS = 8

Record = dict[str, Any]


def summary(title: str, verdicts: Mapping[str, Verdict], output: Path) -> str:
    lines = [*_verdicts(title, verdicts), *_failed_tests(verdicts)]
    for ratios in (_kernels, _stages, _steps, _cluster, _model):
        try:
            lines += ratios(output)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            lines.append(f"no figures from {ratios.__name__}: {error!r}")
    lines = lines if len(lines) <= MOST_LINES else [*lines[: MOST_LINES - 1], "and more"]
    return "".join(f"{line[:WIDTH].rstrip()}\n" for line in lines)


def _wrap(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False)


def _verdicts(title: str, verdicts: Mapping[str, Verdict]) -> list[str]:
    well = [f"{name} {v.seconds:.0f} s" for name, v in verdicts.items() if v.ok]
    lines = [*_wrap(title), *_wrap(f"ok: {', '.join(well)}")]
    lines += [f"{name} {v.seconds:.0f} s: {v.text}" for name, v in verdicts.items() if not v.ok]
    if "smoke" in verdicts and verdicts["smoke"].tests:
        ends = (f"{_short(test)} {end}" for test, end in verdicts["smoke"].tests.items())
        lines += _wrap(f"smoke: {', '.join(ends)}")
    return lines


def _failed_tests(verdicts: Mapping[str, Verdict]) -> list[str]:
    failed = [f"{v.tests[test]} {_short(test)}" for v in verdicts.values() for test in v.failed]
    more = len(failed) - _MOST_FAILED_TESTS
    return failed[:_MOST_FAILED_TESTS] + ([f"and {more} more tests"] if more > 0 else [])


def _short(test: str) -> str:
    """The name of a test without its folder."""
    path, _, name = test.partition("::")
    return f"{Path(path).stem}::{name}" if name else test


def _read(output: Path, pattern: str) -> dict[str, Record]:
    """The records, by file name."""
    return {file.stem: json.loads(file.read_text()) for file in sorted(output.glob(pattern))}


def _table(heading: str, rows: list[tuple[str, str, float]]) -> list[str]:
    """A table with a line for each first name and a column for each second name."""
    if not rows:
        return []
    columns = list(dict.fromkeys(column for _, column, _ in rows))
    cells = {(line, column): f"{value:.2f}" for line, column, value in rows}
    lines = list(dict.fromkeys(line for line, _, _ in rows))

    table = [(heading, columns)]
    table += [(f"  {line}", [cells.get((line, c), "-") for c in columns]) for line in lines]
    return [f"{name:44}" + "".join(f"{cell:>11}" for cell in row) for name, row in table]


def _kernels(output: Path) -> list[str]:
    rows = [
        (
            f"{file.removeprefix('kernels_')} {r['kind']} {r.get('products', '')} {r['rank']}",
            str(r["model"]),
            float(r["ratio"]),
        )
        for file, record in _read(output, "kernels_*.json").items()
        for r in record["results"]
    ]
    return _table("bench_kernels: stages / floor", rows)


def _stages(output: Path) -> list[str]:
    rows = []
    for record in _read(output, "bench_stages.json").values():
        for r in record["results"]:
            name = f"{r['model']} {r['rank']}"
            rows += [
                (name, "hook / ours", float(r["hook_over_ours"])),
                (name, "/ floor", float(r["ours_over_floor"])),
            ]
    return _table("bench_stages", rows)


def _steps(output: Path) -> list[str]:
    rows = [
        (
            f"rank {r['rank']}, buckets of {r['bucket_cap_mb']} MB",
            file.removeprefix("bench_"),
            r["ms"],
        )
        for file, record in _read(output, "bench_step*.json").items()
        for r in record["results"]
    ]
    return _table("bench_step: ms", rows)


def _cluster(output: Path) -> list[str]:
    rows = [
        (f"{setting['model']} {name}", "step", float(figures["step_ms"]))
        for record in _read(output, "bench_cluster*.json").values()
        for setting in record["settings"]
        for name, figures in setting["methods"].items()
        if figures.get("step_ms")
    ]
    return _table("bench_cluster: 4 NCCL hosts, 10 Gbit/s, ms", rows)


def _model(output: Path) -> list[str]:
    rows = [
        (f"rank {r['rank']}, {r['residual_dtype']} residual", f"batch {batch}", 100 * share)
        for record in _read(output, "bench_model.json").values()
        for r in record["stages"]
        for batch, share in r["share"].items()
    ]
    return _table("bench_model: stages, % of a dense step", rows)
