# SPDX-License-Identifier: BSD-3-Clause
"""What does a training step take on a slow network, by the way its gradients are averaged?

    python benchmarks/bench_cluster.py --ranks 2 --rates 1gbit
    python benchmarks/bench_cluster.py --device cuda --json cluster_cuda.json
    python benchmarks/bench_cluster.py --show cluster_cuda.json --picture cluster_cuda.png

The hosts are network namespaces on a switch, each on a link that is shaped in both directions, so
it needs root, ip and tc (iproute2). On a GPU the ranks share it through an MPS daemon of their own
and talk over NCCL's sockets. The methods take turns in blocks, in an order that rotates, in freshly
started ranks; what is compared is from the same block. All is removed at the end, however it
comes; what a killed run left, when the next one starts.

The loss is from longer runs on unshaped links, on the same text for every method. The bytes are the
interface's count, which knows large segments before they are cut: a few per cent of headers less
than on a cable.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cluster import figures, hosts, launch, models, mps
from cluster.methods import EXACT_STEPS, METHODS
from provenance import processor, provenance

# Steps at the start that are not measured: the exact ones, and those that rebuild buckets and
# allocate.
WARMUP_STEPS = EXACT_STEPS + 3
DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {
        "models": ["demo"],
        "ranks": [2, 4],
        "rates": ["100mbit", "1gbit", "10gbit"],
        "learning_steps": 120,
        "blocks": 3,
    },
    "cuda": {
        "models": ["gpt2", "resnet50"],
        "ranks": [4],
        "rates": ["10gbit"],
        "learning_steps": 0,
        "blocks": 2,
    },
}


def _at_least(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"an integer of at least {least}, got {text!r}")
        return int(text)

    return parse


def _rate(text: str) -> str:
    try:
        hosts.bits_per_second(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--device", default="cpu", choices=DEFAULTS)
    add("--models", nargs="+", choices=models.TASKS)
    add("--methods", nargs="+", choices=METHODS, help="default: all that the device has")
    add("--ranks", nargs="+", type=_at_least(2), metavar="N", help="hosts, a rank on each")
    add("--rates", nargs="+", type=_rate, metavar="RATE", help="of the links: 100mbit, 1gbit")
    add("--rank", type=_at_least(1), default=4, help="of the approximation (4)")
    add("--blocks", type=_at_least(1), help="turns of every method (3, and 2 on a GPU)")
    add("--steps", type=_at_least(2), default=20, help="measured per turn (20)")
    add(
        "--learning-steps",
        type=_at_least(0),
        help="steps of the runs that give the loss; 0: none (120, and 0 on a GPU)",
    )
    add("--loss", type=float, help="to time; else what plain has after 3/4 of its steps")
    add("--quick", action="store_true", help="one short turn, 2 ranks, 1gbit, no loss")
    add("--json", type=Path, help="write the results here, after every run")
    add("--picture", type=Path, help="draw them here")
    add("--show", type=Path, metavar="JSON", help="measure nothing: show these results")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.blocks, arguments.steps = 1, 5
        arguments.learning_steps = arguments.learning_steps or 0
        arguments.ranks = arguments.ranks or [2]
        arguments.rates = arguments.rates or ["1gbit"]
    for name, value in DEFAULTS[arguments.device].items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    arguments.methods = arguments.methods or [
        name for name, method in METHODS.items() if arguments.device in method.devices
    ]
    return arguments


def missing(device: str) -> list[str]:
    """What this machine lacks to measure, each in a few words."""
    lacks = hosts.missing()
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
        self.variables = variables  # of the ranks' environment
        lacks = {name: METHODS[name].lacks() for name in arguments.methods}
        self.methods = [name for name, why in lacks.items() if not why]
        self.record: dict[str, Any] = {
            **provenance(processor()),
            "on": arguments.device,
            "cores": len(os.sched_getaffinity(0)),
            "load_average_before": os.getloadavg()[0],
            "approximation": arguments.rank,
            "steps": arguments.steps,
            "warmup_steps": WARMUP_STEPS,
            "titles": {name: METHODS[name].title for name in self.methods},
            "left_out": {METHODS[name].title: why for name, why in lacks.items() if why},
            "settings": [],
        }

    def measure(self, model: str, ranks: int) -> None:
        """At every rate."""
        with torch.device("meta"):
            parameters = models.TASKS[model].make().parameters()
            gradient_bytes = sum(p.numel() * p.element_size() for p in parameters)
        learned: dict[str, launch.Run] = {}
        if self.arguments.learning_steps:
            with hosts.Hosts(ranks, None) as cluster:
                for method in self.methods:
                    if method != "none":
                        steps = self.arguments.learning_steps - WARMUP_STEPS
                        learned[method] = self._run(cluster, "unshaped", 20, model, method, steps)
        for rate in self.arguments.rates:
            # Six times what the bytes of a ring all-reduce need on the link.
            limit = 20 + 6 * 2 * gradient_bytes * 8 / hosts.bits_per_second(rate)
            with hosts.Hosts(ranks, rate) as cluster:
                self._measure_rate(cluster, rate, limit, model, learned)

    def _measure_rate(
        self,
        cluster: hosts.Hosts,
        rate: str,
        limit: float,
        model: str,
        learned: Mapping[str, launch.Run],
    ) -> None:
        loss = self.arguments.loss
        setting: dict[str, Any] = {
            "model": model,
            "ranks": len(cluster),
            "rate": rate,
            "loss": loss if loss is not None else figures.target_loss(learned),
            "learning_steps": self.arguments.learning_steps,
            "learning_failures": {name: run.failures for name, run in learned.items()},
            "losses": {
                name: [round(loss, 4) for loss in run.losses] for name, run in learned.items()
            },
        }
        self.record["settings"].append(setting)
        blocks: list[dict[str, launch.Run]] = []
        for turn in range(self.arguments.blocks):
            blocks.append({})
            shift = turn % len(self.methods)
            for method in self.methods[shift:] + self.methods[:shift]:
                if turn and not blocks[0][method].succeeded:
                    continue  # all its attempts have failed, and would again
                run = self._run(cluster, rate, limit, model, method, self.arguments.steps)
                blocks[-1][method] = run
                if run.device:
                    self.record["device"] = run.device
                compared = figures.compare(blocks, learned, setting["loss"])
                setting["methods"] = {m: compared[m] for m in self.methods if m in compared}
                self._write()

    def _run(
        self,
        cluster: hosts.Hosts,
        rate: str,
        limit: float,
        model: str,
        method: str,
        steps: int,
    ) -> launch.Run:
        run = launch.run(
            cluster,
            self.variables,
            limit,
            method=method,
            model=model,
            device=self.arguments.device,
            world=len(cluster),
            approximation=self.arguments.rank,
            warmup=WARMUP_STEPS,
            steps=steps,
        )
        where = f"{model}, {len(cluster)} ranks, {rate}: {METHODS[method].title}"
        times = [f"{run.median:.0f} ms"] if run.succeeded else []
        failures = (f"failed: {why}" for why in run.failures)
        print(where, *times, *failures, sep="; ", flush=True)
        return run

    def _write(self) -> None:
        if self.arguments.json:  # at once: what is measured is not lost to a time limit
            self.arguments.json.parent.mkdir(parents=True, exist_ok=True)
            self.arguments.json.write_text(json.dumps(self.record, indent=1) + "\n")


def main() -> None:
    arguments = parse_arguments()
    packages = ["rich", "matplotlib"] if arguments.picture else ["rich"]
    lacks = [f"the package {name}" for name in packages if not importlib.util.find_spec(name)]
    lacks += [] if arguments.show else missing(arguments.device)
    if lacks:
        sys.exit(f"bench_cluster cannot run here; missing: {', '.join(lacks)}")
    record = json.loads(arguments.show.read_text()) if arguments.show else measure(arguments)
    from cluster import report

    report.show(record)
    if arguments.picture:
        report.draw(record, arguments.picture)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """The record of what is measured."""
    hosts.unwind_on_signals()
    try:
        mps.sweep()
        if left := hosts.sweep():
            print(f"removed what an earlier run left: {', '.join(left)}")
        with contextlib.ExitStack() as stack:
            on_gpu = arguments.device == "cuda"
            bench = Bench(arguments, stack.enter_context(mps.service()) if on_gpu else {})
            for model in arguments.models:
                for ranks in arguments.ranks:
                    bench.measure(model, ranks)
    except hosts.ClusterError as error:
        sys.exit(f"bench_cluster: {error}")
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    return bench.record


if __name__ == "__main__":
    main()
