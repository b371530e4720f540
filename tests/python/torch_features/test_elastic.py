# SPDX-License-Identifier: BSD-3-Clause
"""A job whose rank is killed in mid-step; torchrun's elastic agent starts it again.

This file is also the job, which saves now and then and resumes from there:

    torchrun ... test_elastic.py FOLDER KILL_AT

Rank 1 of the first start kills itself in the backward pass of step KILL_AT, between the gradients
of its layers. Each rank writes its parameters at the end to FOLDER/result.<rank>.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import torch_powersgd as tp
from support import ranks
from support.torchrun import torchrun

STEPS, SAVE_EVERY, KILL_AT = 12, 3, 7
OPTIONS = tp.Options.hook_defaults(start_powerSGD_iter=1, matrix_approximation_rank=2)
# Otherwise workers share one store over all restarts. In it Gloo, wrapped or not, finds the
# addresses of processes that are gone.
NEW_STORE: dict[str, Any] = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def _batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(16, 32, generator=generator)
    return inputs, inputs.sum(1, keepdim=True).sin()


def _last_saved(folder: Path, world_size: int) -> int:
    """The last step that all ranks have saved; 0 if there is none."""
    complete = [
        step
        for step in range(SAVE_EVERY, STEPS, SAVE_EVERY)
        if all((folder / f"{step}.{rank}").exists() for rank in range(world_size))
    ]
    return max(complete, default=0)


def _train(rank: int, folder: Path, kill_at: int = -1) -> None:
    """Trains in the default group, from the last step that is saved to the end."""
    torch.manual_seed(0)
    first = torch.nn.Linear(32, 64)
    net = torch.nn.Sequential(first, torch.nn.Tanh(), torch.nn.Linear(64, 1))
    ddp = DistributedDataParallel(net, bucket_cap_mb=1e-3)
    compression = tp.attach(ddp)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.02, momentum=0.9)
    begin = _last_saved(folder, dist.get_world_size())
    if begin:
        state = torch.load(folder / f"{begin}.{rank}")
        net.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        compression.load_state_dict(state["powersgd"])
    for step in range(begin, STEPS):
        inputs, target = _batch(rank, step)
        if step == kill_at and rank == 1:
            first.weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(ddp(inputs), target).backward()
        optimizer.step()
        if (step + 1) % SAVE_EVERY == 0:
            state = {
                "model": net.state_dict(),
                "optimizer": optimizer.state_dict(),
                "powersgd": compression.state_dict(per_rank=True),
            }
            # Under another name first, so that a killed rank leaves no half of a file.
            torch.save(state, folder / f"partial.{rank}")
            (folder / f"partial.{rank}").rename(folder / f"{step + 1}.{rank}")
    weights = torch.cat([parameter.detach().flatten() for parameter in net.parameters()])
    torch.save({"weights": weights, "began": begin}, folder / f"result.{rank}")


def _results(folder: Path) -> list[dict[str, Any]]:
    return [torch.load(folder / f"result.{rank}") for rank in range(2)]


def test_a_job_that_is_killed_in_mid_step_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    ranks.run(2, _train, tmp_path / "whole", options=OPTIONS)
    whole = _results(tmp_path / "whole")

    (tmp_path / "killed").mkdir()
    restarts = ["--max-restarts=1", "--monitor-interval=0.1"]
    log = torchrun(*restarts, __file__, tmp_path / "killed", KILL_AT, **NEW_STORE).stderr
    killed = _results(tmp_path / "killed")

    assert "SIGKILL" in log or "exitcode: -9" in log or "Signal 9" in log
    for rank in range(2):
        assert whole[rank]["began"] == 0
        assert killed[rank]["began"] == KILL_AT // SAVE_EVERY * SAVE_EVERY
        # The bits are equal: each rank's own state was restored, and the sum of two has one order.
        assert torch.equal(killed[rank]["weights"], whole[rank]["weights"])
        assert torch.equal(whole[rank]["weights"], whole[0]["weights"])


def _main() -> None:
    first_start = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    dist.init_process_group("cpu:powersgd", pg_options=OPTIONS)
    _train(dist.get_rank(), Path(sys.argv[1]), int(sys.argv[2]) if first_start else -1)
    dist.destroy_process_group()


if __name__ == "__main__":
    _main()
