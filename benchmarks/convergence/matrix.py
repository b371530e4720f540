# SPDX-License-Identifier: BSD-3-Clause
"""The runs of bench_convergence.py, the most informative first, in case time runs out.

A stage is a set of tasks and methods. It runs all of them with one seed before the next.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from cluster.methods import Contender, named

from convergence.tasks import DEMO_LANGUAGE, DIGITS, LANGUAGE, LSTM, TASKS

MODELS = [name for name, task in TASKS.items() if task in (LANGUAGE, DIGITS, LSTM)]
_LARGE = [name for name, task in TASKS.items() if task is DEMO_LANGUAGE]
_LONG = ["language-long"]
_VARIANTS = [name for name in TASKS if name not in (*MODELS, *_LARGE, *_LONG)]

# The stages of local steps, each with its own record.
LOCAL, LONG = "local", "local-long"


@dataclass(frozen=True)
class Run:
    task: str
    seed: int
    contender: Contender


@dataclass(frozen=True)
class Stage:
    tasks: Sequence[str]
    methods: str

    def runs(self, seeds: int) -> Iterator[Run]:
        for seed in range(seeds):
            for task in self.tasks:
                for contender in self.contenders:
                    yield Run(task, seed, contender)

    @property
    def contenders(self) -> list[Contender]:
        return named(self.methods)


_FRONT = (
    "plain hook-1-bucket:1,4,16 attached:4 bf16-wire:16 int8-wire:4,8,10,16,32 int4-wire:8,16,32"
)
STAGES = {
    "front": Stage(MODELS, _FRONT),
    "curve": Stage(
        MODELS,
        "fp16 bf16 hook-1-bucket:1,2,4,8,16,32 attached:1,2,4,8,16,32 bf16-wire:1,2,4,8,16,32 "
        "int8-wire:1,2,4,8,16,32 int4-wire:1,2,4,8,16,32",
    ),
    "large": Stage(_LARGE, "plain hook-1-bucket:4 int8-wire:16,27"),
    "variants": Stage(
        _VARIANTS, "plain hook-1-bucket:4,16 bf16-wire:16 int8-wire:8,16,32 int4-wire:16,32"
    ),
    LOCAL: Stage(
        MODELS,
        "plain int8-wire:1,16 local-sgd:16 local-sgd+fragments=5:16 diloco:16 "
        "diloco+fragment_sync_delay=5:16 diloco+wire_dtype=int4:32 diloco+sync_every=30:16,32 "
        "diloco+sync_every=100:32 post-local-sgd:10 torchft+lr=0.8+momentum=0.3:10 torchft:30 "
        "torchft+lr=0.8+momentum=0.3+matrix_approximation_rank=32+wire_dtype=int4:10",
    ),
    LONG: Stage(
        _LONG,
        "plain int8-wire:16 diloco+wire_dtype=int4:32 diloco+sync_every=30:32 "
        "diloco+sync_every=100:32 torchft+lr=0.8+momentum=0.3:10",
    ),
}


def runs(stages: Iterable[Stage], seeds: int) -> list[Run]:
    """The runs of these stages in order, without duplicates."""
    return list(dict.fromkeys(run for stage in stages for run in stage.runs(seeds)))
