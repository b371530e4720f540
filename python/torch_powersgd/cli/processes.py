# SPDX-License-Identifier: BSD-3-Clause
"""The processes of a command that torchrun starts: their group, their errors, their network."""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from torch_powersgd.agreement import agree, equality_of
from torch_powersgd.group_backends import BACKENDS

PEERS, PINGS = 8, 5  # processes whose delay is measured, and messages to each

T = TypeVar("T")


class SharedError(ValueError):
    """An error of one process, raised on all processes alike."""


@contextlib.contextmanager
def joined(command: str, device_type: str) -> Iterator[torch.device]:
    """The default group, within torchrun, for as long as a command uses it.

    Raises:
        ValueError: if torchrun did not start this process, or started no other.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        raise ValueError(
            f"{command} measures a group of processes: start at least two with torchrun, on all "
            "machines that will train, for example torchrun --nproc_per_node 2 -m torch_powersgd "
            f"{command} ..."
        )
    device = torch.device(device_type)
    if device_type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError("--device cuda needs a GPU, and torch sees none here")
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(BACKENDS[device_type])
    try:
        yield device
    finally:
        dist.destroy_process_group()


def on_every_process(make: Callable[[], T], outline: Callable[[T], str] = lambda made: "") -> T:
    """Calls ``make`` on this process. Collective.

    Raises:
        SharedError: on every process alike, if the call fails on any process (the message names
            it) or the outlines differ.
    """
    group = dist.group.WORLD
    assert group is not None

    def make_with_outline() -> tuple[T, dict[str, Any]]:
        made = make()
        return made, {"outline": outline(made)}

    try:
        compare = equality_of("the model and the arguments")
        return agree(group, "advise", make_with_outline, compare)[0]
    except ValueError as error:
        if not isinstance(error.__context__, ValueError | None):
            traceback.print_exception(error.__context__)
        raise SharedError(str(error)) from None


def in_words(hosts: Sequence[int]) -> str:
    """How many processes share each host, such as "2 hosts of 4 processes", from their numbers."""
    sizes = list(Counter(hosts).values())
    if len(set(sizes)) > 1:
        return f"{len(sizes)} hosts of {' and '.join(map(str, sizes))} processes"
    return f"{len(sizes)} host{'s' * (len(sizes) > 1)} of {sizes[0]} processes"


def slowest(
    values: Sequence[float], device: torch.device, group: dist.ProcessGroup | None = None
) -> list[float]:
    """The element-wise maximum over all processes. Collective."""
    each = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(each, dist.ReduceOp.MAX, group=group)
    largest: list[float] = each.tolist()
    return largest


def delay_of(device: torch.device, group: dist.ProcessGroup | None = None) -> float:
    """The seconds of a small message from the first process, one way. Collective.

    It is that to the farthest of some processes.
    """
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    token = torch.zeros(1, device=device)
    farthest = 0.0
    for peer in range(1, world, math.ceil((world - 1) / PEERS)):
        seconds = []
        for _ in range(1 + PINGS):  # the first one may make a connection
            start = time.perf_counter()
            if rank in (0, peer):
                other = peer if rank == 0 else 0
                for sends in (True, False) if rank == 0 else (False, True):
                    (dist.send if sends else dist.recv)(token, other, group=group)
                synchronize(device)
            seconds.append(time.perf_counter() - start)
        if rank == 0:
            farthest = max(farthest, statistics.median(seconds[1:]) / 2)
    return slowest([farthest], device, group)[0]


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
