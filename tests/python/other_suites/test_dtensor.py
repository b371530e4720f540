# SPDX-License-Identifier: BSD-3-Clause
"""DTensor and FSDP2 give gloo's bits over this backend.

The model comes from the helpers of torch's own tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
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


def _round_trip(rank: int, folder: str) -> list[list[bytes]]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found = []
    for trained in (True, False):
        model = _sharded(mesh, mixed=False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for i in range(2 if trained else 1):
            _step(model, optimizer, i)
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments}
        if trained:
            dcp.save(state, checkpoint_id=folder)
        else:
            dcp.load(state, checkpoint_id=folder)
            set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        _step(model, optimizer, 2)
        found.append([bits(p.full_tensor()) for p in model.parameters()])
    return found


def test_a_distributed_checkpoint_goes_on_to_the_bit(tmp_path: Path) -> None:
    """The default group is of this backend, and so are the collectives of the checkpoint."""
    for went_on, loaded in ranks.run(2, _round_trip, str(tmp_path)):
        assert loaded == went_on
