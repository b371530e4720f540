# SPDX-License-Identifier: BSD-3-Clause
"""Measures how compression affects convergence. Each part produces a section of the docs.

python benchmarks/bench_convergence.py losses --json convergence.json --picture convergence.png
python benchmarks/bench_convergence.py losses --resume --json convergence.json --stages front
python benchmarks/bench_convergence.py losses --methods plain attached:4 int8-wire:8,16,32
python benchmarks/bench_convergence.py shadow --json shadow.json
python benchmarks/bench_convergence.py unlike-data --json unlike_data.json
"""

from __future__ import annotations

from convergence import losses, shadow, unlike_data
from report import run_part

PARTS = {"losses": losses, "shadow": shadow, "unlike-data": unlike_data}


def main(words: list[str] | None = None) -> None:
    part, arguments, record = run_part(__doc__, PARTS, words)
    if getattr(arguments, "picture", None):
        part.draw(record, arguments.picture)


if __name__ == "__main__":
    main()
