# SPDX-License-Identifier: BSD-3-Clause
"""Emulated links lose, reorder and delay frames as stated."""

from __future__ import annotations

import pytest
from launcher import hosts
from launcher.emulated_links import HELD_BACK, Link, Schedule

from support.deadline import DEADLOCK
from support.shaped_links import needs_hosts, needs_taps, said, start

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


@needs_hosts
@needs_taps
def test_a_lossy_link_loses_frames_of_the_mtu_and_tcp_sends_them_again() -> None:
    size = 1_000_000
    with hosts.Hosts(2, None, link=Link(loss=0.05, seed=1)) as cluster:
        receiver, sender = (start(cluster, host, TRANSFER) for host in (1, 0))
        assert said(receiver) == "listening"
        again = sender.communicate("\n", timeout=DEADLOCK)[0]
        total, frames = receiver.communicate(timeout=DEADLOCK)[0].split()
    assert int(total) == sum(i % 251 for i in range(size))
    assert int(frames) >= size / 1500
    assert int(again) > 0


# Host 1 returns every byte to host 0, which prints how long the quickest took.
ECHO = """
import socket, sys, time
if sys.argv[1] == "1":
    with socket.create_server(("", 7000)) as listener:
        print("listening", flush=True)
        connection = listener.accept()[0]
    while byte := connection.recv(1): connection.sendall(byte)
else:
    sys.stdin.readline()
    connection, times = socket.create_connection(("10.77.0.2", 7000)), []
    for _ in range(10):
        began = time.monotonic()
        connection.sendall(b"x")
        connection.recv(1)
        times.append(time.monotonic() - began)
    print(min(times))
"""


@needs_hosts
@needs_taps
def test_a_delay_is_no_shorter_than_it_says() -> None:
    """Both directions have the delay, and the process that makes it ends with the hosts."""
    with hosts.Hosts(2, None, delay_ms=20) as cluster:
        receiver, sender = (start(cluster, host, ECHO) for host in (1, 0))
        assert said(receiver) == "listening"
        seconds = float(sender.communicate("\n", timeout=DEADLOCK)[0])
        assert cluster.emulation
    assert seconds >= 2 * 20e-3
    assert cluster.emulation.returncode is not None
