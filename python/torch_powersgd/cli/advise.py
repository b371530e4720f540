# SPDX-License-Identifier: BSD-3-Clause
"""``torchrun ... -m torch_powersgd advise``."""

from __future__ import annotations

import argparse
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch

from torch_powersgd.cli.arguments import (
    RECOMMENDED_WIRE,
    STEP_FORM,
    WIRES,
    add_device,
    add_model,
    add_ranks,
    add_rate,
    callable_of,
    make_model,
    wires,
)
from torch_powersgd.cli.processes import in_words, joined, on_every_process
from torch_powersgd.cli.rehearsal import (
    BUCKETS_SECONDS,
    Job,
    Rehearsal,
    bucket_sizes,
    measure,
    settings_of,
)
from torch_powersgd.cli.stand_in import StandIn
from torch_powersgd.cli.tables import progress
from torch_powersgd.cli.verdict import FEW, ROUNDS, may_pay, print_advice, verdict, waits
from torch_powersgd.group_backends import find_backends
from torch_powersgd.options import Options
from torch_powersgd.units import ms_text, size_text

RANKS = [8, 16, 32]
GUESSED_BACKWARD_MS = 200.0

ADVISE = """\
Measures whether compression pays on these machines, and with which setting.
Start it with torchrun, on the machines and with the number of processes that you train with.
For one to three minutes, it alternates DDP steps without averaging, with the plain backend, and
with each setting. It recommends the highest matrix rank whose step is within 5 % of the fastest,
and another DDP bucket size if that is faster still. It also shows the one-way delay of a small
message. Where processes share a host's link, it also compares factors in float32, which Gloo or
NCCL sums by itself.
Pass --step to measure your own steps; otherwise a stand-in computes instead of your model.
"""
ADVISE_EXAMPLE = """\
example, in mymodels.py:
  def make_model(): return MyModel()
  def train_step(model): model(BATCH).mean().backward()

  torchrun --nproc_per_node 2 -m torch_powersgd advise mymodels:make_model \\
      --step mymodels:train_step
"""


def _milliseconds(value: str) -> float:
    milliseconds = float(value)
    if not 0 <= milliseconds < math.inf:
        raise argparse.ArgumentTypeError(f"milliseconds must be a finite number >= 0, got {value}")
    return milliseconds


def add(commands: Any) -> None:
    command = commands.add_parser(
        "advise",
        help="measure, under torchrun, whether compression pays and with which setting",
        description=ADVISE,
        epilog=ADVISE_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_ranks(command, RANKS)
    command.add_argument(
        "--wire-dtype", type=wires, metavar="DTYPE,...",
        help=f"wire dtypes of the factors to compare: {', '.join(WIRES)} ({RECOMMENDED_WIRE}, and "
        "none as well if processes share a host's link); none sends float32",
    )  # fmt: skip
    step = command.add_mutually_exclusive_group()
    step.add_argument(
        "--step", metavar="MODULE:FUNCTION",
        help="function that takes the model, wrapped in DDP and on the device to train on, runs a "
        f"forward pass, and calls backward() on the loss, as in '{STEP_FORM}'",
    )  # fmt: skip
    step.add_argument(
        "--backward-ms", type=_milliseconds, metavar="MS",
        help="milliseconds that the stand-in's backward pass takes without averaging "
        f"({GUESSED_BACKWARD_MS:.0f})",
    )  # fmt: skip
    add_device(command)
    add_model(command)
    add_rate(command)
    command.set_defaults(run=run)


def wires_on(hosts: Sequence[int]) -> list[str]:
    """The wire dtypes to compare by default, given the number of each process's host.

    Where processes share a link, Gloo or NCCL may sum float32 faster, by a hierarchy of its own.
    """
    several = 1 < len(set(hosts)) < len(hosts)
    return [RECOMMENDED_WIRE, "none"] if several else [RECOMMENDED_WIRE]


def _job_of(arguments: argparse.Namespace, device: torch.device, hosts: Sequence[int]) -> Job:
    """The steps and settings that advise compares."""
    settings = [
        Options(
            matrix_approximation_rank=rank,
            min_compression_rate=arguments.min_compression_rate,
            start_powerSGD_iter=0,
            wire_dtype=WIRES[wire],
        )
        for wire, rank in itertools.product(
            dict.fromkeys(arguments.wire_dtype or wires_on(hosts)), sorted(set(arguments.ranks))
        )
    ]
    model = make_model(arguments.model).to(device)
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError("the model has no parameter that requires a gradient")
    if arguments.step is not None:
        step = callable_of(arguments.step, "MODULE:FUNCTION", STEP_FORM, "model")
        return Job(model, step, settings)
    stand_in = StandIn(model, _backward_ms(arguments) / 1e3, device)
    return Job(stand_in, lambda ddp: ddp().backward(), settings)


def _backward_ms(arguments: argparse.Namespace) -> float:
    given = arguments.backward_ms
    return GUESSED_BACKWARD_MS if given is None else float(given)


def _introduction(
    arguments: argparse.Namespace, job: Job, hosts: Sequence[int], delay: float
) -> str:
    """Says what was measured."""
    if arguments.step is not None:
        step = f"{arguments.step}, forward and backward"
    else:
        step = f"a stand-in, whose backward pass takes {_backward_ms(arguments):g} ms"
        step += "" if arguments.backward_ms is not None else ", a guess: --step measures yours"
    shared = f" ({in_words(hosts)})" if len(set(hosts)) < len(hosts) else ""
    processes = f"{len(hosts)} processes{shared}, {ms_text(delay)} ms apart one way"
    return f"{processes}, {size_text(job.gradient_bytes)} of gradients. The step is {step}."


def run(arguments: argparse.Namespace) -> int:
    with joined("advise", arguments.device) as device:
        hosts = find_backends(None)[0].hosts
        job = on_every_process(lambda: _job_of(arguments, device, hosts), Job.outline)
        first = torch.distributed.get_rank() == 0
        rehearsal = Rehearsal(job, device)
        delay, measured = rehearsal.delay(), settings_of(job, device)
        with progress("measuring steps", shown=first) as report:
            measure(rehearsal, measured, report=report)
        chosen, _ = verdict(measured)  # the same on all processes
        sizes = bucket_sizes(job, chosen) if chosen else []
        if len(sizes) > 1:
            with progress("measuring buckets", shown=first) as report:
                open_question = functools.partial(may_pay, sizes)
                measure(rehearsal, sizes, BUCKETS_SECONDS, report, open_question)
        kinds = ROUNDS if chosen and waits(measured, sizes) else {}
        rounds = {
            kind: rehearsal.round_seconds(density)
            for kind, density in kinds.items()
            if density is None or len(hosts) <= FEW
        }
        del rehearsal  # before the group
    if first:  # The group has ended, so no process waits for this one.
        introduction = _introduction(arguments, job, hosts, delay)
        print_advice(measured, introduction, sizes, rounds)
    return 0
