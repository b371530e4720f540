# SPDX-License-Identifier: BSD-3-Clause
"""Kills ranks of a training job at moments by chance, and compares its end with a quiet run's.

    python benchmarks/bench_restarts.py --json restarts.json
    python benchmarks/bench_restarts.py --show restarts.json

torchrun starts a job of two ranks again after each kill. The job trains an attached DDP model over
cpu:powersgd in int8. Each rank saves its own state every few steps, and goes on from the last step
that both have saved. Some kills strike while a checkpoint is written. The program fails if the
killed job does not end with the bits of the quiet one.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from endurance import kills, tables
from provenance import heading, processor, provenance, write
from text_tables import print_tables

SAVE_EVERY = 10


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    from rich.progress import Progress

    orders = kills.plan(arguments.kills, arguments.seed)
    record: dict[str, Any] = {
        **provenance(processor()),
        "seed": arguments.seed,
        "steps": arguments.steps,
        "save_every": SAVE_EVERY,
        "ranks": kills.WORLD,
        "kills": [],
    }
    with tempfile.TemporaryDirectory() as folder, Progress() as progress:
        bar = progress.add_task("kills", total=len(orders))

        def note_kill(kill: dict[str, Any]) -> None:
            record["kills"].append(kill)
            write(record, arguments.json)
            progress.update(bar, advance=1)

        for name, todo in (("quiet", []), ("killed", orders)):
            place = Path(folder, name)
            place.mkdir()
            job = kills.Killer(place, arguments.steps, SAVE_EVERY, todo, note_kill)
            record[name] = job.run()
            record[f"{name}_other_failures"] = job.other_failures
    write(record, arguments.json)
    return record


def differences(record: dict[str, Any]) -> list[str]:
    """The results in which a rank of the killed job differs from that of the quiet run."""
    return [
        f"{name} of rank {rank}"
        for rank, (one, other) in enumerate(zip(record["quiet"], record["killed"], strict=True))
        for name in ("loss", "losses", "parameters", "state")
        if one[name] != other[name]
    ]


def show(record: dict[str, Any]) -> None:
    print_tables(heading(record, f"seed {record['seed']}"), tables.of_restarts(record))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--kills", type=int, default=50, help="number of kills (50)")
    add("--steps", type=int, default=3000, help="number of steps of the job (3000)")
    add("--seed", type=int, default=0, help="seed of the moments and the ranks (0)")
    add("--json", type=Path, help="file for the results")
    add("--show", type=Path, metavar="JSON", help="results to show; nothing is measured")
    arguments = parser.parse_args()
    record = json.loads(arguments.show.read_text()) if arguments.show else measure(arguments)
    show(record)
    if found := differences(record):
        sys.exit(f"bench_restarts: the killed job ended with other bits: {', '.join(found)}")


if __name__ == "__main__":
    main()
