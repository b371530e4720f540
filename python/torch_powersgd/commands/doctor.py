# SPDX-License-Identifier: BSD-3-Clause
"""``powersgd doctor``."""

from __future__ import annotations

import argparse
import logging
from typing import Any

from torch_powersgd.commands.arguments import count
from torch_powersgd.tools import doctor
from torch_powersgd.tools.group_check import check

STORE_PORT = 29500  # of torchrun's --master-port
WAIT_SECONDS = 300

DOCTOR = """\
Reports what would be refused on this machine and why, and shows versions, kernels, inner backends,
network interfaces and environment variables. Please include its output in an issue.
It needs no process group. The exit status is 1 if there is a problem.
With --master, and the same command on every other host, it checks that the hosts can train
together, and shows the round trip and the bandwidth. Run it in the environment that you train in.
"""


def _address(value: str) -> tuple[str, int]:
    host, _, port = value.partition(":")
    port = port or str(STORE_PORT)
    if not host or not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise argparse.ArgumentTypeError(f"it must be HOST or HOST:PORT, got {value!r}")
    return host, int(port)


def add(commands: Any) -> None:
    command = commands.add_parser(
        "doctor",
        help="show what is refused here, versions, kernels and network",
        description=DOCTOR,
    )
    command.add_argument(
        "--master", type=_address, metavar="HOST[:PORT]",
        help=f"check the group of hosts that meets at the first one (port {STORE_PORT})",
    )  # fmt: skip
    command.add_argument(
        "--hosts", type=count, default=2, metavar="N", help="hosts in all (%(default)s)"
    )
    command.add_argument(
        "--wait", type=count, default=WAIT_SECONDS, metavar="SECONDS",
        help="how long to wait for the other hosts (%(default)s)",
    )  # fmt: skip
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    found, facts = doctor.problems(), doctor.sections()
    good = doctor.good_report()
    if arguments.master and not found:
        logging.getLogger("torch_powersgd").setLevel(logging.ERROR)  # Nobody trains.
        found, rows = check(arguments.master, arguments.hosts, arguments.wait)
        good, facts = "These hosts can train together.", {"network": rows} if rows else {}
    doctor.print_report(found, good, facts)
    return 1 if found else 0
