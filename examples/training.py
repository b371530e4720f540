# SPDX-License-Identifier: BSD-3-Clause
"""What the examples share: their options, the training loop and checkpoints.

What compression adds to an ordinary script is marked [compression]: the backend's name, one line
after DDP is built, and one entry of the checkpoint.
"""

import argparse
import functools
import json
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torch_powersgd as tp

Batch = tuple[torch.Tensor, torch.Tensor]
Wrap = Callable[[nn.Module], DistributedDataParallel]
WIRE_DTYPES = ("float32", "bfloat16", "float16")


def common_options(doc: str) -> argparse.ArgumentParser:
    """The options of every example; each sets its own --steps, --batch, --lr and others."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    add = parser.add_argument
    add("--backend", choices=["gloo", "powersgd"], default="powersgd", help="gradients' backend")
    add("--rank", type=int, default=16, help="rank of the approximation")
    add("--wire-dtype", choices=WIRE_DTYPES, default="bfloat16", help="dtype of what is sent")
    add("--exact-steps", type=int, default=10, help="number of steps before compression begins")
    add("--steps", type=int, help="number of steps")
    add("--batch", type=int, help="samples per rank and step")
    add("--lr", type=float, help="learning rate")
    add("--warmup", type=int, default=20, help="number of steps until --lr is reached")
    add("--seed", type=int, default=0, help="seed of the weights and the batches")
    add("--validate-every", type=int, default=50, metavar="N", help="steps between validations")
    add("--metrics", type=Path, help="file for one JSON object per step")
    add("--checkpoint", type=Path, help="file to resume from and to save to")
    add("--checkpoint-every", type=int, default=500, metavar="N", help="steps between saves")
    return parser


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Linear warm-up, then a cosine down to a tenth."""
    if step < args.warmup:
        return float(args.lr * (step + 1) / args.warmup)
    progress = (step - args.warmup) / max(1, args.steps - args.warmup)
    return float(args.lr * (0.55 + 0.45 * math.cos(math.pi * progress)))


def parallel(args: argparse.Namespace, model: nn.Module) -> DistributedDataParallel:
    ddp = DistributedDataParallel(model)
    if args.backend == "powersgd":  # [compression]
        options = tp.Options(
            matrix_approximation_rank=args.rank,
            wire_dtype=getattr(torch, args.wire_dtype),
            start_powerSGD_iter=args.exact_steps,
        )
        tp.attach(ddp, options)
    return ddp


class Trainer(ABC):
    """One rank's model, optimizer and share of the data.

    Args:
        model: its forward(*batch) is the loss.
        wrap: makes of the model what averages its gradients; None: `parallel`.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        wrap: Wrap | None = None,
    ) -> None:
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.step = 0
        self.bytes_before_resume = 0
        self.model, self.optimizer = model, optimizer
        self.ddp = (wrap or functools.partial(parallel, args))(model)
        self.gradient_bytes = sum(p.numel() * p.element_size() for p in model.parameters())

    @abstractmethod
    def sample(self, generator: torch.Generator) -> Batch:
        """A batch of this rank's share of the training data."""

    @abstractmethod
    def validate(self) -> dict[str, float]:
        """ "validation_loss" and what else the task is measured by. Collective."""

    def train_step(self) -> float:
        """Returns this rank's loss."""
        # Seeded by the step, so that a resumed run reads what the first one would have read.
        generator = torch.Generator().manual_seed(
            (self.args.seed * 1_000_003 + self.step) * self.world + self.rank
        )
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.step, self.args)

        loss = self.ddp(*self.sample(generator))
        self.optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        if norm.isfinite():  # the same on every rank: the gradients are
            self.optimizer.step()
        self.step += 1
        return float(loss.detach())

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


def train(trainer: Trainer, progress: Progress, metrics: TextIO | None) -> dict[str, Any]:
    """Returns what was recorded of the last step."""
    args = trainer.args
    record: dict[str, Any] = {}
    bar = progress.add_task(args.backend, total=args.steps, completed=trainer.step, loss="")
    while trainer.step < args.steps:
        began = time.perf_counter()
        loss = trainer.mean(trainer.train_step())
        milliseconds = (time.perf_counter() - began) * 1e3
        record = {
            "step": trainer.step,
            "loss": loss,
            "validation_loss": None,
            "ms": milliseconds,
            **trainer.sent(),
        }
        if trainer.step % args.validate_every == 0 or trainer.step == args.steps:
            record.update(trainer.validate())
        if metrics:
            print(json.dumps(record), file=metrics, flush=True)
        progress.update(bar, completed=trainer.step, loss=f"{loss:.3f}")
        due = trainer.step % args.checkpoint_every == 0 or trainer.step == args.steps
        if args.checkpoint and due:
            trainer.save(args.checkpoint)
    return record


def main(args: argparse.Namespace, make: Callable[[argparse.Namespace], Trainer]) -> None:
    dist.init_process_group("cpu:powersgd" if args.backend == "powersgd" else "gloo")
    trainer = make(args)
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
        last = train(trainer, progress, metrics)
        if last and first:
            validated = (f"{k.replace('_', ' ')} {v:.3f}" for k, v in last.items() if "valid" in k)
            megabytes = last["bytes_sent"] / last["step"] / 1e6
            sent = f"{megabytes:.3f} MB of gradients sent per step and rank"
            progress.console.print(", ".join([*validated, sent]), soft_wrap=True)
    if metrics:
        metrics.close()
    # DDP before its group: if its reducer ends the group, Gloo's threads may wait for Python's GIL,
    # which the reducer holds, for ever.
    del trainer
    dist.destroy_process_group()
