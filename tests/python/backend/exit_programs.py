# SPDX-License-Identifier: BSD-3-Clause
"""Programs of two ranks that end in many ways. Each rank runs through an interpreter's whole exit.

    python exit_programs.py FOLDER PROGRAM...

A multiprocessing child leaves by os._exit, which skips all that can go wrong at an exit: the atexit
functions, the end of the interpreter, static destructors. So this program imports torch once and
then forks its ranks. Each rank runs off the end of the script, as a user's program does.

The programs run at the same time. One that is named more than once runs as often, in a row. The
output is JSON: {program: [[exit code of rank 0, exit code of rank 1] of each run]}.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import torch_powersgd as tp
from support.ddp import make_attached, train
from support.deadline import OPERATION
from support.groups import compress
from support.synthetic import gradient

SHAPES = {"weight": (32, 48), "bias": (48,)}

# Objects that a program leaves for the interpreter to destroy.
kept: list[Any] = []


class SlowToDestroy:
    """Stretches the end of the interpreter, as a large program does.

    Other threads run meanwhile. One that then asks for the GIL is ended where it is.
    """

    def __del__(self, sleep: Callable[[float], None] = time.sleep) -> None:
        sleep(1)


def init(rank: int, store: str) -> None:
    dist.init_process_group(
        "cpu:powersgd",
        store=dist.FileStore(store, 2),
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=OPERATION),
        pg_options=tp.Options.hook_defaults(start_powerSGD_iter=0),
    )
    dist.barrier()


def trained() -> torch.nn.Module:
    ddp = make_attached(SHAPES)
    train(ddp, range(3))
    return ddp


def start_work(rank: int) -> dist.Work:
    work: dist.Work = compress(gradient([64, 64], rank), async_op=True)
    return work


def reduces_and_destroys(rank: int) -> None:
    for _ in range(3):
        start_work(rank).wait()
    dist.destroy_process_group()


def trains_and_does_not_destroy(rank: int) -> None:
    trained()


def does_not_compress_and_does_not_destroy(rank: int) -> None:
    """A job that is too short for its warm-up."""
    ddp = make_attached(SHAPES, tp.Options.hook_defaults())
    train(ddp, range(3))


def keeps_everything(rank: int) -> None:
    """The module, the group, works and futures are globals at the exit."""
    work = start_work(rank)
    future = work.get_future().then(lambda done: done.value()[0])
    kept.extend([trained(), dist.group.WORLD, work, future])


def destroys_and_keeps_everything(rank: int) -> None:
    keeps_everything(rank)
    dist.destroy_process_group()


def leaves_answered_works(rank: int) -> None:
    kept.extend(start_work(rank) for _ in range(20))


def linger(done: torch.futures.Future[Any]) -> None:
    """A callback that asks for the GIL again and again, for half a second."""
    for _ in range(500):
        time.sleep(0.001)


def leaves_a_work_that_nobody_answers(rank: int) -> None:
    """The peer exits too, which ends the work: its callback begins during the exit."""
    if rank == 0:
        kept.extend([SlowToDestroy(), start_work(rank)])
        kept.append(kept[1].get_future().then(linger))


def outlive_rank_0(rank: int) -> None:
    """Keeps the connection open, so that nothing ends the works of rank 0."""
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        store.set("pid", str(os.getpid()))
    else:
        status = Path(f"/proc/{int(store.get('pid'))}/status")
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            while "zombie" not in status.read_text():
                time.sleep(0.1)


def leaves_a_work_while_the_peer_lives(rank: int) -> None:
    if rank == 0:
        kept.append(start_work(rank))
    outlive_rank_0(rank)


def aborts_while_the_peer_lives(rank: int) -> None:
    outlive_rank_0(rank)
    if rank == 0:
        kept.extend(start_work(rank) for _ in range(3))
        dist.distributed_c10d._abort_process_group()


def exits_with_a_work_in_flight(rank: int) -> None:
    start_work(rank)
    sys.exit(3)


def exits_with_an_exact_work_in_flight(rank: int) -> None:
    kept.append(dist.all_reduce(torch.ones(3, dtype=torch.int64), async_op=True))


def exits_while_a_callback_runs(rank: int) -> None:
    kept.append(SlowToDestroy())
    started = threading.Event()

    def callback(done: torch.futures.Future[Any]) -> None:
        started.set()
        linger(done)

    start_work(rank).get_future().then(callback)
    started.wait()


class InRank(Exception):
    """Leaves the starter's loop in a fork. The end of the script runs the program that it names."""


def start(name: str, store: str) -> list[int]:
    pids = []
    for rank in range(2):
        pid = os.fork()
        if pid == 0:
            raise InRank(name, rank, store)
        pids.append(pid)
    return pids


def wait(pids: list[int], deadline: float) -> list[int]:
    """The exit codes. A rank that hangs is killed, which gives -SIGKILL."""
    codes: dict[int, int] = {}
    while len(codes) < len(pids):
        for pid in pids:
            if pid not in codes:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    codes[pid] = os.waitstatus_to_exitcode(status)
                elif time.monotonic() > deadline:
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
    return [codes[pid] for pid in pids]


def run_all(folder: str, programs: list[str]) -> dict[str, list[list[int]]]:
    results: dict[str, list[list[int]]] = {name: [] for name in programs}
    left = Counter(programs)
    while left:
        running = {name: start(name, f"{folder}/{name}{left[name]}") for name in left}
        deadline = time.monotonic() + OPERATION
        for name, pids in running.items():
            results[name].append(wait(pids, deadline))
        left -= Counter(running.keys())
    return results


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, *programs = sys.argv[1:]
    importlib.import_module("torch._dynamo")  # otherwise DDP imports it in each fork
    # Frozen objects are neither walked nor copied by the collections at the end of a fork.
    gc.collect()
    gc.freeze()
    rank_to_be = None
    try:
        print(json.dumps(run_all(folder, programs)))
    except InRank as fork:
        rank_to_be = fork.args
    if rank_to_be is not None:
        name, rank, store = rank_to_be
        faulthandler.dump_traceback_later(OPERATION - 5)
        init(rank, store)
        globals()[name](rank)
