# SPDX-License-Identifier: BSD-3-Clause
"""One rank: `python -m cluster.rank JOB RESULTS`, started on a host by cluster/launch.py.

Reads numbers of steps from its standard input, and trains for so many, until there are no more.
Writes a line of JSON for every step, and one after each number, with what was counted meanwhile.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

from cluster import hosts


@dataclass(frozen=True)
class Job:
    method: str
    model: str
    device: str
    world: int
    rank: int  # this process's
    approximation: int
    store: str  # the file of the ranks' store
    timeout: float  # seconds that a collective may take
    seed: int = 0  # the seed of the weights, the batches and the random start

    def command(self, results: Path, module: str = "cluster.rank") -> list[str]:
        return [sys.executable, "-m", module, json.dumps(asdict(self)), str(results)]


def _train(job: Job, commands: TextIO, results: TextIO) -> None:
    import torch
    import torch.distributed as dist

    from cluster import methods, models

    torch.set_num_threads(1)
    torch.manual_seed(job.seed)
    device = torch.device(job.device, 0) if job.device == "cuda" else torch.device("cpu")
    task = models.TASKS[job.model]
    model = task.make().to(device)
    trainee = methods.find(job.method).make(model, job.approximation, job.seed)
    batches = task.data(job.rank, job.world, job.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, betas=(0.9, 0.95), fused=True)
    rising = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))

    def step(batch: list[torch.Tensor]) -> float:
        loss = models.loss_of(trainee.module, batch)
        loss.backward()
        with trainee.averaged():
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        trainee.clear()
        rising.step()
        return float(loss.detach())

    def meet() -> None:
        """Waits for all ranks."""
        dist.all_reduce(torch.zeros(1, device=device))
        if device.type == "cuda":
            torch.cuda.synchronize()

    def turn(first: int, last: int) -> dict[str, Any]:
        meet()
        bytes_before = int(hosts.TX_BYTES.read_text())
        for i in range(first, last):
            batch = [tensor.to(device) for tensor in batches(i)]
            began = time.perf_counter()
            loss = step(batch)
            if device.type == "cuda":
                torch.cuda.synchronize()
            ms = (time.perf_counter() - began) * 1e3
            print(json.dumps({"ms": ms, "loss": loss}), file=results, flush=True)
        meet()
        on_gpu = device.type == "cuda"
        if on_gpu:  # The ranks of all methods share the GPU, and those of one run at a time.
            torch.cuda.empty_cache()
        return {
            "tx_bytes": int(hosts.TX_BYTES.read_text()) - bytes_before,
            "gradient_bytes": sum(p.numel() * p.element_size() for p in model.parameters()),
            "peak_memory_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
            "device": torch.cuda.get_device_name() if on_gpu else None,
        }

    done = 0
    for command in commands:
        counted = turn(done, done + int(command))
        done += int(command)
        print(json.dumps(counted), file=results, flush=True)


def this_job() -> Job:
    """Returns the job of a process that Job.command started, which now ends with its parent."""
    hosts.die_with_parent()
    return Job(**json.loads(sys.argv[1]))


def group_of(job: Job, backend: str, options: Any = None) -> AbstractContextManager[None]:
    import torch.distributed as dist
    from groups import default_group

    return default_group(
        backend,
        store=dist.FileStore(job.store, job.world),
        rank=job.rank,
        world_size=job.world,
        timeout=timedelta(seconds=job.timeout),
        pg_options=options,
    )


def main() -> None:
    job = this_job()
    from cluster import methods

    method = methods.find(job.method)
    options = method.options(job.approximation, job.seed) if method.options else None
    with group_of(job, method.backend[job.device], options), open(sys.argv[2], "w") as results:
        _train(job, sys.stdin, results)


if __name__ == "__main__":
    main()
