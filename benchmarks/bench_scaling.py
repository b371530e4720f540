# SPDX-License-Identifier: BSD-3-Clause
"""Measures what a step costs on 2 to 16 processes, and models up to 1024 of them.

    python benchmarks/bench_scaling.py --json scaling.json
    python benchmarks/bench_scaling.py --show scaling.json

It trains a model that computes nothing and has random gradients, in local processes over Gloo. It
counts sent bytes, memory, threads and sockets, which do not depend on the load of the machine. The
models of larger groups predict times from assumed costs of a message; see scaling/model.py and,
for NCCL on hosts with several devices, scaling/devices.py.
"""

from __future__ import annotations

import argparse
import os
import statistics
from typing import Any

from launcher import ranks
from report import Record, add_files, in_turn, processor, provenance, recorded, show, write
from scaling import devices, model, rank, tables

_LIMIT_SECONDS = 900


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--ranks", nargs="+", type=int, default=[2, 4, 8, 16], help="group sizes (2 4 8 16)")
    add_files(parser, "after every run")
    arguments = parser.parse_args(words)
    if min(arguments.ranks) < 2:
        parser.error(f"--ranks: integers of at least 2, got {min(arguments.ranks)}")
    return arguments


def measure(arguments: argparse.Namespace) -> Record:
    # With this threshold, glibc returns large blocks as soon as they are free: memory is exact.
    os.environ.update({"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"})
    record: Record = {
        **provenance(processor()),
        "approximation": model.RANK,
        "runs": [],
        "model": model.predict(),
        "several_devices": devices.predict(),
    }
    todo = [(world, method) for world in arguments.ranks for method in model.METHODS]
    for world, method in in_turn(todo, lambda each: f"{each[0]} ranks, {each[1]}"):
        record["runs"].append(_run(world, method))
        write(record, arguments.json)
    return record


def _run(world: int, method: str) -> dict[str, Any]:
    """The figures of a run: means, and the counts of the last rank."""
    what, name = f"{method} on {world} ranks", model.MEASURED_MODEL
    figures = ranks.call(rank.measure, world, name, method, what=what, seconds=_LIMIT_SECONDS)
    sizes = ("sent_bytes", "memory_bytes")
    means = {size: round(statistics.mean(each[size] for each in figures)) for size in sizes}
    layout = model.layout_of(name, model.cap_of(method))
    predicted = {"sent_bytes": model.sent_bytes(layout, method, world)}
    if method in model.WIRES:
        predicted["memory_bytes"] = model.memory_bytes(layout, method, world)
    return {"world": world, "method": method, **figures[-1], **means, "predicted": predicted}


def main() -> None:
    record = recorded(parse_arguments(), measure)
    shown = {
        "kB sent by a rank in a step": tables.sent_by_ranks(record),
        "costs of a rank": tables.costs(record),
        f"modeled ms of communication, {model.TIMED_MODEL}": tables.larger_groups(record),
        f"modeled hosts with several devices, {devices.MODEL}": tables.several_devices(record),
    }
    show(record, shown)


if __name__ == "__main__":
    main()
