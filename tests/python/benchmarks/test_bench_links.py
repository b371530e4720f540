# SPDX-License-Identifier: BSD-3-Clause
"""Shaped links are as slow as stated, and no process or namespace is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.repository import ROOT

pytest.importorskip("matplotlib")
pytest.importorskip("rich")

from cluster import hosts, mps

from support.shaped_links import needs_hosts, needs_taps

BENCHMARKS = ROOT / "benchmarks"


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
        connection.sendall(bytes(size))
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)  # returns once all has arrived
def receive():
    with listener.accept()[0] as connection:
        while part := connection.recv(1 << 16):
            times.append((time.monotonic(), len(part)))
times, threads = [], []
if me in senders: threads += [threading.Thread(target=send, args=(to,)) for to in receivers]
if me in receivers: threads += [threading.Thread(target=receive) for _ in senders]
for thread in threads: thread.start()
for thread in threads: thread.join()
sent = open("/sys/class/net/eth0/statistics/tx_bytes").read()
print(min(times)[0] if times else 0, max(times)[0] if times else 0, int(sent))
"""


@needs_hosts
@pytest.mark.parametrize(
    ("senders", "receivers"), [([0], [1, 2]), ([1, 2], [0])], ids=["sends", "receives"]
)
@pytest.mark.parametrize("delay_ms", [0, pytest.param(1, marks=needs_taps)])
def test_a_link_is_as_slow_as_it_says(
    senders: list[int], receivers: list[int], delay_ms: float
) -> None:
    """Both directions have the rate, and the interface counts the bytes that it sends."""
    size = 8_000_000
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with hosts.Hosts(3, "100mbit", delay_ms) as cluster:
        processes = []
        for host in range(3):
            arguments = [str(host), str(senders), str(receivers), str(size)]
            command = [sys.executable, "-c", TRAFFIC, *arguments]
            processes.append(cluster.start(host, command, os.environ, **pipes))
        for process in processes:
            assert process.stdout
            assert process.stdout.readline() == "listening\n"
        for process in processes:
            assert process.stdin
            process.stdin.write("\n")
            process.stdin.flush()
        outputs = [process.communicate(timeout=60)[0] for process in processes]
    said = [[float(word) for word in output.split()] for output in outputs]
    first = min(said[host][0] for host in receivers)
    last = max(said[host][1] for host in receivers)
    rate = 2 * size * 8 / (last - first)
    # The token bucket and the sockets' buffers pass 2 % of it at once.
    assert rate < 110e6
    for host in senders:
        payload = size * len(receivers)
        assert payload < said[host][2] < 1.1 * payload


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
    print(min(times), connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16))
"""


@needs_hosts
@needs_taps
def test_a_delay_is_no_shorter_than_it_says() -> None:
    """Both directions have the delay, and the process that makes it ends with the hosts."""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with hosts.Hosts(2, None, delay_ms=20, congestion_control="reno") as cluster:
        processes = [
            cluster.start(host, [sys.executable, "-c", ECHO, str(host)], os.environ, **pipes)
            for host in range(2)
        ]
        assert processes[1].stdout
        assert processes[1].stdout.readline() == "listening\n"
        seconds, congestion_control = processes[0].communicate("\n", timeout=60)[0].split()
    assert float(seconds) >= 2 * 20e-3
    assert "reno" in congestion_control
    assert _of(os.getpid()) == ([], [])


def _until(condition: Callable[[], bool], seconds: float = 120) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _of(pid: int) -> tuple[list[str], list[int]]:
    """The namespaces and the processes of a run."""
    prefix = f"psgd-{pid}-"
    names = [name for name in hosts.namespaces() if name.startswith(prefix)]
    return names, [process for process, name in hosts.marked() if name.startswith(prefix)]


@needs_hosts
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_leaves_nothing_behind(number: int) -> None:
    command = [sys.executable, str(BENCHMARKS / "bench_cluster.py"), "--quick"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
        # A shell's background jobs ignore it, and so do their children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert _until(lambda: process.poll() is not None or len(_of(process.pid)[1]) >= 2)
        assert len(_of(process.pid)[0]) == 3  # two hosts and the switch
        process.send_signal(number)
        assert process.wait(60) == (-9 if number == signal.SIGKILL else 128 + number)
    finally:
        process.kill()
        process.wait()
    if number == signal.SIGKILL:
        assert _until(lambda: not _of(process.pid)[1], 30)  # the ranks ended by themselves
        assert len(_of(process.pid)[0]) == 3
        with hosts.Hosts(2, "1gbit"):
            mine = _of(os.getpid())[0]
            swept = hosts.sweep()
            assert _of(os.getpid())[0] == mine  # a living process keeps its files
        assert len([name for name in swept if name.startswith(f"psgd-{process.pid}-")]) == 3
    assert _of(process.pid) == ([], [])


# Stands in for NVIDIA's program. With -d it leaves a daemon behind. Otherwise it reads commands,
# and obeys them unless it was told not to.
FAKE_CONTROL = """#!/bin/sh
if [ "$1" = -d ]; then
  sleep 1000 </dev/null >/dev/null 2>&1 &
  echo $! >"$CUDA_MPS_PIPE_DIRECTORY/daemon"
elif [ -z "$DEAF" ]; then
  read command && [ "$command" = quit ] && kill "$(cat "$CUDA_MPS_PIPE_DIRECTORY/daemon")"
fi
"""


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")
@pytest.mark.parametrize("deaf", ["", "1"], ids=["quits", "is killed"])
def test_the_mps_daemon_ends(deaf: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    control = tmp_path / mps.CONTROL
    control.write_text(FAKE_CONTROL)
    control.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("DEAF", deaf)

    def daemons() -> list[int]:
        return [pid for pid, name in hosts.marked() if name == hosts.owner()]

    folders = []

    def serve_until_interrupted() -> None:
        with mps.service() as variables:
            folders.append(Path(variables["CUDA_MPS_PIPE_DIRECTORY"]))
            daemon = int((folders[0] / "daemon").read_text())
            # A process that has just begun has no environment yet by which it can be found.
            assert _until(lambda: daemons() == [daemon], 30)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        serve_until_interrupted()
    assert daemons() == []
    assert not folders[0].exists()
