# SPDX-License-Identifier: BSD-3-Clause
"""A process group of torchft that ends, or that torchft makes in another way: nothing is lost."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("torchft")

from by_hand import LIMIT, Replica, shared_store
from torch._C._distributed_c10d import ErrorType, HashStore
from torchft.process_group import ProcessGroupWrapper

from support.on_ranks import on_ranks
from support.tensors import Tensors
from torch_powersgd import _backend
from torch_powersgd._core import _C
from torch_powersgd.integrations.torchft import (
    ProcessGroupPowerSGD,
    attached,
    process_group,
    versions,
)


def _fail(*_: Any) -> None:
    raise RuntimeError("a replica died")


@pytest.mark.parametrize("kind", ["ddp", "diloco"])
@on_ranks(2, backend="gloo")
def test_an_end_of_the_group_loses_nothing(rank: int, kind: str) -> None:
    """It ends in the middle of a step, or before the replicas have shared the factors."""
    _store, address = shared_store(rank)
    replica = Replica(rank, kind, "int8")
    group, manager = replica.group, replica.manager
    for quorum, end in enumerate((group.abort, group.shutdown, group._leave)):
        replica.join(address, quorum, [0, 1], new=[])
        for i in range(3):
            replica.step(i)
        before = replica.residuals()
        manager.before_commit = end
        replica.step(3, commit=False)
        manager.before_commit = lambda: None
        _check_same(replica, before)
        replica.step(4)
        assert "was aborted, or torchft made it in a way" in str(manager.error)
        manager.error = None
        _check_same(replica, before)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_C.ModelStates, "agree_with", _fail)
            with pytest.raises(RuntimeError, match="a replica died"):
                replica.join(address, 10 + quorum, [0, 1], new=[])
        _check_same(replica, before)
        replica.join(address, 20 + quorum, [0, 1], new=[])
        _check_same(replica, before)
    replica.step(5)
    assert not all(torch.equal(r, before[name]) for name, r in replica.residuals().items())
    replica.join(address, 30 + rank, [rank], new=[])
    assert "over 1 process:" in str(replica.compression)
    assert "Gbit/s" not in str(replica.compression)
    dist.barrier()  # rank 0 has the store


def _check_same(replica: Replica, before: Tensors) -> None:
    assert all(torch.equal(r, before[name]) for name, r in replica.residuals().items())
    assert replica.compression.stats()["compressed_calls"] > 0
    assert "at matrix rank 2 in int8" in str(replica.compression)


@on_ranks(2, backend="gloo")
def test_a_checkpoint_during_a_quorum_has_the_residuals(rank: int) -> None:
    """In torchft the main thread may save one while another makes the group."""
    _store, address = shared_store(rank)
    replica = Replica(rank, "ddp", "int8")
    replica.join(address, 1, [0, 1], new=[])
    for i in range(3):
        replica.step(i)
    before = replica.residuals()
    reads = []

    def reads_around(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            _check_same(replica, before)
            result = function(*arguments, **named)
            _check_same(replica, before)
            reads.append(function.__name__)
            return result

        return call

    module = sys.modules["torch_powersgd.attach"]
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in (
            (process_group, "_make_group"),
            (module, "agree"),
            (_C.ModelStates, "agree_with"),
            (attached, "make_reducer"),
        ):
            patch.setattr(owner, name, reads_around(getattr(owner, name)))
        replica.join(address, 2, [0, 1], new=[])
    assert reads == ["_make_group", "agree", "agree_with", "make_reducer"]
    _check_same(replica, before)


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "diloco"])
@on_ranks(2, backend="gloo")
def test_a_group_that_torchft_makes_in_an_unknown_way_drops_the_step(rank: int, kind: str) -> None:
    """What is attached would be summed alone, and divided by the number of replicas."""
    _store, address = shared_store(rank)
    replica = Replica(rank, kind, None)
    options = replica.group._options
    replica.group._pg = process_group._make_group(HashStore(), 0, 1, LIMIT, options)
    replica.participating = [0, 1]
    replica.step(0)
    assert "torchft made it in a way that ProcessGroupPowerSGD doesn't know" in str(
        replica.manager.error
    )
    assert replica.manager.step == 0


def test_an_error_that_no_call_raises_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL fails on the device, and only its watchdog notices."""
    group: Any = ProcessGroupPowerSGD()
    made = process_group._make_group(HashStore(), 0, 1, LIMIT, group._options)
    monkeypatch.setattr(process_group, "device_types", lambda: ["cpu", "cuda"])
    assert group.errored() is None
    errors = [made._get_backend(torch.device("cpu")).get_error]  # of Gloo
    errors += [lambda: ErrorType.SUCCESS, lambda: ErrorType.COMM_ERROR]
    group._pg = SimpleNamespace(_get_backend=lambda _: SimpleNamespace(get_error=errors.pop(0)))
    assert group.errored() is None
    assert group.errored() is None
    assert "COMM_ERROR" in str(group.errored())


def test_nccl_is_told_not_to_end_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    made, seen = _backend.create, dict[str, str]()

    def create(*arguments: Any) -> Any:
        seen.update(os.environ)
        return made(*arguments)

    monkeypatch.setattr(_backend, "create", create)
    monkeypatch.setenv("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")  # the user's stays
    before = dict(os.environ)
    process_group._make_group(HashStore(), 0, 1, LIMIT, ProcessGroupPowerSGD()._options)
    assert seen["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "2"
    assert seen["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
    assert dict(os.environ) == before


def test_another_torchft_is_refused_with_both_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    versions.check()
    for method in ("configure", "reconfigure"):
        later = lambda *_: None  # noqa: E731
        monkeypatch.setattr(ProcessGroupWrapper, method, later, raising=False)
    with pytest.raises(ImportError, match=r"needs torchft 0\.2\.0 and .*, but found torchft.* \d"):
        versions.check()
    monkeypatch.setitem(sys.modules, "torchft.local_sgd", None)
    monkeypatch.setattr(metadata, "version", _not_found)
    with pytest.raises(ImportError, match="but found no torchft: import of torchft.local_sgd"):
        versions.check()


def _not_found(name: str) -> None:
    raise metadata.PackageNotFoundError(name)
