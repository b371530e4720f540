# SPDX-License-Identifier: BSD-3-Clause
"""The figures of `torch_powersgd advise` on the hosts: `python -m cluster.advised JOB RESULTS`.

Each rank writes the milliseconds that synchronization adds to a step, by contender; all the same.
The job's method names the contenders: "attached:4 bf16-wire:16".
"""

from __future__ import annotations

import dataclasses
import json
import sys

from cluster.rank import Job, group_of, this_job

SHORTEST_MS = 0.001  # the least figure; less is lost in noise


def _added_ms(job: Job) -> dict[str, float]:
    import torch

    from cluster import contenders, models
    from torch_powersgd.tools import advise

    torch.set_num_threads(1)
    device = torch.device(job.device, 0) if job.device == "cuda" else torch.device("cpu")
    model = models.TASKS[job.model].make().to(device)
    first = models.TASKS[job.model].data(job.rank, job.world, job.seed)(0)
    batch = [tensor.to(device) for tensor in first]
    names, settings = ["plain"], []
    for contender in contenders.expand(map(contenders.parse, job.method.split()), ()):
        assert contender.how.options
        assert contender.rank
        names.append(contender.name)
        chosen = contender.how.options(contender.rank, 0)
        # The measured steps are those after the exact ones.
        settings.append(dataclasses.replace(chosen, start_powerSGD_iter=0))
    question = advise.Job(model, lambda ddp: models.loss_of(ddp, batch).backward(), settings)
    alone, *averaging = advise.measure(question, device)
    return {
        name: max(1e3 * (measured.median - alone.median), SHORTEST_MS)
        for name, measured in zip(names, averaging, strict=True)
    }


def main() -> None:
    job = this_job()
    from cluster import methods

    with group_of(job, methods.POWERSGD[job.device]):
        added = _added_ms(job)
        with open(sys.argv[2], "w") as results:
            print(json.dumps(added), file=results)


if __name__ == "__main__":
    main()
