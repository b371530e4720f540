# SPDX-License-Identifier: BSD-3-Clause
"""Kills replicas of a torchft job at intervals, and measures its goodput and its loss.

Each replica is a process that trains a small GPT. A killed replica restarts at once, and fetches
the model from another. Goodput is the time in which an undisturbed job commits its steps, divided
by the time of the job with kills. The loss is the mean of the last hundred steps. For comparison,
torchft's own process group trains too. It uses this package's DDP class, because torchft's own
fails when a replica dies in an exchange.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import statistics
import sys
import time
from contextlib import ExitStack
from datetime import timedelta
from multiprocessing import connection
from typing import Any

import torch
import torch.distributed as dist
from cluster import models
from launcher import ranks
from report import Record, Table, processor, provenance, write

from reliability import tables

REPLICAS = 3
MODEL = "gpt-1M"
LIMIT = timedelta(seconds=20)
HEARTBEAT_MS = 1000  # a replica without a heartbeat for so long counts as dead
WARMUP_STEPS = 20  # not measured
LAST = 100  # steps that the loss is averaged over
STALL = 120.0  # seconds without a committed step after which a run fails


def train(rank: ranks.Rank, number: int, method: str, lighthouse: str, steps: int) -> None:
    """Trains one replica. Sends the number and the loss of each committed step."""
    from torchft import Manager, Optimizer
    from torchft.process_group import ProcessGroupGloo

    from torch_powersgd.integrations.torchft import DistributedDataParallel, ProcessGroupPowerSGD

    torch.manual_seed(0)
    task = models.TASKS[MODEL]
    model = task.make()
    inner = torch.optim.AdamW(model.parameters(), lr=5e-4, betas=(0.9, 0.95), fused=True)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    ours = ProcessGroupPowerSGD(LIMIT) if method == "ours" else None
    manager = Manager(
        ours or ProcessGroupGloo(LIMIT),
        load,
        lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=1,
        timeout=LIMIT,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=f"replica{number}",
    )
    ddp = DistributedDataParallel(manager, model)
    if ours:
        ours.attach(ddp, manager)
    optimizer = Optimizer(manager, inner)
    batch = task.data(number, REPLICAS, 0)
    while (step := manager.current_step()) < steps:
        optimizer.zero_grad()
        loss = models.loss_of(ddp, batch(step))
        loss.backward()
        optimizer.step()
        if manager.current_step() > step:
            rank.pipe.send((manager.current_step(), loss.item()))
    manager.shutdown(wait=False)
    os._exit(0)  # torchft's threads would wait for the other replicas


class _Job:
    """A context manager for replicas and their lighthouse."""

    def __init__(self, method: str, steps: int) -> None:
        from torchft.coordination import LighthouseServer

        self._method, self._steps = method, steps
        self._lighthouse = LighthouseServer(
            bind="[::]:0",
            min_replicas=1,
            join_timeout_ms=10_000,  # waits for slow replicas, but not for dead ones
            heartbeat_timeout_ms=HEARTBEAT_MS,
        )
        self._replicas: list[ranks.Ranks] = []
        self._stack = ExitStack()

    def __enter__(self) -> _Job:
        self._replicas = [self._start(number) for number in range(REPLICAS)]
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.__exit__(RuntimeError, None, None)  # kills the processes that have not ended
        self._lighthouse.shutdown()

    def _start(self, number: int) -> ranks.Ranks:
        words = (number, self._method, self._lighthouse.address(), self._steps)
        quiet = {"RUST_LOG": "error"}
        replica = ranks.Ranks(train, 1, *words, variables=quiet)
        return self._stack.enter_context(replica)

    def run(self, every: float, seed: int) -> dict[str, Any]:
        """Trains to the end, and kills a replica every `every` seconds (0: never)."""
        chance = random.Random(seed)
        losses: dict[int, list[float]] = {}
        began = last = time.monotonic()
        kills = 0
        while max(losses, default=0) < self._steps:
            pipes: list[Any] = [replica.pipes[0] for replica in self._replicas]
            ready: list[Any] = connection.wait(pipes, timeout=0.2)
            for pipe in ready:
                try:
                    step, loss = pipe.recv()
                except EOFError:
                    continue
                if step == WARMUP_STEPS and step not in losses:
                    began = killed_at = time.monotonic()
                losses.setdefault(step, []).append(loss)
                last = time.monotonic()
            if time.monotonic() - last > STALL:
                raise RuntimeError(f"{self._method}: no step within {STALL:g} seconds")
            started = max(losses, default=0) >= WARMUP_STEPS
            if every and started and time.monotonic() - killed_at > every:
                number = chance.randrange(REPLICAS)
                self._replicas[number].processes[0].kill()
                self._replicas[number] = self._start(number)
                killed_at = time.monotonic()
                kills += 1
        ends = [
            loss for step in range(self._steps - LAST, self._steps) for loss in losses[step + 1]
        ]
        return {"seconds": last - began, "kills": kills, "loss": statistics.mean(ends)}


def measure(arguments: argparse.Namespace) -> Record:
    if not importlib.util.find_spec("torchft"):
        sys.exit("replicas cannot run here; missing: torchft (pip install torchft)")
    record: Record = {
        **provenance(processor()),
        "model": MODEL,
        "replicas": REPLICAS,
        "steps": arguments.steps,
        "heartbeat_ms": HEARTBEAT_MS,
        "results": [],
    }
    os.environ.setdefault("RUST_LOG", "error")  # torchft's
    for method in arguments.methods:
        for every in [0.0, *arguments.every]:
            with _Job(method, arguments.steps) as job:
                ended = job.run(every, arguments.seed)
            record["results"].append({"method": method, "every": every, **ended})
            print(f"{method}, a kill every {every:g} s: {ended}", file=sys.stderr)
            write(record, arguments.json)
    return record


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    of = {"ours": "this package's", "gloo": "torchft's Gloo"}
    add("--methods", nargs="+", choices=of, default=list(of), help="process groups (all)")
    add("--steps", type=int, default=4000, help="committed steps of a job (4000)")
    add("--every", type=float, nargs="+", default=[30, 3], help="seconds between kills (30 3)")
    add("--seed", type=int, default=0, help="seed that chooses the replicas (0)")


def tables_of(record: Record) -> dict[str, Table]:
    return {f"{record['replicas']} replicas, {record['steps']} steps": tables.replicas(record)}


def problems(record: Record) -> list[str]:
    return []  # a job that does not end raises
