# SPDX-License-Identifier: BSD-3-Clause
"""Starts job.py by torchrun, and kills one of its ranks after another."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

BENCHMARKS = Path(__file__).parents[1]
WORLD = 2
POLL = 0.001  # seconds
PATIENCE = 120.0  # seconds without any progress, after which the job counts as hung
# A kill strikes a rank that starts, one that trains, or one that writes a checkpoint.
MOMENTS = {"start": 0.2, "training": 0.5, "writing": 0.3}
STEP_SECONDS = 0.02  # A kill in training comes within so many seconds after the start of a step.


class Said(NamedTuple):
    """The last word of a rank's status."""

    process: int
    word: str
    step: int


@dataclass(frozen=True)
class Order:
    """A kill that is to come: the moment, the rank, and two numbers from 0 to 1."""

    moment: str
    rank: int
    where: float
    when: float


def plan(kills: int, seed: int) -> list[Order]:
    """The kills, in an order by chance. Each kind of moment has its share of them."""
    chance = random.Random(seed)
    counts = {moment: round(share * kills) for moment, share in MOMENTS.items()}
    counts["training"] += kills - sum(counts.values())
    moments = [moment for moment, count in counts.items() for _ in range(count)]
    chance.shuffle(moments)
    return [
        Order(moment, chance.randrange(WORLD), chance.random(), chance.random())
        for moment in moments
    ]


class Killer:
    """Runs the job in a folder, with a list of kills.

    Args:
        folder: an empty folder.
        steps: the number of steps of the job.
        save_every: the number of steps between two checkpoints.
        orders: the kills, none for an undisturbed run.
        note: a function that is called after each kill with its record.
    """

    def __init__(
        self,
        folder: Path,
        steps: int,
        save_every: int,
        orders: list[Order],
        note: Callable[[dict[str, Any]], None],
    ) -> None:
        self.folder = folder
        self.save_every = save_every
        self.orders = list(orders)
        self.note = note
        self.kills: list[dict[str, Any]] = []
        self.other_failures = 0  # starts that ended without a kill
        self.start_seconds = 4.0  # from a rank's first word to its first step, as last seen
        # The job cannot end before the last kill: no start comes further than its share.
        self.reach = steps // max(1, len(orders)) if orders else steps
        self._words = [str(folder), str(steps), str(save_every)]

    def run(self) -> list[dict[str, Any]]:
        """Runs the job to its end. Returns the result of each rank."""
        with self._torchrun() as agent:
            restart = 0
            while self.orders and agent.poll() is None:
                killed = self._kill(agent, restart, self.orders[0])
                if killed is None:
                    self.other_failures += 1
                else:
                    self.orders.pop(0)
                    self.kills.append(killed)
                    self.note(killed)
                restart += 1
            code = agent.wait(10 * PATIENCE)
        if code or self.orders:
            log = (self.folder / "log").read_text()[-3000:]
            raise RuntimeError(
                f"the job ended with {code} and {len(self.orders)} kills left\n{log}"
            )
        return [json.loads((self.folder / f"result.{rank}").read_text()) for rank in range(WORLD)]

    @contextmanager
    def _torchrun(self) -> Iterator[subprocess.Popen[bytes]]:
        restarts = 2 * len(self.orders) + 2
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORLD}"]
        launcher += [f"--max-restarts={restarts}", "--monitor-interval=0.1", "--module"]
        own = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        with (self.folder / "log").open("wb") as log:
            agent = subprocess.Popen(
                [sys.executable, *launcher, "endurance.job", *self._words],
                cwd=BENCHMARKS,
                env={**os.environ, **own},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            try:
                yield agent
            finally:
                if agent.poll() is None:
                    agent.terminate()  # torchrun ends its ranks
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        agent.wait(30)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(agent.pid, signal.SIGKILL)

    def _kill(
        self, agent: subprocess.Popen[bytes], restart: int, order: Order
    ) -> dict[str, Any] | None:
        """Carries an order out in one start of the job. None: the start ended before."""
        first = self._wait(agent, restart, order.rank, lambda said: True)
        if first is None:
            return None
        began = time.monotonic()
        strikes = True
        if order.moment == "writing":
            # The order goes to one of the first two checkpoints of this start.
            share = {0: order.when, 1: 1.0, 2: 2.0}[max(0, int(5 * order.where) - 2)]
            (self.folder / f"order.{restart}.{order.rank}").write_text(str(share))
            strikes = False
        elif order.moment == "start":
            time.sleep(order.where * self.start_seconds)
        else:
            trains = self._wait(agent, restart, order.rank, lambda said: said.word == "training")
            if trains is None:
                return None
            self.start_seconds = time.monotonic() - began
            goal = trains.step + int(order.where * self.reach)
            if self._wait(agent, restart, order.rank, lambda said: said.step >= goal) is None:
                return None
            time.sleep(order.when * STEP_SECONDS)
        if strikes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(first.process, signal.SIGKILL)
        self._wait_for_end(first.process)
        return self._record(restart, order)

    def _record(self, restart: int, order: Order) -> dict[str, Any]:
        said = self._said(restart, order.rank)
        assert said is not None
        half = [file.stat().st_size for file in self.folder.glob(f"*.{order.rank}.unfinished")]
        return {
            "restart": restart,
            "rank": order.rank,
            "moment": order.moment,
            "found": said.word,
            "step": said.step,
            "unfinished_bytes": half[0] if half and said.word == "saving" else None,
            "newest": [self._newest(rank) for rank in range(WORLD)],
        }

    def _newest(self, rank: int) -> int:
        """The last step that a rank has saved."""
        files = self.folder.glob(f"*.{rank}.pt")
        return max((int(file.name.split(".")[0]) for file in files), default=0)

    def _wait(
        self,
        agent: subprocess.Popen[bytes],
        restart: int,
        rank: int,
        until: Callable[[Said], bool],
    ) -> Said | None:
        """Waits for a word of a rank. None: torchrun has ended, or has started the job again."""
        last, deadline = None, time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            said = self._said(restart, rank)
            if said is not None and until(said):
                return said
            if said != last:
                last, deadline = said, time.monotonic() + PATIENCE
            if agent.poll() is not None or self._said(restart + 1, rank) is not None:
                return None
            time.sleep(POLL)
        raise TimeoutError(f"start {restart} of the job made no progress within {PATIENCE:g} s")

    def _wait_for_end(self, process: int) -> None:
        deadline = time.monotonic() + PATIENCE
        while _lives(process):
            if time.monotonic() > deadline:
                raise TimeoutError(f"a rank that was to die lives after {PATIENCE:g} s")
            time.sleep(POLL)

    def _said(self, restart: int, rank: int) -> Said | None:
        try:
            process, word, step = (self.folder / f"status.{restart}.{rank}").read_text().split()
        except FileNotFoundError:
            return None
        return Said(int(process), word, int(step))


def _lives(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
