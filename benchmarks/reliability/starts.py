# SPDX-License-Identifier: BSD-3-Clause
"""Starts a job many times on a slow network, and counts failures, hangs and differing results.

Hosts are network namespaces on shaped links, which need root, ip and tc. There are many small
buckets, so that several are in flight at once. A start has finished if all processes end in time
with equal parameters. If a program issues its collectives in a fixed order, all starts end with the
same bits. If the order depends on timing, processes hang or abort. Each process may start late and
each frame be delayed, by random times from the seed of the start.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence

import torch
import torch.distributed as dist
from bits import digest
from launcher import hosts, ranks
from launcher.emulated_links import Link
from report import Record, Table, in_turn, processor, provenance, write
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torch_powersgd as tp
from reliability import tables

LAYERS, WIDTH = 8, 512
EXACT_STEPS = 2


def train(rank: ranks.Rank, steps: int, seconds: float, late: Sequence[float]) -> str:
    """Trains on a rank that starts `late` seconds late. Returns a digest of its parameters."""
    time.sleep(late[rank.number])
    torch.manual_seed(0)
    with rank.group("cpu:powersgd", seconds):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
        ddp = DistributedDataParallel(model, bucket_cap_mb=1)
        fields = {"matrix_approximation_rank": 4, "start_powerSGD_iter": EXACT_STEPS}
        tp.attach(ddp, tp.Options.hook_defaults(**fields))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        generator = torch.Generator().manual_seed(rank.number)
        for _ in range(steps):
            optimizer.zero_grad()
            ddp(torch.randn(4, WIDTH, generator=generator)).square().mean().backward()
            optimizer.step()
        dist.barrier()  # or one closes its sockets while another still reads
        return digest(ddp.parameters())


def start(cluster: hosts.Hosts, steps: int, limit: float, late: Sequence[float]) -> tuple[str, str]:
    """Runs one start. Returns how it ended, and the digest of all ranks if they agree."""
    try:
        found = ranks.call(train, cluster, steps, limit, late, what="a start", seconds=limit)
    except TimeoutError:
        return "hung", ""
    except RuntimeError:
        return "failed", ""
    return ("finished", found[0]) if len(set(found)) == 1 else ("ranks differ", "")


def measure(arguments: argparse.Namespace) -> Record:
    if lacks := hosts.missing():
        sys.exit(f"starts cannot run here; missing: {', '.join(lacks)}")
    hosts.sweep()
    record: Record = {
        **provenance(processor()),
        "rate": arguments.rate,
        "steps": arguments.steps,
        "starts": arguments.starts,
        "late_ms": arguments.late_ms,
        "jitter_ms": arguments.jitter_ms,
        "results": [],
    }
    link = Link(jitter=arguments.jitter_ms / 1e3)
    for world in arguments.ranks:
        endings: Counter[str] = Counter()
        digests = set()
        with hosts.Hosts(world, arguments.rate, link=link) as cluster:
            for seed in in_turn(range(arguments.starts), lambda seed: f"start {seed + 1}"):
                drawn = random.Random(seed)
                late = [drawn.uniform(0, arguments.late_ms / 1e3) for _ in range(world)]
                ending, found = start(cluster, arguments.steps, arguments.limit, late)
                endings[ending] += 1
                digests |= {found} - {""}
        result = {"ranks": world, "endings": dict(endings), "results": len(digests)}
        record["results"].append(result)
        write(record, arguments.json)
    return record


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--starts", type=int, default=200, help="number of starts (200)")
    add("--steps", type=int, default=12, help="steps per start (12)")
    add("--ranks", type=int, nargs="+", default=[2, 4], help="group sizes (2 4)")
    add("--rate", default="1gbit", help="rate of each link, in tc's notation (1gbit)")
    add("--late-ms", type=float, default=0, help="largest delay of a process's start, in ms (0)")
    add("--jitter-ms", type=float, default=0, help="largest delay of a frame, in ms (0)")
    add("--limit", type=float, default=60, help="seconds after which a start counts as hung (60)")


def tables_of(record: Record) -> dict[str, Table]:
    title = f"{record['starts']} starts of {record['steps']} steps at {record['rate']}"
    if late := record["late_ms"]:
        title += f", ranks up to {late:g} ms late, frames up to {record['jitter_ms']:g} ms"
    return {title: tables.starts(record)}


def problems(record: Record) -> list[str]:
    """The starts that did not finish, and results that differ between starts."""
    found = []
    for result in record["results"]:
        counts = {**result["endings"], "different results": result["results"] - 1}
        counts.pop("finished", None)
        found += [f"{result['ranks']} ranks: {n} {what}" for what, n in counts.items() if n > 0]
    return found
