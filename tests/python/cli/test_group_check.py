# SPDX-License-Identifier: BSD-3-Clause
"""powersgd doctor --master: what keeps hosts from training together."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
from launcher.hosts import Hosts

from support import command_line, launch, ranks
from support.deadline import DEADLOCK
from support.shaped_links import needs_hosts
from torch_powersgd.cli import doctor, group_check

DOCTOR = [sys.executable, "-m", "torch_powersgd", "doctor"]


def _doctor(rank: int, port: int, hosts: list[str]) -> tuple[object, str]:
    os.environ.update(GLOO_SOCKET_IFNAME="lo", POWERSGD_HOST=hosts[rank])
    group_check.LONG_ENOUGH = 0.01
    socket.gethostname = lambda: f"name-of-{hosts[rank]}"
    arguments = "--hosts", "2", "--per-host", str(len(hosts) // 2)
    status, said = command_line.run("doctor", "--master", f"127.0.0.1:{port}", *arguments)
    return status, " ".join(said.split())


@pytest.mark.parametrize(
    ("hosts", "found"),
    [
        (["a", "b"], ""),
        (["a", "b", "b", "a"], "2 hosts of 2 processes: "),
    ],
)
def test_processes_train(hosts: list[str], found: str) -> None:
    port, count = launch.free_port(), len(hosts)
    for status, said in ranks.run(count, _doctor, port, hosts, backend=None):
        assert said.startswith(
            f"Waiting for {count} processes at 127.0.0.1 port {port} (300 seconds at most)."
        )
        assert f"These hosts can train together. network hosts {found}name-of-" in said
        assert (group_check.SHARED in said) == (count > 2)
        assert " round trip " in said
        assert " bandwidth " in said
        assert status == 0


@pytest.mark.parametrize(
    ("hosts", "found"),
    [
        (["a 1"] * 3, ["1 host of 3 processes: A"]),
        (["b 2", "a 1"], ["B, A"]),
        (["b 2", "a 1", "b 2", "a 1"], ["2 hosts of 2 processes: B, A", group_check.SHARED]),
        (["a 1", "a 1", "b 2"], ["2 hosts of 2 and 1 processes: A, B", group_check.UNEQUAL]),
        (["c 1", "a 1"], ["C, A", group_check.ONE_KERNEL]),
        (["named", "named too"], ["NAMED, NAMED"]),
    ],
)
def test_who_shares_a_link(hosts: list[str], found: list[str]) -> None:
    rows = group_check.described(hosts, [host.split()[0].upper() for host in hosts])
    assert [value for _, value in rows] == found


def test_torchrun_says_how_many_and_one_process_of_a_host_speaks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checked: list[object] = []

    def check(*arguments: object) -> group_check.Found:
        checked.append(arguments)
        return [], [("hosts", "found")]

    monkeypatch.setattr(doctor, "check", check)
    started = {"TORCHELASTIC_RUN_ID": "job", "MASTER_ADDR": "::1", "MASTER_PORT": "29400"}
    numbers = {"WORLD_SIZE": "12", "GROUP_WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "4"}
    for name, value in (started | numbers).items():
        monkeypatch.setenv(name, value)
    for rank, speaks in (("0", True), ("1", False)):
        monkeypatch.setenv("LOCAL_RANK", rank)
        status, said = command_line.run("doctor")
        assert status == 0
        assert bool(said) is speaks
    assert checked == [(("::1", 29400), 12, 300)] * 2


def _doctors_on(hosts: Hosts, **environment: str) -> list[str]:
    """What the doctors of all hosts say, which are two."""
    started = [
        subprocess.Popen(
            ["ip", "netns", "exec", name, *DOCTOR, "--master", "10.77.0.1"],
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in hosts.names
    ]
    return [" ".join(each.communicate(timeout=DEADLOCK)[0].split()) for each in started]


@needs_hosts
def test_a_host_that_listens_where_no_other_reaches_it() -> None:
    with Hosts(2, "100mbit") as hosts:
        first, second = _doctors_on(hosts, GLOO_SOCKET_IFNAME="lo")
        assert first == second
        assert " at 127.0.0.1 port " in first
        assert ": Connection refused. On " in first
        assert ", set GLOO_SOCKET_IFNAME to the interface between them. 2. " in first
        for said in _doctors_on(hosts, GLOO_SOCKET_IFNAME="eth0"):
            assert "These hosts can train together." in said


def test_a_host_that_never_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_check, "CONNECT_SECONDS", 0.1)
    address = ("127.0.0.1", launch.free_port())
    (problem,), rows = group_check.check(address, 3, 0.1)
    came = f"Only 1 of 3 processes came to 127.0.0.1 port {address[1]}: {socket.gethostname()}. "
    assert problem.startswith(came)
    assert not rows


def _hang_up(server: socket.socket) -> None:
    with contextlib.suppress(OSError):  # It is closed at the end.
        while True:
            server.accept()[0].close()


def test_another_program_at_the_port_of_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_check, "ANSWER", timedelta(seconds=0.3))
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=_hang_up, args=(server,), daemon=True).start()
        address = server.getsockname()
        (problem,), _ = group_check.check(address, 2, 0.1)
    assert problem.startswith(f"The group that met at 127.0.0.1 port {address[1]} failed: ")
    assert problem.endswith(". See what the others say.")


def test_a_master_without_an_address() -> None:
    (problem,), _ = group_check.check(("no-such-host.invalid", 29500), 2, DEADLOCK)
    assert problem.startswith("no-such-host.invalid port 29500 cannot be reached: ")
    assert "Run this on no-such-host.invalid too, and open TCP port 29500 there." in problem


@contextlib.contextmanager
def _refuses() -> Iterator[int]:
    yield launch.free_port()


@contextlib.contextmanager
def _drops() -> Iterator[int]:
    """A port whose queue is full: Linux then drops who knocks, as firewalls do."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server:
        address = server.getsockname()
        with socket.create_connection(address):
            yield address[1]


@pytest.mark.parametrize(("port", "why"), [(_refuses, "Connection refused"), (_drops, "timed out")])
@pytest.mark.parametrize("local", [True, False])
def test_a_closed_port_is_named(
    port: Callable[[], contextlib.AbstractContextManager[int]],
    why: str,
    local: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(group_check, "CONNECT_SECONDS", 0.3)
    monkeypatch.setattr(group_check, "is_loopback", lambda address: local)
    with port() as number:
        (problem,) = group_check._blocked("a", "b", [("127.0.0.1", number)])
    assert problem.startswith(f"a cannot reach b at 127.0.0.1 port {number}: {why}. ")
    remedies = "Open the TCP ports of b to a.", "On b, set GLOO_SOCKET_IFNAME to the interface"
    assert remedies[local] in problem


def test_a_master_that_comes_later_is_waited_for() -> None:
    port = launch.free_port()
    opened: list[socket.socket] = []
    later = threading.Timer(0.3, lambda: opened.append(socket.create_server(("127.0.0.1", port))))
    later.start()
    assert group_check._unreachable(("127.0.0.1", port), DEADLOCK) == ""
    later.join()
    opened[0].close()


def test_gloo_chooses_where_it_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with group_check.gloo_listening() as addresses:
        (address,) = addresses
        assert address[0] == "127.0.0.1"
        assert group_check._unreachable(address) == ""
    assert group_check._unreachable(address) == "Connection refused"


@pytest.mark.parametrize("master", ["node0:70000", "node0:http", ":29500"])
def test_a_master_of_another_form_is_refused(master: str) -> None:
    status, said = command_line.run("doctor", "--master", master)
    assert status == 2
    assert f"argument --master: it must be HOST or HOST:PORT, got {master!r}" in said


def test_a_bad_environment_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such0")
    status, said = command_line.run("doctor", "--master", "no-such-host.invalid")
    assert status == 1
    assert "GLOO_SOCKET_IFNAME names the interface no-such0" in said
    assert "no-such-host" not in said
