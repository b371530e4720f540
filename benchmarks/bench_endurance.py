# SPDX-License-Identifier: BSD-3-Clause
"""Trains for long with every option in turns, and makes and destroys many groups in one process.

    python benchmarks/bench_endurance.py --json endurance.json
    python benchmarks/bench_endurance.py --show endurance.json

Two ranks compare their parameters after every 500 steps. The gradients are known, so that outputs
and residual must add up to them. Memory, threads and files are counted on the way. All of it runs
over plain Gloo too, as torch's own memory may grow. The program fails if the ranks differ, the
outputs do not add up, or memory, threads or files grow.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import local_ranks
from endurance import resources, tables, turns
from provenance import heading, processor, provenance, write
from text_tables import print_tables

METHODS = {"ours": True, "gloo": False}
SECONDS_PER_STEP, SECONDS_PER_GROUP = 0.2, 10.0  # time limits for a machine that is busy


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    os.environ.update(resources.ENVIRONMENT)  # before the server that forks the ranks starts
    cycle = min(turns.CYCLE, arguments.steps // 2)
    record: dict[str, Any] = {
        **provenance(processor()),
        "environment": resources.ENVIRONMENT,
        "ranks": turns.WORLD,
        "turn": turns.TURN,
        "steps": arguments.steps,
        "groups": arguments.groups,
        "steps_warm_up": cycle,
        "groups_warm_up": arguments.groups // 4,
        "runs": {},
    }
    for method, compressed in METHODS.items():
        for part, function, count, each in (
            ("steps", turns.train, arguments.steps, SECONDS_PER_STEP),
            ("groups", turns.groups, arguments.groups, SECONDS_PER_GROUP),
        ):
            if not count:
                continue
            record["runs"][f"{method} {part}"] = local_ranks.call(
                function,
                turns.WORLD,
                count,
                compressed,
                what=f"{count} {part} of {method}",
                seconds=120 + each * count,
            )
            write(record, arguments.json)
    return record


def show(record: dict[str, Any]) -> None:
    environment = (f"{name}={value}" for name, value in record["environment"].items())
    print_tables(heading(record, *environment), tables.of_endurance(record))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--steps", type=int, default=20_000, help="number of steps (20000)")
    add("--groups", type=int, default=200, help="number of groups (200)")
    add("--json", type=Path, help="file for the results")
    add("--show", type=Path, metavar="JSON", help="results to show; nothing is measured")
    arguments = parser.parse_args()
    record = json.loads(arguments.show.read_text()) if arguments.show else measure(arguments)
    show(record)
    if found := tables.faults(record):
        sys.exit(f"bench_endurance: {'; '.join(found)}")


if __name__ == "__main__":
    main()
