# SPDX-License-Identifier: BSD-3-Clause
"""python -m torch_powersgd doctor --listen and --peer: what is blocked between two hosts."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import torch_powersgd.__main__
from support import launch
from support.deadline import DEADLOCK
from torch_powersgd.tools import interfaces, line, peer

HERE = peer.Host("a", "10.0.0.1", "10.0.0.2", "10.0.0.1", "eth0", [7], "7-9", "token of a")
THERE = peer.Host("b", "10.0.0.2", "10.0.0.1", "10.0.0.2", "eth1", [8], "7-9", "token of b")


def _doctors(port: int, blocks: bool) -> None:
    """Runs --listen on rank 0, which may listen on no other port, and --peer on rank 1."""
    if os.environ["RANK"] == "0":
        if blocks:
            peer._servers = _deaf
        assert peer.listen(port) is not blocks
        return
    connected = False
    while not connected:  # The first connection is a stranger's, who goes without a word.
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port)).close()
            connected = True
        time.sleep(0.02)
    assert peer.visit("127.0.0.1", port) is not blocks


def _deaf(address: str) -> Iterator[socket.socket]:
    """A socket that has a port and refuses connections."""
    deaf = socket.socket()
    deaf.bind((address, 0))
    yield deaf


def _said(folder: Path, blocks: bool) -> list[str]:
    """What the one that listens says, and the other one."""
    outputs = launch.run(2, _doctors, launch.free_port(), blocks, folder=folder)
    return [" ".join(output.stdout.split()) for output in outputs]


def test_both_sides_hear_that_all_is_well(tmp_path: Path) -> None:
    for said in _said(tmp_path, blocks=False):
        assert "These hosts can train together. link" in said
        assert "store port" in said
        assert " ms bandwidth " in said
        assert "bit/s to the other" in said
        assert "here on port" in said


def test_hosts_with_one_name_are_told_apart() -> None:
    assert peer._told_apart(HERE, THERE) == (HERE, THERE)
    mine, theirs = peer._told_apart(HERE, dataclasses.replace(THERE, name="a"))
    assert (mine.name, theirs.name) == ("a (10.0.0.1)", "a (10.0.0.2)")


@pytest.mark.parametrize(
    ("address", "shown"),
    [("10.0.0.1", "10.0.0.1"), ("127.0.1.1", "name"), ("fe80::1", "name"), ("", "name")],
)
def test_the_other_host_is_told_an_address(
    address: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer, "gloo_address", lambda: address)
    monkeypatch.setattr(socket, "gethostname", lambda: "name")
    assert peer._reached_as() == shown


def test_both_sides_hear_of_a_blocked_port(tmp_path: Path) -> None:
    listener, visitor = _said(tmp_path, blocks=True)
    assert "connected and left" in listener
    for said in (listener, visitor):
        assert "Connection refused. Open TCP ports" in said
        assert "(net.ipv4.ip_local_port_range) of" in said
        problems = said.split("These hosts cannot train together yet:")[1].split(" link ")[0]
        assert " 2. " not in problems, "the other way is open"


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


@contextlib.contextmanager
def _is_silent() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@contextlib.contextmanager
def _is_another_program() -> Iterator[int]:
    def answer(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection:
            connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=answer, args=(server,))
        thread.start()
        yield server.getsockname()[1]
        thread.join()


@pytest.mark.parametrize(
    ("port", "message"),
    [
        (_refuses, "refuses the connection. Run powersgd doctor --listen there"),
        (_drops, "does not answer within 0.3 seconds. Open TCP port"),
        (_is_silent, "is open, but no doctor there finished the check (timed out)"),
        (_is_another_program, "is open, but no doctor there finished the check (Expecting value"),
    ],
)
def test_a_store_that_cannot_be_reached(
    port: Callable[[], contextlib.AbstractContextManager[int]],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    seconds = 0.3 if port in (_drops, _is_silent) else DEADLOCK
    monkeypatch.setattr(peer, "CONNECT_SECONDS", seconds)
    monkeypatch.setattr(line, "ANSWER_SECONDS", seconds)
    with port() as number:
        assert not peer.visit("127.0.0.1", number)
    assert message in " ".join(capsys.readouterr().out.split())


def test_a_host_without_an_address(capsys: pytest.CaptureFixture[str]) -> None:
    assert not peer.visit("no-such-host.invalid", 1)
    assert "no-such-host.invalid has no address here" in capsys.readouterr().out


def test_nobody_comes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(peer, "WAIT_SECONDS", 0.1)
    assert not peer.listen(0)
    assert "No host connected to port" in capsys.readouterr().out


def test_an_interrupt_of_the_wait_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(port: int) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(peer, "listen", interrupted)
    monkeypatch.setattr(sys, "argv", ["torch_powersgd", "doctor", "--listen"])
    assert torch_powersgd.__main__.main() == 130


def test_a_port_that_is_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("", 0)) as server:
        assert not peer.listen(server.getsockname()[1])
    assert "Address already in use. Stop what uses it" in " ".join(capsys.readouterr().out.split())


def test_another_host_at_the_address_is_not_taken_for_the_peer() -> None:
    with next(peer._servers("127.0.0.1")) as server:
        threading.Thread(target=peer._greet, args=(server, "token of c"), daemon=True).start()
        port = server.getsockname()[1]
        there = dataclasses.replace(THERE, listens="127.0.0.1", own="127.0.0.1", ports=[port])
        assert peer._blocked(there) == [(port, "another host answers")]
        assert peer._blocked(dataclasses.replace(there, token="token of c")) == []


@pytest.mark.parametrize(
    ("there", "sees", "remedy"),
    [
        (THERE, "10.0.0.2", "Open TCP ports 7-9 of b to a."),
        (THERE, "203.0.113.9", "b is behind NAT, as 203.0.113.9. Join both to a VPN"),
        (
            dataclasses.replace(THERE, listens="127.0.1.1"),
            "10.0.0.2",
            "On b, export GLOO_SOCKET_IFNAME=eth1.",
        ),
    ],
)
def test_the_remedy_fits_the_cause(there: peer.Host, sees: str, remedy: str) -> None:
    here = dataclasses.replace(HERE, sees=sees)
    blocked = peer._blocked(there) if interfaces.is_loopback(there.listens) else [(8, "timed out")]
    (problem,) = peer._refused(here, there, blocked)
    assert f"a cannot reach b on {there.listens} port 8: " in problem.what
    assert remedy in str(problem)


def test_ports_that_fail_alike_are_one_problem() -> None:
    blocked = [(8, "timed out"), (9, "timed out"), (10, "Connection refused")]
    first, second = peer._refused(HERE, THERE, blocked)
    assert "port 8 and 9: timed out" in first.what
    assert "port 10: Connection refused" in second.what


def test_a_range_without_a_free_port_is_a_problem() -> None:
    (problem,) = peer._refused(HERE, dataclasses.replace(THERE, ports=[]), [])
    assert "b cannot listen on 10.0.0.2: no port in 7-9 is free" in problem.what


def test_far_hosts_are_told_of_local_steps(capsys: pytest.CaptureFixture[str]) -> None:
    assert peer._print([], [], trip=0.1)
    assert "waits 100 ms or more" in " ".join(capsys.readouterr().out.split())


def test_interfaces_and_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert interfaces.gloo_address() == interfaces.address_of("lo") == "127.0.0.1"
    assert interfaces.interface_of("127.0.0.1") == "lo"
    assert interfaces.address_of("no-such0") == interfaces.interface_of("192.0.2.99") == ""


@pytest.mark.parametrize(
    ("resolved", "expected"),
    [
        ([], "127.0.0.1"),
        (["192.0.2.99"], "127.0.0.1"),  # of no interface
        (["192.0.2.99", "127.0.1.1"], "127.0.1.1"),
        (["::1", "127.0.1.1"], "::1"),
    ],
)
def test_gloo_listens_on_an_address_that_the_host_has(
    resolved: list[str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def addresses(*_: object, **__: object) -> list[Any]:
        if not resolved:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [info for each in resolved for info in real(each, None, type=socket.SOCK_STREAM)]

    real = socket.getaddrinfo
    if expected == "::1" and not Path("/proc/net/if_inet6").exists():
        pytest.skip("needs IPv6")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(socket, "getaddrinfo", addresses)
    assert interfaces.gloo_address() == expected
    there = dataclasses.replace(THERE, listens=expected)
    (problem,) = peer._refused(HERE, there, peer._blocked(there))
    assert "export GLOO_SOCKET_IFNAME=eth1" in problem.remedy, "only this host reaches it"
    with next(peer._servers(expected)) as server:
        assert server.getsockname()[0] == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--peer", "node0:70000"], "argument --peer: a port must be 1 to 65535, got '70000'"),
        (["--listen", "http"], "argument --listen: a port must be 1 to 65535, got 'http'"),
        (["--listen", "--peer", "a"], "not allowed with argument --listen"),
    ],
)
def test_bad_arguments(
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["torch_powersgd", "doctor", *arguments])
    with pytest.raises(SystemExit):
        torch_powersgd.__main__.main()
    assert message in capsys.readouterr().err


def test_a_bad_environment_is_named_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["torch_powersgd", "doctor", "--listen"])
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such0")
    assert torch_powersgd.__main__.main() == 1
    assert "GLOO_SOCKET_IFNAME names the interface no-such0" in capsys.readouterr().out
