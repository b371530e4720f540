# SPDX-License-Identifier: BSD-3-Clause
"""attach and detach of modules that FSDP2 has sharded: what it says, and what it refuses."""

from __future__ import annotations

import contextlib
import io
import os
import textwrap
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import torch_powersgd as tp
from support.fsdp_pairs import (
    WORLD_SIZE,
    Net,
    both,
    make_pair,
    on_mesh,
    sharded,
    step,
)
from support.meshes import mesh_of
from support.paired_training import OPTIONS, WARM_UP
from support.refusals import refuses
from support.tensors import same


@both
@on_mesh
def test_a_detached_module_is_exact_until_it_is_attached_again(rank: int, native: bool) -> None:
    pair = make_pair(native=native)
    compression, exact = pair.compression, []
    for i in range(12):
        if i == 6:
            compression.detach()
        if i == 9:
            options = {"start_powerSGD_iter": 1}
            compression = tp.attach(pair.modules[0], options, group=compression.group)
            with pytest.raises(ValueError, match="already attached"):
                tp.attach(pair.modules[0], group=compression.group)
        exact.append(same(*(step(module, i) for module in pair.modules)))
    assert compression.stats()["steps"] == 3
    assert exact == [True] * WARM_UP + [False] * (6 - WARM_UP) + [True] * 4 + [False] * 2


@on_mesh
def test_attach_speaks_once_and_not_once_for_each_shard(rank: int) -> None:
    with contextlib.redirect_stderr(io.StringIO()) as heard:
        make_pair(native=True)
        make_pair(native=False)
    assert heard.getvalue().count("3 of 7 parameters") == (2 if rank == 0 else 0)


def _refuses(module: Any, message: str, group: dist.ProcessGroup | None = None) -> None:
    refuses(lambda: tp.attach(module, group=group), message)


@on_mesh
def test_refusals_say_why(rank: int) -> None:
    mesh = mesh_of(("cpu:powersgd", OPTIONS))
    replicate, shard = mesh.get_group("replicate"), mesh.get_group("shard")
    hooked = sharded(mesh["shard"])
    hooked.set_all_reduce_hook(lambda gradients: None)
    one = init_device_mesh("cpu", (WORLD_SIZE,), mesh_dim_names=("shard",))
    remedy = 'init_device_mesh(..., backend_override={"replicate": "cpu:powersgd"})'
    _refuses(sharded(mesh["shard"]), "group=mesh.get_group")
    _refuses(sharded(mesh["shard"]), "has 'gloo'. Call", shard)
    _refuses(sharded(mesh_of("gloo")), remedy)
    _refuses(sharded(mesh), "be left out", shard)
    _refuses(hooked, "already has an all-reduce hook", replicate)
    _refuses(sharded(one["shard"]), "no replicas", dist.group.WORLD)


@pytest.mark.parametrize("per_host", [2, WORLD_SIZE])
@on_mesh
def test_a_module_without_replicas_is_told_how_to_have_them(rank: int, per_host: int) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = str(per_host)
    one = sharded(init_device_mesh("cpu", (WORLD_SIZE,)))
    with pytest.raises(ValueError, match="no replicas") as refused:
        tp.attach(one)
    lines = textwrap.dedent(str(refused.value).partition("\n")[2])
    net = Net()
    names: dict[str, Any] = {"init_device_mesh": init_device_mesh, "fully_shard": fully_shard}
    if per_host == WORLD_SIZE:
        assert "(hosts, devices_per_host)" in lines
        names |= {"hosts": 2, "devices_per_host": 2}
    exec(lines, names | {"model": net})
    assert tp.attach(net, OPTIONS).group.size() == WORLD_SIZE // 2  # type: ignore[arg-type]


@on_mesh
def test_a_group_that_mixes_shards_is_refused_on_every_rank(rank: int) -> None:
    """Groups whose ranks hold different shards, and whose backend could compress them."""
    backend = ("cpu:powersgd", OPTIONS)
    mesh = mesh_of(backend, shard=backend)
    everyone = dist.new_group(backend="cpu:powersgd", pg_options=OPTIONS)
    shared = mesh_of("gloo", ("shard", 1), ("tensor", 2))
    tensor_group = dist.new_subgroups(2, backend="cpu:powersgd", pg_options=OPTIONS)[0]
    _refuses(
        sharded(mesh["shard"]),
        "but its rank 0 holds shard [0] and its rank 1 holds shard [1]",
        mesh.get_group("shard"),
    )
    _refuses(sharded(mesh["shard"]), "rank 1 holds shard [1]", everyone)
    _refuses(
        sharded(shared["shard"], shared["tensor"]),
        "holds shard [0, 0] and its rank 1 holds shard [0, 1]",
        tensor_group,
    )
    tp.attach(sharded(mesh["shard"]), group=mesh.get_group("replicate"))
