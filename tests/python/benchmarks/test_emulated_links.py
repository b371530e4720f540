# SPDX-License-Identifier: BSD-3-Clause
"""Emulated links lose, reorder and delay frames as stated, and a host can be cut off."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("rich")

from cluster import hosts
from cluster.emulated_links import HELD_BACK, Link, Schedule

from support.shaped_links import needs_hosts, needs_taps

FRAMES = 2000
_END = 7


def _arrivals(link: Link, suffers: bool = True) -> list[tuple[float, int]]:
    """When each frame is due, and its number, if one is sent every millisecond."""
    schedule = Schedule(link)
    for i in range(FRAMES):
        schedule.add(i / 1e3, _END, i.to_bytes(2, "big"), suffers)
    arrivals = []
    while (now := schedule.patience(0)) is not None:
        for end, frame in schedule.due(now):
            assert end == _END
            arrivals.append((now, int.from_bytes(frame, "big")))
    return arrivals


def test_a_delay_alone_is_the_same_for_all() -> None:
    alone = _arrivals(Link(delay=0.02))
    assert [number for _, number in alone] == list(range(FRAMES))
    assert [moment - number / 1e3 for moment, number in alone] == pytest.approx([0.02] * FRAMES)
    faulty = Link(0.02, jitter=0.1, loss=0.5, reordering=0.5)
    assert _arrivals(faulty, suffers=False) == alone  # frames to the other end


def test_loss() -> None:
    numbers = [number for _, number in _arrivals(Link(loss=0.3, seed=3))]
    assert numbers == sorted(numbers)
    deviation = (FRAMES * 0.3 * 0.7) ** 0.5
    assert abs(len(numbers) - 0.7 * FRAMES) < 5 * deviation
    assert numbers != [number for _, number in _arrivals(Link(loss=0.3, seed=4))]
    assert numbers == [number for _, number in _arrivals(Link(loss=0.3, seed=3))]


def test_jitter_keeps_the_order() -> None:
    arrivals = _arrivals(Link(delay=0.005, jitter=0.195))
    assert [number for _, number in arrivals] == list(range(FRAMES))
    late = [moment - number / 1e3 - 0.005 for moment, number in arrivals]
    assert min(late) >= 0
    assert 0.15 < max(late) <= 0.195 + 1e-9


def test_reordering_holds_frames_back() -> None:
    arrivals = _arrivals(Link(reordering=0.1))
    assert sorted(number for _, number in arrivals) == list(range(FRAMES))
    held = [number for moment, number in arrivals if moment > number / 1e3 + HELD_BACK / 2]
    assert abs(len(held) - 0.1 * FRAMES) < 5 * (FRAMES * 0.1 * 0.9) ** 0.5
    numbers = [number for _, number in arrivals]
    assert numbers != sorted(numbers)


# Host 0 sends the bytes to host 1, which prints their sum and the frames that it was sent. Host 0
# prints the segments that it sent again.
TRANSFER = """
import socket, sys
size = 1_000_000
if sys.argv[1] == "1":
    with socket.create_server(("", 7000)) as listener:
        print("listening", flush=True)
        connection, total = listener.accept()[0], 0
    while part := connection.recv(1 << 16): total += sum(part)
    line = next(line for line in open("/proc/self/net/dev") if "eth0" in line)
    print(total, line.partition(":")[2].split()[1])
else:
    sys.stdin.readline()
    connection = socket.create_connection(("10.77.0.2", 7000))
    connection.sendall(bytes(i % 251 for i in range(size)))
    connection.shutdown(socket.SHUT_WR)
    connection.recv(1)
    rows = [line.split() for line in open("/proc/self/net/snmp") if line.startswith("Tcp:")]
    print(rows[1][rows[0].index("RetransSegs")])
"""
_PIPES: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}


def _start(cluster: hosts.Hosts, program: str) -> list[subprocess.Popen[str]]:
    processes = [
        cluster.start(host, [sys.executable, "-c", program, str(host)], os.environ, **_PIPES)
        for host in range(2)
    ]
    assert processes[1].stdout
    assert processes[1].stdout.readline() == "listening\n"
    return processes


@needs_hosts
@needs_taps
def test_a_lossy_link_loses_frames_of_the_mtu_and_tcp_sends_them_again() -> None:
    size = 1_000_000
    with hosts.Hosts(2, None, link=Link(loss=0.05, seed=1)) as cluster:
        sender, receiver = _start(cluster, TRANSFER)
        again = sender.communicate("\n", timeout=60)[0]
        total, frames = receiver.communicate(timeout=60)[0].split()
    assert int(total) == sum(i % 251 for i in range(size))
    assert int(frames) >= size / 1500
    assert int(again) > 0


# Host 1 returns every datagram. Host 0 sends one for each line, and prints how many came back.
DATAGRAMS = """
import socket, sys
link = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
if sys.argv[1] == "1":
    link.bind(("", 7000))
    print("listening", flush=True)
    while True:
        link.sendto(*link.recvfrom(100))
for i, line in enumerate(sys.stdin):
    link.settimeout(float(line))
    link.sendto(str(i).encode(), ("10.77.0.2", 7000))
    try:
        while link.recv(100) != str(i).encode(): pass
        print(1, flush=True)
    except TimeoutError:
        print(0, flush=True)
"""


@needs_hosts
def test_a_host_is_cut_off_and_comes_back_at_another_rate() -> None:
    with hosts.Hosts(2, "100mbit") as cluster:
        sender, _ = _start(cluster, DATAGRAMS)
        assert sender.stdin
        assert sender.stdout

        def echoes(patience: float) -> bool:
            assert sender.stdin
            assert sender.stdout
            sender.stdin.write(f"{patience}\n")
            sender.stdin.flush()
            return sender.stdout.readline() == "1\n"

        assert echoes(30)
        cluster.cut(1)
        assert not echoes(0.3)
        cluster.mend(1)
        assert echoes(30)
        cluster.set_rate(1, "1mbit")
        assert echoes(30)
        for host, device in ((1, "eth0"), (0, "eth0")):
            command = ["tc", "-n", cluster.names[host], "qdisc", "show", "dev", device]
            shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            assert ("rate 1Mbit" in shown) == (host == 1), shown
