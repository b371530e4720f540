# SPDX-License-Identifier: BSD-3-Clause
"""The steps that ``advise`` measures.

The settings take turns at real DDP steps: without averaging, with the plain backend, and with each
setting of ``attach``.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from torch_powersgd.attach import attach
from torch_powersgd.cli.footprint import assign_buckets
from torch_powersgd.cli.processes import delay_of, on_every_process, slowest, synchronize
from torch_powersgd.cli.tables import Report
from torch_powersgd.group_backends import PLAIN_BACKENDS, find_backends, group_or_default
from torch_powersgd.local_steps.fragment import Fragment
from torch_powersgd.local_steps.schedule import lay_under
from torch_powersgd.matrices import as_reals
from torch_powersgd.option_values import dtype_name
from torch_powersgd.options import Options

BUDGET_SECONDS, BUCKETS_SECONDS = 30.0, 15.0  # for all rounds; the minimum number may take longer
ROUNDS = (7, 12)
BLOCK_SECONDS = 1.0  # for the steps of one setting in one round
BLOCK_STEPS = (2, 10)
CAPS_MB = (5, 100)  # besides DDP's default
WARM_UP_STEPS = 2  # DDP rebuilds its buckets after the first one, and their tables are allocated

Step = Callable[[torch.nn.Module], object]


@dataclass(frozen=True)
class Job:
    """A step and the settings to measure it with.

    Attributes:
        model: the model, on the device that trains.
        step: a function of the wrapped model, which runs a forward and a backward pass.
        settings: the options to compare.
    """

    model: torch.nn.Module
    step: Step
    settings: Sequence[Options]

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        return [p for p in self.model.parameters() if p.requires_grad]

    @property
    def gradient_bytes(self) -> int:
        return sum(p.numel() * p.element_size() for p in self.parameters)

    def outline(self) -> str:
        """A text that is the same on all processes."""
        return repr((self.settings, [(p.shape, p.dtype) for p in self.parameters]))


@dataclass
class Measured:
    """The steps of one setting, the same on all processes.

    Attributes:
        name: the setting in words.
        options: the options of ``attach``. None: nothing is attached.
        bucket_cap_mb: the size of DDP's buckets. None: DDP's default.
        averages: False if the gradients stay as they are on each process.
        sent_bytes: the bytes that a process gives to the backend in a step.
        rounds: the seconds of each step on the slowest process, by round.
    """

    name: str
    options: Options | None = None
    bucket_cap_mb: int | None = None
    averages: bool = True
    sent_bytes: int = 0
    rounds: list[list[float]] = field(default_factory=list)

    @property
    def seconds(self) -> list[float]:
        return [step for steps in self.rounds for step in steps]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def settings_of(job: Job, device: torch.device) -> list[Measured]:
    """A step without averaging, one of the plain backend, and one of each setting."""
    return [
        Measured("no averaging", averages=False),
        Measured(f"plain {PLAIN_BACKENDS[device.type]}", sent_bytes=job.gradient_bytes),
        *(Measured(name_of(options), options) for options in job.settings),
    ]


def bucket_sizes(job: Job, setting: Measured) -> list[Measured]:
    """A setting with DDP's own buckets, and with sizes that give other numbers of buckets."""
    gradients = [as_reals(p) for p in job.parameters]
    counts = {len(assign_buckets(gradients))}
    found = [Measured(setting.name, setting.options)]
    for cap in CAPS_MB:
        if (count := len(assign_buckets(gradients, [cap << 20]))) not in counts:
            counts.add(count)
            name = f"{setting.name}, buckets of {cap} MB"
            found.append(Measured(name, setting.options, bucket_cap_mb=cap))
    return found


def measure(
    rehearsal: Rehearsal,
    measured: Sequence[Measured],
    budget: float = BUDGET_SECONDS,
    report: Report = lambda done, parts: None,
    open_question: Callable[[], bool] = lambda: True,
) -> None:
    """Measures steps of each of these. Collective.

    Each round measures every setting, so that drift of the machines affects all alike. After a
    round, ``open_question`` says whether another one may change the verdict.

    Raises:
        SharedError: on every process alike, if the step fails or runs no backward pass.
    """
    start, rounds = time.perf_counter(), ROUNDS[0]
    for done in range(ROUNDS[1]):
        if done == 1:
            [seconds] = rehearsal.slowest([time.perf_counter() - start])
            rounds = min(max(int(budget / seconds), ROUNDS[0]), ROUNDS[1])
        if done == rounds:
            break
        # Back and forth, so that a steady drift favors no setting.
        for i, setting in enumerate(measured if done % 2 == 0 else measured[::-1], 1):
            setting.rounds.append(rehearsal.block(setting))
            report(done * len(measured) + i, rounds * len(measured))
        if not open_question():
            break


def name_of(options: Options) -> str:
    wire = dtype_name(options.wire_dtype or torch.float32)
    return f"matrix rank {options.matrix_approximation_rank}, {wire}"


class Rehearsal:
    """Steps of a job, one setting after the other. All methods are collective.

    The default group's backend is powersgd.
    """

    def __init__(self, job: Job, device: torch.device) -> None:
        logging.getLogger("torch_powersgd").setLevel(logging.ERROR)  # Nobody trains these models.
        self._job = job
        self._device = device
        self._plain = dist.new_group(backend=PLAIN_BACKENDS[device.type])
        self._finds_unused = False
        ddp = self._wrap(None, None)
        with ddp.no_sync():
            unused = on_every_process(lambda: self._first_step(ddp))
        self._finds_unused = self.slowest([unused])[0] > 0

    def block(self, setting: Measured) -> list[float]:
        """The seconds of some steps of a setting. Its ``sent_bytes`` are counted if it has options.

        The setting holds memory only during the call.
        """
        ddp = self._wrap(setting.options, setting.bucket_cap_mb)
        with contextlib.nullcontext() if setting.averages else ddp.no_sync():
            warm = [self._seconds(ddp) for _ in range(WARM_UP_STEPS)]
            last = self.slowest(warm)[-1]  # the processes start together as well
            before = _sent_bytes()
            steps = min(max(round(BLOCK_SECONDS / max(last, 1e-6)), BLOCK_STEPS[0]), BLOCK_STEPS[1])
            seconds = [self._seconds(ddp) for _ in range(steps)]
        if setting.options is not None:
            setting.sent_bytes = (_sent_bytes() - before) // steps
        return self.slowest(seconds)

    def round_seconds(self, density: float | None) -> float:
        """The seconds of a round of local steps of all parameters, without a step."""
        parameters = {str(i): p.detach().clone() for i, p in enumerate(self._job.parameters)}
        options = lay_under(None, 0, Options())
        group = group_or_default(None)
        fragment = Fragment(parameters, options, group, parameters.keys(), density)
        seconds = []
        for _ in range(WARM_UP_STEPS + ROUNDS[0]):
            synchronize(self._device)
            start = time.perf_counter()
            fragment.begin(overlaps=False, deed="measure a round")
            fragment.finish(Fragment.subtract)
            synchronize(self._device)
            seconds.append(time.perf_counter() - start)
        fragment.compression.detach()
        return statistics.median(self.slowest(seconds[WARM_UP_STEPS:]))

    def slowest(self, values: Sequence[float]) -> list[float]:
        """The element-wise maximum over all processes."""
        return slowest(values, self._device, self._plain)

    def delay(self) -> float:
        """The seconds that a small message takes one way, to the farthest of some processes."""
        return delay_of(self._device, self._plain)

    def _wrap(self, options: Options | None, cap_mb: int | None) -> DistributedDataParallel:
        """A new DDP module around the model. The previous one must no longer be in use."""
        gc.collect()  # The old one's hooks would run as well.
        ddp = DistributedDataParallel(
            self._job.model,
            process_group=self._plain if options is None else None,
            init_sync=False,  # The weights don't matter, and are slow to send on a slow link.
            bucket_cap_mb=cap_mb,
            find_unused_parameters=self._finds_unused,
        )
        if options is not None:
            attach(ddp, options)
        return ddp

    def _first_step(self, ddp: DistributedDataParallel) -> int:
        """The number of parameters without a gradient."""
        self._seconds(ddp)
        unused = sum(p.grad is None for p in self._job.parameters)
        if unused == len(self._job.parameters):
            raise ValueError(
                "the step must call backward() on its loss and keep the gradients, but no "
                "parameter has a gradient after it"
            )
        return unused

    def _seconds(self, ddp: DistributedDataParallel) -> float:
        ddp.zero_grad()
        synchronize(self._device)
        start = time.perf_counter()
        self._job.step(ddp)
        synchronize(self._device)
        return time.perf_counter() - start


def _sent_bytes() -> int:
    return sum(backend.stats()["bytes_after"] for backend in find_backends(None))
