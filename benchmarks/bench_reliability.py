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
from report import run_part

PARTS = {"faults": faults, "restarts": restarts}


def main(words: list[str] | None = None) -> None:
    signals.unwind_on_signals()
    try:
        part, _, record = run_part(__doc__, PARTS, words)
    except hosts.ClusterError as error:
        sys.exit(f"bench_reliability: {error}")
    if found := part.problems(record):
        sys.exit(f"bench_reliability: {'; '.join(found)}")


if __name__ == "__main__":
    main()
