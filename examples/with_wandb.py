# SPDX-License-Identifier: BSD-3-Clause
"""Logs to Weights & Biases what compression does to each layer.

pip install wandb
torchrun --nproc-per-node 2 examples/with_wandb.py    # WANDB_MODE=offline needs no account
"""

import torch
import torch.distributed as dist
import wandb
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torch_powersgd

EVERY = 10  # steps

dist.init_process_group("cpu:powersgd")  # on GPUs: "cpu:gloo,cuda:powersgd"
torch.manual_seed(dist.get_rank())  # each process draws its own data
model = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512))
ddp = DistributedDataParallel(model)
compression = torch_powersgd.attach(ddp)
optimizer = torch.optim.AdamW(ddp.parameters())
# Each process has its own residuals, which are much alike.
run = wandb.init(project="powersgd") if dist.get_rank() == 0 else None
for step in range(1, 101):
    inputs = torch.randn(32, 512)
    loss = nn.functional.mse_loss(ddp(inputs), inputs.roll(1, dims=1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if run is not None and step % EVERY == 0:
        scalars = compression.stats(flat=True, per_layer=True)
        run.log({"loss": loss.item(), **{f"powersgd/{k}": v for k, v in scalars.items()}}, step)

if run is not None:
    run.finish()
dist.destroy_process_group()
