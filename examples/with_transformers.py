# SPDX-License-Identifier: BSD-3-Clause
"""Trains a small language model with the Trainer of transformers. A second start resumes.

    pip install transformers accelerate
    torchrun --nproc-per-node 2 examples/with_transformers.py

The Trainer uses the process group that exists. On GPUs the backend is "cpu:gloo,cuda:powersgd",
without use_cpu=True.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from char_gpt import VOCABULARY, read_text
from summary import summary
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from torch_powersgd.integrations.transformers import attach

CONTEXT = 64


def main(args: argparse.Namespace) -> None:
    dist.init_process_group("cpu:powersgd")  # before the TrainingArguments
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=CONTEXT,
        n_embd=128,
        n_layer=2,
        n_head=4,
        bos_token_id=None,
        eos_token_id=None,
    )
    windows = read_text(100_000).long().unfold(0, CONTEXT, CONTEXT)
    settings = TrainingArguments(
        str(args.folder),
        use_cpu=True,
        per_device_train_batch_size=8,
        learning_rate=1e-3,
        max_steps=args.steps,
        save_steps=20,
        logging_steps=10,
        report_to=[],
    )
    trainer = Trainer(
        GPT2LMHeadModel(config),
        settings,
        train_dataset=[{"input_ids": window, "labels": window} for window in windows],
    )
    attach(trainer)
    last = get_last_checkpoint(args.folder) if args.folder.exists() else None
    result = trainer.train(resume_from_checkpoint=last)
    if trainer.is_world_process_zero():
        print(summary(result.training_loss))
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=60, help="steps of all starts together (60)")
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/with_transformers"), help="folder to save to"
    )
    main(parser.parse_args())
