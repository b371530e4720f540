# SPDX-License-Identifier: BSD-3-Clause
"""A pipeline of two stages, each with two replicas whose gradients are compressed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import torch_powersgd as tp
from support import ranks
from support.paired_training import OPTIONS, STEPS, WARM_UP, digest, same
from support.synthetic import Ledger, gradient

TOLERANCE = 1e-5  # the identity in float32, as in test_identity
MICRO_BATCHES, MICRO_SIZE = 4, 3
SIZES = (24, 36, 30)  # of the input, of the tensors that the stages exchange, of the output


def _mesh(replicate: Any, stage: Any) -> DeviceMesh:
    return init_device_mesh(
        "cpu",
        (2, 2),
        mesh_dim_names=("replicate", "stage"),
        backend_override={"replicate": replicate, "stage": stage},
    )


class _Stage:
    """This rank's stage, and the schedule of the whole pipeline."""

    def __init__(self, mesh: DeviceMesh, schedule: Any, ddp: bool) -> None:
        self.number = mesh.get_local_rank("stage")
        self.replica = mesh.get_local_rank("replicate")
        torch.manual_seed(self.number)
        inputs, outputs = SIZES[self.number : self.number + 2]
        net = nn.Sequential(nn.Linear(inputs, outputs), nn.Tanh())
        self.net = net
        self.module: Any = (
            DistributedDataParallel(net, process_group=mesh.get_group("replicate"))
            if ddp
            else replicate(net, mesh=mesh["replicate"])
        )
        # With the shapes given, no backward pass is needed to find them.
        shapes = [
            torch.empty(MICRO_SIZE, size, requires_grad=n > 0) for n, size in enumerate(SIZES)
        ]
        stage = PipelineStage(
            self.module,  # type: ignore[arg-type]
            self.number,
            2,
            torch.device("cpu"),
            input_args=(shapes[self.number],),
            output_args=(shapes[self.number + 1],),
            group=mesh.get_group("stage"),
        )
        self.schedule = schedule(stage, MICRO_BATCHES, loss_fn=self.loss)

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output - target).square().mean()

    def step(self, i: int) -> list[torch.Tensor]:
        """Runs a step; returns the micro-batches' losses, on the last stage."""
        self.module.zero_grad()
        losses: list[torch.Tensor] = []
        size = MICRO_BATCHES * MICRO_SIZE
        if self.number == 0:
            self.schedule.step(gradient((size, SIZES[0]), "input", self.replica, i))
        else:
            target = gradient((size, SIZES[2]), "target", self.replica, i)
            self.schedule.step(target=target, losses=losses)
        return losses

    def gradients(self) -> dict[str, torch.Tensor]:
        return {
            name: _local(p.grad).clone()
            for name, p in self.net.named_parameters()
            if p.grad is not None
        }

    def parameters(self) -> dict[str, torch.Tensor]:
        return {name: _local(p.detach()) for name, p in self.net.named_parameters()}


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a replica's DTensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# The identity's errors; by step whether losses and gradients are equal, and the digests; the count
# of steps.
Trained = tuple[dict[str, float], list[bool], list[bool], list[str], int]


def _train(rank: int, schedule: Any, stage_backend: Any, ddp: bool) -> Trained:
    mesh = _mesh(("cpu:powersgd", OPTIONS), stage_backend)
    attached = _Stage(mesh, schedule, ddp)
    plain = _Stage(_mesh("gloo", "gloo"), schedule, ddp)
    compression = tp.attach(attached.module)
    ledger, exact, equal, digests = Ledger(), [], [], []
    for i in range(STEPS):
        for name, mine in plain.parameters().items():
            mine.copy_(attached.parameters()[name])
        exact.append(same(attached.step(i), plain.step(i)))
        found, wanted = attached.gradients(), plain.gradients()
        equal.append(same(found.values(), wanted.values()))
        # The schedule has divided the averaged gradients by the number of micro-batches.
        ledger.add(found, {name: g.double() for name, g in wanted.items()})
        for name, parameter in attached.parameters().items():
            parameter.sub_(found[name], alpha=0.05)
        digests.append(digest([*found.values(), *attached.parameters().values()]))
    saved = compression.state_dict()["parameters"]
    residuals = {n: state["residual"].double() / MICRO_BATCHES for n, state in saved.items()}
    assert set(residuals) == {"0.weight"}
    steps = compression.stats()["steps"]
    return ledger.errors(residuals), exact, equal, digests, steps


@pytest.mark.parametrize(
    ("schedule", "stage_backend", "ddp"),
    [
        (ScheduleGPipe, "gloo", True),
        (Schedule1F1B, ("cpu:powersgd", OPTIONS), True),
        (Schedule1F1B, "gloo", False),
    ],
    ids=["gpipe-gloo", "1f1b-powersgd", "1f1b-fsdp2"],
)
def test_stages_of_a_pipeline(schedule: Any, stage_backend: Any, ddp: bool) -> None:
    results = ranks.run(4, _train, schedule, stage_backend, ddp, backend="gloo")
    for errors, exact, equal, _, steps in results:
        assert all(exact)
        assert equal == [True] * WARM_UP + [False] * (STEPS - WARM_UP)
        assert max(errors.values()) < TOLERANCE, errors
        # One synchronization for all micro-batches. FSDP2's, which the schedule calls outside of
        # backward, ends when the next begins.
        assert steps == (STEPS if ddp else STEPS - 1)
    for first, second in ((0, 2), (1, 3)):  # these have the same stage
        assert results[first][3] == results[second][3]
