# SPDX-License-Identifier: BSD-3-Clause
"""The runs of bench_convergence.py: its tasks, and the stages that train them.

To add an optimizer, a task or a stage, add an entry to OPTIMIZERS, TASKS or STAGES. The methods
are those of cluster/methods.py. The learning rate of a task is the best of three for a plain
all-reduce.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from cluster.methods import Contender, named
from cluster.trainees import Trainee
from torch import nn

from convergence.muon import MuonAndAdamW

ADAMW, SGD, MUON = "AdamW", "SGD with momentum", "Muon"
# As in the examples. The trainer sets the learning rate.
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    ADAMW: lambda model: torch.optim.AdamW(
        model.parameters(), betas=(0.9, 0.95), weight_decay=0.1, fused=True
    ),
    SGD: lambda model: torch.optim.SGD(
        model.parameters(), momentum=0.9, nesterov=True, weight_decay=1e-4
    ),
    MUON: MuonAndAdamW,
}


@dataclass(frozen=True)
class Task:
    """What is trained.

    Attributes:
        model: what the title says of the model.
        trainer: MODULE.CLASS, where the module has options().
        optimizer: one of OPTIMIZERS.
        arguments: the trainer's.
        quick: additional arguments with --quick.
        note: the end of the title.
    """

    model: str
    trainer: str
    optimizer: str
    arguments: str
    quick: str
    note: str = ""

    @property
    def about(self) -> dict[str, str]:
        """The part of a record that describes the task."""
        title = f"{self.model}, {self.optimizer}{self.note}"
        return {"title": title, "arguments": self.arguments}

    def but(self, arguments: str, **others: str) -> Task:
        """The same task with additional arguments, and with other fields."""
        return replace(self, arguments=f"{self.arguments} {arguments}", **others)

    def in_short(self) -> Task:
        return self.but(self.quick)

    def start(self, contender: Contender, seed: int) -> tuple[Any, Trainee]:
        """This process's trainer, and what the method made of its model."""
        made: list[Trainee] = []

        def wrap(model: nn.Module) -> nn.Module:
            made.append(contender.make(model, seed))
            return made[0].module

        module, _, name = self.trainer.rpartition(".")
        example = importlib.import_module(module)
        words = [*self.arguments.split(), "--seed", str(seed)]
        trainer = getattr(example, name)(example.options().parse_args(words), wrap)
        optimizer = OPTIMIZERS[self.optimizer](trainer.model)
        trainer.optimizer = made[0].optimized_by(optimizer)
        return trainer, made[0]


LANGUAGE = Task(
    "character GPT on the standard library",
    "train_lm.LanguageTrainer",
    ADAMW,
    "--layers 3 --width 192 --heads 6 --batch 2 --steps 300 --lr 1e-3",
    "--layers 1 --width 64 --heads 2 --context 64 --steps 12 --characters 100000"
    " --validation-batches 4",
)
DIGITS = Task(
    "convolutional net on scikit-learn's digits",
    "train_digits.DigitTrainer",
    SGD,
    "--batch 32 --steps 300 --lr 0.05",
    "--channels 16 --width 64 --steps 12 --warmup 3",
)
LSTM = Task(
    "character LSTM on the standard library",
    "convergence.recurrent.RecurrentTrainer",
    ADAMW,
    "--layers 1 --width 256 --context 64 --batch 8 --steps 300 --lr 2e-2",
    "--width 64 --context 16 --steps 12 --characters 100000 --validation-batches 4",
)
MODELS = {"language": LANGUAGE, "digits": DIGITS, "lstm": LSTM}
_4X = ", 4 times the batch"  # of all processes
VARIANTS = {
    "language-sgd": LANGUAGE.but("--lr 0.1", optimizer=SGD),
    "digits-adamw": DIGITS.but("--lr 2e-3", optimizer=ADAMW),
    "lstm-sgd": LSTM.but("--lr 3", optimizer=SGD),
    "language-4x": LANGUAGE.but("--batch 8", note=_4X),
    "digits-4x": DIGITS.but("--batch 128", note=_4X),
    "lstm-4x": LSTM.but("--batch 32", note=_4X),
}


def _of_width(width: int) -> Task:
    """A GPT of two layers. Larger widths learn best at lower learning rates."""
    shape = f"--layers 2 --width {width} --heads {width // 32}"
    return LANGUAGE.but(f"{shape} --steps 200 --lr {0.256 / width}")


_WIDTHS = 128, 256, 512, 1024
WIDTHS = {f"language-{width}": _of_width(width) for width in _WIDTHS}
WIDTHS_MUON = {
    f"language-{width}-muon": _of_width(width).but(f"--lr {0.512 / width}", optimizer=MUON)
    for width in _WIDTHS[:2]
}
TASKS = {
    **MODELS,
    "demo-language": replace(
        LANGUAGE,
        model="the demo's character GPT on the standard library",
        arguments="--layers 3 --width 512 --heads 8 --batch 2 --steps 300 --lr 2.5e-4",
    ),
    **VARIANTS,
    "language-long": LANGUAGE.but("--steps 2000", note=", 2000 steps"),
    "language-muon": LANGUAGE.but("--lr 2e-3", optimizer=MUON),
    "lstm-muon": LSTM.but("--lr 2e-2", optimizer=MUON),
    "digits-by-class": replace(
        DIGITS,
        trainer="convergence.digits_by_class.DigitsByClassTrainer",
        note=", other digits on each process",
    ),
    **WIDTHS,
    **WIDTHS_MUON,
}


class Stage(NamedTuple):
    """Tasks, and methods that train each of them."""

    tasks: Sequence[str]
    methods: str

    @property
    def contenders(self) -> list[Contender]:
        return named(self.methods)


_EXACT = "torchft+lr=0.8+momentum=0.3:10"
_SPARSE = "sparse sparse+density=0.03125 sparse-loco:256"
# The most informative first, in case time runs out.
STAGES = {
    "front": Stage(
        [*MODELS],
        "plain hook-1-bucket:1,4,16 attached:4 bf16-wire:16 int8-wire:4,8,10,16,32 "
        "int4-wire:8,16,32",
    ),
    "curve": Stage(
        [*MODELS],
        "fp16 bf16 hook-1-bucket:1,2,4,8,16,32 attached:1,2,4,8,16,32 bf16-wire:1,2,4,8,16,32 "
        "int8-wire:1,2,4,8,16,32 int4-wire:1,2,4,8,16,32",
    ),
    "large": Stage(["demo-language"], "plain hook-1-bucket:4 int8-wire:16,27"),
    "variants": Stage(
        [*VARIANTS], "plain hook-1-bucket:4,16 bf16-wire:16 int8-wire:8,16,32 int4-wire:16,32"
    ),
    # Local steps, each stage with its own record.
    "local": Stage(
        [*MODELS],
        "plain int8-wire:1,16 local-sgd:16 local-sgd+fragments=5:16 diloco:16 "
        "diloco+fragment_sync_delay=5:16 diloco+wire_dtype=int4:32 diloco+sync_every=30:16,32 "
        f"diloco+sync_every=100:32 {_SPARSE} sparse-loco:128 post-local-sgd:10 {_EXACT} torchft:30 "
        "torchft+lr=0.8+momentum=0.3+matrix_approximation_rank=32+wire_dtype=int4:10",
    ),
    "local-muon": Stage(
        ["language-muon", "lstm-muon"],
        f"plain int8-wire:16,32 diloco+wire_dtype=int4:32 {_SPARSE} {_EXACT}",
    ),
    "local-long": Stage(
        ["language-long"],
        "plain int8-wire:16 diloco+wire_dtype=int4:32 diloco+sync_every=30:32 "
        f"diloco+sync_every=100:32 {_SPARSE} {_EXACT}",
    ),
    "local-unlike": Stage(
        ["digits-by-class"], f"plain int8-wire:16 diloco+wire_dtype=int4:32 sparse {_EXACT}"
    ),
    "width": Stage(
        [*WIDTHS, *WIDTHS_MUON],
        f"plain int8-wire:8,16,32 diloco+wire_dtype=int4:32 sparse {_EXACT}",
    ),
}
USUAL = ("front", "curve", "large", "variants")  # those of convergence.json


class Run(NamedTuple):
    task: str
    seed: int
    contender: Contender

    @property
    def title(self) -> str:
        return f"{self.task}, seed {self.seed}, {self.contender.title}"


def runs(stages: Iterable[Stage], seeds: int) -> list[Run]:
    """The runs of these stages in order, without duplicates: all with one seed, then the next."""
    found = (
        Run(task, seed, contender)
        for stage in stages
        for seed in range(seeds)
        for task in stage.tasks
        for contender in stage.contenders
    )
    return list(dict.fromkeys(found))
