# SPDX-License-Identifier: BSD-3-Clause
"""Measures if compression pays on this group: ``torchrun ... -m torch_powersgd advise``.

The steps of DDP are rehearsed without averaging, with the plain all-reduce, and at each rank with
one wire (rehearsal.py). The steps of the other wires are predicted from these (prediction.py). The
verdict on the steps is verdict.py's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import os
import statistics
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from torch_powersgd._core import _C
from torch_powersgd.lookup import BACKENDS, find_backend
from torch_powersgd.options import Options
from torch_powersgd.store_agreement import equality_of, next_call
from torch_powersgd.tools.costs import Link, StageSeconds, measure_link, measure_stages
from torch_powersgd.tools.footprint import Layout, as_reals, buckets_of, elements_of, footprint_of
from torch_powersgd.tools.prediction import Model, shifted
from torch_powersgd.tools.rehearsal import (
    BUDGET_SECONDS,
    TIMED_SECONDS,
    TIMED_STEPS,
    WARM_UP_STEPS,
    Rehearsal,
    Rehearsed,
    Report,
    StartAverage,
    UserStep,
    slowest,
    time_step,
)
from torch_powersgd.tools.verdict import Passes, Timing, eligible_wires, wire_of

STAND_IN = UserStep(backward=0.2)  # where the user gives no step

T = TypeVar("T")


class RanksError(ValueError):
    """An error of one rank, raised on all ranks alike."""


@dataclass(frozen=True)
class Job:
    """The job that advise measures.

    Attributes:
        layout: the shapes of DDP's buckets.
        dtype: the dtype of the gradients.
        step: the seconds of a step without averaging.
        options: the settings to compare.
    """

    layout: Layout
    dtype: torch.dtype
    step: UserStep
    options: Sequence[Options]


@dataclass(frozen=True)
class Measured:
    """The measurements, which are the same on all ranks.

    Attributes:
        link: the group's latency and bandwidth.
        alone: seconds of each step without averaging, by pass.
        plain: the timing of the plain all-reduce.
        timings: the timing of each setting, measured or predicted.
    """

    link: Link
    alone: Passes
    plain: Timing
    timings: list[Timing]


@contextlib.contextmanager
def joined(device_type: str) -> Iterator[torch.device]:
    """The default group, within torchrun, for as long as it is in use.

    Raises:
        ValueError: if torchrun did not start this process.
    """
    if "RANK" not in os.environ:
        raise ValueError(
            "advise measures a group of processes: start it with torchrun, on all machines that "
            "will train, for example torchrun --nproc_per_node 2 -m torch_powersgd advise ..."
        )
    device = torch.device(device_type)
    if device_type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(BACKENDS[device_type])
    try:
        yield device
    finally:
        dist.destroy_process_group()


def on_every_rank(make: Callable[[], T]) -> T:
    """Calls it on this rank. Collective: all ranks learn of it if the call fails on any.

    Raises:
        RanksError: on every rank alike. It names the first rank that failed.
    """
    mine = {}
    try:
        result = make()
    except (ValueError, ImportError, AttributeError) as error:
        mine = {"error": str(error)}
    except Exception as error:  # the other ranks must not wait for this one
        traceback.print_exc()
        mine = {"error": f"{type(error).__name__}: {error}"}
    _agree(mine)
    return result


def time_on_all_ranks(
    model: torch.nn.Module, step: Callable[[torch.nn.Module], object], device: torch.device
) -> UserStep:
    """The step of the slowest rank. Collective; all ranks compute at the same time."""
    on_every_rank(lambda: model.to(device))  # the ranks may take unlike times

    def timed(steps: int) -> UserStep:
        mine = on_every_rank(lambda: time_step(lambda: step(model), model.zero_grad, device, steps))
        return UserStep(*slowest([mine.backward, mine.rest], device))

    first = timed(WARM_UP_STEPS)
    # All ranks take as many steps: the model may hold collective layers.
    steps = int(TIMED_SECONDS / max(first.backward + first.rest, 1e-6))
    return timed(min(max(steps, TIMED_STEPS[0]), TIMED_STEPS[1]))


def job_of(model: torch.nn.Module, step: UserStep, options: Sequence[Options]) -> Job:
    """The job of training a model. Collective.

    The gradients are rehearsed in one dtype, that of most elements.

    Raises:
        RanksError: if the ranks' models, options or steps differ.
    """
    job = on_every_rank(lambda: _job_of(model, step, options))
    _agree({"job": repr(job)})
    return job


def measure(
    job: Job,
    device: torch.device,
    budget: float = BUDGET_SECONDS,
    report: Report = lambda done, blocks: None,
) -> Measured:
    """Rehearses the job on the default group, whose backend is powersgd. Collective."""
    link = measure_link(device)
    numels = [elements_of(shapes) for shapes in job.layout]
    rehearsal = Rehearsal(numels, device, job.step.backward, job.dtype)
    known = measured_options(job.options)
    rehearsed = [
        each
        for each in job.options
        if each in known or not any(_differ_in_wire(other, each) for other in known)
    ]
    settings = [
        Rehearsed(lambda: None, allocates=False),
        Rehearsed(lambda: _start_plain, allocates=False),
        *(Rehearsed(_compressing(job, each, device), allocates=True) for each in rehearsed),
    ]
    samples = rehearsal.measure(settings, budget, report)
    whole = [[[job.step.rest + s for s in block] for block in blocks] for blocks in samples]
    alone, plain, *compressed = whole
    timings = _timings(job, link, dict(zip(rehearsed, compressed, strict=True)), alone, device)
    return Measured(link, alone, _timing(job, None, plain), timings)


def measured_options(options: Sequence[Options]) -> list[Options]:
    """The settings of the wire that may be recommended, so that no advice is on a prediction."""
    wire = eligible_wires(options)[0]
    return [each for each in options if wire_of(each) == wire]


def with_errors(measured: Measured, errors: Mapping[Options, float]) -> Measured:
    """The measurements with the errors of some settings."""
    timings = [
        dataclasses.replace(timing, error=errors.get(timing.options)) if timing.options else timing
        for timing in measured.timings
    ]
    return dataclasses.replace(measured, timings=timings)


def quiet() -> None:
    """Keeps the log lines of the rehearsed models, which nobody trains, to warnings."""
    logging.getLogger("torch_powersgd").setLevel(logging.WARNING)


def _agree(mine: dict[str, str]) -> None:
    """Returns once every rank has called it with the same. Collective.

    Raises:
        RanksError: on every rank alike, if a rank gives an error or they differ.
    """
    group = dist.group.WORLD
    assert group is not None
    try:
        compare = equality_of("the model and the arguments")
        next_call(group, "advise", default_pg_timeout).agree(mine, compare)
    except ValueError as error:
        raise RanksError(str(error)) from None


def _job_of(model: torch.nn.Module, step: UserStep, options: Sequence[Options]) -> Job:
    parameters = [as_reals(p) for p in model.parameters() if p.requires_grad]
    sizes: dict[torch.dtype, int] = {}
    for parameter in parameters:
        sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.numel()
    if not sizes:
        raise ValueError("the model has no parameter that requires a gradient")
    dtype = max(sizes, key=lambda each: sizes[each])
    return Job(buckets_of([list(p.shape) for p in parameters], dtype), dtype, step, options)


def _timings(
    job: Job, link: Link, rehearsed: dict[Options, Passes], alone: Passes, device: torch.device
) -> list[Timing]:
    """The timing of each setting. Collective, where some have to be predicted."""
    model = Model(job.layout, job.dtype, job.step.backward, link, dist.get_world_size())
    least = statistics.median(sample for block in alone for sample in block)
    stages: dict[Options, list[StageSeconds]] = {}
    timings = []
    for options in job.options:
        passes = rehearsed.get(options)
        if passes is not None:
            timings.append(_timing(job, options, passes))
            continue
        known = next(each for each in rehearsed if _differ_in_wire(each, options))
        if known not in stages:
            without_packets = dataclasses.replace(known, wire_dtype=None)
            stages[known] = measure_stages(job.layout, without_packets, job.dtype, device)
        more = model.seconds(options, stages[known]) - model.seconds(known, stages[known])
        timings.append(_timing(job, options, shifted(rehearsed[known], more, least), True))
    return timings


def _timing(job: Job, options: Options | None, passes: Passes, predicted: bool = False) -> Timing:
    footprint = footprint_of(job.layout, options, job.dtype, dist.get_world_size())
    return Timing(options, footprint.sent_bytes, footprint.multiplications, passes, predicted)


def _differ_in_wire(one: Options, other: Options) -> bool:
    return dataclasses.replace(one, wire_dtype=other.wire_dtype) == other


def _start_plain(_bucket: int, buffer: torch.Tensor) -> dist.Work:
    # Outside of a backward pass the backend hands everything on.
    work: dist.Work = dist.all_reduce(buffer, async_op=True)
    return work


def _compressing(job: Job, options: Options, device: torch.device) -> Callable[[], StartAverage]:
    """Makes the function that prepares a setting: an attached model of its own."""
    backend = find_backend(None, device)
    assert backend is not None, "the default group's backend is powersgd"
    shapes = [shape for bucket in job.layout for shape in bucket]
    names = [str(i) for i in range(len(shapes))]
    ends = list(itertools.accumulate(map(len, job.layout)))
    members = [list(range(end - len(b), end)) for end, b in zip(ends, job.layout, strict=True)]

    def prepare() -> StartAverage:
        parameters = [torch.empty(shape, device=device, dtype=job.dtype) for shape in shapes]
        model = _C.AttachedModel(backend, names, parameters, options._core())

        def start(bucket: int, buffer: torch.Tensor) -> dist.Work:
            if bucket == 0:
                model.end_step()  # the last one
            work: dist.Work = model.reduce(bucket, buffer, members[bucket], dist.get_world_size())
            return work

        return start

    return prepare
