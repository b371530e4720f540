# SPDX-License-Identifier: BSD-3-Clause
"""The command line of bench_cluster.py."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cluster import contenders, hosts, models

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
        "models": ["gpt2", "resnet50"],
        "methods": "none ddp-alone plain bf16 hook:4 attached:4 int8-wire:16",
        "ranks": [4],
        "rates": ["10gbit"],
        "learning_steps": 0,
        "rounds": 8,
    },
}
QUICK = {"rounds": 2, "learning_steps": 0, "ranks": [2], "rates": ["1gbit"]}
PICTURED = "plain hook-1-bucket:16 int8-wire:16"  # the last one is colored

_DECIMAL = re.compile(r"\d+(\.\d+)?")


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


def _delay(text: str) -> float:
    if not _DECIMAL.fullmatch(text):
        raise argparse.ArgumentTypeError(f"milliseconds of at least 0, got {text!r}")
    return float(text)


def _default(name: str) -> str:
    """The defaults of an option, as its help gives them."""

    def words(value: Any) -> str:
        return " ".join(map(str, value)) if isinstance(value, list) else str(value)

    return "; ".join(f"{device}: {words(of[name])}" for device, of in DEFAULTS.items())


def _parser(doc: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def add(name: str, help: str, **settings: Any) -> None:
        parser.add_argument(name, help=help, **settings)

    def add_methods(name: str, help: str, **settings: Any) -> None:
        methods: dict[str, Any] = {"nargs": "+", "type": contenders.parse}
        add(name, help, metavar="METHOD[:RANK,...]", **methods, **settings)

    def of(name: str) -> str:
        return f"({_default(name)})"

    add("--device", "device of the ranks (cpu)", default="cpu", choices=DEFAULTS)
    add("--models", f"models {of('models')}", nargs="+", choices=models.TASKS)
    add_methods("--methods", f"methods and their ranks of approximation {of('methods')}")
    rank = {"nargs": "+", "type": _at_least(1), "default": [16]}
    add("--rank", "ranks of the approximation for methods that name none (16)", **rank)
    hosts_help = f"numbers of hosts, a rank on each {of('ranks')}"
    add("--ranks", hosts_help, nargs="+", type=_at_least(2), metavar="N")
    add("--rates", f"rates of the links {of('rates')}", nargs="+", type=_rate, metavar="RATE")
    delays = "one-way delays from host to host in milliseconds (0)"
    add("--delays", delays, nargs="+", type=_delay, default=[0.0], metavar="MS")
    congestion = "congestion control of the hosts' TCP, as Linux names it (the machine's)"
    add("--congestion-control", congestion, metavar="NAME")
    add("--rounds", f"number of rounds of turns {of('rounds')}", type=_at_least(1))
    steps = "number of steps measured per turn, after one that is not (4)"
    add("--steps", steps, type=_at_least(2), default=4)
    learning = f"steps of the runs that give the loss; 0: no such runs {of('learning_steps')}"
    add("--learning-steps", learning, type=_at_least(0))
    add_methods("--learning-methods", "methods that have such runs (all)")
    add(
        "--seeds",
        "number of such runs of a method, with seeds 0 to N - 1 (1)",
        metavar="N",
        type=_at_least(1),
        default=1,
    )
    add("--loss", "loss to time, in place of plain's at each quarter of its steps", type=float)
    add("--no-advise", "does not run advise", action="store_false", dest="advise")
    add("--quick", "two rounds, 2 ranks, 1gbit, no loss", action="store_true")
    add("--json", "file for the results, written after every round", type=Path)
    add("--logs", "folder for the logs of ranks that fail, and of the GPU's MPS daemon", type=Path)
    add("--picture", "file for a picture of the step's time by link, see --pictured", type=Path)
    pictured: dict[str, Any] = {"default": [contenders.parse(word) for word in PICTURED.split()]}
    add_methods("--pictured", f"methods of that picture, ours last ({PICTURED})", **pictured)
    add("--show", "results to show; nothing is measured", type=Path, metavar="JSON")
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
    learning = arguments.learning_methods or arguments.methods
    arguments.learning = contenders.expand(learning, arguments.rank)
    arguments.pictured = contenders.expand(arguments.pictured, arguments.rank)
    return arguments
