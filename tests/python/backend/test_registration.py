# SPDX-License-Identifier: BSD-3-Clause
"""The names of the backend, the groups that they make, and the backends that it wraps."""

from __future__ import annotations

import dataclasses
import importlib
import re
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend

import torch_powersgd as tp
from support import ranks
from support.groups import backend_of_world, compress, world
from support.on_ranks import on_ranks
from support.synthetic import gradient
from support.tensors import sum_of
from torch_powersgd import _core
from torch_powersgd._backend import _create_inner
from torch_powersgd._core import _C
from torch_powersgd.group_backends import find_backend

OPTIONS = tp.Options.hook_defaults(start_powerSGD_iter=0)
CPU = torch.device("cpu")


def _compresses(rank: int, group: dist.ProcessGroup | None = None) -> bool:
    """True if the group compresses a matrix. It must sum the matrix and an exact tensor in any
    case.
    """
    size = dist.get_world_size(group)
    members = dist.get_process_group_ranks(group or world())
    matrix = gradient([64, 64], rank)
    compress(matrix, group=group)
    exact = sum_of(gradient([64, 64], member) for member in members)
    dist.all_reduce(count := torch.ones(1, dtype=torch.int64), group=group)
    assert count.item() == size
    assert torch.isfinite(matrix).all()
    different = (matrix - exact).norm() / exact.norm()
    assert different < 1e-6 or different > 0.1
    return bool(different > 0.1)


@pytest.mark.parametrize(
    ("name", "kind", "compresses"),
    [
        ("cpu:powersgd", "BackendPowerSGD", True),
        ("powersgd", "BackendPowerSGD", True),
        ("cpu:powersgd,cuda:powersgd", "BackendPowerSGD", True),
        ("cpu:gloo,cuda:powersgd", "ProcessGroupGloo", False),
    ],
)
@on_ranks(backend=None)
def test_init_process_group(rank: int, name: str, kind: str, compresses: bool) -> None:
    ranks.init_group(name, OPTIONS)
    assert type(backend_of_world()).__name__ == kind
    assert _compresses(rank) == compresses


@on_ranks(op_timeout=41)
def test_what_the_backend_says_of_itself(rank: int) -> None:
    backend = backend_of_world()
    assert isinstance(backend, Backend)
    assert backend.name() == "powersgd"
    assert (backend.rank(), backend.size()) == (rank, 2)
    assert "powersgd" in dist.get_backend_config()
    assert dist.is_backend_available("powersgd")
    assert backend.options._timeout == timedelta(seconds=41)
    assert tp.stats()["steps"] == 0
    dist.barrier()


@on_ranks()
def test_new_group(rank: int) -> None:
    assert not _compresses(rank), "the default group has the default options"
    for name in ("cpu:powersgd", "powersgd"):
        group = dist.new_group(backend=name, pg_options=OPTIONS)
        assert isinstance(group._get_backend(CPU), _C.BackendPowerSGD)
        assert _compresses(rank, group)
        assert tp.stats(group)["compressed_calls"] == 1
    without = dist.new_group(backend="cpu:powersgd")
    assert not _compresses(rank, without), "pg_options are not inherited"
    gloo = dist.new_group(backend="gloo")
    assert not _compresses(rank, gloo)
    with pytest.raises(ValueError, match="no powersgd backend"):
        tp.stats(gloo)
    assert tp.stats()["compressed_calls"] == 0


@on_ranks(backend=None)
def test_debug_level_detail(rank: int) -> None:
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    ranks.init_group("cpu:powersgd", OPTIONS)
    wrapper = backend_of_world()
    assert not isinstance(wrapper, _C.BackendPowerSGD)
    assert isinstance(find_backend(None, CPU), _C.BackendPowerSGD)
    assert _compresses(rank)
    assert tp.stats()["compressed_calls"] == 1
    # The wrapper still finds ranks that do not make the same call.
    with pytest.raises(RuntimeError, match="(?i)mismatch"):
        dist.all_reduce(torch.ones(3 + rank))


# Inner backends.

made: list[Backend] = []


def _create_gloo(
    store: dist.Store, rank: int, size: int, timeout: timedelta
) -> dist.ProcessGroupGloo:
    backend = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
    made.append(backend)
    return backend


def _create_gloo_extended(options: Any, pg_options: object) -> dist.ProcessGroupGloo:
    assert pg_options is None
    return _create_gloo(options.store, options.group_rank, options.group_size, options.timeout)


@pytest.mark.parametrize(
    ("inner", "extended", "expected"),
    [("auto", False, 0), ("gloo", False, 0), ("plugin", False, 2), ("plugin", True, 2)],
)
@on_ranks(backend=None)
def test_inner(rank: int, inner: str, extended: bool, expected: int) -> None:
    """A plugin makes two backends: one passes calls through, and the engine has one."""
    creator = _create_gloo_extended if extended else _create_gloo
    dist.Backend.register_backend("plugin", creator, extended_api=extended, devices=["cpu"])
    ranks.init_group("cpu:powersgd", dataclasses.replace(OPTIONS, inner=inner))
    assert _compresses(rank)
    assert len(made) == expected


@pytest.mark.skipif(dist.is_nccl_available(), reason="this torch has nccl")
@on_ranks(backend=None)
def test_an_inner_that_this_torch_lacks_is_an_error_on_every_rank(rank: int) -> None:
    with pytest.raises(ValueError, match="inner must be .*torch has, of .*'gloo'.*, got 'nccl'"):
        ranks.init_group("cpu:powersgd", tp.Options.hook_defaults(inner="nccl"))


class _FakeNccl:
    class Options:
        def __init__(self, is_high_priority_stream: bool = False) -> None:
            self.is_high_priority_stream = is_high_priority_stream

    def __init__(self, store: object, rank: int, size: int, options: Options) -> None:
        self.options = options


def test_nccl_runs_on_a_stream_of_high_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", _FakeNccl, raising=False)
    group: Any = SimpleNamespace(
        group_rank=0,
        group_size=2,
        timeout=timedelta(seconds=7),
        global_ranks_in_group=[],
        group_id="group",
    )
    made: Any = _create_inner("nccl", dist.HashStore(), group)
    assert vars(made.options) == {
        "is_high_priority_stream": True,
        "_timeout": timedelta(seconds=7),
        "global_ranks_in_group": [0, 1],
        "group_name": "group",
    }


# Import.


def test_another_release_of_torch_is_refused_at_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.0.1+cpu")
    with pytest.raises(
        ImportError, match=f"built against torch {re.escape(_C.torch_version)}"
    ) as it:
        importlib.reload(_core)
    assert "loaded by torch 2.0.1+cpu. Install the wheel for this torch" in str(it.value)


def test_another_build_of_the_same_release_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", f"{_C.torch_version.split('+')[0]}+local")
    importlib.reload(_core)
