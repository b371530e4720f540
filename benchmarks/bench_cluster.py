# SPDX-License-Identifier: BSD-3-Clause
"""Compares methods of averaging gradients by the time of a training step on a slow network.

    python benchmarks/bench_cluster.py --rates 1gbit --models gpt-1M --rounds 2
    python benchmarks/bench_cluster.py --methods none plain hook-1-bucket:4 bf16-wire:8,16,32
    python benchmarks/bench_cluster.py --rates 1gbit --delays 0.1 5 20 50
    python benchmarks/bench_cluster.py --rounds 0 --learning-steps 300 --methods plain int8-wire:16
    python benchmarks/bench_cluster.py --device cuda --models gpt2 --json gpt2.json --logs logs
    python benchmarks/bench_cluster.py --show gpt2.json --picture gpt2.png

Each host is a network namespace on a virtual switch, with a link that is shaped in both directions.
This needs root, ip and tc (iproute2). On a GPU, the processes share it through a private MPS daemon
and communicate over NCCL's sockets. There, expect about 6 minutes per model and 70 GB for the
processes of all methods; on a smaller GPU, choose fewer with --methods.

Each method has its own processes, started anew for each setting. The methods take turns of a few
steps, in a rotating order, and sleep in between. Times are compared within one round of turns. All
hosts and processes are removed at exit, even after an error. The next run removes what a killed run
left behind.

With --delays, each frame takes that much longer from host to host, one way. The links are then TAP
devices, and one process forwards frames between them, because many kernels lack netem; see
launcher/emulated_links.py. TCP windows and congestion control are the machine's own.

The loss comes from separate, longer runs on unshaped links, with the same text for every method.
The time to a loss is the number of steps to it times the median step time. The target is plain's
final loss with the same seed; with --seeds, a figure is the median over the seeds. A method that
has not reached it by plain's last step trains for half as many steps again. The bytes sent are the
interface's count, which sees large segments before they are split, so it lacks the headers that a
cable would also carry, a few percent.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from cluster import arguments as command_line
from cluster import figures, models, pictures, tables
from cluster.methods import Contender
from cluster.player import Player, Run
from cluster.rank import Job
from cluster.trainees import EXACT_STEPS
from launcher import emulated_links, hosts, mps, signals
from report import Record, processor, provenance, recorded, show, write

# The first steps are not measured: they are exact, rebuild buckets and allocate memory.
WARMUP_STEPS = EXACT_STEPS + 3


def parse_arguments() -> argparse.Namespace:
    return command_line.parse(__doc__ or "")


def missing(device: str, delayed: bool, named: Sequence[str] = ()) -> list[str]:
    """Returns what this machine lacks for the benchmark, each item in a few words."""
    lacks = hosts.missing() + [why for model in named if (why := models.lacks(model))]
    if delayed and not os.access(emulated_links.CONTROL, os.W_OK):
        lacks.append(f"{emulated_links.CONTROL} (for links with a delay)")
    if device == "cuda":
        if not torch.cuda.is_available():
            lacks.append("a GPU that this torch can use")
        if not dist.is_nccl_available():
            lacks.append("NCCL in this torch")
        if not shutil.which(mps.CONTROL):
            lacks.append(f"the program {mps.CONTROL}")
    return lacks


class Bench:
    """One run of the benchmark, and the record of what it has measured so far."""

    def __init__(self, arguments: argparse.Namespace, variables: Mapping[str, str]) -> None:
        self.arguments = arguments
        self.variables = variables  # of the processes' environment
        lacks = {contender: contender.lacks for contender in arguments.contenders}
        self.contenders = [contender for contender, why in lacks.items() if not why]
        self.record: Record = {
            **provenance(processor()),
            "on": arguments.device,
            "cores": len(os.sched_getaffinity(0)),
            "rounds": arguments.rounds,
            "steps_per_round": arguments.steps,
            "warmup_steps": WARMUP_STEPS,
            "titles": {contender.name: contender.title for contender in self.contenders},
            "left_out": {contender.title: why for contender, why in lacks.items() if why},
            "losses": {},
            "settings": [],
        }

    def measure(self, model: str, ranks: int) -> None:
        """Measures at every rate and delay."""
        with torch.device("meta"):
            gradient_bytes = sum(p.nbytes for p in models.TASKS[model].make().parameters())
        learned = self._learned(model, ranks)
        if not self.arguments.rounds:
            return
        target = figures.target(learned)
        for rate, delay_ms in itertools.product(self.arguments.rates, self.arguments.delays):
            # Six times what a ring all-reduce takes on the link.
            limit = 20 + 6 * 2 * gradient_bytes * 8 / hosts.bits_per_second(rate)
            with hosts.Hosts(ranks, rate, delay_ms) as cluster, contextlib.ExitStack() as stack:
                players = {
                    contender: stack.enter_context(self._player(cluster, limit, model, contender))
                    for contender in self.contenders
                }
                self._play(players, self._setting(model, cluster, target), learned, target)

    def _player(
        self, cluster: hosts.Hosts, limit: float, model: str, contender: Contender, seed: int = 0
    ) -> Player:
        job = Job(contender, model, self.arguments.device, seed)
        variables = {**self.variables, **contender.how.variables}
        return Player(cluster, job, limit, WARMUP_STEPS, variables, self.arguments.logs)

    def _learned(self, model: str, ranks: int) -> dict[str, list[Run]]:
        """Returns the runs for the loss, one for each seed."""
        learned: dict[str, list[Run]] = {}
        if self.arguments.learning_steps:
            learners = [c for c in self.contenders if c in self.arguments.learning and c.learns]
            learners.sort(key=lambda contender: contender.method != "plain")
            with hosts.Hosts(ranks, None) as cluster:
                for contender in learners:
                    plain = learned.get("plain") if self.arguments.rounds else None
                    runs = [
                        self._learn(cluster, model, contender, seed, plain)
                        for seed in range(self.arguments.seeds)
                    ]
                    learned[contender.name] = runs
                    by_method = self.record["losses"].setdefault(f"{model}, {ranks} ranks", {})
                    by_method[contender.name] = figures.losses(runs, self.arguments.learning_steps)
                    write(self.record, self.arguments.json)
        return learned

    def _learn(
        self,
        cluster: hosts.Hosts,
        model: str,
        contender: Contender,
        seed: int,
        plain: Sequence[Run] | None,
    ) -> Run:
        """Trains for plain's steps, and half as many more if plain's final loss is not reached."""
        steps = self.arguments.learning_steps
        with self._player(cluster, 20, model, contender, seed) as player:
            run = player.turn(steps - WARMUP_STEPS - 1)
            if plain and run.succeeded and not figures.catches_up(run, plain[seed], steps):
                more = player.turn(steps // 2 - 1)
                run = max(run, more, key=lambda run: len(run.losses))  # a failed run starts over
        self.record["device"] = run.device or self.record["device"]
        _tell(f"{model}, {len(cluster)} ranks, loss of seed {seed}", contender, run)
        return run

    def _setting(self, model: str, cluster: hosts.Hosts, target: figures.Target) -> Record:
        setting: Record = {
            "model": model,
            "ranks": len(cluster),
            "rate": cluster.rate,
            "delay_ms": cluster.delay_ms,
            "congestion_control": cluster.congestion_control,
            "load_average_before": os.getloadavg()[0],
            **target.record(),
            "methods": {},
        }
        self.record["settings"].append(setting)
        return setting

    def _play(
        self,
        players: Mapping[Contender, Player],
        setting: Record,
        learned: Mapping[str, Sequence[Run]],
        target: figures.Target,
    ) -> None:
        """Measures the rounds of a setting."""
        where = figures.title(setting)
        rounds: list[dict[str, Run]] = []
        for number in range(self.arguments.rounds):
            rounds.append({})
            shift = number % len(self.contenders)
            for contender in self.contenders[shift:] + self.contenders[:shift]:
                if players[contender].exhausted:
                    continue
                run = players[contender].turn(self.arguments.steps)
                rounds[-1][contender.name] = run
                self.record["device"] = run.device or self.record["device"]
                if number == 0 or run.failures:
                    _tell(where, contender, run)
            compared = figures.compare(rounds, learned, target)
            setting["methods"] = {
                contender.name: compared[contender.name]
                for contender in self.contenders
                if contender.name in compared
            }
            write(self.record, self.arguments.json)


def _tell(where: str, contender: Contender, run: Run) -> None:
    times = [f"{run.median:.0f} ms"] if run.succeeded else []
    failures = (f"failed: {why}" for why in run.failures)
    print(f"{where}: {contender.title}", *times, *failures, sep="; ", flush=True)


@contextlib.contextmanager
def machine(device: str, logs: Path | None) -> Iterator[Mapping[str, str]]:
    """Yields the variables that processes on this device need, once earlier runs are cleared away.

    An interruption, or an error of the hosts, ends the process.
    """
    signals.unwind_on_signals()
    try:
        mps.sweep()
        if left := hosts.sweep():
            print(f"removed what an earlier run left: {', '.join(left)}")
        with contextlib.ExitStack() as stack:
            yield stack.enter_context(mps.service(logs)) if device == "cuda" else {}
    except hosts.ClusterError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def measure(arguments: argparse.Namespace) -> Record:
    """The record of the measurements."""
    with machine(arguments.device, arguments.logs) as variables:
        bench = Bench(arguments, variables)
        for model, ranks in itertools.product(arguments.models, arguments.ranks):
            bench.measure(model, ranks)
    return bench.record


def main() -> None:
    arguments = parse_arguments()
    lacks = missing(arguments.device, any(arguments.delays), arguments.models)
    if lacks and not arguments.show:
        sys.exit(f"bench_cluster cannot run here; missing: {', '.join(lacks)}")
    record = recorded(arguments, measure)
    show(record, tables.everything(record))
    for title, why in record["left_out"].items():
        print(f"left out: {title}: {why}")
    if arguments.picture:
        pictures.draw_links(record, command_line.PICTURED.split(), arguments.picture)


if __name__ == "__main__":
    main()
