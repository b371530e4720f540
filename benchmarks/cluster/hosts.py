# SPDX-License-Identifier: BSD-3-Clause
"""Hosts on one machine: network namespaces around a switch, each on a link of a given rate.

All that a run makes carries its owner's name, psgd-<pid>-<start time>: the namespaces in their
names, the processes in their environment. By these sweep() finds and removes what a killed owner
left. No interface is made outside the namespaces: the machine's own and its firewall have no part.
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
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from cluster.emulated_links import Link
from cluster.signals import uninterrupted

MARK = "CLUSTER_HOSTS"  # the variable that holds the owner's name in its processes
INTERFACE = "eth0"
TX_BYTES = Path(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes")

_OWNED = re.compile(r"psgd-(\d+)-(\d+)\b")
_RATE = re.compile(r"(\d+(?:\.\d+)?)(k|m|g)bit")
_BENCHMARKS = Path(__file__).resolve().parents[1]
_CONGESTION_CONTROL = Path("/proc/sys/net/ipv4/tcp_congestion_control")
_serial = itertools.count()


class ClusterError(Exception):
    """An error whose text names what cannot be made or run, and why."""


def missing() -> list[str]:
    """Returns the things that this machine lacks for hosts, each in a few words."""
    lacks = [] if os.geteuid() == 0 else ["root (network namespaces are made)"]
    return lacks + [f"the program {name}" for name in ("ip", "tc") if not shutil.which(name)]


def bits_per_second(rate: str) -> float:
    """The value of a rate as tc writes it.

    Raises:
        ValueError: names the rate and what is allowed.
    """
    match = _RATE.fullmatch(rate)
    if not match or float(match[1]) == 0:
        raise ValueError(f"a rate is a number and kbit, mbit or gbit (1gbit), got {rate!r}")
    return float(match[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[match[2]]


def owner() -> str:
    """The name of all that this process makes."""
    return f"psgd-{os.getpid()}-{_start_time(os.getpid())}"


def sweep() -> list[str]:
    """Removes what runs have left that are no longer alive. Returns the namespaces' names."""
    left = [name for name in namespaces() if is_left(name)]
    for name in {name for _, name in marked() if is_left(name)}:
        kill_marked(name)
    for name in left:
        _run("ip", "netns", "del", name)
    for folder in Path(tempfile.gettempdir()).glob("psgd-*"):
        if is_left(folder.name):
            shutil.rmtree(folder)
    return left


def namespaces() -> list[str]:
    """The names of the namespaces that any run has made."""
    lines = _run("ip", "netns", "list").splitlines()
    return [line.split()[0] for line in lines if _OWNED.match(line)]


def marked() -> Iterator[tuple[int, str]]:
    """The pid and the owner's name of every process that a run has started."""
    for environment in Path("/proc").glob("[0-9]*/environ"):
        pid = int(environment.parent.name)
        if _start_time(pid) is None:
            continue
        with suppress(OSError):
            for entry in environment.read_bytes().split(b"\0"):
                variable, _, value = entry.partition(b"=")
                if variable == MARK.encode():
                    yield pid, value.decode()


def is_left(name: str) -> bool:
    """True if the name belongs to a run that is no longer alive."""
    match = _OWNED.match(name)
    return match is not None and _start_time(int(match[1])) != int(match[2])


def kill_marked(name: str, patience: float = 10) -> None:
    """Kills the processes of an owner, and waits until they are gone."""
    deadline = time.monotonic() + patience
    while alive := [pid for pid, mark in marked() if mark == name and pid != os.getpid()]:
        for pid in alive:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise ClusterError(f"processes {alive} do not end")
        time.sleep(0.05)


def die_with_parent() -> None:
    """Lets a process that Hosts.start made end when its parent ends, however that ends."""
    death_signal = 1  # PR_SET_PDEATHSIG
    ctypes.CDLL(None).prctl(death_signal, signal.SIGKILL)
    match = _OWNED.match(os.environ[MARK])
    if not match or os.getppid() != int(match[1]):  # it ended before
        os._exit(1)


class Hosts:
    """`count` hosts, 10.77.0.1 onwards, on a switch; use it in a with statement.

    Every link sends at most `rate` in either direction; None: as fast as the machine can.
    A frame from a host to another takes `delay_ms` milliseconds more, half of it on either link.
    The hosts' TCP has this congestion control; None: the machine's own.
    `link` holds what else goes wrong with frames, once on the way from a host to another.
    """

    def __init__(
        self,
        count: int,
        rate: str | None,
        delay_ms: float = 0,
        congestion_control: str | None = None,
        link: Link | None = None,
    ) -> None:
        self._prefix = f"{owner()}-{next(_serial)}"
        self._switch = f"{self._prefix}-switch"
        self._names = [f"{self._prefix}-{i}" for i in range(count)]
        self.rate = rate
        self.delay_ms = delay_ms
        self._link = dataclasses.replace(link or Link(), delay=delay_ms / 2e3)
        self.congestion_control = congestion_control or _CONGESTION_CONTROL.read_text().strip()
        self._processes: list[subprocess.Popen[Any]] = []

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
        return len(self._names)

    @property
    def names(self) -> list[str]:
        """The names of the network namespaces."""
        return list(self._names)

    def start(
        self, host: int, command: Sequence[str], env: Mapping[str, str], **popen: Any
    ) -> subprocess.Popen[Any]:
        """Starts a command on a host. It is killed at the latest when the hosts are removed."""
        return self._start(self._names[host], command, env, **popen)

    def _start(
        self, namespace: str, command: Sequence[str], env: Mapping[str, str], **popen: Any
    ) -> subprocess.Popen[Any]:
        with uninterrupted():
            process = subprocess.Popen(
                ["ip", "netns", "exec", namespace, *command],
                env={**env, MARK: owner()},
                start_new_session=True,  # Ctrl-C reaches the parent alone
                **popen,
            )
            self._processes.append(process)
        return process

    def kill(self, processes: Sequence[subprocess.Popen[Any]]) -> None:
        """Kills some of the processes on the hosts."""
        with uninterrupted():
            for process in processes:
                process.kill()
            for process in processes:
                process.wait()
            self._processes = [p for p in self._processes if p not in processes]

    def set_rate(self, host: int, rate: str) -> None:
        """Changes the rate of a host's link, which must have one, in both directions."""
        self._shape("change", rate, self._names[host], INTERFACE)
        self._shape("change", rate, self._switch, f"port{host}")

    def cut(self, host: int) -> None:
        """Lets the switch drop what a host sends and is sent. Its interface notices nothing."""
        _run("ip", "-n", self._switch, "link", "set", f"port{host}", "nomaster")

    def mend(self, host: int) -> None:
        """Undoes `cut`."""
        _run("ip", "-n", self._switch, "link", "set", f"port{host}", "master", "br0")

    def _make(self) -> None:
        _run("ip", "netns", "add", self._switch)
        _run("ip", "-n", self._switch, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", self._switch, "link", "set", "br0", "up")
        for name in self._names:
            _run("ip", "netns", "add", name)
        ports = [f"port{i}" for i in range(len(self._names))]
        if self._link != Link():
            self._make_emulated_links(ports)
        else:
            self._make_links(ports)
        for i, (name, port) in enumerate(zip(self._names, ports, strict=True)):
            _run("ip", "-n", name, "address", "add", f"10.77.0.{i + 1}/24", "dev", INTERFACE)
            _run("ip", "-n", name, "link", "set", "lo", "up")
            if self.congestion_control != _CONGESTION_CONTROL.read_text().strip():
                write = f"echo {self.congestion_control} >{_CONGESTION_CONTROL}"
                _run("ip", "netns", "exec", name, "sh", "-c", write)
            _run("ip", "-n", name, "link", "set", INTERFACE, "up")
            _run("ip", "-n", self._switch, "link", "set", port, "master", "br0", "up")
            if self.rate:
                self._shape("add", self.rate, name, INTERFACE)  # what the host sends
                self._shape("add", self.rate, self._switch, port)  # what the host receives

    def _make_links(self, ports: Sequence[str]) -> None:
        for name, port in zip(self._names, ports, strict=True):
            ends = f"{INTERFACE} netns {name} type veth peer {port} netns {self._switch}"
            _run("ip", "link", "add", *ends.split())

    def _make_emulated_links(self, ports: Sequence[str]) -> None:
        far_ends = [f"far{i}" for i in range(len(ports))]
        ends = [end for link in zip(far_ends, ports, strict=True) for end in link]
        link = json.dumps(dataclasses.asdict(self._link))
        command = [sys.executable, "-m", "cluster.emulated_links", link, *ends]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        process = self._start(self._switch, command, os.environ, cwd=_BENCHMARKS, **pipes)
        assert process.stdout
        if not process.stdout.readline():
            raise ClusterError(f"emulated links: {process.communicate()[1].strip()}")
        for name, end in zip(self._names, far_ends, strict=True):
            _run("ip", "-n", self._switch, "link", "set", end, "netns", name, "name", INTERFACE)

    def _shape(self, verb: str, rate: str, namespace: str, device: str) -> None:
        burst = _burst(rate)
        if self._link != Link():
            # Whole segments must fit into a burst. Otherwise each piece is forwarded by itself.
            size = str(min(burst, 1 << 16) - 1000)
            _run("ip", "-n", namespace, "link", "set", device, "gso_max_size", size)
        shape = f"tbf rate {rate} burst {burst}b latency 100ms".split()
        _run("tc", "-n", namespace, "qdisc", verb, "dev", device, "root", *shape)

    def _remove(self) -> None:
        self.kill(self._processes)
        with uninterrupted():
            there = namespaces()
            for name in [*self._names, self._switch]:
                if name in there:
                    _run("ip", "netns", "del", name)


def _burst(rate: str) -> int:
    """The bytes of a token bucket: 2 ms, which is below a step and above a timer's tick."""
    return max(4 << 10, int(bits_per_second(rate) / 8 * 2e-3))


def _run(*command: str) -> str:
    result = subprocess.run(command, capture_output=True, text=True, start_new_session=True)
    if result.returncode:
        raise ClusterError(f"{' '.join(command)}: {result.stderr.strip()}")
    return result.stdout


def _start_time(pid: int) -> int | None:
    """The start of a process in ticks since boot. None means that the process has ended.

    Together with the pid it names a process forever.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()  # the name before it may hold any character
    return int(fields[19]) if fields[0] not in "ZX" else None
