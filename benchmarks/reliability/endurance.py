# SPDX-License-Identifier: BSD-3-Clause
"""Trains for thousands of steps with changing options, and makes and destroys many process groups.

Two processes compare their parameters every 500 steps. The gradients are known, so the outputs and
the residual must add up to them. Memory, threads and open files are sampled on the way. The same
runs over plain Gloo show how much torch's own memory grows. With powersgd, neither memory nor
threads nor files may grow.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from typing import Any

from launcher import ranks
from report import Record, Table, processor, provenance, write

from reliability import long_run, tables
from reliability.long_run import CYCLE, TURN, WORLD
from reliability.resources import ENVIRONMENT

METHODS = {"ours": True, "gloo": False}
PARTS: dict[str, Callable[..., Any]] = {"steps": long_run.train, "groups": long_run.groups}
# Bounds on the errors of a turn, relative to the sum of 500 mean gradients. Each step rounds M, the
# factors and the output once in float32. A residual in half precision is rounded at each step.
TOLERANCE, HALF_TOLERANCE = 1e-5, 2e-2
# Bounds on the growth of memory in bytes: 1 MB in 10,000 steps, and 20 kB per group, of which plain
# Gloo takes 10.
GROWTH = {"steps": 100.0, "groups": 20_000.0}
SECONDS = {"steps": 0.2, "groups": 10.0}  # time limit of each, on a busy machine


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=20_000, help="number of steps (20000)")
    parser.add_argument("--groups", type=int, default=200, help="number of groups (200)")


def measure(arguments: argparse.Namespace) -> Record:
    os.environ.update(ENVIRONMENT)  # before the server that forks the ranks starts
    counts = {"steps": arguments.steps, "groups": arguments.groups}
    record: Record = {
        **provenance(processor()),
        "environment": ENVIRONMENT,
        "ranks": WORLD,
        "turn": TURN,
        **counts,
        "runs": {},
    }
    warm_up = {"steps": min(CYCLE, arguments.steps // 2), "groups": arguments.groups // 4}
    for method, compressed in METHODS.items():
        for part, count in counts.items():
            if count:
                what, seconds = f"{count} {part} of {method}", 120 + SECONDS[part] * count
                args = (WORLD, count, compressed, warm_up[part])
                found = ranks.call(PARTS[part], *args, what=what, seconds=seconds)
                record["runs"][f"{method} {part}"] = found
                write(record, arguments.json)
    return record


def tables_of(record: Record) -> dict[str, Table]:
    environment = " ".join(f"{name}={value}" for name, value in record["environment"].items())
    title = f"memory, threads and files, with {environment}"
    shown = {title: tables.endurance_memory(record)}
    if "ours steps" in record["runs"]:
        title = "sum of outputs + residual = sum of mean gradients"
        shown[title] = tables.endurance_turns(record)
    return shown


def problems(record: Record, growth: Mapping[str, float] = GROWTH) -> list[str]:
    """Lists differences between ranks, sums that do not add up, and growth.

    Args:
        record: the record.
        growth: the bounds on the growth of memory, in bytes per step or group.
    """
    found = []
    steps = record["runs"].get("ours steps", [])
    if len({run["parameters"] for run in steps}) > 1:
        found.append("the ranks' parameters differ")
    for title, (_, error) in steps[0]["turns"].items() if steps else ():
        bound = HALF_TOLERANCE if title == "bfloat16 residual" else TOLERANCE
        if not error < bound:  # it may be NaN
            found.append(f"{title}: the sums differ by {error:.1e}")
    for part, bound in growth.items():
        for rank, run in enumerate(record["runs"].get(f"ours {part}", [])):
            name = f"ours {part}, rank {rank}"
            if run["growth"] > bound:
                found.append(f"{name}: memory grows by {run['growth']:.0f} bytes per {part[:-1]}")
            for what in ("threads", "files"):
                _, early, late = run[what]
                if late > early:
                    found.append(f"{name}: {what} grow from {early} to {late}")
    return found
