# SPDX-License-Identifier: BSD-3-Clause
"""``powersgd doctor``."""

from __future__ import annotations

import argparse
from typing import Any

from torch_powersgd import ports
from torch_powersgd.tools import doctor, peer

DOCTOR = """\
Says what would be refused here and why, and shows versions, kernels, inner backends, network
interfaces and environment variables. An issue on this package should have this output.
It needs no process group. The exit status is 1 if there is a problem.
With --listen on one host and --peer on another, it examines the link between the two instead: the
ports, the addresses, the round trip and the bandwidth. Start it in the environment of the training.
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
        "doctor", help="what is refused here, versions, kernels and network", description=DOCTOR
    )
    side = command.add_mutually_exclusive_group()
    side.add_argument(
        "--listen", type=_port, nargs="?", const=peer.STORE_PORT, metavar="PORT",
        help=f"wait for --peer of another host, on the port of the training ({peer.STORE_PORT})",
    )  # fmt: skip
    side.add_argument(
        "--peer", type=_peer, metavar="HOST[:PORT]",
        help="examine the link to the host where --listen waits",
    )  # fmt: skip
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.listen is None and arguments.peer is None:
        return 0 if doctor.print_report() else 1
    ports.allowed()  # raises an error if POWERSGD_PORTS is wrong
    if found := [*doctor.network_refused()]:
        doctor.print_verdict(found)
        return 1
    well = peer.visit(*arguments.peer) if arguments.peer else peer.listen(arguments.listen)
    return 0 if well else 1
