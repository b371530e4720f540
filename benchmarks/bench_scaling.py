# SPDX-License-Identifier: BSD-3-Clause
"""Measures how costs grow with processes, parameters and buckets, and models up to 1024 processes.

    python benchmarks/bench_scaling.py --json scaling.json
    python benchmarks/bench_scaling.py --resume --json scaling.json --parts parameters model
    python benchmarks/bench_scaling.py --show scaling.json

It trains models that compute nothing and have random gradients, in local processes over Gloo. It
counts bytes on the wire, collectives, memory, threads, sockets and checkpoint sizes, which do not
depend on the load of the machine. The times are those of processes that share one machine.

A run starts only if the machine has enough memory for it, and is ended if memory runs low. The part
"model" measures nothing: it predicts times from --rates, --message-us and --handling-us.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from typing import Any

from launcher import hosts, ranks
from process import available_memory
from report import Record, add_files, in_turn, processor, provenance, recorded, show, write
from scaling import hops, model, rank, tables
from scaling.settings import MODELS, RANK, Setting, runs_of

MEASURED = ("ranks", "parameters", "buckets")
PARTS = (*MEASURED, "hops", "model")
MEASURED_MODEL = "10 M"  # by the part "ranks"
MOST_HOSTS = 8  # more are too slow on two cores
_LIMIT_SECONDS = 900

# The first rank's figure stands for all where they are (nearly) equal. Others are averaged, or are
# the slowest rank's, or the last rank's, since rank 0 also serves the store.
_OF_FIRST = ("collectives", "buckets", "stage_seconds")
_MEANS = ("wire_bytes", "memory_bytes", "mean_checkpoint_bytes", "rank_checkpoint_bytes")
_OF_LAST = ("threads", "sockets", "store_bytes")
_SLOWEST = ("seconds", "processor_seconds")


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    models = ["1 M", "10 M", "100 M", "1 B"]
    add = parser.add_argument
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="parts to run (all)")
    add("--ranks", nargs="+", type=int, default=[2, 4, 8, 16], help="group sizes (2 4 8 16)")
    of_models = f"models for the part parameters ({' '.join(map(repr, models))})"
    add("--models", nargs="+", choices=MODELS, default=models, help=of_models)
    add(
        "--caps",
        nargs="+",
        type=int,
        default=[1, 5, 25, 100],
        help="bucket sizes, in MiB (1 5 25 100)",
    )
    add(
        "--rates",
        nargs="+",
        type=float,
        default=[1, 10, 100],
        help="modeled link rates, in Gbit/s (1 10 100)",
    )
    add(
        "--message-us",
        type=float,
        default=50,
        help="modeled latency of a small message, in microseconds (50)",
    )
    handling = "modeled CPU time of sending and receiving a message, in microseconds (25)"
    add("--handling-us", type=float, default=25, help=handling)
    add("--quick", action="store_true", help="two processes and a tiny model")
    add("--resume", action="store_true", help="keep the runs that are already in the --json file")
    add_files(parser, "after every run")
    arguments = parser.parse_args(words)
    if min(arguments.ranks) < 2:
        parser.error(f"--ranks: integers of at least 2, got {min(arguments.ranks)}")
    if arguments.quick:
        arguments.ranks, arguments.models, arguments.caps = [2], ["tiny"], [1]
    return arguments


def _record(arguments: argparse.Namespace) -> Record:
    """The record to add runs to: an empty one, or the one to resume."""
    if not (arguments.resume and arguments.json and arguments.json.exists()):
        cores = os.cpu_count()
        return {**provenance(processor()), "approximation": RANK, "cores": cores, "runs": []}
    record: Record = json.loads(arguments.json.read_text())
    for run in record["runs"]:
        run["predicted"] = model.predict_run(_setting_of(run))
    return record


def _setting_of(run: dict[str, Any]) -> Setting:
    return Setting(**{name: run[name] for name in Setting.__dataclass_fields__})


def measure(arguments: argparse.Namespace) -> Record:
    """The record of all parts."""
    # With this threshold, glibc returns large blocks as soon as they are free: memory is exact.
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
    for setting in in_turn(todo, lambda setting: setting.title):
        if run := _run(setting):
            record["runs"].append(run)
        else:
            print(f"left out, too little memory: {setting.title}")
        write(record, arguments.json)
    if "hops" in arguments.parts:
        if lacks := hosts.missing():
            print(f"left out: hops; missing: {', '.join(lacks)}")
        else:
            record["hops"] = hops.measure([each for each in arguments.ranks if each <= MOST_HOSTS])
            write(record, arguments.json)
    if "model" in arguments.parts:
        record["model"] = model.predict(
            MEASURED_MODEL, arguments.rates, arguments.message_us, arguments.handling_us
        )
    return record


def _run(setting: Setting) -> dict[str, Any] | None:
    """The record of a run, or None if the machine lacks the memory."""
    needs, free = setting.needs(), available_memory()
    if needs > free:
        return None
    # The mean checkpoints of all ranks exist at the same time.
    checkpoints = needs + setting.world * setting.state_bytes() < free
    load = round(os.getloadavg()[0], 1)
    args = (setting.world, setting, checkpoints)
    figures = ranks.call(rank.measure, *args, what=setting.title, seconds=_LIMIT_SECONDS)
    about = {**vars(setting), "load": load, "predicted": model.predict_run(setting)}
    return {**about, **_joined(figures)}


def _joined(figures: list[dict[str, Any]]) -> dict[str, Any]:
    """One figure for all ranks: the mean, the last rank's, or the slowest's."""
    first, last = figures[0], figures[-1]
    joined = {name: first[name] for name in _OF_FIRST if name in first}
    joined |= {name: last[name] for name in _OF_LAST}
    for name in _MEANS:
        if name in first:
            joined[name] = round(statistics.mean(each[name] for each in figures))
    for clock in _SLOWEST:
        joined[clock] = {name: max(each[clock][name] for each in figures) for name in first[clock]}
    return joined


def main() -> None:
    record = recorded(parse_arguments(), measure)
    show(record, tables.everything(record), f"{record['cores']} cores")


if __name__ == "__main__":
    main()
