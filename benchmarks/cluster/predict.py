# SPDX-License-Identifier: BSD-3-Clause
"""What `torch_powersgd advise` predicts on the hosts: `python -m cluster.predict JOB RESULTS`.

Each rank writes the predicted milliseconds of a step's synchronization, by contender; all the same.
The job's method names the contenders: "attached:4 bf16-wire:16".
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any

from cluster.rank import Job, join_group, this_job

BACKWARD_STEPS = 8


def _backward_seconds(job: Job, model: Any, device: Any) -> float:
    """Without averaging; what a user knows of a job, and tells advise."""
    from cluster import models
    from torch_powersgd.rehearsal import slowest, synchronize

    batches = models.TASKS[job.model].data(job.rank, job.world)
    times = []
    for i in range(BACKWARD_STEPS):
        model.zero_grad()
        loss = models.loss_of(model, [tensor.to(device) for tensor in batches(i)])
        synchronize(device)
        start = time.perf_counter()
        loss.backward()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return slowest(statistics.median(times[2:]), device)


def _predictions(job: Job) -> dict[str, float]:
    import torch

    from cluster import contenders, models
    from torch_powersgd import advise

    torch.set_num_threads(1)
    device = torch.device(job.device, 0) if job.device == "cuda" else torch.device("cpu")
    model = models.TASKS[job.model].make().to(device)
    layout = advise.buckets_of([list(p.shape) for p in model.parameters()])
    setting = advise.measure(layout, device, _backward_seconds(job, model, device))
    predicted = {"plain": advise.predict_plain(setting)}
    for contender in contenders.expand(map(contenders.parse, job.method.split()), ()):
        assert contender.how.options
        assert contender.rank
        options = contender.how.options(contender.rank, 0)
        predicted[contender.name] = advise.predict(setting, options)
    return {name: 1e3 * prediction.seconds for name, prediction in predicted.items()}


def main() -> None:
    job = this_job()
    import torch.distributed as dist

    from cluster import methods

    join_group(job, methods.POWERSGD[job.device])
    predictions = _predictions(job)
    with open(sys.argv[2], "w") as results:
        print(json.dumps(predictions), file=results)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
