# SPDX-License-Identifier: BSD-3-Clause
"""Compares methods of averaging gradients by the time of a training step on a slow network.

    python benchmarks/bench_cluster.py --rates 1gbit --models gpt-1M --rounds 2
    python benchmarks/bench_cluster.py --methods none plain hook-1-bucket:4 bf16-wire:8,16,32
    python benchmarks/bench_cluster.py --rates 1gbit --delays 0.1 5 20 50
    python benchmarks/bench_cluster.py --ranks 8 --per-host 4 --methods int8-wire+levels=1:16
    python benchmarks/bench_cluster.py --rounds 0 --learning-steps 300 --methods plain int8-wire:16
    python benchmarks/bench_cluster.py --device cuda --models gpt2 --json gpt2.json --logs logs
    python benchmarks/bench_cluster.py --show gpt2.json --picture gpt2.png

Each host is a network namespace on a virtual switch, with a link that is shaped in both directions.
This needs root, ip and tc (iproute2). On a GPU, the processes share it through a private MPS daemon
and communicate over NCCL's sockets. There, expect about 6 minutes per model and 70 GB for the
processes of all methods; on a smaller GPU, choose fewer with --methods.

With --per-host, that many processes share a host and its link. The bytes sent are the host's, and
"payloads" compares them with the factors and raw gradients of one process. A method with levels=1
sums as if each process were on a host of its own.

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
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cluster import figures, methods, models, pictures, tables
from cluster.methods import Contender
from cluster.player import Player, Run
from cluster.rank import Job
from cluster.trainees import EXACT_STEPS
from launcher import emulated_links, hosts, mps, signals
from report import Record, add_files, processor, provenance, recorded, show, write

# The first steps are not measured: they are exact, rebuild buckets and allocate memory.
WARMUP_STEPS = EXACT_STEPS + 3


# By device. The words on the command line override them.
DEFAULTS = {
    "cpu": "--models demo --ranks 2 --rates 100mbit 1gbit 10gbit"
    " --methods none plain hook-1-bucket:4,16 attached:4 bf16-wire:16 int8-wire:16",
    "cuda": "--models gpt2 --ranks 4 --rates 10gbit"
    " --methods none plain bf16 hook:4 attached:4 int8-wire:16",
}
PICTURED = "plain hook-1-bucket:16 int8-wire:16"  # the last one is colored


def _at_least(least: int, kind: type = int, name: str = "an integer") -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        pattern = r"\d+" if kind is int else r"\d+(\.\d+)?"
        if not re.fullmatch(pattern, text) or kind(text) < least:
            raise argparse.ArgumentTypeError(f"expected {name} of at least {least}, got {text!r}")
        return kind(text)

    return parse


def _rate(text: str) -> str:
    try:
        hosts.bits_per_second(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def parse_arguments() -> argparse.Namespace:
    listed = "\n".join(f"  {device}: {words}" for device, words in DEFAULTS.items())
    parser = argparse.ArgumentParser(description=__doc__, epilog=f"defaults:\n{listed}")
    add_files(parser, "after every round")
    add = parser.add_argument
    of_methods: dict[str, Any] = {"nargs": "+", "metavar": "METHOD[:RANK,...]"}
    of_methods["type"] = methods.parse
    number: dict[str, Any] = {"type": _at_least(1), "metavar": "N", "default": 1}
    count = _at_least(0)
    add("--device", help="device (cpu)", default="cpu", choices=DEFAULTS)
    add("--models", help="models", nargs="+", choices=models.TASKS)
    add("--methods", help="methods and their matrix ranks", **of_methods)
    add("--ranks", help="numbers of processes", nargs="+", type=_at_least(2), metavar="N")
    add("--per-host", help="processes on each host (1)", **number)
    add("--rates", help="rates of the links", nargs="+", type=_rate, metavar="RATE")
    delay = _at_least(0, float, "milliseconds")
    delays = "one-way delays from host to host, in milliseconds (0)"
    add("--delays", help=delays, nargs="+", type=delay, default=[0.0], metavar="MS")
    add("--rounds", help="number of rounds of turns; 0: only the loss (8)", type=count, default=8)
    steps = "measured steps per turn, after an unmeasured one (4)"
    add("--steps", help=steps, type=_at_least(2), default=4)
    learning = "steps of the runs that measure the loss; 0: no such runs (0)"
    add("--learning-steps", help=learning, type=count, default=0)
    add("--learning-methods", help="methods whose loss is measured (all)", **of_methods)
    add("--seeds", help="loss runs per method, with seeds 0 to N - 1 (1)", **number)
    logs = "folder for the logs of failed processes and of the MPS daemon"
    add("--logs", help=logs, type=Path)
    picture = f"file for a plot of the step time by link, of {PICTURED}"
    add("--picture", help=picture, type=Path)
    words = sys.argv[1:]
    arguments = parser.parse_args([*DEFAULTS[parser.parse_args(words).device].split(), *words])
    for ranks in arguments.ranks:
        if ranks % (each := arguments.per_host):
            parser.error(f"--ranks: expected multiples of --per-host {each}, got {ranks}")
    arguments.contenders = methods.joined(arguments.methods)
    arguments.learning = methods.joined(arguments.learning_methods or arguments.methods)
    return arguments


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


@dataclass(frozen=True)
class Bench:
    """What is measured of one model on so many ranks, and the record that it is added to."""

    arguments: argparse.Namespace
    variables: Mapping[str, str]  # of the processes' environment
    record: Record
    model: str
    ranks: int

    def measure(self) -> None:
        """Measures at every rate and delay."""
        with torch.device("meta"):
            gradient_bytes = sum(p.nbytes for p in models.TASKS[self.model].make().parameters())
        learned = self._learned()
        if not self.arguments.rounds:
            return
        for rate, delay_ms in itertools.product(self.arguments.rates, self.arguments.delays):
            # Six times what a ring all-reduce takes on the link.
            limit = 20 + 6 * 2 * gradient_bytes * 8 / hosts.bits_per_second(rate)
            with self._hosts(rate, delay_ms) as cluster, contextlib.ExitStack() as stack:
                players = {
                    contender: stack.enter_context(self._player(cluster, limit, contender))
                    for contender in self.arguments.contenders
                }
                self._play(players, cluster, learned)

    def _hosts(self, rate: str | None, delay_ms: float = 0) -> hosts.Hosts:
        per_host = self.arguments.per_host
        return hosts.Hosts(self.ranks // per_host, rate, delay_ms, per_host=per_host)

    def _player(
        self, cluster: hosts.Hosts, limit: float, contender: Contender, seed: int = 0
    ) -> Player:
        job = Job(contender, self.model, self.arguments.device, seed)
        variables = {**self.variables, **contender.how.variables}
        return Player(cluster, job, limit, WARMUP_STEPS, variables, self.arguments.logs)

    def _learned(self) -> dict[str, list[Run]]:
        """Returns the runs for the loss, one for each seed."""
        of, learned = self.arguments, dict[str, list[Run]]()
        if not of.learning_steps:
            return learned
        learners = [each for each in of.contenders if each in of.learning and each.learns]
        learners.sort(key=lambda contender: contender.method != "plain")
        where = f"{self.model}, {self.ranks} ranks"
        with self._hosts(None) as cluster:
            for contender in learners:
                plain = learned.get("plain") if of.rounds else None
                learned[contender.name] = runs = []
                for seed in range(of.seeds):
                    with self._player(cluster, 20, contender, seed) as player:
                        runs.append(self._learn(player, plain[seed] if plain else None))
                    self._tell(f"{where}, loss of seed {seed}", contender, runs[-1])
                by_method = self.record["losses"].setdefault(where, {})
                by_method[contender.name] = figures.losses(runs, of.learning_steps)
                write(self.record, of.json)
        return learned

    def _learn(self, player: Player, plain: Run | None) -> Run:
        """Trains for plain's steps, and half as many more if plain's final loss is not reached."""
        steps = self.arguments.learning_steps
        run = player.turn(steps - WARMUP_STEPS - 1)
        if plain and run.succeeded and not figures.catches_up(run, plain, steps):
            more = player.turn(steps // 2 - 1)
            run = max(run, more, key=lambda run: len(run.losses))  # a failed run starts over
        return run

    def _play(
        self,
        players: Mapping[Contender, Player],
        cluster: hosts.Hosts,
        learned: Mapping[str, Sequence[Run]],
    ) -> None:
        """Measures the rounds of a setting."""
        target = figures.target(learned)
        setting: Record = {
            "model": self.model,
            "ranks": self.ranks,
            "per_host": cluster.per_host,
            "rate": cluster.rate,
            "delay_ms": cluster.delay_ms,
            "congestion_control": cluster.congestion_control,
            "load_average_before": os.getloadavg()[0],
            **target.record(),
        }
        self.record["settings"].append(setting)
        rounds: list[dict[str, Run]] = []
        contenders = list(players)
        for number in range(self.arguments.rounds):
            rounds.append({})
            shift = number % len(contenders)
            for contender in contenders[shift:] + contenders[:shift]:
                if players[contender].exhausted:
                    continue
                run = players[contender].turn(self.arguments.steps)
                rounds[-1][contender.name] = run
                self._tell(figures.title(setting), contender, run, number == 0)
            setting["methods"] = figures.compare(rounds, learned, target)
            write(self.record, self.arguments.json)

    def _tell(self, where: str, contender: Contender, run: Run, anyway: bool = True) -> None:
        self.record["device"] = run.device or self.record["device"]
        if run.failures or anyway:
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
    lacks = {contender: contender.lacks for contender in arguments.contenders}
    arguments.contenders = [contender for contender, why in lacks.items() if not why]
    record: Record = {
        **provenance(processor()),
        "on": arguments.device,
        "cores": len(os.sched_getaffinity(0)),
        "rounds": arguments.rounds,
        "steps_per_round": arguments.steps,
        "warmup_steps": WARMUP_STEPS,
        "titles": {contender.name: contender.title for contender in arguments.contenders},
        "left_out": {contender.title: why for contender, why in lacks.items() if why},
        "losses": {},
        "settings": [],
    }
    with machine(arguments.device, arguments.logs) as variables:
        for model, ranks in itertools.product(arguments.models, arguments.ranks):
            Bench(arguments, variables, record, model, ranks).measure()
    return record


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
        pictures.draw_links(record, PICTURED.split(), arguments.picture)


if __name__ == "__main__":
    main()
