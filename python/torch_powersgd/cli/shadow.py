# SPDX-License-Identifier: BSD-3-Clause
"""``torchrun ... -m torch_powersgd shadow``."""

from __future__ import annotations

import argparse
import json
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from torch_powersgd.cli.arguments import (
    add_device,
    add_model,
    add_ranks,
    callable_of,
    count,
    make_model,
)
from torch_powersgd.cli.processes import SharedError, joined, on_every_process
from torch_powersgd.cli.tables import Report, progress, say
from torch_powersgd.matrices import compressible
from torch_powersgd.options import Options
from torch_powersgd.shadow_mode import RANKS, STEPS, Shadow, shadow

WARMUP_STEPS = 100
LARGE = 0.1  # error above which the loss is likely to suffer
STEP_FORM = "def train_step(model): ...; optimizer.step()"

SHADOW = """\
Measures the error that compression would make, on copies of the gradients: training stays exact.
Start it with torchrun. Set --warmup-steps to at least the learning rate's warm-up, because the
gradients differ from later ones until then.
"""
EXAMPLE = """\
example, in mymodels.py:
  def make_model():
      global optimizer
      model = MyModel()
      optimizer = torch.optim.AdamW(model.parameters())
      return model
  def train_step(model):
      optimizer.zero_grad()
      model(BATCH).mean().backward()
      optimizer.step()

  torchrun --nproc_per_node 2 -m torch_powersgd shadow mymodels:make_model \\
      --step mymodels:train_step
"""


def add(commands: Any) -> None:
    command = commands.add_parser(
        "shadow",
        help="measure, under torchrun, the error that compression would make",
        description=SHADOW,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument(
        "--step", required=True, metavar="MODULE:FUNCTION",
        help="function that takes the model, wrapped in DDP and on the device to train on, and "
        f"runs a whole training step, as in '{STEP_FORM}'",
    )  # fmt: skip
    add_ranks(command, RANKS)
    command.add_argument(
        "--warmup-steps", type=count, default=WARMUP_STEPS, metavar="N",
        help="steps to train before measuring (%(default)s)",
    )  # fmt: skip
    command.add_argument(
        "--steps", type=count, default=STEPS, metavar="N", help="steps to measure (%(default)s)"
    )
    command.add_argument(
        "--find-unused-parameters", action="store_true",
        help="if some parameters get no gradient in some steps, as DDP's argument of that name",
    )  # fmt: skip
    add_device(command)
    add_model(command)
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    logging.getLogger("torch_powersgd").setLevel(logging.ERROR)  # The verdict says it all.
    with joined("shadow", arguments.device) as device:
        model, step = on_every_process(lambda: _job_of(arguments, device))
        first = torch.distributed.get_rank() == 0
        before = [parameter.detach().clone() for parameter in model.parameters()]
        ddp = DistributedDataParallel(
            model, find_unused_parameters=arguments.find_unused_parameters
        )
        with progress("training", shown=first) as report:
            _train(ddp, step, arguments.warmup_steps, report)
        trained = not all(map(torch.equal, before, model.parameters()))
        measured = shadow(ddp, sorted(set(arguments.ranks)), arguments.steps)
        with progress("measuring", shown=first) as report:
            _train(ddp, step, arguments.steps, report)
        if not measured.done:
            raise SharedError(f"{arguments.step} must call backward() each time, but {measured}")
        if first:
            say(verdict(measured, [p for p in model.parameters() if p.requires_grad]))
            if not trained:
                say(
                    f"{arguments.step} changed no parameter, so these are the errors of a model "
                    "that is not trained: call optimizer.step() in it."
                )
            print()
            say(str(measured))
            if advice := of_layers(measured):
                print()
                say(advice)
    return 0


def verdict(measured: Shadow, parameters: Sequence[torch.Tensor]) -> str:
    """Returns the lowest matrix rank with a small error, in words.

    Args:
        measured: The errors.
        parameters: The parameters that the model trains.
    """
    rank = _best(measured)
    if not rank:
        why = compressible(parameters, Options())
        return " ".join(["Nothing is compressed at these matrix ranks.", *why])
    error = measured.error(rank)
    if error < LARGE:
        return (
            f"Matrix rank {rank} is enough: the error of the gradients is {error:.2f}, and below "
            f"{LARGE:g} the loss hardly suffers."
        )
    if not measured.falls:
        return (
            "These errors don't tell which matrix rank is enough: all of them are above "
            f"{LARGE:g}, and they don't fall with the matrix rank."
        )
    return (
        f"No matrix rank up to {rank} is enough: at {rank}, the error of the gradients is "
        f"{error:.2f}, and above {LARGE:g} the loss is likely to suffer. Try higher --ranks."
    )


def _best(measured: Shadow) -> int:
    """The lowest matrix rank with a small error, or the highest. 0: nothing is compressed."""
    ranks = [rank for rank, layers in measured.layers.items() if any(of.rank for of in layers)]
    small = [rank for rank in ranks if measured.error(rank) < LARGE]
    return min(small, default=max(ranks, default=0))


def of_layers(measured: Shadow) -> str:
    """Returns matrix ranks for the layers with the largest errors, if they are a small part."""
    best = _best(measured)
    compressed = [layer for layer in measured.layers.get(best, ()) if layer.rank]
    large = [layer for layer in compressed if layer.error >= LARGE]
    sizes = [sum(math.prod(of.shape) for of in layers) for layers in (large, compressed)]
    if not large or 2 * sizes[0] > sizes[1]:
        return ""
    own = dict.fromkeys([layer.name for layer in large], 0)
    for rank in sorted(measured.ranks, reverse=True):
        for layer in measured.layers[rank]:
            if layer.name in own and layer.error < LARGE:
                own[layer.name] = rank if layer.rank else 0
    return (
        f"At matrix rank {best}, the error of {len(own)} of {len(compressed)} layers, up to "
        f"{max(layer.error for layer in large):.2f}, is above {LARGE:g}. To give them others, or "
        f'0, which averages them exactly: {{"matrix_ranks": {json.dumps(own)}}}'
    )


def _job_of(
    arguments: argparse.Namespace, device: torch.device
) -> tuple[torch.nn.Module, Callable[..., Any]]:
    step = callable_of(arguments.step, "MODULE:FUNCTION", STEP_FORM, "model")
    return make_model(arguments.model).to(device), step


def _train(
    ddp: DistributedDataParallel, step: Callable[..., Any], steps: int, report: Report
) -> None:
    for done in range(1, steps + 1):
        step(ddp)
        report(done, steps)
