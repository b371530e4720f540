# SPDX-License-Identifier: BSD-3-Clause
"""One replica of a job that goes on when others leave or join. docs/torchft.md says how to run."""

import os
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torchft import Manager, Optimizer

from torch_powersgd.integrations.torchft import DistributedDataParallel, ProcessGroupPowerSGD

STEPS = int(os.environ.get("STEPS", "100"))
model = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512))
inner = torch.optim.AdamW(model.parameters())


def state_dict() -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": inner.state_dict()}


def load_state_dict(state: dict[str, Any]) -> None:
    model.load_state_dict(state["model"])
    inner.load_state_dict(state["optimizer"])


group = ProcessGroupPowerSGD(timeout=timedelta(seconds=30))
manager = Manager(group, load_state_dict, state_dict, min_replica_size=1)
ddp = DistributedDataParallel(manager, model)
compression = group.attach(ddp, manager)
optimizer = Optimizer(manager, inner)
print(f"this replica is process {os.getpid()}", flush=True)
replicas = 0
while manager.current_step() < STEPS:
    inputs = torch.randn(32, 512)
    optimizer.zero_grad()  # asks the lighthouse who is there
    loss = nn.functional.mse_loss(ddp(inputs), inputs.roll(1, dims=1))
    loss.backward()  # averages over these replicas
    optimizer.step()  # unless one of them has left meanwhile
    if manager.num_participants() != replicas:
        replicas = manager.num_participants()
        print(f"step {manager.current_step()}, replicas: {replicas}", flush=True)
print(f"ended at step {manager.current_step()}\n{compression}")
manager.shutdown(wait=False)
