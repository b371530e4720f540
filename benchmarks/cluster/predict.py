# SPDX-License-Identifier: BSD-3-Clause
"""What `torch_powersgd advise` predicts on the hosts: `python -m cluster.predict JOB RESULTS`.

Each rank writes the predicted milliseconds of a step's synchronisation, by method; all the same.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta

from cluster import hosts
from cluster.rank import Job


def _predictions(job: Job) -> dict[str, float]:
    import torch

    from cluster import methods, models
    from torch_powersgd import advise

    torch.set_num_threads(1)
    device = torch.device(job.device, 0) if job.device == "cuda" else torch.device("cpu")
    model = models.TASKS[job.model].make()
    layout = advise.buckets_of([list(p.shape) for p in model.parameters()])
    link = advise.measure_link(device)
    predicted = {"plain": advise.predict_plain(layout, link)}
    for name, method in methods.METHODS.items():
        if method.attached and not method.lacks():
            assert method.options
            options = method.options(job.approximation, 0)
            predicted[name] = advise.predict(layout, link, options, device)
    return {name: 1e3 * prediction.seconds for name, prediction in predicted.items()}


def main() -> None:
    hosts.die_with_parent()
    job = Job(**json.loads(sys.argv[1]))
    import torch.distributed as dist

    from cluster import methods

    dist.init_process_group(
        methods.POWERSGD[job.device],
        store=dist.FileStore(job.store, job.world),  # type: ignore[attr-defined]
        rank=job.rank,
        world_size=job.world,
        timeout=timedelta(seconds=job.timeout),
    )
    predictions = _predictions(job)
    with open(sys.argv[2], "w") as results:
        print(json.dumps(predictions), file=results)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
