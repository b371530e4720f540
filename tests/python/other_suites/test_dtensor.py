# SPDX-License-Identifier: BSD-3-Clause
"""DTensor and FSDP2 give gloo's bits over this backend.

The model comes from the helpers of torch's own tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

import torch_powersgd as tp
from support import ranks
from support.tensors import bits

pytest.importorskip("expecttest", reason="the helpers of torch's tests need expecttest")

# A reduction would be compressed from the first step on, if it were one of gradients.
OPTIONS = tp.Options.hook_defaults(start_powerSGD_iter=0, matrix_approximation_rank=1, min_numel=16)
BACKENDS: tuple[Any, ...] = ("gloo", ("cpu:powersgd", OPTIONS))
PLACEMENTS: tuple[Placement, ...] = (Replicate(), Shard(0), Shard(1), Partial("sum"))


def _mesh(backend: Any) -> DeviceMesh:
    return init_device_mesh(
        "cpu",
        (dist.get_world_size(),),
        mesh_dim_names=("world",),
        backend_override={"world": backend},
    )


def _redistributed(mesh: DeviceMesh) -> Iterator[bytes]:
    torch.manual_seed(dist.get_rank())
    for shape in ((12, 9), (5, 7)):
        for source in PLACEMENTS:
            for target in PLACEMENTS:
                # A change to Partial from another placement is none that DTensor has.
                if target == PLACEMENTS[-1] and source != target:
                    continue
                local = torch.randn(shape, requires_grad=True)
                tensor = DTensor.from_local(local, mesh, [source], run_check=False)
                moved = tensor.redistribute(mesh, [target])
                moved.to_local().square().sum().backward()
                assert local.grad is not None
                yield bits(moved.to_local())
                yield bits(local.grad)


def _dtensors(rank: int) -> list[list[bytes]]:
    found = []
    for backend in BACKENDS:
        mesh = _mesh(backend)
        found.append([*_redistributed(mesh)])
    assert tp.stats(mesh.get_group())["compressed_calls"] == 0
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_dtensors_have_the_bits_of_gloo(world_size: int) -> None:
    for over_gloo, ours in ranks.run(world_size, _dtensors, backend="gloo"):
        assert len(over_gloo) > 50
        assert ours == over_gloo


def _sharded(mesh: DeviceMesh, mixed: bool) -> Any:
    from torch.testing._internal.distributed._tensor.common_dtensor import ModelArgs, Transformer

    torch.manual_seed(0)
    model: Any = Transformer(ModelArgs(dropout_p=0.0, use_attn_mask=False))
    mixed_policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    policy = mixed_policy if mixed else MixedPrecisionPolicy()
    for unit in (*model.layers, model):
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    return model


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, i: int) -> None:
    generator = torch.Generator().manual_seed(100 * dist.get_rank() + i)
    tokens = torch.randint(0, 8, (4, 8), generator=generator)
    optimizer.zero_grad()
    model(tokens).square().mean().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def _steps(rank: int, mixed: bool) -> list[list[bytes]]:
    found = []
    for backend in BACKENDS:
        model = _sharded(_mesh(backend), mixed)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for i in range(4):
            _step(model, optimizer, i)
        found.append([bits(p.full_tensor()) for p in model.parameters()])
    return found


@pytest.mark.parametrize(("world_size", "mixed"), [(2, True), (3, False)])
def test_sharded_steps_have_the_bits_of_gloo(world_size: int, mixed: bool) -> None:
    """A model without replicas sends no gradient that could be compressed."""
    results = ranks.run(world_size, _steps, mixed, backend="gloo")
    for over_gloo, ours in results:
        assert ours == over_gloo
        assert ours == results[0][1]
