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

from cluster import methods, models

DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {
        "models": ["demo"],
        "methods": "none plain hook-1-bucket:4,16 attached:4 bf16-wire:16 int8-wire:16",
        "ranks": [2],
        "rates": ["100mbit", "1gbit", "10gbit"],
    },
    "cuda": {
        "models": ["gpt2"],
        "methods": "none plain bf16 hook:4 attached:4 int8-wire:16",
        "ranks": [4],
        "rates": ["10gbit"],
    },
}
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
        if (key := name.strip("-")) in DEFAULTS["cpu"]:
            defaults = [f"{device}: {of[key]}" for device, of in DEFAULTS.items()]
            help += " ({})".format(re.sub(r"[\[\]']|,(?= )", "", "; ".join(defaults)))
        parser.add_argument(name, help=help, **settings)

    of_methods: dict[str, Any] = {"nargs": "+", "metavar": "METHOD[:RANK,...]"}
    of_methods["type"] = methods.parse
    steps = _at_least(2)
    add("--device", "device (cpu)", default="cpu", choices=DEFAULTS)
    add("--models", "models", nargs="+", choices=models.TASKS)
    add("--methods", "methods and their matrix ranks", **of_methods)
    add("--ranks", "numbers of hosts, each with one process", nargs="+", type=steps, metavar="N")
    add("--rates", "rates of the links", nargs="+", type=_rate, metavar="RATE")
    delays = "one-way delays from host to host, in milliseconds (0)"
    add("--delays", delays, nargs="+", type=_delay, default=[0.0], metavar="MS")
    rounds = "number of rounds of turns; 0: only the loss (8)"
    add("--rounds", rounds, type=_at_least(0), default=8)
    measured = "measured steps per turn, after an unmeasured one (4)"
    add("--steps", measured, type=steps, default=4)
    learning = "steps of the runs that measure the loss; 0: no such runs (0)"
    add("--learning-steps", learning, type=_at_least(0), default=0)
    add("--learning-methods", "methods whose loss is measured (all)", **of_methods)
    seeds = "loss runs per method, with seeds 0 to N - 1 (1)"
    add("--seeds", seeds, metavar="N", type=_at_least(1), default=1)
    add("--logs", "folder for the logs of failed processes and of the MPS daemon", type=Path)
    drawn = f"file for a plot of the step time by link, of {PICTURED}"
    add("--picture", drawn, type=Path)
    return parser


def parse(doc: str) -> argparse.Namespace:
    arguments = _parser(doc).parse_args()
    defaults = DEFAULTS[arguments.device]
    for name in ("models", "ranks", "rates"):
        if getattr(arguments, name) is None:
            setattr(arguments, name, defaults[name])
    chosen = arguments.methods or [methods.named(defaults["methods"])]
    arguments.contenders = methods.joined(chosen)
    arguments.learning = methods.joined(arguments.learning_methods or chosen)
    return arguments
