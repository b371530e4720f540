# SPDX-License-Identifier: BSD-3-Clause
"""Trains a small language model with the Trainer of transformers. A second start resumes.

    pip install transformers accelerate
    torchrun --nproc-per-node 2 examples/with_transformers.py

The Trainer uses the process group that exists. On GPUs the backend is "cpu:gloo,cuda:powersgd",
without use_cpu=True.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from char_gpt import VOCABULARY, read_text
from summary import summary
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import torch_powersgd

CONTEXT = 64


class Compression(TrainerCallback):
    """Attaches the DDP module when the trainer has made it. Every checkpoint holds the state."""

    def __init__(self, options: torch_powersgd.Options) -> None:
        self.options = options
        self.trainer: Trainer | None = None  # set by the user

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        assert self.trainer is not None
        ddp = self._ddp()
        torch_powersgd.attach(ddp, self.options, scaler=self.trainer.accelerator.scaler)
        path = self.path(args, state)
        if path.exists():
            torch_powersgd.load_state_dict(ddp, torch.load(path))

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        saved = torch_powersgd.state_dict(self._ddp())  # on all ranks
        if state.is_world_process_zero:
            torch.save(saved, self.path(args, state))

    def _ddp(self) -> DistributedDataParallel:
        assert self.trainer is not None
        ddp = self.trainer.model_wrapped
        assert isinstance(ddp, DistributedDataParallel)
        return ddp

    def path(self, args: Any, state: Any) -> Path:
        return Path(args.output_dir, f"checkpoint-{state.global_step}", "powersgd.pt")


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
    options = torch_powersgd.Options.recommended()
    compression = Compression(options)
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
        callbacks=[compression],
    )
    compression.trainer = trainer
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
