# SPDX-License-Identifier: BSD-3-Clause
"""``powersgd doctor``."""

from __future__ import annotations

import argparse
from typing import Any

from torch_powersgd.tools import doctor, peer

DOCTOR = """\
Reports what would be refused on this machine and why, and shows versions, kernels, inner backends,
network interfaces and environment variables. Please include its output in an issue.
It needs no process group. The exit status is 1 if there is a problem.
With --listen on one host and --peer on another, it checks the link between the two instead: ports,
addresses, round trip and bandwidth. Run it in the environment that you train in.
"""


def _port(value: str) -> int:
    if not value.isdecimal() or not 1 <= int(value) <= 65535:
        raise argparse.ArgumentTypeError(f"a port must be 1 to 65535, got {value!r}")
    return int(value)


def _peer(value: str) -> tuple[str, int]:
    host, _, port = value.partition(":")
    return host, _port(port) if port else peer.STORE_PORT


def add(commands: Any) -> None:
    command = commands.add_parser(
        "doctor",
        help="show what is refused here, versions, kernels and network",
        description=DOCTOR,
    )
    side = command.add_mutually_exclusive_group()
    side.add_argument(
        "--listen", type=_port, nargs="?", const=peer.STORE_PORT, metavar="PORT",
        help=f"wait for another host's --peer, on the port to train on ({peer.STORE_PORT})",
    )  # fmt: skip
    side.add_argument(
        "--peer", type=_peer, metavar="HOST[:PORT]",
        help="check the link to the host where --listen waits",
    )  # fmt: skip
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.listen is None and arguments.peer is None:
        return 0 if doctor.print_report() else 1
    if found := [*doctor.network_refused()]:
        doctor.print_verdict(found)
        return 1
    well = peer.visit(*arguments.peer) if arguments.peer else peer.listen(arguments.listen)
    return 0 if well else 1
