# SPDX-License-Identifier: BSD-3-Clause
"""Checks that hosts can train together: they connect to each other and take a compressed step."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import logging
import os
import socket
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from torch_powersgd.attach import attach
from torch_powersgd.cli.processes import delay_of, in_words, slowest
from torch_powersgd.group_backends import BACKENDS
from torch_powersgd.hosts import in_two_levels, numbered, this_host
from torch_powersgd.scope import scope
from torch_powersgd.units import ms_text

CONNECT_SECONDS, ANSWER_SECONDS = 5.0, 60.0
ANSWER = timedelta(seconds=ANSWER_SECONDS)
SMALLEST, LARGEST = 1 << 12, 1 << 24  # elements whose sum measures the bandwidth
LONG_ENOUGH = 1.0  # seconds of such a sum
FAR_SECONDS = 0.02  # of a round trip
SHARED = "the processes of a host share its link, and sum among themselves first (docs/hosts.md)"
UNEQUAL = (
    "the hosts have unequal numbers of processes, so each process sends to all others, over the "
    "links that they share (docs/hosts.md)"
)
ONE_KERNEL = (
    "some of these hosts are containers of one machine. If they share a link, set POWERSGD_HOST to "
    "the same name in them (docs/hosts.md)"
)

Address = tuple[str, int]
Rows = list[tuple[str, str]]
Found = tuple[list[str], Rows]  # the problems, and what was measured


def check(master: Address, count: int, seconds: float) -> Found:
    """Waits for ``count`` processes and checks their group. The address has the store."""
    where = f"{master[0]} port {master[1]}"
    here = _is_here(master[0])
    if not here and (why := _unreachable(master, seconds)):
        remedy = f"Run this on {master[0]} too, and open TCP port {master[1]} there"
        return [f"{where} cannot be reached: {why}. {remedy}."], []
    try:
        store, first = _store_at(master, here)
        meeting = _Meeting(store, store.add("number", 1) - 1, count)
        found = _check(meeting, where, seconds)
        store.set(f"done/{meeting.number}", "0")
        if first:  # It has the store.
            meeting.tell("done", 0, CONNECT_SECONDS)
        return found
    except (RuntimeError, ValueError) as error:
        what = str(error).splitlines()[0].rstrip(".?")
        return [f"The group that met at {where} failed: {what}. See what the others say."], []


def _is_here(host: str) -> bool:
    """Whether the address is this host's."""
    try:
        socket.create_server((host, 0)).close()
    except OSError:
        return False
    return True


def _store_at(master: Address, here: bool) -> tuple[dist.Store, bool]:
    """The store at an address, and whether this process hosts it: the first one there does."""

    def join(hosts: bool) -> dist.Store:
        return dist.TCPStore(*master, None, hosts, ANSWER, wait_for_workers=False)

    if here and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":  # or torchrun has it
        with contextlib.suppress(RuntimeError):  # Another process has the port.
            return join(hosts=True), True
    return join(hosts=False), False


@dataclass(frozen=True)
class _Meeting:
    """Processes that talk through a store."""

    store: dist.Store
    number: int
    count: int

    def tell(self, what: str, mine: Any, seconds: float = ANSWER_SECONDS) -> list[Any]:
        """Returns what each process tells, without those that don't within so many seconds."""
        self.store.set(f"{what}/{self.number}", json.dumps(mine))
        keys, end = [f"{what}/{i}" for i in range(self.count)], time.monotonic() + seconds
        while not self.store.check(keys) and time.monotonic() < end:
            time.sleep(0.1)
        return [json.loads(self.store.get(key)) for key in keys if self.store.check([key])]


def _check(meeting: _Meeting, where: str, seconds: float) -> Found:
    me = socket.gethostname()
    with gloo_listening() as addresses:
        told = meeting.tell("host", (this_host(), me, addresses), seconds)
        names = [name for _, name, _ in told]
        if len(told) < meeting.count:
            came = f"Only {len(told)} of {meeting.count} processes came to {where}"
            which = ", ".join(dict.fromkeys(names))
            return [f"{came}: {which}. Run this on the others too, and see what they say."], []
        others = told[: meeting.number] + told[meeting.number + 1 :]
        mine = [problem for _, *other in others for problem in _blocked(me, *other)]
        problems = [problem for each in meeting.tell("blocked", mine) for problem in each]
    if problems:
        return problems, []
    hosts = [host for host, *_ in told]
    return [], [*described(hosts, names), *_measured(meeting, numbered(hosts))]


def described(hosts: list[str], names: list[str]) -> Rows:
    """Says which processes share a host and its link.

    Args:
        hosts: Of each process, what ``this_host`` has returned.
        names: The hostname of each process.
    """
    numbers, name_of = numbered(hosts), dict(zip(hosts[::-1], names[::-1], strict=True))
    shown = ", ".join(name_of[host] for host in dict.fromkeys(hosts))
    sizes = set(Counter(numbers).values())
    rows = [("hosts", shown if sizes == {1} else f"{in_words(numbers)}: {shown}")]
    if len(name_of) > 1 and sizes != {1}:
        rows.append(("link", SHARED if in_two_levels(numbers) else UNEQUAL))
    kernels = Counter(boot for host in name_of if (boot := host.partition(" ")[2]))
    if max(kernels.values(), default=1) > 1:
        rows.append(("kernel", ONE_KERNEL))
    return rows


@contextlib.contextmanager
def gloo_listening() -> Iterator[list[Address]]:
    """The addresses that Gloo chooses to listen on. It does so in the context."""
    before = _listening()
    group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, ANSWER)
    yield sorted(_listening() - before)
    del group


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def _listening() -> set[Address]:
    """The addresses that this process listens on, whoever chose them."""
    found = set()
    for file in Path("/proc/self/fd").iterdir():
        if file.is_socket():
            with socket.socket(fileno=os.dup(int(file.name))) as copy:
                if copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    found.add(copy.getsockname()[:2])
    return found


def _unreachable(address: Address, seconds: float = 0.0) -> str:
    """Why an address cannot be reached within so many seconds, or nothing."""
    end = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection(address, CONNECT_SECONDS).close()
            return ""
        except OSError as error:
            if isinstance(error, socket.gaierror) or time.monotonic() > end:
                return error.strerror or str(error)
        time.sleep(0.5)


def _blocked(me: str, name: str, listens: list[Address]) -> Iterator[str]:
    """The problems on the way to the addresses where Gloo listens on another host."""
    for address, port in listens:
        if why := _unreachable((address, port)):
            remedy = f"Open the TCP ports of {name} to {me}"
            if is_loopback(address):
                remedy = f"On {name}, set GLOO_SOCKET_IFNAME to the interface between them"
            yield f"{me} cannot reach {name} at {address} port {port}: {why}. {remedy}."


def _measured(meeting: _Meeting, hosts: list[int]) -> Rows:
    """Makes the group as a training does, takes a compressed step, and measures the network.

    The processes of a host are neighbors, as with torchrun, so a ring crosses its link once.
    """
    logging.getLogger("torch_powersgd").setLevel(logging.ERROR)  # Nobody trains.
    cpu, store = torch.device("cpu"), dist.PrefixStore("group", meeting.store)
    order = sorted(range(meeting.count), key=lambda number: (hosts[number], number))
    place: dict[str, Any] = {"rank": order.index(meeting.number), "world_size": meeting.count}
    dist.init_process_group(BACKENDS["cpu"], timeout=ANSWER, store=store, **place)
    try:
        gradient = {"gradient": torch.randn(512, 512)}
        attach(gradient, {"start_powerSGD_iter": 0}).all_reduce(gradient).wait()
        round_trip, elements, seconds = 2 * delay_of(cpu), SMALLEST, 0.0
        while seconds < LONG_ENOUGH and elements < LARGEST:
            elements *= 4
            begin = time.perf_counter()
            with scope("never"):
                dist.all_reduce(torch.zeros(elements))
            [seconds] = slowest([time.perf_counter() - begin], cpu)
    finally:
        dist.destroy_process_group()
    bits = 32 * elements * 2 * (1 - 1 / meeting.count)  # that each host sends, and receives
    far = ", for which each compressed step waits (docs/local-steps.md)"
    return [
        ("round trip", f"{ms_text(round_trip)} ms{far if round_trip > FAR_SECONDS else ''}"),
        ("bandwidth", f"{1e-6 * bits / seconds:.1f} Mbit/s in each direction at once"),
    ]
