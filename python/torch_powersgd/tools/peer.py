# SPDX-License-Identifier: BSD-3-Clause
"""What keeps two hosts from training together: ``doctor --listen`` and ``doctor --peer HOST``."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch_powersgd.tools.doctor import Problem, Rows, print_rows, print_verdict
from torch_powersgd.tools.interfaces import gloo_address, interface_of, is_loopback
from torch_powersgd.tools.line import Line
from torch_powersgd.units import ms_text

STORE_PORT = 29500  # of torchrun's --master-port
CONNECT_SECONDS = 5.0
WAIT_SECONDS = 600.0
COMMAND = "powersgd doctor"
FAILURES = (OSError, ValueError, TypeError)  # of a connection, and of what another program sends
HELLO = {"torch_powersgd": "doctor", "protocol": 1}
FAR_SECONDS = 0.02  # of a round trip
EPHEMERAL = "/proc/sys/net/ipv4/ip_local_port_range"


@dataclass(frozen=True)
class Host:
    """What one side tells the other about itself.

    Attributes:
        name: of the host.
        own: the address of this side of the connection, as the host itself knows it.
        sees: the other side's address, as this host sees it.
        listens: the address that Gloo would listen on.
        interface: the interface of ``own``.
        ports: the ports that it listens on now, as a group would.
        open: the ports that must be open, in words.
        token: the greeting of these ports, which no other host sends.
    """

    name: str
    own: str
    sees: str
    listens: str
    interface: str
    ports: list[int]
    open: str
    token: str


def listen(port: int) -> bool:
    """Waits for the other host's doctor, and prints what it finds. Returns whether all is well."""
    try:
        server = socket.create_server(("", port))
    except OSError as error:
        what = f"This host cannot listen on port {port}: {os.strerror(error.errno or 0)}"
        there = f"--peer {_reached_as()}:PORT there"
        remedy = f"Stop what uses it, or choose another: --listen PORT, and {there}"
        return _print([], [Problem(what, remedy)])
    with server:
        server.settimeout(WAIT_SECONDS)
        print(f"waiting {WAIT_SECONDS / 60:.0f} minutes; on the other host, run:")
        print(f"  {COMMAND} --peer {_reached_as()}:{port}", flush=True)
        while True:
            try:
                connection, address = server.accept()
            except TimeoutError:
                what = f"No host connected to port {port} in {WAIT_SECONDS / 60:.0f} minutes"
                return _print([], [Problem(what, "See what the other host's doctor says")])
            try:
                return _examine(connection, port, dials=False)
            except FAILURES as error:  # It may have been a port scanner.
                print(f"{address[0]} connected and left ({error}); still waiting", flush=True)


def visit(name: str, port: int) -> bool:
    """Examines the link to a host whose doctor listens. Returns whether all is well."""
    try:
        connection = socket.create_connection((name, port), CONNECT_SECONDS)
    except OSError as error:
        return _print([], [_unreachable(name, port, error)])
    try:
        return _examine(connection, port, dials=True)
    except FAILURES as error:
        what = f"Port {port} of {name} is open, but no doctor there finished the check ({error})"
        return _print([], [Problem(what, f"Run {COMMAND} --listen there, from the same version")])


def _unreachable(name: str, port: int, error: OSError) -> Problem:
    where = f"Port {port} of {name}"
    if isinstance(error, socket.gaierror):
        return Problem(
            f"{name} has no address here ({error.strerror})",
            "Give its address instead of its name, or add it to DNS or /etc/hosts",
        )
    if isinstance(error, ConnectionRefusedError):
        return Problem(
            f"{where} refuses the connection",
            f"Run {COMMAND} --listen there. If it is running, a firewall blocks the port: open it",
        )
    if isinstance(error, TimeoutError):
        return Problem(
            f"{where} does not answer within {CONNECT_SECONDS:g} seconds",
            f"Open TCP port {port} in the firewall or security group of {name}. If it is open, no "
            "route leads there, as to a host behind NAT: join both to a VPN",
        )
    return Problem(f"{where} cannot be reached: {error.strerror}", "Check the route to it")


def _examine(connection: socket.socket, port: int, dials: bool) -> bool:
    """Both hosts do the same, except that the one that dialed measures first."""
    with connection, _listening(connection) as mine:
        line = Line(connection)
        if line.exchange(HELLO) != HELLO:
            raise ValueError("another version")
        mine, theirs = _told_apart(mine, Host(**line.exchange(vars(mine))))
        blocked = _blocked(theirs)
        blocked_theirs = line.exchange(blocked)
        for turn in (True, False):
            if dials is turn:
                trip, rate = line.measure()
            else:
                line.echo()
        rate_theirs = float(line.exchange(rate))
    rows = [
        ("this host", _about(mine)),
        ("the other", _about(theirs)),
        ("store", f"port {port} of {(theirs if dials else mine).name} is open"),
        ("round trip", f"{ms_text(trip)} ms"),
        ("bandwidth", f"{_rate_text(rate)} to the other, {_rate_text(rate_theirs)} from it"),
    ]
    found = [*_refused(mine, theirs, blocked), *_refused(theirs, mine, blocked_theirs)]
    return _print(rows, found, trip)


def _told_apart(mine: Host, theirs: Host) -> tuple[Host, Host]:
    """Adds the addresses to equal names, which cloned machines have."""
    if mine.name != theirs.name:
        return mine, theirs
    named = [replace(host, name=f"{host.name} ({host.own})") for host in (mine, theirs)]
    return named[0], named[1]


@contextlib.contextmanager
def _listening(connection: socket.socket) -> Iterator[Host]:
    """Listens as a group would, or on the connection's address if Gloo has none."""
    own, sees = connection.getsockname()[0], connection.getpeername()[0]
    listens, token = gloo_address() or own, secrets.token_hex(8)
    with contextlib.ExitStack() as stack:
        servers = list(_servers(listens))
        for server in servers:
            stack.enter_context(server)
            threading.Thread(target=_greet, args=(server, token), daemon=True).start()
        yield Host(
            _name(), own, sees, listens, interface_of(own),
            [server.getsockname()[1] for server in servers], _open(), token,
        )  # fmt: skip


def _servers(address: str) -> Iterator[socket.socket]:
    """A socket that listens on a port that the system picks, if one is free."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.suppress(OSError):
        yield socket.create_server((address, 0), family=family)


def _open() -> str:
    with open(EPHEMERAL) as file:
        first, last = file.read().split()
    return f"{first}-{last} (net.ipv4.ip_local_port_range)"


def _greet(server: socket.socket, token: str) -> None:
    with contextlib.suppress(OSError):  # It is closed at the end.
        while True:
            connection, _ = server.accept()
            with connection:
                connection.sendall(token.encode())


def _blocked(host: Host) -> list[tuple[int, str]]:
    """The ports of a host that cannot be reached from here, and why."""
    if is_loopback(host.listens) and not is_loopback(host.own):
        return [(port, "a loopback address") for port in host.ports]
    found = []
    for port in host.ports:
        try:
            with socket.create_connection((host.listens, port), CONNECT_SECONDS) as connection:
                greeting = connection.makefile().read(len(host.token))
            if greeting != host.token:
                found.append((port, "another host answers"))
        except OSError as error:
            found.append((port, error.strerror or str(error)))
    return found


def _refused(here: Host, there: Host, blocked: list[Any]) -> Iterator[Problem]:
    """The problems on the way from one host to the ports of the other."""
    if not there.ports:
        yield Problem(
            f"{there.name} cannot listen on {there.listens}: no port in {there.open} is free",
            "Set the sysctl net.ipv4.ip_local_port_range to a wider range there",
        )
    for why in dict.fromkeys(why for _, why in blocked):
        which = " and ".join(str(port) for port, reason in blocked if reason == why)
        what = f"{here.name} cannot reach {there.name} on {there.listens} port {which}: {why}"
        if there.interface and there.listens != there.own:
            yield Problem(what, f"On {there.name}, export GLOO_SOCKET_IFNAME={there.interface}")
        elif there.own != here.sees:
            yield Problem(
                what,
                f"{there.name} is behind NAT, as {here.sees}. Join both to a VPN such as WireGuard",
            )
        else:
            yield Problem(what, f"Open TCP ports {there.open} of {there.name} to {here.name}")


def _about(host: Host) -> str:
    there = " and ".join(map(str, host.ports)) or "none"
    where = f"{host.own} on {host.interface or 'an unknown interface'}"
    return f"{host.name}, {where}. Gloo listens on {host.listens}, here on port {there}"


def _rate_text(rate: float) -> str:
    megabits = 8e-6 * rate
    return f"{megabits / 1e3:.1f} Gbit/s" if megabits >= 1e3 else f"{megabits:.1f} Mbit/s"


def _name() -> str:
    return socket.gethostname()


def _reached_as() -> str:
    """The address that Gloo would listen on, or this host's name if no other host can use it."""
    address = gloo_address()
    usable = address and ":" not in address and not is_loopback(address)
    return address if usable else _name()


def _print(rows: Rows, found: list[Problem], trip: float = 0.0) -> bool:
    far = (
        f" A compressed step waits {ms_text(trip)} ms or more for its messages, whatever the "
        "bandwidth. docs/local-steps.md shows how to average less often."
    )
    print_verdict(
        found,
        "These hosts can train together." + (far if trip >= FAR_SECONDS else ""),
        "These hosts cannot train together yet:",
    )
    if rows:
        print_rows("link", rows)
    return not found
