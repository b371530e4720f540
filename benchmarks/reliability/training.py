# SPDX-License-Identifier: BSD-3-Clause
"""One process of a trial, as an ordinary training program.

It reports a digest of its parameters after every step, and its error, if any. After an error,
processes of even rank destroy their group, and those of odd rank just exit.
"""

from __future__ import annotations

import ctypes
import faulthandler
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from bits import digest
from groups import tcp_store
from launcher.ranks import Rank
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torch_powersgd as tp
from reliability.cases import EXACT_STEPS, Case
from reliability.kills import EXACT, IN_STATE_DICT, Killer

LAYERS, WIDTH = 4, 256
PAUSE = 0.01  # seconds between two steps


def train(rank: Rank, case: Case, method: str, timeout: float) -> NoReturn:
    """Trains, and exits as a program does, with destructors, which may crash."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    killed = case.kind == "kill" and rank.number == case.victim
    killer = Killer(case.stage if killed else "", rank.pipe)
    try:
        _train(rank, case, method, timeout, killer)
    except Exception as error:
        lines = str(error).splitlines() or [""]
        rank.pipe.send(("error", f"{type(error).__name__}: {lines[0]}"))
        rank.pipe.send(("error_time", time.monotonic()))
        if rank.number % 2 == 0 and dist.is_initialized():
            dist.destroy_process_group()
        sys.excepthook(*sys.exc_info())
        _end(rank, case, 1)  # inside except, where the error keeps objects alive, as in a program
    _end(rank, case, 0)


def _end(rank: Rank, case: Case, code: int) -> NoReturn:
    if case.needs_links:  # so that the counter is this host's alone
        rank.pipe.send(("retransmitted", _retransmitted()))
    ctypes.pythonapi.Py_Exit(code)
    raise AssertionError("the process has ended")


def _payload_bytes(world: int) -> int:
    """The bytes of P, or Q, that a process sends in a step: its own and those it forwards."""
    return (world - 1) * LAYERS * WIDTH * 16


def _arm(killer: Killer, world: int, model: Any, optimizer: Any) -> None:
    """Prepares the kill in the next step."""
    killer.at("before its forward pass")
    payload = _payload_bytes(world)  # TCP and biases add a quarter
    killer.after_bytes("while P is on its way", payload // 2)
    killer.after_bytes("while q is on its way", payload * 19 // 10)
    # The buckets of later layers are in flight when this gradient is ready.
    for stage in ("in backward, between buckets", EXACT):
        killer.hook(stage, model[1].weight.register_hook)
    killer.hook("in optimizer.step", optimizer.register_step_pre_hook)


def _checkpoint(killer: Killer, ddp: Any, compression: tp.Compression | None) -> None:
    """Takes a checkpoint on all ranks, during which one is killed."""
    killer.after_bytes(IN_STATE_DICT, WIDTH * WIDTH)  # a fraction of the residual
    if compression is not None:
        compression.state_dict()
    else:
        ddp.state_dict()  # not a collective call
        killer.at(IN_STATE_DICT)
        dist.barrier()


def _join_group(rank: Rank, case: Case, method: str, timeout: float, killer: Killer) -> None:
    for module in (dist, dist.distributed_c10d):
        killer.replace("in init_process_group", module, "ProcessGroupGloo")
    address = "10.77.0.1" if case.needs_links else "127.0.0.1"
    store = tcp_store(rank.folder, rank.number, address, timeout)
    _meet(store, rank.world, timeout)
    dist.init_process_group(
        "gloo" if method == "plain" else "cpu:powersgd",
        store=store,
        rank=rank.number,
        world_size=rank.world,
        timeout=timedelta(seconds=timeout),
    )


def _meet(store: dist.TCPStore, world: int, timeout: float) -> None:
    """Waits until all ranks have joined the store, as under torchrun."""
    store.add("joined", 1)
    deadline = time.monotonic() + timeout
    while (joined := store.add("joined", 0)) < world:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{joined} of {world} ranks joined within {timeout:g} s")
        time.sleep(0.01)


def _model(case: Case, method: str, killer: Killer) -> tuple[Any, tp.Compression | None]:
    """The DDP module, and its compression if the method is ours."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    if method == "plain":
        killer.at("in attach")  # the others wait in DDP's constructor
    # Otherwise each layer has a bucket.
    cap = 25.0 if case.one_bucket else WIDTH * WIDTH * 4 / 2**20
    ddp = DistributedDataParallel(model, bucket_cap_mb=cap)
    if method == "plain":
        return ddp, None
    killer.replace("in attach", tp.store_agreement.CollectiveCall, "agree")
    return ddp, tp.attach(ddp, tp.Options(start_powerSGD_iter=EXACT_STEPS))


def _train(rank: Rank, case: Case, method: str, timeout: float, killer: Killer) -> None:
    _join_group(rank, case, method, timeout, killer)
    ddp, compression = _model(case, method, killer)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9)
    generator = torch.Generator().manual_seed(rank.number)
    for step in range(case.steps):
        if step == case.fault_step:
            if case.slowed:
                rank.pipe.recv()  # the message that the links are slow
            _arm(killer, rank.world, ddp.module, optimizer)
            if case.stage == IN_STATE_DICT:
                _checkpoint(killer, ddp, compression)
        time.sleep(PAUSE)
        optimizer.zero_grad()
        inputs = torch.randn(8, WIDTH, generator=generator)
        (ddp(inputs) - inputs.roll(1, dims=1)).square().mean().backward()
        optimizer.step()
        rank.pipe.send(("digest", digest(ddp.parameters())))
    dist.barrier()
    del ddp  # plain Gloo may hang otherwise
    dist.destroy_process_group()


def _retransmitted() -> int:
    """The TCP segments that this host has retransmitted."""
    lines = Path("/proc/self/net/snmp").read_text().splitlines()
    names, values = (line.split() for line in lines if line.startswith("Tcp:"))
    return int(values[names.index("RetransSegs")])
