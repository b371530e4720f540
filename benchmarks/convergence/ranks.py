# SPDX-License-Identifier: BSD-3-Clause
"""Runs a function on the ranks of a method, one local process for each."""

from __future__ import annotations

import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cluster.methods import Trainee, find
from torch import nn
from torch.multiprocessing.spawn import start_processes

WORLD = 2
_LIMIT_SECONDS = 1800  # for a run; one that hangs is ended by the limit of its collectives
_COLLECTIVE_SECONDS = 120

Make = Callable[[nn.Module], Trainee]

# The server that forks the ranks imports the modules that take seconds.
multiprocessing.set_forkserver_preload(
    [
        "torch._dynamo",
        "torch.nn.parallel",
        "torch_powersgd",
        "sklearn.datasets",
        "rich.progress",
        "matplotlib.pyplot",
    ]
)


def run(
    function: Callable[..., Any], method: str, approximation: int, seed: int, *args: Any
) -> Any:
    """Calls function(make, *args) on every rank, and returns the result of the first rank.

    Args:
        function: the function to call. Its first argument is the method's factory.
        method: the name of the method.
        approximation: the rank of the approximation.
        seed: the seed of the method's random start.
        args: further arguments of the function.
    """
    with tempfile.TemporaryDirectory() as folder:
        context = start_processes(
            _rank,
            (Path(folder), function, method, approximation, seed, args),
            WORLD,
            join=False,
            start_method="forkserver",
        )
        deadline = time.monotonic() + _LIMIT_SECONDS
        while not context.join(timeout=1):  # raises what a rank raised
            if time.monotonic() > deadline:
                for process in context.processes:
                    process.kill()
                raise TimeoutError(f"{method} did not end within {_LIMIT_SECONDS} s")
        return json.loads((Path(folder) / "result").read_text())


def _rank(
    rank: int,
    folder: Path,
    function: Callable[..., Any],
    method: str,
    approximation: int,
    seed: int,
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    chosen = find(method)
    dist.init_process_group(
        chosen.backend["cpu"],
        store=dist.FileStore(str(folder / "store"), WORLD),
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=_COLLECTIVE_SECONDS),
        pg_options=chosen.options(approximation, seed) if chosen.options else None,
    )
    result = function(lambda model: chosen.make(model, approximation, seed), *args)
    if rank == 0:
        (folder / "result").write_text(json.dumps(result))
    dist.destroy_process_group()
