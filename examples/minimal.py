# SPDX-License-Identifier: BSD-3-Clause
"""The smallest whole program: torchrun --nproc-per-node 2 examples/minimal.py."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torch_powersgd

dist.init_process_group("cpu:powersgd")  # on GPUs: "cpu:gloo,cuda:powersgd"
torch.manual_seed(dist.get_rank())  # each process draws its own data
model = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512))
ddp = DistributedDataParallel(model)
compression = torch_powersgd.attach(ddp)  # matrix rank 16 in int8, after 10 exact steps
optimizer = torch.optim.AdamW(ddp.parameters())
for _ in range(20):
    inputs = torch.randn(32, 512)
    loss = nn.functional.mse_loss(ddp(inputs), inputs.roll(1, dims=1))
    optimizer.zero_grad()
    loss.backward()  # averages the gradients over the processes
    optimizer.step()

if dist.get_rank() == 0:
    ratio = compression.stats()["compressed_ratio"]
    print(f"A compressed step sent {ratio:.1f} times fewer bytes.")
dist.destroy_process_group()
