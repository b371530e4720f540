# SPDX-License-Identifier: BSD-3-Clause
"""Shows when each part of a training step begins and what it takes, on several hosts.

    python benchmarks/bench_timeline.py --ranks 2
    python benchmarks/bench_timeline.py --device cuda --json timeline.json
    python benchmarks/bench_timeline.py --show timeline.json

The hosts, the models and the methods are those of bench_cluster.py. One method runs after the
other. The tables show the step of median length. The record has the marks of all steps on all
ranks: what begins, its bucket, when the device begins it, and when the host enqueued it, in
milliseconds since the first rank began its backward pass.

On a GPU, the times are those of events in the streams, so a part also takes as long as the device
does anything else. On a CPU, they are the host's, and a collective begins when it is waited for.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import bench_cluster
from cluster import methods, models, timeline
from cluster.methods import Contender
from cluster.rank import Job
from launcher import hosts, ranks
from report import Record, Table, add_files, provenance, recorded, show, write

# Few exact steps, which take 0.6 s each on a GPU.
METHODS = (
    "none ddp-alone attached+start_powerSGD_iter=2+bucket_cap_mb=100:4"
    " int8-wire+start_powerSGD_iter=2+bucket_cap_mb=100:16"
)
MODELS = {"cpu": "gpt-1M", "cuda": "gpt2"}
LIMIT = 90  # seconds of a method, with the start
WARMUP_STEPS = 6


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add_files(parser, "after every method")
    add = parser.add_argument
    add("--device", default="cpu", choices=MODELS, help="device (cpu)")
    add("--model", choices=models.TASKS, help=f"model ({MODELS})")
    add("--methods", nargs="+", type=methods.parse, metavar="METHOD[:RANK]")
    add("--ranks", type=int, default=4, help="hosts, each with one process (4)")
    add("--rate", default="10gbit", help="rate of the links (10gbit)")
    add("--steps", type=int, default=8, help="steps shown (8)")
    add("--logs", type=Path, help="folder for the logs of the MPS daemon")
    arguments = parser.parse_args(words)
    arguments.model = arguments.model or MODELS[arguments.device]
    arguments.contenders = methods.joined(arguments.methods or [methods.named(METHODS)])
    return arguments


def measure(arguments: argparse.Namespace) -> Record:
    """The record of the measurements."""
    of = arguments
    record: Record = {
        **provenance(),
        **{"model": of.model, "ranks": of.ranks, "rate": of.rate, "warmup": WARMUP_STEPS},
        "on": of.device,
        "failed": {},
        "methods": {},
    }
    machine = bench_cluster.machine(of.device, of.logs)
    with machine as variables, hosts.Hosts(of.ranks, of.rate) as cluster:
        record["congestion_control"] = cluster.congestion_control
        for contender in of.contenders:
            of_method = {**variables, **contender.how.variables}
            try:
                gpu, steps = _watch(of, cluster, contender, of_method)
                record["device"] = gpu or record["device"]
                record["methods"][contender.title] = steps
            except (RuntimeError, TimeoutError) as error:
                print(error, flush=True)
                record["failed"][contender.title] = str(error).splitlines()[0]
            write(record, of.json)
    return record


def _watch(
    of: argparse.Namespace, cluster: hosts.Hosts, contender: Contender, variables: dict[str, str]
) -> tuple[str, list[Any]]:
    """The GPU's name, and the marks of each step and rank."""
    given = (Job(contender, of.model, of.device), WARMUP_STEPS, of.steps)
    of_ranks = ranks.call(
        timeline.watch, cluster, *given, what=contender.title, seconds=LIMIT, variables=variables
    )
    steps = zip(*(marks for _, marks in of_ranks), strict=True)
    return of_ranks[0][0], [timeline.from_first_backward(step) for step in steps]


def tables(record: Record) -> dict[str, Table]:
    """The phases of a step by method, and the parts of each method's buckets."""
    in_order = record["on"] == "cuda"
    steps = {title: timeline.median_step(of) for title, of in record["methods"].items()}
    phases = {title: timeline.phases(step, in_order) for title, step in steps.items()}
    headings = ["method", *timeline.PHASES]
    rows = [[title, *(f"{ms:.2f}" for ms in of.values())] for title, of in phases.items()]
    shown: dict[str, Table] = {"The step of median length, ms": (headings, rows)}
    for title, step in steps.items():
        by_rank = [timeline.parts_of(marks, in_order) for marks in step]
        if any(by_rank):
            shown[f"{title}: parts, ms since the first backward began"] = _parts(by_rank)
            shown[f"{title}: all buckets, ms"] = _kinds(by_rank)
    return shown


def _parts(by_rank: Sequence[Sequence[timeline.Part]]) -> Table:
    def cells(values: list[float], digits: int) -> list[str]:
        least, middle, most = (f"{v:.{digits}f}" for v in (min(values), mean(values), max(values)))
        return [middle, f"{least} to {most}"]

    rows = []
    for same in zip(*by_rank, strict=True):
        name = f"{same[0].bucket} {same[0].name}"
        starts, takes = [p.start for p in same], [p.end - p.start for p in same]
        rows.append([name, *cells(starts, 2), *cells(takes, 3)])
    return ["bucket and part", "starts", "by rank", "takes", "by rank"], rows


def _kinds(by_rank: Sequence[Sequence[timeline.Part]]) -> Table:
    rows = []
    for name in dict.fromkeys(part.name for part in by_rank[0]):
        of_ranks = [[p.end - p.start for p in parts if p.name == name] for parts in by_rank]
        rows.append([name, f"{mean(map(sum, of_ranks)):.3f}", f"{len(of_ranks[0])}"])
    return ["part", "takes", "times"], rows


def main() -> None:
    arguments = parse_arguments()
    lacks = bench_cluster.missing(arguments.device, False, [arguments.model])
    if lacks and not arguments.show:
        sys.exit(f"bench_timeline cannot run here; missing: {', '.join(lacks)}")
    record = recorded(arguments, measure)
    link = (record["rate"], record["congestion_control"])
    show(record, tables(record), record["model"], f"{record['ranks']} hosts", *link)
    if record["failed"]:
        sys.exit(f"failed: {record['failed']}")


if __name__ == "__main__":
    main()
