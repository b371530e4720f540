# SPDX-License-Identifier: BSD-3-Clause
"""``powersgd plan``."""

from __future__ import annotations

import argparse
from typing import Any

from torch_powersgd.commands.arguments import (
    RECOMMENDED_WIRE,
    WIRES,
    add_model,
    add_rate,
    count,
    make_model,
)
from torch_powersgd.options import Options
from torch_powersgd.tools.advice import RECOMMENDED
from torch_powersgd.tools.plan import print_plan

PLAN = """\
Shows which parameters of a model PowerSGD compresses, and how many bytes a step then sends.
It needs no process group and no GPU.
"""


def add(commands: Any) -> None:
    plan = commands.add_parser(
        "plan",
        help="show which parameters are compressed, and the bytes of a step",
        description=PLAN,
    )
    plan.add_argument(
        "--rank", type=int, default=RECOMMENDED.matrix_approximation_rank,
        help="matrix rank of the factors (%(default)s)",
    )  # fmt: skip
    plan.add_argument(
        "--wire-dtype", choices=WIRES, default=RECOMMENDED_WIRE, metavar="DTYPE",
        help=f"wire dtype of the factors: {', '.join(WIRES)} (%(default)s); none sends float32",
    )  # fmt: skip
    shown = plan.add_mutually_exclusive_group()
    shown.add_argument(
        "--top", type=count, default=10, metavar="N", help="rows of the table to show (%(default)s)"
    )
    shown.add_argument("--all", action="store_true", help="show one row per parameter")
    add_model(plan)
    add_rate(plan)
    plan.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    options = Options(
        matrix_approximation_rank=arguments.rank,
        min_compression_rate=arguments.min_compression_rate,
        wire_dtype=WIRES[arguments.wire_dtype],
    )
    print_plan(make_model(arguments.model), options, None if arguments.all else arguments.top)
    return 0
