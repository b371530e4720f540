# SPDX-License-Identifier: BSD-3-Clause
"""Tests training under network faults, kills and restarts, for docs/reliability.md.

    python benchmarks/bench_reliability.py faults --only stopped killed
    python benchmarks/bench_reliability.py restarts --kills 10 --steps 600
    python benchmarks/bench_reliability.py faults --help

The exit status is 1 if a part finds a problem.
"""

from __future__ import annotations

import sys

from launcher import hosts, signals
from reliability import faults, restarts
from report import part_of, recorded, show

PARTS = {"faults": faults, "restarts": restarts}


def main(words: list[str] | None = None) -> None:
    part, arguments = part_of(__doc__, PARTS, "after every trial", words)
    signals.unwind_on_signals()
    try:
        record = recorded(arguments, part.measure)
    except hosts.ClusterError as error:
        sys.exit(f"bench_reliability: {error}")
    show(record, part.tables_of(record))
    if found := part.problems(record):
        sys.exit(f"bench_reliability: {'; '.join(found)}")


if __name__ == "__main__":
    main()
