# SPDX-License-Identifier: BSD-3-Clause
"""Trains a small language model with DistributedDataParallel, with or without compression.

    torchrun --nproc-per-node 2 examples/train_lm.py --backend gloo
    torchrun --nproc-per-node 2 examples/train_lm.py --backend powersgd --rank 4

What compression adds to an ordinary script is marked [compression]: the backend's name, one line
after DDP is built, and one entry of the checkpoint.
"""

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from char_gpt import CharGPT, Shape, read_text, sample
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch.nn.parallel import DistributedDataParallel

import torch_powersgd as tp


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=["gloo", "powersgd"], default="powersgd")
    parser.add_argument("--rank", type=int, default=4, help="rank of the approximation")
    parser.add_argument(
        "--exact-steps", type=int, default=3, help="steps before compression begins"
    )
    parser.add_argument("--steps", type=int, default=350)
    parser.add_argument("--batch", type=int, default=2, help="sequences per rank and step")
    parser.add_argument("--context", type=int, default=128, help="characters per sequence")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--warmup", type=int, default=20, help="steps until --lr is reached")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--characters", type=int, default=4_000_000, help="length of the text")
    parser.add_argument("--validate-every", type=int, default=50)
    parser.add_argument("--validation-batches", type=int, default=16)
    parser.add_argument("--metrics", type=Path, help="write one JSON object per step here")
    parser.add_argument("--checkpoint", type=Path, help="resume from here, and save here")
    parser.add_argument("--checkpoint-every", type=int, default=500)
    return parser.parse_args()


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Linear warm-up, then a cosine down to a tenth."""
    if step < args.warmup:
        return float(args.lr * (step + 1) / args.warmup)
    progress = (step - args.warmup) / max(1, args.steps - args.warmup)
    return float(args.lr * (0.55 + 0.45 * math.cos(math.pi * progress)))


class Trainer:
    """One rank's model, optimizer and share of the text."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.step = 0
        self.bytes_before_resume = 0

        text = read_text(args.characters)
        training, self.validation = text[: -len(text) // 10], text[-len(text) // 10 :]
        self.shard = training.chunk(self.world)[self.rank]

        torch.manual_seed(args.seed)
        self.model = CharGPT(Shape(args.layers, args.width, args.heads, args.context))
        self.ddp = DistributedDataParallel(self.model)
        if args.backend == "powersgd":  # [compression]
            options = tp.Options(
                matrix_approximation_rank=args.rank, start_powerSGD_iter=args.exact_steps
            )
            tp.attach(self.ddp, options)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )
        self.gradient_bytes = sum(p.numel() * p.element_size() for p in self.model.parameters())

    def train_step(self) -> float:
        # Seeded by the step, so that a resumed run reads what the first one would have read.
        generator = torch.Generator().manual_seed(
            (self.args.seed * 1_000_003 + self.step) * self.world + self.rank
        )
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.step, self.args)

        inputs, targets = sample(self.shard, self.args.batch, self.args.context, generator)
        loss = self.ddp(inputs, targets)
        self.optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        if norm.isfinite():  # the same on every rank: the gradients are
            self.optimizer.step()
        self.step += 1
        return float(loss.detach())

    @torch.no_grad()
    def validate(self) -> float:
        """The mean loss over windows that are the same at every step."""
        generator = torch.Generator().manual_seed(self.rank)
        total = torch.zeros(())
        for _ in range(self.args.validation_batches):
            total += self.model(*sample(self.validation, 2, self.args.context, generator))
        return self.mean(float(total) / self.args.validation_batches)

    def mean(self, value: float) -> float:
        tensor = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(tensor)  # not a gradient: exact on either backend
        return float(tensor) / self.world

    def sent(self) -> dict[str, int]:
        """The gradient payloads that this rank handed to the network, and the steps that no rank
        applied because a gradient was not finite."""
        if self.args.backend == "powersgd":  # [compression]
            stats = tp.stats(residual_norms=False)
            total = self.bytes_before_resume + stats["bytes_after"]
            return {"bytes_sent": total, "skipped": stats["skipped_steps"]}
        return {"bytes_sent": self.gradient_bytes * self.step, "skipped": 0}

    def save(self, path: Path) -> None:
        state: dict[str, Any] = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "bytes_sent": self.sent()["bytes_sent"],
        }
        if self.args.backend == "powersgd":  # [compression] collective: every rank calls it
            state["powersgd"] = tp.state_dict(self.ddp)
        if self.rank == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_suffix(".unfinished")
            torch.save(state, unfinished)
            unfinished.replace(path)

    def load(self, path: Path) -> None:
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]
        self.bytes_before_resume = state["bytes_sent"]
        if self.args.backend == "powersgd" and "powersgd" in state:  # [compression]
            tp.load_state_dict(self.ddp, state["powersgd"])


def train(trainer: Trainer, progress: Progress, metrics: TextIO | None) -> None:
    args = trainer.args
    bar = progress.add_task(args.backend, total=args.steps, completed=trainer.step, loss="")
    while trainer.step < args.steps:
        began = time.perf_counter()
        loss = trainer.mean(trainer.train_step())
        milliseconds = (time.perf_counter() - began) * 1e3
        record: dict[str, Any] = {
            "step": trainer.step,
            "loss": loss,
            "validation_loss": None,
            "ms": milliseconds,
            **trainer.sent(),
        }
        if trainer.step % args.validate_every == 0 or trainer.step == args.steps:
            record["validation_loss"] = trainer.validate()
        if metrics:
            print(json.dumps(record), file=metrics, flush=True)
        progress.update(bar, completed=trainer.step, loss=f"{loss:.3f}")
        due = trainer.step % args.checkpoint_every == 0 or trainer.step == args.steps
        if args.checkpoint and due:
            trainer.save(args.checkpoint)


def main() -> None:
    args = parse_arguments()
    dist.init_process_group("cpu:powersgd" if args.backend == "powersgd" else "gloo")
    trainer = Trainer(args)
    if args.checkpoint and args.checkpoint.exists():
        trainer.load(args.checkpoint)

    first = trainer.rank == 0
    metrics = args.metrics.open("a" if trainer.step else "w") if args.metrics and first else None
    columns = (
        TextColumn("{task.description:>9}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, disable=not first) as progress:
        train(trainer, progress, metrics)
    if metrics:
        metrics.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
