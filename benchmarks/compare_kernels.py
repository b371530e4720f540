# SPDX-License-Identifier: BSD-3-Clause
"""Shows results of bench_kernels side by side: microseconds of a step over the floor's.

    python benchmarks/compare_kernels.py kernels.json kernels_without_dependent_launch.json

Each file has a column. It needs nothing but Python.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

Case = tuple[str, int, str, str]  # the model, the rank, the kind of gradient and of products


def ratios(record: dict[str, Any]) -> dict[Case, float]:
    return {
        (r["model"], r["rank"], r["kind"], r["products"]): r["ratio"] for r in record["results"]
    }


def table(records: dict[str, dict[str, Any]]) -> list[list[str]]:
    """The rows of the table, its heading first. A case that a file lacks has a dash."""
    columns = [ratios(record) for record in records.values()]
    cases = list(dict.fromkeys(case for column in columns for case in column))
    rows = [["model", "rank", "gradient", "products", *records]]
    for case in cases:
        cells = [f"{column[case]:.2f}" if case in column else "-" for column in columns]
        rows.append([*map(str, case), *cells])
    return rows


def show(rows: list[list[str]]) -> None:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path, help="results of bench_kernels --json")
    files = [file for file in parser.parse_args().files if file.exists()]
    records = {file.stem: json.loads(file.read_text()) for file in files}
    for name, record in records.items():
        print(
            f"{name}: {record['device']}, {record['copy_tbyte_per_s']:.2f} TB/s of copies", end=""
        )
        print(f", {record['environment']}")
    if records:
        show(table(records))


if __name__ == "__main__":
    main()
