# SPDX-License-Identifier: BSD-3-Clause
"""Trains the debug model of torchtitan, compressed between replicas. A second start resumes.

    pip install torchtitan triton
    torchrun --nproc-per-node 4 examples/with_torchtitan.py --training.steps 40

Any option of torchtitan may follow. torchtitan is made for GPUs; torchtitan_on_cpu.py lets it run
without. On GPUs the function ``llama3_debugmodel`` is all that is needed, in a module of yours. In
a clone of torchtitan, whose tests have the text and the tokenizer:

    torchrun --nproc-per-node 8 -m torchtitan.train --module my_configs \\
        --config llama3_debugmodel --parallelism.data_parallel_replicate_degree 2
"""

import os
import sys

import torch

if not torch.cuda.is_available():
    import torchtitan_on_cpu

import torch.distributed as dist
from summary import sent
from torchtitan.config import ConfigManager
from torchtitan.models.llama3 import config_registry
from torchtitan.tools.logging import init_logger
from torchtitan.trainer import Trainer

from torch_powersgd.integrations.torchtitan import compressed


def llama3_debugmodel() -> Trainer.Config:
    return compressed(config_registry.llama3_debugmodel())


def llama3_debugmodel_on_cpu() -> Trainer.Config:
    config = torchtitan_on_cpu.on_cpu(llama3_debugmodel())
    config.parallelism.data_parallel_replicate_degree = int(os.environ["WORLD_SIZE"])
    config.dump_folder = "runs/with_torchtitan"
    config.checkpoint.enable = True
    return config


def main() -> None:
    module = ["--module", "with_torchtitan", "--config", "llama3_debugmodel_on_cpu"]
    config = ConfigManager().parse_args([*module, *sys.argv[1:]])
    if os.environ["RANK"] == "0":
        init_logger()
    trainer = config.build()
    trainer.train()
    if dist.get_rank() == 0:
        print(sent(trainer.parallel_dims.get_mesh("dp_replicate").get_group()))
    trainer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
