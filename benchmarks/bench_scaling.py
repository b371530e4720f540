# SPDX-License-Identifier: BSD-3-Clause
"""Measures what grows with ranks, parameters and buckets, and models groups of up to 1024 ranks.

    python benchmarks/bench_scaling.py --json scaling.json
    python benchmarks/bench_scaling.py --resume --json scaling.json --parts parameters model
    python benchmarks/bench_scaling.py --show scaling.json

It trains models without computation, whose gradients are random numbers, on local ranks over Gloo.
It counts bytes on the wire, collectives, memory, threads, sockets and checkpoints, which other
programs on the machine do not change. Its seconds are those of ranks that share the machine.

A run starts only if the machine has the memory for it, and ends if the memory runs out. The part
"model" measures nothing: it is a model of links of these rates and costs of a message.
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
MEASURED_MODEL = "10 M"  # of the part "ranks"
MOST_HOSTS = 8  # more take too long to share two cores
_LIMIT_SECONDS = 900

# The figures that are the same on all ranks, or nearly, and those whose mean is taken. The others
# are the last rank's, since rank 0 also serves the store, or the slowest's.
_OF_FIRST = ("collectives", "buckets", "stage_seconds")
_MEANS = ("wire_bytes", "memory_bytes", "mean_checkpoint_bytes", "rank_checkpoint_bytes")
_OF_LAST = ("threads", "sockets", "store_bytes")
_SLOWEST = ("seconds", "processor_seconds")


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    models = ["1 M", "10 M", "100 M", "1 B"]
    add = parser.add_argument
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="parts (all)")
    add("--ranks", nargs="+", type=int, default=[2, 4, 8, 16], help="group sizes (2 4 8 16)")
    of_models = f"models of the part on parameters ({' '.join(map(repr, models))})"
    add("--models", nargs="+", choices=MODELS, default=models, help=of_models)
    add("--caps", nargs="+", type=int, default=[1, 5, 25, 100], help="MiB of buckets (1 5 25 100)")
    add("--rates", nargs="+", type=float, default=[1, 10, 100], help="Gbit/s to model (1 10 100)")
    add("--message-us", type=float, default=50, help="microseconds of a small message (50)")
    handling = "microseconds of the processor for a message that is sent and received (25)"
    add("--handling-us", type=float, default=25, help=handling)
    add("--quick", action="store_true", help="two ranks and a tiny model")
    add("--resume", action="store_true", help="keep the runs that the file of --json has")
    add_files(parser, "after every run")
    arguments = parser.parse_args(words)
    if min(arguments.ranks) < 2:
        parser.error(f"--ranks: integers of at least 2, got {min(arguments.ranks)}")
    if arguments.quick:
        arguments.ranks, arguments.models, arguments.caps = [2], ["tiny"], [1]
    return arguments


def _record(arguments: argparse.Namespace) -> Record:
    """The record to add runs to, which is empty or the one to resume."""
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
    for setting in in_turn(todo, lambda setting: setting.title):
        if run := _run(setting):
            record["runs"].append(run)
        else:
            print(f"left out, as memory is short: {setting.title}")
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
    # Every rank's mean checkpoint exists at the same time.
    checkpoints = needs + setting.world * setting.state_bytes() < free
    load = round(os.getloadavg()[0], 1)
    args = (setting.world, setting, checkpoints)
    figures = ranks.call(rank.measure, *args, what=setting.title, seconds=_LIMIT_SECONDS)
    about = {**vars(setting), "load": load, "predicted": model.predict_run(setting)}
    return {**about, **_joined(figures)}


def _joined(figures: list[dict[str, Any]]) -> dict[str, Any]:
    """One figure of all ranks: a mean, that of the last rank, or the slowest's."""
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
