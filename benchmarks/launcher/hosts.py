# SPDX-License-Identifier: BSD-3-Clause
"""Hosts on one machine: network namespaces around a switch, each on a link of a given rate.

Everything that a run makes is named after its owner, psgd-<pid>-<start time>. sweep() uses this
name to find and remove what a killed owner left. All interfaces are inside the namespaces, so the
machine's own interfaces and firewall are not involved.
"""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from launcher.emulated_links import Link
from launcher.signals import uninterrupted

INTERFACE = "eth0"

_OWNED = re.compile(r"psgd-(\d+)-(\d+)\b")
_RATE = re.compile(r"(\d+(?:\.\d+)?)(k|m|g)bit")
_CONGESTION_CONTROL = "/proc/sys/net/ipv4/tcp_congestion_control"  # which namespaces inherit
_BENCHMARKS = Path(__file__).resolve().parents[1]
_serial = itertools.count()


class ClusterError(Exception):
    """Raised if something cannot be made or run. The message names it and the cause."""


def missing() -> list[str]:
    """Returns what this machine lacks for hosts, each item in a few words."""
    lacks = [] if os.geteuid() == 0 else ["root (to make network namespaces)"]
    return lacks + [f"the program {name}" for name in ("ip", "tc") if not shutil.which(name)]


def bits_per_second(rate: str) -> float:
    """The value of a rate in tc's notation.

    Raises:
        ValueError: If the rate is not in this notation.
    """
    match = _RATE.fullmatch(rate)
    if not match or float(match[1]) == 0:
        raise ValueError(f"expected a number and kbit, mbit or gbit, such as 1gbit, got {rate!r}")
    return float(match[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[match[2]]


def owner() -> str:
    """The name prefix of everything that this process makes."""
    return f"psgd-{os.getpid()}-{_start_time(os.getpid())}"


def is_left(name: str) -> bool:
    """True if the name belongs to a run that has ended."""
    match = _OWNED.match(name)
    return match is not None and _start_time(int(match[1])) != int(match[2])


def sweep() -> list[str]:
    """Removes what ended runs have left. Returns the names of the namespaces."""
    left = [name for name in namespaces() if is_left(name)]
    for name in left:
        try:
            _remove(name)
        except ClusterError:  # another run may have removed it
            if name in namespaces():
                raise
    for folder in Path(tempfile.gettempdir()).glob("psgd-*"):
        if is_left(folder.name):
            shutil.rmtree(folder, ignore_errors=True)
    return left


def namespaces() -> list[str]:
    """The names of the namespaces of all runs."""
    lines = _run("ip", "netns", "list").splitlines()
    return [line.split()[0] for line in lines if _OWNED.match(line)]


def processes_in(namespace: str) -> list[int]:
    """The processes in a network namespace."""
    return [int(pid) for pid in _run("ip", "netns", "pids", namespace).split()]


def enter(namespace: str) -> None:
    """Moves this thread, and what it starts, into a network namespace."""
    new_network = 0x40000000  # CLONE_NEWNET
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/var/run/netns/{namespace}") as handle:
        if libc.setns(handle.fileno(), new_network):
            raise OSError(ctypes.get_errno(), f"setns {namespace}")


def sent_bytes() -> int:
    """The bytes that this process's host has sent. /sys would give the machine's."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == INTERFACE:
            return int(counts.split()[8])
    raise ClusterError(f"there is no {INTERFACE}")


class Hosts:
    """A context manager for `count` hosts on a switch, with addresses from 10.77.0.1.

    Each is for `per_host` ranks, which share its link: first those of the first host, and so on.
    Every link sends at most `rate` in either direction; None: as fast as the machine can.
    A frame from host to host takes `delay_ms` milliseconds longer, half of it on each link. `link`
    sets the other faults, each of which affects a frame once between two hosts.
    """

    def __init__(
        self,
        count: int,
        rate: str | None,
        delay_ms: float = 0,
        link: Link | None = None,
        per_host: int = 1,
    ) -> None:
        prefix = f"{owner()}-{next(_serial)}"
        self._switch = f"{prefix}-switch"
        self.names = [f"{prefix}-{i}" for i in range(count)]  # of the network namespaces
        self.per_host = per_host
        self.rate = rate
        self.delay_ms = delay_ms
        self._link = dataclasses.replace(link or Link(), delay=delay_ms / 2e3)
        self.congestion_control = Path(_CONGESTION_CONTROL).read_text().strip()
        self.emulation: subprocess.Popen[str] | None = None  # of the links, if they need it

    def __enter__(self) -> Hosts:
        try:
            with uninterrupted():
                self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._remove()

    def __len__(self) -> int:
        return len(self.names)

    @property
    def of_ranks(self) -> list[str]:
        """The network namespace of each rank."""
        return [name for name in self.names for _ in range(self.per_host)]

    def set_rate(self, host: int, rate: str) -> None:
        """Changes the rate of a host's link in both directions. The link must already have one."""
        self._shape("change", rate, self.names[host], INTERFACE)
        self._shape("change", rate, self._switch, f"port{host}")

    def cut(self, host: int) -> None:
        """Makes the switch drop a host's traffic, both ways. The host's interface stays up."""
        _run("ip", "-n", self._switch, "link", "set", f"port{host}", "nomaster")

    def mend(self, host: int) -> None:
        """Undoes `cut`."""
        _run("ip", "-n", self._switch, "link", "set", f"port{host}", "master", "br0")

    def _make(self) -> None:
        for name in [*self.names, self._switch]:
            _run("ip", "netns", "add", name)
        _run("ip", "-n", self._switch, "link", "add", "br0", "up", "type", "bridge")
        ports = [f"port{i}" for i in range(len(self.names))]
        if self._link == Link():
            for name, port in zip(self.names, ports, strict=True):
                ends = f"{INTERFACE} netns {name} type veth peer {port} netns {self._switch}"
                _run("ip", "link", "add", *ends.split())
        else:
            self._make_emulated_links(ports)
        for i, (name, port) in enumerate(zip(self.names, ports, strict=True)):
            _run("ip", "-n", name, "address", "add", f"10.77.0.{i + 1}/24", "dev", INTERFACE)
            for interface in ("lo", INTERFACE):
                _run("ip", "-n", name, "link", "set", interface, "up")
            _run("ip", "-n", self._switch, "link", "set", port, "master", "br0", "up")
            if self.rate:
                self._shape("add", self.rate, name, INTERFACE)  # what the host sends
                self._shape("add", self.rate, self._switch, port)  # what the host receives

    def _make_emulated_links(self, ports: Sequence[str]) -> None:
        far_ends = [f"far{i}" for i in range(len(ports))]
        ends = [end for link in zip(far_ends, ports, strict=True) for end in link]
        link = json.dumps(dataclasses.asdict(self._link))
        program = [sys.executable, "-m", "launcher.emulated_links", link, *ends]
        pipe = subprocess.PIPE
        self.emulation = subprocess.Popen(
            ["ip", "netns", "exec", self._switch, *program],
            stdin=pipe,  # the process ends when this is closed, or this process is killed
            stdout=pipe,
            stderr=pipe,
            text=True,
            cwd=_BENCHMARKS,
            start_new_session=True,  # Ctrl-C only reaches the parent
        )
        assert self.emulation.stdout
        if not self.emulation.stdout.readline():
            raise ClusterError(f"emulated links: {self.emulation.communicate()[1].strip()}")
        for name, end in zip(self.names, far_ends, strict=True):
            _run("ip", "-n", self._switch, "link", "set", end, "netns", name, "name", INTERFACE)

    def _shape(self, verb: str, rate: str, namespace: str, device: str) -> None:
        burst = _burst(rate)
        if self._link != Link():
            # A whole segment must fit into a burst, or its pieces are forwarded separately.
            size = str(min(burst, 1 << 16) - 1000)
            _run("ip", "-n", namespace, "link", "set", device, "gso_max_size", size)
        shape = f"tbf rate {rate} burst {burst}b latency 100ms".split()
        _run("tc", "-n", namespace, "qdisc", verb, "dev", device, "root", *shape)

    def _remove(self) -> None:
        with uninterrupted():
            if self.emulation:
                self.emulation.kill()
                self.emulation.communicate()
            there = namespaces()
            for name in [*self.names, self._switch]:
                if name in there:
                    _remove(name)


def _remove(namespace: str) -> None:
    """Removes a namespace, and kills the processes that are still in it."""
    for pid in processes_in(namespace):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    _run("ip", "netns", "del", namespace)


def _burst(rate: str) -> int:
    """The bytes of a token bucket: 2 ms, less than a step and more than a timer's tick."""
    return max(4 << 10, int(bits_per_second(rate) / 8 * 2e-3))


def _run(*command: str) -> str:
    result = subprocess.run(command, capture_output=True, text=True, start_new_session=True)
    if result.returncode:
        raise ClusterError(f"{' '.join(command)}: {result.stderr.strip()}")
    return result.stdout


def _start_time(pid: int) -> int | None:
    """The start time of a process in ticks since boot, or None if the process has ended.

    With the pid, it identifies a process uniquely.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()  # the name before it may contain any character
    return int(fields[19]) if fields[0] not in "ZX" else None
