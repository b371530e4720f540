# SPDX-License-Identifier: BSD-3-Clause
"""Measures what grows with ranks, parameters and buckets, and models groups of up to 1024 ranks.

    python benchmarks/bench_scaling.py --json scaling.json
    python benchmarks/bench_scaling.py --resume --json scaling.json --parts parameters model
    python benchmarks/bench_scaling.py --show scaling.json

It trains models without computation, whose gradients are random numbers, on local ranks over Gloo.
It counts bytes on the wire, collectives, memory, threads, sockets and checkpoints, which other
programs on the machine do not change. Its seconds are those of ranks that share the machine.

A run starts only if the machine has the memory for it, and ends if the memory runs out. The part
"model" measures nothing: it is a model of links of an ideal ring, of these rates and of this
latency.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from pathlib import Path
from typing import Any

import local_ranks
from cluster import hosts
from provenance import heading, processor, provenance, write
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from scaling import hops, model, rank, tables
from scaling.settings import MODELS, RANK, Setting, runs_of
from text_tables import print_tables

MEASURED = ("ranks", "parameters", "buckets")
PARTS = (*MEASURED, "hops", "model")
MOST_HOSTS = 8  # more take too long to share two cores
_LIMIT_SECONDS = 900

# The figures that are the same on all ranks, or nearly, and those whose mean is taken.
_OF_FIRST = ("collectives", "buckets", "payload_bytes", "stage_seconds")
_MEANS = ("wire_bytes", "memory_bytes", "mean_checkpoint_bytes", "rank_checkpoint_bytes")


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="parts (all)")
    add("--ranks", nargs="+", type=int, default=[2, 4, 8, 16], help="group sizes (2 4 8 16)")
    add(
        "--models",
        nargs="+",
        choices=MODELS,
        default=["1 M", "10 M", "100 M", "1 B"],
        help="models of the part on parameters ('1 M' '10 M' '100 M' '1 B')",
    )
    add("--caps", nargs="+", type=int, default=[1, 5, 25, 100], help="MiB of buckets (1 5 25 100)")
    add("--rates", nargs="+", type=float, default=[1, 10, 100], help="Gbit/s to model (1 10 100)")
    add("--message-us", type=float, default=50, help="microseconds of a small message (50)")
    add("--quick", action="store_true", help="two ranks and a tiny model")
    add("--json", type=Path, help="file for the results, written after every run")
    add("--resume", action="store_true", help="keep the runs that the file of --json has")
    add("--show", type=Path, metavar="JSON", help="results to show; nothing is measured")
    arguments = parser.parse_args(words)
    if min(arguments.ranks) < 2:
        parser.error(f"--ranks: integers of at least 2, got {min(arguments.ranks)}")
    if arguments.quick:
        arguments.ranks, arguments.models, arguments.caps = [2], ["tiny"], [1]
    return arguments


def _record(arguments: argparse.Namespace) -> dict[str, Any]:
    """The record to add runs to, which is empty or the one to resume."""
    here = {**provenance(processor()), "approximation": RANK, "cores": os.cpu_count()}
    if not (arguments.resume and arguments.json and arguments.json.exists()):
        return {**here, "runs": []}
    record: dict[str, Any] = json.loads(arguments.json.read_text())
    for run in record["runs"]:
        run["predicted"] = model.predict_run(_setting_of(run))
    return record


def _setting_of(run: dict[str, Any]) -> Setting:
    return Setting(**{name: run[name] for name in Setting.__dataclass_fields__})


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """The record of all parts."""
    # glibc then gives large blocks back as soon as they are free, so that the memory is exact.
    os.environ.update({"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"})
    record = _record(arguments)
    done = [_setting_of(run) for run in record["runs"]]
    todo = [
        setting
        for part in MEASURED
        if part in arguments.parts
        for setting in runs_of(
            part, arguments.ranks, arguments.models, arguments.caps, arguments.quick
        )
        if setting not in done
    ]
    columns = (
        TextColumn("{task.description:<56}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns) as progress:
        bar = progress.add_task("", total=len(todo))
        for setting in todo:
            progress.update(bar, description=setting.title)
            if run := _run(setting):
                record["runs"].append(run)
            else:
                progress.console.print(f"left out, as memory is short: {setting.title}")
            progress.advance(bar)
            write(record, arguments.json)
    if "hops" in arguments.parts:
        if lacks := hosts.missing():
            print(f"left out: hops; missing: {', '.join(lacks)}")
        else:
            record["hops"] = hops.measure(
                [world for world in arguments.ranks if world <= MOST_HOSTS]
            )
            write(record, arguments.json)
    if "model" in arguments.parts:
        record["model"] = model.predict(arguments.rates, arguments.message_us)
        write(record, arguments.json)
    return record


def _run(setting: Setting) -> dict[str, Any] | None:
    """The record of a run, or None if the machine lacks the memory."""
    needs, free = setting.needs(), local_ranks.available_memory()
    if needs > free:
        return None
    # Every rank's mean checkpoint exists at the same time.
    checkpoints = needs + setting.world * setting.state_bytes() < free
    load = os.getloadavg()[0]
    ranks = local_ranks.call(
        rank.measure,
        setting.world,
        setting,
        checkpoints,
        what=setting.title,
        seconds=_LIMIT_SECONDS,
    )
    about = {**vars(setting), "load": round(load, 1), "predicted": model.predict_run(setting)}
    return {**about, **_joined(ranks)}


def _joined(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """One figure of all ranks: a mean, that of the last rank, or the slowest's."""
    first, last = ranks[0], ranks[-1]
    joined = {name: first[name] for name in _OF_FIRST if name in first}
    for name in _MEANS:
        if name in first:
            joined[name] = round(statistics.mean(each[name] for each in ranks))
    # Rank 0 also serves the store.
    joined |= {name: last[name] for name in ("threads", "files", "sockets")}
    joined["store_bytes"] = {"first": first["store_bytes"], "last": last["store_bytes"]}
    joined["step_seconds"] = max(each["step_seconds"] for each in ranks)
    for clock in ("seconds", "processor_seconds"):
        joined[clock] = {name: max(each[clock][name] for each in ranks) for name in first[clock]}
    return joined


def show(record: dict[str, Any]) -> None:
    """Prints the tables of the page."""
    print_tables(heading(record, f"{record['cores']} cores"), tables.everything(record))


def main() -> None:
    arguments = parse_arguments()
    show(json.loads(arguments.show.read_text()) if arguments.show else measure(arguments))


if __name__ == "__main__":
    main()
