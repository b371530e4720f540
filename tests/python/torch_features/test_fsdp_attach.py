# SPDX-License-Identifier: BSD-3-Clause
"""attach and detach of modules that FSDP2 has sharded: what it says, and what it refuses."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import torch_powersgd as tp
from support import ranks
from support.fsdp_pairs import REPLICAS, SHARDS, backward, make_modules, mesh_of, sharded
from support.paired_training import OPTIONS, WARM_UP, same

WORLD_SIZE = REPLICAS * SHARDS


def _detached(rank: int, native: bool) -> list[bool]:
    attached, plain, compression = make_modules(native)
    exact = []
    for i in range(12):
        if i == 6:
            compression.detach()
        if i == 9:
            options = {"start_powerSGD_iter": 1}
            compression = tp.attach(attached, options, group=compression.group)
            with pytest.raises(ValueError, match="attached already"):
                tp.attach(attached, group=compression.group)
        exact.append(same(*(backward(m, rank, i) for m in (attached, plain))))
    assert compression.stats()["steps"] == 3
    return exact


@pytest.mark.parametrize("native", [False, True])
def test_a_detached_module_is_exact_until_it_is_attached_again(native: bool) -> None:
    for exact in ranks.run(WORLD_SIZE, _detached, native, backend="gloo"):
        assert exact == [True] * WARM_UP + [False] * 3 + [True] * 4 + [False] * 2


def _attach_lines(rank: int) -> str:
    with contextlib.redirect_stderr(io.StringIO()) as heard:
        make_modules(native=True)
        make_modules(native=False)
    return heard.getvalue()


def test_attach_says_once_what_it_will_do_and_not_once_for_each_shard() -> None:
    first, *others = ranks.run(WORLD_SIZE, _attach_lines, backend="gloo")
    assert first.count("3 of 7 parameters") == 2
    assert others == [""] * (WORLD_SIZE - 1)


def _refused(rank: int) -> list[str]:
    mesh = mesh_of(("cpu:powersgd", OPTIONS))
    replicate, shard = mesh.get_group("replicate"), mesh.get_group("shard")
    hooked = sharded(mesh["shard"])
    hooked.set_all_reduce_hook(lambda gradients: None)
    one = init_device_mesh("cpu", (WORLD_SIZE,), mesh_dim_names=("shard",))
    messages = []
    for module, group in (
        (sharded(mesh["shard"]), None),
        (sharded(mesh["shard"]), shard),
        (sharded(mesh_of("gloo")), None),
        (sharded(mesh), shard),
        (hooked, replicate),
        (sharded(one["shard"]), dist.group.WORLD),
    ):
        with pytest.raises(ValueError) as caught:  # noqa: PT011 - the messages are compared below
            tp.attach(module, OPTIONS, group=group)
        messages.append(str(caught.value))
    return messages


def test_refusals_say_why() -> None:
    on_gloo = "has 'gloo'. Use"
    remedy = 'init_device_mesh(..., backend_override={"replicate": "cpu:powersgd"})'
    parts = ["group=mesh.get_group", on_gloo, remedy, "be left out", "set already", "no replicas"]
    for messages in ranks.run(WORLD_SIZE, _refused, backend="gloo"):
        for message, part in zip(messages, parts, strict=True):
            assert part in message


def _wrong_group(rank: int) -> list[str]:
    """Groups whose ranks hold different shards, and whose backend could compress them."""
    backends: Any = dict.fromkeys(("replicate", "shard"), ("cpu:powersgd", OPTIONS))
    mesh = init_device_mesh(
        "cpu",
        (REPLICAS, SHARDS),
        mesh_dim_names=("replicate", "shard"),
        backend_override=backends,
    )
    everyone = dist.new_group(backend="cpu:powersgd", pg_options=OPTIONS)
    shard_group = mesh.get_group("shard")
    shared = mesh_of("gloo", ("shard", 1), ("tensor", 2))
    tensor_group = dist.new_subgroups(2, backend="cpu:powersgd", pg_options=OPTIONS)[0]
    messages = []
    for module, group in (
        (sharded(mesh["shard"]), shard_group),
        (sharded(mesh["shard"]), everyone),
        (sharded(shared["shard"], shared["tensor"]), tensor_group),
    ):
        with pytest.raises(ValueError) as caught:  # noqa: PT011 - the messages are compared below
            tp.attach(module, group=group)
        messages.append(str(caught.value))
    right = sharded(mesh["shard"])
    tp.attach(right, group=mesh.get_group("replicate"))
    return messages


def test_a_group_that_mixes_shards_is_refused_on_every_rank() -> None:
    for messages in ranks.run(WORLD_SIZE, _wrong_group, backend="gloo"):
        for message in messages:
            assert "hold the same shard" in message
            assert 'get_group("replicate")' in message
        shard, everyone, tensor = messages
        assert "Rank 0 of the given group holds shard [0] and rank 1 holds shard [1]" in shard
        assert "rank 1 holds shard [1]" in everyone
        assert "holds shard [0, 0] and rank 1 holds shard [0, 1]" in tensor
