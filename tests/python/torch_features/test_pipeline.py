# SPDX-License-Identifier: BSD-3-Clause
"""A pipeline of two stages, each with two replicas whose gradients are compressed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

import torch_powersgd as tp
from support.meshes import mesh_of
from support.on_ranks import on_ranks
from support.paired_training import OPTIONS, STEPS, TrainingPair
from support.synthetic import gradient

MICRO_BATCHES, MICRO_SIZE = 4, 3
SIZES = (24, 36, 30)  # of the input, of the tensors that the stages exchange, of the output


class _Stage:
    """This rank's stage, and the schedule of the whole pipeline."""

    def __init__(self, mesh: DeviceMesh, schedule: Any, ddp: bool) -> None:
        self.number = mesh.get_local_rank("stage")
        self.replica = mesh.get_local_rank("replicate")
        torch.manual_seed(self.number)
        inputs, outputs = SIZES[self.number : self.number + 2]
        net = nn.Sequential(nn.Linear(inputs, outputs), nn.Tanh())
        self.net: Any = (
            DistributedDataParallel(net, process_group=mesh.get_group("replicate"))
            if ddp
            else replicate(net, mesh=mesh["replicate"])
        )
        # With the shapes given, no backward pass is needed to find them.
        shapes = [
            torch.empty(MICRO_SIZE, size, requires_grad=n > 0) for n, size in enumerate(SIZES)
        ]
        stage = PipelineStage(
            self.net,  # type: ignore[arg-type]
            self.number,
            2,
            torch.device("cpu"),
            input_args=(shapes[self.number],),
            output_args=(shapes[self.number + 1],),
            group=mesh.get_group("stage"),
        )
        self.schedule = schedule(stage, MICRO_BATCHES, loss_fn=nn.functional.mse_loss)

    def step(self, i: int) -> list[torch.Tensor]:
        """Runs a step; returns the micro-batches' losses, on the last stage."""
        losses: list[torch.Tensor] = []
        size = MICRO_BATCHES * MICRO_SIZE
        if self.number == 0:
            self.schedule.step(gradient((size, SIZES[0]), "input", self.replica, i))
        else:
            target = gradient((size, SIZES[2]), "target", self.replica, i)
            self.schedule.step(target=target, losses=losses)
        return losses


@pytest.mark.parametrize(
    ("schedule", "stage_backend", "ddp"),
    [
        (ScheduleGPipe, "gloo", True),
        (Schedule1F1B, ("cpu:powersgd", OPTIONS), True),
        (Schedule1F1B, "gloo", False),
    ],
    ids=["gpipe-gloo", "1f1b-powersgd", "1f1b-fsdp2"],
)
@on_ranks(4, backend="gloo")
def test_stages_of_a_pipeline(rank: int, schedule: Any, stage_backend: Any, ddp: bool) -> None:
    mesh = mesh_of(("cpu:powersgd", OPTIONS), ("stage", 2), stage=stage_backend)
    stages = [_Stage(m, schedule, ddp) for m in (mesh, mesh_of("gloo", ("stage", 2)))]
    by_net = {stage.net: stage for stage in stages}
    attached, plain = by_net
    pair = TrainingPair(attached, plain, tp.attach(attached))
    pair.train(lambda net, i: by_net[net].step(i))
    pair.check(scale=1 / MICRO_BATCHES)  # the schedule divides the averaged gradients at last
    assert pair.residuals().keys() == {"0.weight"}
    # One synchronization for all micro-batches. FSDP2's, which the schedule calls outside of
    # backward, ends when the next begins.
    assert pair.compression.stats()["steps"] == (STEPS if ddp else STEPS - 1)
