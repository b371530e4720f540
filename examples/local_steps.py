# SPDX-License-Identifier: BSD-3-Clause
"""Local steps, for slow or far links: torchrun --nproc-per-node 2 examples/local_steps.py."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torch_powersgd

dist.init_process_group("cpu:powersgd")  # on GPUs: "cpu:gloo,cuda:powersgd"
torch.manual_seed(dist.get_rank())  # each process draws its own data
model = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512))
ddp = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(ddp.parameters())
with torch_powersgd.LocalSGD(ddp, optimizer, sync_every=10, fragments=2) as steps:
    for _ in range(50):
        inputs = torch.randn(32, 512)
        loss = nn.functional.mse_loss(ddp(inputs), inputs.roll(1, dims=1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()  # at every fifth, half of the model is averaged

if dist.get_rank() == 0:
    print(f"Ten local steps sent {steps.stats()['round_ratio']:.0f} times fewer bytes.")
dist.destroy_process_group()
