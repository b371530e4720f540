# SPDX-License-Identifier: BSD-3-Clause
"""Tensor parallelism in one dimension of a mesh, compressed data parallelism in another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import torch_powersgd as tp
from support import ranks
from support.paired_training import OPTIONS, STEPS, WARM_UP, digest, same
from support.synthetic import Ledger, gradient, own_part

TOLERANCE = 1e-5  # the identity in float32, as in test_identity
# Every all-reduce of activations has more elements than this: only its kind keeps it exact.
SMALL = tp.Options.hook_defaults(start_powerSGD_iter=0, matrix_approximation_rank=2, min_numel=16)

PLAN = {"0": ColwiseParallel(), "2": RowwiseParallel()}


def _mesh(replicate: Any, tensor: Any) -> DeviceMesh:
    return init_device_mesh(
        "cpu",
        (2, 2),
        mesh_dim_names=("replicate", "tensor"),
        backend_override={"replicate": replicate, "tensor": tensor},
    )


class _Trained:
    def __init__(self, mesh: DeviceMesh) -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(24, 36), nn.Tanh(), nn.Linear(36, 30))
        parallelize_module(net, mesh["tensor"], PLAN)
        self.ddp = DistributedDataParallel(net, device_mesh=mesh["replicate"])
        # These are this rank's shards. DDP replaces them by DTensors, which are not parameters.
        self.shards = dict(self.ddp.module.named_parameters())

    def backward(self, replica: int, i: int) -> list[torch.Tensor]:
        """Returns the loss and the input's gradient, which depend on all that tensor parallelism
        sends.
        """
        for shard in self.shards.values():
            shard.grad = None
        x = gradient((6, 24), "input", replica, i).requires_grad_()
        loss = self.ddp(x).square().mean()
        loss.backward()
        return [loss, x.grad]

    def gradients(self) -> dict[str, torch.Tensor]:
        return {
            name: shard.grad.clone()
            for name, shard in self.shards.items()
            if shard.grad is not None
        }


def _train(rank: int, tensor_backend: str | tuple[str, tp.Options]) -> tuple[Any, ...]:
    mesh = _mesh(("cpu:powersgd", OPTIONS), tensor_backend)
    attached, plain = _Trained(mesh), _Trained(_mesh("gloo", "gloo"))
    compression = tp.attach(attached.ddp)
    replica = mesh.get_local_rank("replicate")
    ledger, exact, equal, digests = Ledger(), [], [], []
    for i in range(STEPS):
        with torch.no_grad():
            for name, shard in plain.shards.items():
                shard.copy_(attached.shards[name])
        exact.append(same(attached.backward(replica, i), plain.backward(replica, i)))
        found, wanted = attached.gradients(), plain.gradients()
        equal.append(same(found.values(), wanted.values()))
        ledger.add(found, {name: g.double() for name, g in wanted.items()})
        with torch.no_grad():
            for name, shard in attached.shards.items():
                shard.sub_(found[name], alpha=0.05)
        digests.append(digest([*found.values(), *attached.shards.values()]))
    state = compression.state_dict()
    assert list(state) == [f"shard {mesh.get_local_rank('tensor')} of 2"]
    saved = own_part(state)["parameters"]
    residuals = {name: state["residual"].double() for name, state in saved.items()}
    assert set(residuals) == {"0.weight", "2.weight"}
    others = tp.stats(mesh.get_group("tensor")) if tensor_backend != "gloo" else {}
    return ledger.errors(residuals), exact, equal, digests, others.get("compressed_calls", 0)


def _attached_late(rank: int) -> None:
    trained = _Trained(_mesh(("cpu:powersgd", OPTIONS), "gloo"))
    trained.backward(0, 0)
    with pytest.raises(ValueError, match="first forward pass"):
        tp.attach(trained.ddp)


def test_attach_after_the_first_forward_pass_says_why_not() -> None:
    ranks.run(4, _attached_late, backend="gloo")


@pytest.mark.parametrize(
    "tensor_backend", ["gloo", ("cpu:powersgd", SMALL)], ids=["gloo", "powersgd"]
)
def test_beside_ddp(tensor_backend: str | tuple[str, tp.Options]) -> None:
    results = ranks.run(4, _train, tensor_backend, backend="gloo")
    for errors, exact, equal, _, compressed in results:
        assert all(exact)
        assert equal == [True] * WARM_UP + [False] * (STEPS - WARM_UP)
        assert max(errors.values()) < TOLERANCE, errors
        assert compressed == 0
    for first, second in ((0, 2), (1, 3)):  # these have the same shards
        assert results[first][3] == results[second][3]
