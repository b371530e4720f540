# SPDX-License-Identifier: BSD-3-Clause
"""POWERSGD_PORTS: a group listens on these ports alone, and says what is wrong with them."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys

import pytest
import torch.distributed as dist

from support import launch, ranks
from support.deadline import DEADLOCK
from support.on_ranks import on_ranks
from support.synthetic import SHAPES, make_attached, train
from torch_powersgd import ports

IMPORTING = """
import torch.distributed as dist
import torch_powersgd
print(dist.TCPStore("localhost", 0, is_master=True).port)
"""


def _listening() -> set[int]:
    """The ports that this process listens on."""
    found = set()
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as copy:
            if copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                name = copy.getsockname()
                found |= {name[1]} if isinstance(name, tuple) else set()
    return found


@pytest.fixture
def first() -> int:
    """A port that was free, with a hundred behind it: no system chooses one of the last."""
    return launch.free_port()


@on_ranks(backend=None)
def test_the_ranks_of_a_host_share_them(rank: int, first: int) -> None:
    os.environ[ports.VARIABLE] = f"{first}-{first + 99}"
    ranks.init_group("cpu:powersgd", {"matrix_approximation_rank": 2})
    inner = _listening()
    train(make_attached(SHAPES, {"start_powerSGD_iter": 0}), range(1))
    with_engine = _listening()
    assert inner < with_engine <= set(range(first, first + 100))


@on_ranks(1, backend=None)
def test_they_can_be_unset(rank: int, first: int) -> None:
    for value in (f"{first}-{first}", None):
        if value:
            os.environ[ports.VARIABLE] = value
        else:
            del os.environ[ports.VARIABLE]
        ports.apply()
        store = dist.TCPStore("localhost", 0, is_master=True)
        assert (store.port == first) is bool(value)


def test_the_import_applies_them_to_all_of_torch(first: int) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", IMPORTING],
        env=os.environ | {ports.VARIABLE: f"{first}-{first}"},
        capture_output=True,
        text=True,
        timeout=DEADLOCK,
    )
    assert ended.stdout.split() == [str(first)], ended.stderr


BAD = ["", "29600", "29600-", "29699-29600", "80-90", "60000-70000", "0-0", " 29600-29699", "a-b"]


@pytest.mark.parametrize("value", BAD)
def test_bad_ports_are_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ports.VARIABLE, value)
    with pytest.raises(ValueError, match="POWERSGD_PORTS: ports must be .* 1024-65535") as raised:
        ports.apply()
    assert repr(value) in str(raised.value)


@on_ranks(backend=None)
def test_bad_ports_of_one_rank_are_an_error_on_every_rank(rank: int) -> None:
    if rank == 1:
        os.environ[ports.VARIABLE] = "29600"
    with pytest.raises(ValueError, match="rank 1: .*POWERSGD_PORTS.*got '29600'"):
        ranks.init_group("cpu:powersgd")


@on_ranks(1, backend=None)
def test_ports_that_are_all_taken_are_named(rank: int) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        os.environ[ports.VARIABLE] = f"{port}-{port}"
        with pytest.raises(RuntimeError, match=f"no port in POWERSGD_PORTS={port}-{port} is free"):
            ranks.init_group("cpu:powersgd")
