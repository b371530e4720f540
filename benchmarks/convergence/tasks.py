# SPDX-License-Identifier: BSD-3-Clause
"""The tasks of bench_convergence.py: four models, two optimizers, two batch sizes.

The learning rate of each task is the best of three for a plain all-reduce.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

Example = tuple[argparse.ArgumentParser, Callable[..., Any]]


def _language() -> Example:
    import train_lm

    return train_lm.options(), train_lm.LanguageTrainer


def _recurrent() -> Example:
    import train_lm

    from convergence import recurrent

    return train_lm.options(), recurrent.RecurrentTrainer


def _digits() -> Example:
    import train_digits

    return train_digits.options(), train_digits.DigitTrainer


def _adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


def _sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, momentum=0.9, nesterov=True, weight_decay=1e-4)


# As in the examples. The trainer sets the learning rate.
OPTIMIZERS = {"AdamW": _adamw, "SGD with momentum": _sgd}


@dataclass(frozen=True)
class Task:
    model: str
    example: Callable[[], Example]
    optimizer: str
    arguments: str  # of the example
    quick: str  # additional arguments with --quick
    note: str = ""  # the end of the title

    @property
    def about(self) -> dict[str, str]:
        """The part of a record that describes the task."""
        title = f"{self.model}, {self.optimizer}{self.note}"
        return {"title": title, "arguments": self.arguments}

    def with_arguments(self, more: str) -> Task:
        return replace(self, arguments=f"{self.arguments} {more}")

    def with_optimizer(self, optimizer: str, more: str) -> Task:
        return replace(self.with_arguments(more), optimizer=optimizer)

    def with_large_batch(self, more: str) -> Task:
        return replace(self.with_arguments(more), note=", 4 times the batch")

    def with_steps(self, steps: int) -> Task:
        return replace(self.with_arguments(f"--steps {steps}"), note=f", {steps} steps")

    def trainer(self, seed: int, wrap: Callable[[nn.Module], nn.Module]) -> Any:
        parser, trainer_of = self.example()
        trainer = trainer_of(
            parser.parse_args([*self.arguments.split(), "--seed", str(seed)]), wrap
        )
        trainer.optimizer = OPTIMIZERS[self.optimizer](trainer.model.parameters())
        return trainer


LANGUAGE = Task(
    "character GPT on the standard library",
    _language,
    "AdamW",
    "--layers 3 --width 192 --heads 6 --batch 2 --steps 300 --lr 1e-3",
    "--layers 1 --width 64 --heads 2 --context 64 --steps 12 --characters 100000"
    " --validation-batches 4",
)
DEMO_LANGUAGE = replace(
    LANGUAGE,
    model="the demo's character GPT on the standard library",
    arguments="--layers 3 --width 512 --heads 8 --batch 2 --steps 300 --lr 2.5e-4",
)
DIGITS = Task(
    "convolutional net on scikit-learn's digits",
    _digits,
    "SGD with momentum",
    "--batch 32 --steps 300 --lr 0.05",
    "--channels 16 --width 64 --steps 12 --warmup 3",
)
LSTM = Task(
    "character LSTM on the standard library",
    _recurrent,
    "AdamW",
    "--layers 1 --width 256 --context 64 --batch 8 --steps 300 --lr 2e-2",
    "--width 64 --context 16 --steps 12 --characters 100000 --validation-batches 4",
)
# The four models, and variants of the three small ones: the other optimizer, a global batch four
# times as large, and longer training.
TASKS = {
    "language": LANGUAGE,
    "digits": DIGITS,
    "lstm": LSTM,
    "demo-language": DEMO_LANGUAGE,
    "language-sgd": LANGUAGE.with_optimizer("SGD with momentum", "--lr 0.1"),
    "digits-adamw": DIGITS.with_optimizer("AdamW", "--lr 2e-3"),
    "lstm-sgd": LSTM.with_optimizer("SGD with momentum", "--lr 3"),
    "language-4x": LANGUAGE.with_large_batch("--batch 8"),
    "digits-4x": DIGITS.with_large_batch("--batch 128"),
    "lstm-4x": LSTM.with_large_batch("--batch 32"),
    "language-long": LANGUAGE.with_steps(2000),
}
