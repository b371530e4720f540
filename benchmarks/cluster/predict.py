# SPDX-License-Identifier: BSD-3-Clause
"""The prediction of `torch_powersgd advise` on the hosts: `python -m cluster.predict JOB RESULTS`.

Each rank writes the predicted milliseconds of a step's synchronization, by contender; all the same.
The job's method names the contenders: "attached:4 bf16-wire:16".
"""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

from cluster.rank import Job, group_of, this_job

SHORTEST_MS = 0.001  # the least prediction; less is lost in noise


def _backward(job: Job, model: Any, device: Any) -> Any:
    """Runs the backward pass, which advise times as it does with --step."""
    from cluster import models
    from torch_powersgd.tools import advise
    from torch_powersgd.tools.rehearsal import UserStep

    first = models.TASKS[job.model].data(job.rank, job.world, job.seed)(0)
    batch = [tensor.to(device) for tensor in first]
    step = advise.time_on_all_ranks(
        model, lambda module: models.loss_of(module, batch).backward(), device
    )
    return UserStep(step.backward)


def _predictions(job: Job) -> dict[str, float]:
    import torch

    from cluster import contenders, models
    from torch_powersgd.tools import advise
    from torch_powersgd.tools.verdict import figure_of

    torch.set_num_threads(1)
    device = torch.device(job.device, 0) if job.device == "cuda" else torch.device("cpu")
    model = models.TASKS[job.model].make().to(device)
    options = {}
    for contender in contenders.expand(map(contenders.parse, job.method.split()), ()):
        assert contender.how.options
        assert contender.rank
        chosen = contender.how.options(contender.rank, 0)
        # The rehearsed steps are those after the exact ones.
        options[contender.name] = dataclasses.replace(chosen, start_powerSGD_iter=0)
    question = advise.job_of(model, _backward(job, model, device), list(options.values()))
    measured = advise.measure(question, device)
    alone = figure_of(measured.alone).median
    timings = dict(zip(["plain", *options], [measured.plain, *measured.timings], strict=True))
    return {
        name: max(1e3 * (figure_of(timing.passes).median - alone), SHORTEST_MS)
        for name, timing in timings.items()
    }


def main() -> None:
    job = this_job()
    from cluster import methods

    with group_of(job, methods.POWERSGD[job.device]):
        predictions = _predictions(job)
        with open(sys.argv[2], "w") as results:
            print(json.dumps(predictions), file=results)


if __name__ == "__main__":
    main()
