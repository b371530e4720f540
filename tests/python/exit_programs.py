# SPDX-License-Identifier: BSD-3-Clause
"""Programs of two ranks that end in many ways, each rank through a whole interpreter's exit.

    python exit_programs.py FOLDER ROUNDS

A multiprocessing child leaves by os._exit, which skips all that can go wrong at an exit: the atexit
functions, the end of the interpreter, static destructors. So this program imports torch once and
then forks its ranks, each of which runs off the end of the script as a user's program does. It
prints the exit codes as JSON: {program: [[code of rank 0, code of rank 1, seconds], ...]}.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch._dynamo  # DDP imports it when it is first used, in each fork  # noqa: F401
import torch.distributed as dist
from synthetic import gradient, gradients, make_attached, step

import torch_powersgd as tp

HANG = 40  # seconds

SHAPES = {"weight": (32, 48), "bias": (48,)}

# What a program leaves behind for the interpreter to destroy.
kept: list[Any] = []


def init(rank: int, store: str) -> None:
    dist.init_process_group(
        "cpu:powersgd",
        store=dist.FileStore(store, 2),
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=HANG),
        pg_options=tp.Options(scope="always", start_powerSGD_iter=0),
    )
    dist.barrier()


def train(rank: int) -> torch.nn.Module:
    ddp = make_attached(SHAPES)
    for i in range(3):
        step(ddp, gradients(SHAPES, rank, i))
    return ddp


def start_work(rank: int) -> dist.Work:
    return dist.all_reduce(gradient([64, 64], rank), async_op=True)


def destroys_its_group(rank: int) -> None:
    train(rank)
    dist.destroy_process_group()


def does_not_destroy_its_group(rank: int) -> None:
    train(rank)


def keeps_everything(rank: int) -> None:
    """The module, the group, works and futures are globals at the exit."""
    work = start_work(rank)
    future = work.get_future().then(lambda done: done.value()[0])
    kept.extend([train(rank), dist.group.WORLD, work, future])


def destroys_and_keeps_everything(rank: int) -> None:
    keeps_everything(rank)
    dist.destroy_process_group()


def leaves_answered_works(rank: int) -> None:
    kept.extend(start_work(rank) for _ in range(20))


def destroys_with_answered_works(rank: int) -> None:
    works = [start_work(rank) for _ in range(20)]
    dist.destroy_process_group()
    for work in works:
        work.wait()


def leaves_a_work_that_nobody_answers(rank: int) -> None:
    """The peer exits too, which ends what is in flight."""
    if rank == 0:
        kept.append(start_work(rank))
        kept.append(kept[0].get_future().then(lambda done: done.value()))


def leaves_a_work_while_the_peer_lives(rank: int) -> None:
    """Nothing ends what is in flight before the exit."""
    if rank == 0:
        start_work(rank)
    else:
        time.sleep(20)


def aborts_while_the_peer_lives(rank: int) -> None:
    if rank == 0:
        kept.extend(start_work(rank) for _ in range(3))
        dist.distributed_c10d._abort_process_group()
    else:
        time.sleep(10)


def raises_with_a_work_in_flight(rank: int) -> None:
    start_work(rank)
    raise RuntimeError("an uncaught exception, as it should be")


def exits_with_a_work_in_flight(rank: int) -> None:
    start_work(rank)
    sys.exit(3)


def exits_while_a_callback_runs(rank: int) -> None:
    start_work(rank).get_future().then(lambda done: time.sleep(1.5))
    time.sleep(0.2)


def exits_with_an_exact_work_in_flight(rank: int) -> None:
    kept.append(dist.all_reduce(torch.ones(3, dtype=torch.int64), async_op=True))


PROGRAMS: dict[str, Callable[[int], None]] = {
    function.__name__: function
    for function in (
        destroys_its_group,
        does_not_destroy_its_group,
        keeps_everything,
        destroys_and_keeps_everything,
        leaves_answered_works,
        destroys_with_answered_works,
        leaves_a_work_that_nobody_answers,
        leaves_a_work_while_the_peer_lives,
        aborts_while_the_peer_lives,
        raises_with_a_work_in_flight,
        exits_with_a_work_in_flight,
        exits_while_a_callback_runs,
        exits_with_an_exact_work_in_flight,
    )
}


class InRank(Exception):
    """Leaves the loop of the starter in a fork: what it carries is run at the end of the script."""


def start(name: str, store: str) -> tuple[list[int], float]:
    pids = []
    for rank in range(2):
        pid = os.fork()
        if pid == 0:
            raise InRank(name, rank, store)
        pids.append(pid)
    return pids, time.monotonic()


def wait(pids: list[int], started: float) -> list[float]:
    """The exit codes, negative for a signal; a rank that hangs is killed and has -SIGKILL."""
    codes: dict[int, int] = {}
    while len(codes) < len(pids):
        for pid in pids:
            if pid not in codes:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    codes[pid] = os.waitstatus_to_exitcode(status)
                elif time.monotonic() - started > HANG:
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
    return [*(codes[pid] for pid in pids), round(time.monotonic() - started, 2)]


def run_all(folder: str, rounds: int) -> dict[str, list[list[float]]]:
    # All at once, for some of them sleep; then one after the other the rounds of the first.
    once = {name: start(name, f"{folder}/{name}") for name in PROGRAMS}
    results = {name: [wait(*started)] for name, started in once.items()}
    for i in range(rounds):
        results["destroys_its_group"].append(
            wait(*start("destroys_its_group", f"{folder}/round {i}"))
        )
    return results


if __name__ == "__main__":
    torch.set_num_threads(1)
    program = None
    try:
        print(json.dumps(run_all(sys.argv[1], int(sys.argv[2]))))
    except InRank as fork:
        program = fork.args
    if program is not None:
        name, rank, store = program
        faulthandler.dump_traceback_later(HANG - 5)
        init(rank, store)
        PROGRAMS[name](rank)
