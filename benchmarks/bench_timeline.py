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
from report import Record, Table, add_files, processor, provenance, recorded, show, write

# Few exact steps, which take 0.6 s each on a GPU.
METHODS = (
    "none ddp-alone attached+start_powerSGD_iter=2+bucket_cap_mb=100:4"
    " int8-wire+start_powerSGD_iter=2+bucket_cap_mb=100:16"
)
MODELS = {"cpu": "gpt-1M", "cuda": "gpt2"}
METHOD_SECONDS = 90  # the limit, with the start


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add_files(parser, "after every method")
    parser.add_argument("--device", default="cpu", choices=MODELS, help="device (cpu)")
    parser.add_argument("--model", choices=models.TASKS, help=f"model ({MODELS})")
    parser.add_argument("--methods", nargs="+", type=methods.parse, metavar="METHOD[:RANK]")
    parser.add_argument("--ranks", type=int, default=4, help="hosts, each with one process (4)")
    parser.add_argument("--rate", default="10gbit", help="rate of the links (10gbit)")
    parser.add_argument("--warmup", type=int, default=6, help="steps before those shown (6)")
    parser.add_argument("--steps", type=int, default=8, help="steps shown (8)")
    parser.add_argument("--logs", type=Path, help="folder for the logs of the MPS daemon")
    arguments = parser.parse_args(words)
    arguments.model = arguments.model or MODELS[arguments.device]
    arguments.contenders = methods.joined(arguments.methods or [methods.named(METHODS)])
    return arguments


def measure(arguments: argparse.Namespace) -> Record:
    """The record of the measurements."""
    of = arguments
    record: Record = {
        **provenance(processor()),
        **{name: getattr(of, name) for name in ("model", "ranks", "rate", "warmup")},
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
    job = Job(contender, of.model, of.device)
    of_ranks = ranks.call(
        timeline.watch,
        cluster,
        job,
        of.warmup,
        of.steps,
        what=contender.title,
        seconds=METHOD_SECONDS,
        variables=variables,
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
    rows = []
    for same in zip(*by_rank, strict=True):
        starts = [part.start for part in same]
        takes = [part.end - part.start for part in same]
        rows.append(
            [
                f"{same[0].bucket} {same[0].name}",
                f"{mean(starts):.2f}",
                f"{min(starts):.2f} to {max(starts):.2f}",
                f"{mean(takes):.3f}",
                f"{min(takes):.3f} to {max(takes):.3f}",
            ]
        )
    return ["bucket and part", "starts", "by rank", "takes", "by rank"], rows


def _kinds(by_rank: Sequence[Sequence[timeline.Part]]) -> Table:
    names = dict.fromkeys(part.name for part in by_rank[0])
    rows = []
    for name in names:
        of_ranks = [[p.end - p.start for p in parts if p.name == name] for parts in by_rank]
        rows.append([name, f"{mean([sum(each) for each in of_ranks]):.3f}", f"{len(of_ranks[0])}"])
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
