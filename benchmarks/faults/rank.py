# SPDX-License-Identifier: BSD-3-Clause
"""One rank: `python -m faults.rank JOB`, an ordinary training program that trial.py starts.

It writes a digest of its parameters after every step, and its error, if there is one. After an
error the even ranks destroy their group, and the odd ones just end.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import json
import signal
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bits import digest
from cluster import hosts

from faults.kills import EXACT, IN_STATE_DICT, Killer, note_time

if TYPE_CHECKING:
    from torch_powersgd import Compression

EXACT_STEPS = 6
FAULT_STEP = 12
LAYERS, WIDTH = 4, 256
LOCAL = "127.0.0.1"  # the address of ranks that share the machine's network
PAUSE = 0.01  # seconds between two steps


@dataclass(frozen=True)
class Job:
    method: str  # "plain" or "ours"
    rank: int
    world: int
    steps: int
    address: str  # of rank 0
    folder: str
    timeout: float  # seconds, of the process group
    kill: str = ""  # the stage at which the victim ends itself
    victim: int = 1
    one_bucket: bool = False  # P is then on its way alone, and then q
    gate: bool = False  # wait for the file "go" before the step of the fault

    def command(self) -> list[str]:
        return [sys.executable, "-m", "faults.rank", json.dumps(dataclasses.asdict(self))]


@dataclass
class Report:
    """The end of a rank, as it writes it."""

    digests: list[str] = dataclasses.field(default_factory=list)
    error: str = ""
    retransmitted: int = 0


def _store(job: Job) -> Any:
    """The store of torchrun's kind, which rank 0 serves."""
    import torch.distributed as dist

    port_file = Path(job.folder, "port")
    timeout = timedelta(seconds=job.timeout)
    serves = job.rank == 0
    while not serves and not port_file.exists():
        time.sleep(0.01)
    port = 0 if serves else int(port_file.read_text())  # 0: a free one
    store = dist.TCPStore(job.address, port, None, serves, timeout, wait_for_workers=False)
    if serves:
        part = port_file.with_suffix(".part")
        part.write_text(str(store.port))
        part.rename(port_file)
    store.add("joined", 1)
    deadline = time.monotonic() + job.timeout
    while (joined := store.add("joined", 0)) < job.world:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{joined} of {job.world} ranks joined within {job.timeout:g} s")
        time.sleep(0.01)
    return store


def _payload_bytes(world: int) -> int:
    """The bytes of the factors P, or q, that a rank sends in a step: its own, and others' on."""
    return (world - 1) * LAYERS * WIDTH * 16


def fault_step(stage: str) -> int:
    """The step of a fault, which is a kill at a stage or, without one, another fault."""
    return EXACT_STEPS // 2 if stage == EXACT else FAULT_STEP


def _arm(killer: Killer, job: Job, model: Any, optimizer: Any) -> None:
    """Prepares the death in the step that follows."""
    killer.at("before its forward pass")
    payload = _payload_bytes(job.world)  # TCP and biases add a quarter
    killer.after_bytes("while P is on its way", payload // 2)
    killer.after_bytes("while q is on its way", payload * 19 // 10)
    # The buckets of later layers are on their way when this gradient is there.
    for stage in ("in backward, between buckets", EXACT):
        killer.hook(stage, model[1].weight.register_hook)
    killer.hook("in optimizer.step", optimizer.register_step_pre_hook)


def _checkpoint(killer: Killer, ddp: Any, compression: Compression | None) -> None:
    """Lets all ranks take a checkpoint, in which one dies."""
    import torch.distributed as dist

    killer.after_bytes(IN_STATE_DICT, WIDTH * WIDTH)  # a fraction of the residual
    if compression is not None:
        compression.state_dict()
    else:
        ddp.state_dict()  # which is not collective
        killer.at(IN_STATE_DICT)
        dist.barrier()


def _join_group(job: Job, killer: Killer) -> None:
    import torch.distributed as dist

    import torch_powersgd  # noqa: F401 - registers the backend

    for module in (dist, dist.distributed_c10d):
        killer.replace("in init_process_group", module, "ProcessGroupGloo")
    dist.init_process_group(
        "gloo" if job.method == "plain" else "cpu:powersgd",
        store=_store(job),
        rank=job.rank,
        world_size=job.world,
        timeout=timedelta(seconds=job.timeout),
    )


def _model(job: Job, killer: Killer) -> tuple[Any, Compression | None]:
    """The DDP module, and its compression if the method is ours."""
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    import torch_powersgd as tp

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    if job.method == "plain":
        killer.at("in attach")  # the others wait in DDP's constructor
    # Otherwise each layer has a bucket.
    cap = 25.0 if job.one_bucket else WIDTH * WIDTH * 4 / 2**20
    ddp = DistributedDataParallel(model, bucket_cap_mb=cap)
    if job.method == "ours":
        killer.replace("in attach", tp.store_agreement.CollectiveCall, "agree")
        return ddp, tp.attach(ddp, tp.Options(start_powerSGD_iter=EXACT_STEPS))
    return ddp, None


def _train(job: Job, killer: Killer, report: Report) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    _join_group(job, killer)
    ddp, compression = _model(job, killer)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9)
    generator = torch.Generator().manual_seed(job.rank)
    with open(Path(job.folder, f"progress{job.rank}"), "wb", buffering=0) as progress:
        for step in range(job.steps):
            if step == fault_step(job.kill):
                while job.gate and not Path(job.folder, "go").exists():
                    time.sleep(0.01)
                _arm(killer, job, ddp.module, optimizer)
                if job.kill == IN_STATE_DICT:
                    _checkpoint(killer, ddp, compression)
            time.sleep(PAUSE)
            optimizer.zero_grad()
            inputs = torch.randn(8, WIDTH, generator=generator)
            (ddp(inputs) - inputs.roll(1, dims=1)).square().mean().backward()
            optimizer.step()
            report.digests.append(digest(ddp.parameters()))
            progress.write(b".")
    dist.barrier()
    del ddp  # plain Gloo may hang otherwise
    dist.destroy_process_group()


def _destroy_group() -> None:
    """Ends the group after an error, as many programs do, and others do not."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def _retransmitted() -> int:
    """The TCP segments that this host has sent again."""
    lines = Path("/proc/self/net/snmp").read_text().splitlines()
    names, values = (line.split() for line in lines if line.startswith("Tcp:"))
    return int(values[names.index("RetransSegs")])


def main() -> None:
    hosts.die_with_parent()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    job = Job(**json.loads(sys.argv[1]))
    folder, report = Path(job.folder), Report()
    killer = Killer(job.kill if job.rank == job.victim else "", folder)
    try:
        _train(job, killer, report)
    except BaseException as error:
        lines = str(error).splitlines() or [""]
        report.error = f"{type(error).__name__}: {lines[0]}"
        note_time(folder / f"error{job.rank}")
        if job.rank % 2 == 0:
            _destroy_group()
        raise
    finally:
        if job.address != LOCAL:  # the counter of the whole machine
            report.retransmitted = _retransmitted()
        Path(folder, f"report{job.rank}").write_text(json.dumps(dataclasses.asdict(report)))


if __name__ == "__main__":
    main()
