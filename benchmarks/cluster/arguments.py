# SPDX-License-Identifier: BSD-3-Clause
"""The command line of bench_cluster.py."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from launcher import hosts
from report import add_files

from cluster import contenders, models

DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {
        "models": ["demo"],
        "methods": "none ddp-alone plain fp16 hook-1-bucket:4,16 author:4 attached:4 flat:4"
        " bf16-wire:16 int8-wire:16",
        "ranks": [2, 4],
        "rates": ["100mbit", "1gbit", "10gbit"],
        "learning_steps": 120,
        "rounds": 10,
    },
    "cuda": {
        "models": ["gpt2"],
        "methods": "none ddp-alone plain bf16 hook:4 attached:4 int8-wire:16",
        "ranks": [4],
        "rates": ["10gbit"],
        "learning_steps": 0,
        "rounds": 8,
    },
}
QUICK = {"rounds": 2, "learning_steps": 0, "ranks": [2], "rates": ["1gbit"]}
PICTURED = "plain hook-1-bucket:16 int8-wire:16"  # the last one is colored


def _at_least(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(
                f"expected an integer of at least {least}, got {text!r}"
            )
        return int(text)

    return parse


def _rate(text: str) -> str:
    try:
        hosts.bits_per_second(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _delay(text: str) -> float:
    if not re.fullmatch(r"\d+(\.\d+)?", text):
        raise argparse.ArgumentTypeError(f"expected milliseconds of at least 0, got {text!r}")
    return float(text)


def _parser(doc: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=doc)
    add_files(parser, "after every round")

    def add(name: str, help: str, **settings: Any) -> None:
        if (key := name.strip("-").replace("-", "_")) in DEFAULTS["cpu"]:
            defaults = [f"{device}: {of[key]}" for device, of in DEFAULTS.items()]
            help += " ({})".format(
                "; ".join(re.sub(r"[\[\]']|,(?= )", "", text) for text in defaults)
            )
        parser.add_argument(name, help=help, **settings)

    of_methods: dict[str, Any] = {"nargs": "+", "metavar": "METHOD[:RANK,...]"}
    of_methods["type"] = contenders.parse
    count, steps = _at_least(1), _at_least(2)
    add("--device", "device (cpu)", default="cpu", choices=DEFAULTS)
    add("--models", "models", nargs="+", choices=models.TASKS)
    add("--methods", "methods and their matrix ranks", **of_methods)
    rank = "matrix ranks of methods that name none (16)"
    before = "also run this project's methods from another checkout, which must be built"
    add("--before", before, type=Path, metavar="PATH")
    add("--rank", rank, nargs="+", type=count, default=[16])
    add("--ranks", "numbers of hosts, each with one process", nargs="+", type=steps, metavar="N")
    add("--rates", "rates of the links", nargs="+", type=_rate, metavar="RATE")
    delays = "one-way delays from host to host, in milliseconds (0)"
    add("--delays", delays, nargs="+", type=_delay, default=[0.0], metavar="MS")
    congestion = "TCP congestion control of the hosts, by its name in Linux (the machine's)"
    add("--congestion-control", congestion, metavar="NAME", default="")
    idle = "tcp_slow_start_after_idle: 1 shrinks TCP's window after a pause, 0 keeps it (1)"
    add("--slow-start-after-idle", idle, nargs="+", type=int, choices=(0, 1), default=[1])
    add("--rounds", "number of rounds of turns; 0: only the loss", type=_at_least(0))
    measured = "measured steps per turn, after an unmeasured one (4)"
    add("--steps", measured, type=steps, default=4)
    add(
        "--learning-steps",
        "steps of the runs that measure the loss; 0: no such runs",
        type=_at_least(0),
    )
    add("--learning-methods", "methods whose loss is measured (all)", **of_methods)
    seeds = "loss runs per method, with seeds 0 to N - 1 (1)"
    add("--seeds", seeds, metavar="N", type=count, default=1)
    add("--loss", "target loss, instead of plain's after each quarter of its steps", type=float)
    add("--quick", "two rounds, two processes, 1gbit, no loss", action="store_true")
    add("--logs", "folder for the logs of failed processes and of the MPS daemon", type=Path)
    add("--picture", "file for a plot of the step time by link; see --pictured", type=Path)
    pictured = [contenders.parse(word) for word in PICTURED.split()]
    drawn = f"methods in that plot, this project's last ({PICTURED})"
    add("--pictured", drawn, default=pictured, **of_methods)
    return parser


def parse(doc: str) -> argparse.Namespace:
    arguments = _parser(doc).parse_args()
    defaults = DEFAULTS[arguments.device] | (QUICK if arguments.quick else {})
    for name, value in defaults.items():
        if getattr(arguments, name) is None:
            if name == "methods":
                value = [contenders.parse(word) for word in value.split()]
            setattr(arguments, name, value)
    arguments.contenders = contenders.expand(arguments.methods, arguments.rank)
    if arguments.before:
        arguments.contenders = contenders.with_before(arguments.contenders)
    learning = arguments.learning_methods or arguments.methods
    arguments.learning = contenders.expand(learning, arguments.rank)
    arguments.pictured = contenders.expand(arguments.pictured, arguments.rank)
    return arguments
