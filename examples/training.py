# SPDX-License-Identifier: BSD-3-Clause
"""The options, the training loop and the checkpoints that the examples share.

The lines that compression adds to an ordinary script are marked [compression]: the backend's name,
one call after DDP is built, and one entry of the checkpoint.
"""

import argparse
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
WIRE_DTYPES = ("none", "bfloat16", "int8", "int4")
DEFAULTS = tp.Options()


def common_options(doc: str) -> argparse.ArgumentParser:
    """The options of every example. Each sets its own --steps, --batch, --lr and others."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    add = parser.add_argument
    add(
        "--backend",
        choices=["gloo", "powersgd"],
        default="powersgd",
        help="backend of the gradients",
    )
    rank, exact = DEFAULTS.matrix_approximation_rank, DEFAULTS.start_powerSGD_iter
    add("--rank", type=int, default=rank, help="matrix rank of the approximation")
    add(
        "--wire-dtype",
        choices=WIRE_DTYPES,
        default=DEFAULTS.wire_dtype,
        help="wire dtype of the factors; none sends float32",
    )
    add("--exact-steps", type=int, default=exact, help="number of steps before compression begins")
    add("--steps", type=int, help="number of steps")
    add("--batch", type=int, help="samples per process and step")
    add("--lr", type=float, help="learning rate")
    add("--warmup", type=int, default=20, help="number of steps until --lr is reached")
    add("--seed", type=int, default=0, help="seed of the weights and the batches")
    add("--validate-every", type=int, default=50, metavar="N", help="steps between validations")
    add("--metrics", type=Path, help="file for one JSON object per step")
    add("--checkpoint", type=Path, help="file to resume from and to save to")
    add("--checkpoint-every", type=int, default=500, metavar="N", help="steps between saves")
    return parser


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """The learning rate: a linear warm-up, then a cosine down to a tenth."""
    if step < args.warmup:
        return float(args.lr * (step + 1) / args.warmup)
    progress = (step - args.warmup) / max(1, args.steps - args.warmup)
    return float(args.lr * (0.55 + 0.45 * math.cos(math.pi * progress)))


def compress(args: argparse.Namespace, ddp: DistributedDataParallel) -> tp.Compression:
    options = tp.Options(
        matrix_approximation_rank=args.rank,
        wire_dtype=None if args.wire_dtype == "none" else args.wire_dtype,
        start_powerSGD_iter=args.exact_steps,
    )
    return tp.attach(ddp, options)


class Trainer(ABC):
    """One process's model, optimizer and share of the data.

    Args:
        args: the options of the example.
        model: the model, whose forward(*batch) returns the loss.
        optimizer: the optimizer of the model.
        wrap: wraps the model in a module that averages its gradients. None stands for DDP, which
            is compressed if the options ask for it.
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
        self.ddp = (wrap or DistributedDataParallel)(model)
        self.compression: tp.Compression | None = None
        if args.backend == "powersgd" and wrap is None:  # [compression]
            self.compression = compress(args, self.ddp)
        self.gradient_bytes = sum(p.numel() * p.element_size() for p in model.parameters())

    @abstractmethod
    def sample(self, generator: torch.Generator) -> Batch:
        """A batch of this process's share of the training data."""

    @abstractmethod
    def validate(self) -> dict[str, float]:
        """The "validation_loss", and the other measures of the task. Collective."""

    def train_step(self) -> float:
        """Takes one step. Returns this process's loss."""
        # The step is part of the seed, so that a resumed run reads the same batches.
        generator = torch.Generator().manual_seed(
            (self.args.seed * 1_000_003 + self.step) * self.world + self.rank
        )
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.step, self.args)

        loss = self.ddp(*self.sample(generator))
        self.optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        if norm.isfinite():  # on all processes alike: their gradients are equal
            self.optimizer.step()
        self.step += 1
        return float(loss.detach())

    def mean(self, value: float) -> float:
        """The mean over the processes. Collective."""
        tensor = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(tensor)  # exact on either backend, since this is no gradient
        return float(tensor) / self.world

    def sent(self) -> dict[str, int]:
        """The bytes of gradients that this process has sent, and the number of skipped steps.

        No process applies a step in which a gradient is not finite.
        """
        if self.compression:  # [compression]
            stats = self.compression.stats(residual_norms=False)
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
        if self.compression:  # [compression] collective: every process calls it
            state["powersgd"] = self.compression.state_dict()
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
        if self.compression and "powersgd" in state:  # [compression]
            self.compression.load_state_dict(state["powersgd"])


def train(trainer: Trainer, progress: Progress, metrics: TextIO | None) -> dict[str, Any]:
    """Trains to the last step. Returns the record of that step."""
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
            sent = f"{megabytes:.3f} MB of gradients sent per step and process"
            progress.console.print(", ".join([*validated, sent]), soft_wrap=True)
    if metrics:
        metrics.close()
    # DDP is destroyed before its group. Its reducer holds Python's interpreter lock. If the reducer
    # ended the group, Gloo's threads could wait for that lock forever.
    del trainer
    dist.destroy_process_group()
