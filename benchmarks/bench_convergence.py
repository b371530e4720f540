# SPDX-License-Identifier: BSD-3-Clause
"""Measures what compression costs in what is learned. Each part makes a section of the docs.

python benchmarks/bench_convergence.py losses --json convergence.json --picture convergence.png
python benchmarks/bench_convergence.py losses --resume --json convergence.json --stages front
python benchmarks/bench_convergence.py losses --methods plain attached:4 int8-wire:8,16,32
python benchmarks/bench_convergence.py shadow --json shadow.json
python benchmarks/bench_convergence.py unlike-data --json unlike_data.json
python benchmarks/bench_convergence.py unlike-data --show unlike_data.json --picture unlike.png
"""

from __future__ import annotations

import argparse

from convergence import losses, shadow, unlike_data
from report import add_files, recorded, show

PARTS = {"losses": losses, "shadow": shadow, "unlike-data": unlike_data}


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = parser.add_subparsers(dest="part", required=True)
    for name, part in PARTS.items():
        doc = part.__doc__ or ""
        of_part = parts.add_parser(name, help=doc.splitlines()[0], description=doc)
        part.add_arguments(of_part)
        add_files(of_part, "after every run")
    arguments = parser.parse_args(words)
    chosen = PARTS[arguments.part]
    record = recorded(arguments, chosen.measure)
    show(record, chosen.tables_of(record))
    if getattr(arguments, "picture", None):
        chosen.draw(record, arguments.picture)


if __name__ == "__main__":
    main()
