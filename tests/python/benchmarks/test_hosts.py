# SPDX-License-Identifier: BSD-3-Clause
"""Hosts: their links are as slow as stated, and no process or namespace is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
from launcher import hosts

from support.deadline import DEADLOCK
from support.repository import ROOT
from support.shaped_links import needs_hosts, needs_taps, said, start

# A host sends so many bytes to every other host, in threads. A receiver prints when the first and
# the last byte came. The arguments are this host's number, the senders, the receivers, and the
# bytes.
TRAFFIC = """
import socket, sys, threading, time
me, senders, receivers, size = (eval(argument) for argument in sys.argv[1:])
listener = socket.create_server(("", 7000))
print("listening", flush=True)
sys.stdin.readline()
def send(to):
    with socket.create_connection((f"10.77.0.{to + 1}", 7000)) as connection:
        times.append(time.monotonic())
        connection.sendall(bytes(size))
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)  # returns once all has arrived
def receive():
    with listener.accept()[0] as connection:
        while connection.recv(1 << 16):
            times.append(time.monotonic())
times, threads = [], []
if me in senders: threads += [threading.Thread(target=send, args=(to,)) for to in receivers]
if me in receivers: threads += [threading.Thread(target=receive) for _ in senders]
for thread in threads: thread.start()
for thread in threads: thread.join()
(line,) = (line for line in open("/proc/self/net/dev") if "eth0:" in line)
print(min(times, default=0), max(times, default=0), line.split()[9])
"""


@needs_hosts
@pytest.mark.parametrize("delay_ms", [0, pytest.param(1, marks=needs_taps)])
def test_a_link_is_as_slow_as_it_says(delay_ms: float) -> None:
    """Both directions have the rate, and the interface counts the bytes that it sends."""
    size = 4_000_000
    counted = [0.0] * 3
    with hosts.Hosts(3, "100mbit", delay_ms) as cluster:
        for senders, receivers in (([0], [1, 2]), ([1, 2], [0])):
            programs = [
                start(cluster, host, TRAFFIC, senders, receivers, size) for host in range(3)
            ]
            assert [said(program) for program in programs] == ["listening"] * 3
            for program in programs:
                assert program.stdin
                program.stdin.write("\n")
                program.stdin.flush()
            outputs = [program.communicate(timeout=DEADLOCK)[0].split() for program in programs]
            first = min(float(outputs[host][0]) for host in senders)
            last = max(float(outputs[host][1]) for host in receivers)
            rate = 2 * size * 8 / (last - first)
            # The token bucket passes some of it at once. A busy machine is slower than the link.
            assert rate < 110e6
            for host in senders:
                payload, before = size * len(receivers), counted[host]
                assert payload < float(outputs[host][2]) - before < 1.1 * payload
            counted = [float(output[2]) for output in outputs]


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
        receiver, sender = (start(cluster, host, DATAGRAMS) for host in (1, 0))
        assert said(receiver) == "listening"
        assert said(sender, "30") == "1"
        cluster.cut(1)
        assert said(sender, "0.3") == "0"
        cluster.mend(1)
        assert said(sender, "30") == "1"
        cluster.set_rate(1, "1mbit")
        assert said(sender, "30") == "1"
        for host in (1, 0):
            command = ["tc", "-n", cluster.names[host], "qdisc", "show", "dev", "eth0"]
            shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            assert ("rate 1Mbit" in shown) == (host == 1), shown


def _until(condition: Callable[[], bool], seconds: float = DEADLOCK) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _of(pid: int) -> list[str]:
    """The namespaces of a run."""
    return [name for name in hosts.namespaces() if name.startswith(f"psgd-{pid}-")]


def _processes(pid: int) -> list[int]:
    """The processes on the hosts of a run."""
    return [process for name in _of(pid) for process in hosts.processes_in(name)]


@needs_hosts
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_leaves_nothing_behind(number: int) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "bench_cluster.py"), "--rates", "1gbit"]
    process = subprocess.Popen(
        [*command, "--models", "gpt-1M", "--methods", "plain", "--rounds", "1000"],
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        assert _until(lambda: process.poll() is not None or len(_processes(process.pid)) >= 2)
        assert len(_of(process.pid)) == 3  # two hosts and the switch
        ranks = _processes(process.pid)
        process.send_signal(number)
        assert process.wait(DEADLOCK) == (-9 if number == signal.SIGKILL else 128 + number)
    finally:
        process.kill()
        process.wait()
    if number == signal.SIGKILL:
        assert _until(lambda: not _processes(process.pid))  # the ranks ended by themselves
        with hosts.Hosts(2, "1gbit"):
            mine = _of(os.getpid())
            hosts.sweep()  # if no other run has done it
            assert _of(os.getpid()) == mine  # a living process keeps its namespaces
    assert _of(process.pid) == []
    assert _until(lambda: not any(os.path.exists(f"/proc/{rank}") for rank in ranks), 30)
