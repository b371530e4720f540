# SPDX-License-Identifier: BSD-3-Clause
"""The training job whose ranks restarts.py kills: one rank, started by torchrun.

    torchrun ... --module reliability.job FOLDER

It goes on from the last step that all ranks have saved. The plan in FOLDER has the steps, and the
kills that are to come, one in each start. A rank that writes a checkpoint kills itself. Otherwise a
process that the rank has forked kills it, which nothing that the rank does can put off.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from bits import digest

if TYPE_CHECKING:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    from torch_powersgd import Compression

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
POLL = 0.001  # seconds
STEP_SECONDS = 0.02  # A kill in training comes within so many seconds after the start of a step.


class Fate:
    """The kill that is to come in this start, and what the rank does, as its killer must know.

    Args:
        folder: the folder of the job.
        plan: its plan.
    """

    def __init__(self, folder: Path, plan: dict[str, Any]) -> None:
        self._folder = folder
        self._began = time.monotonic()
        self._doing = mmap.mmap(-1, 40)  # a word and a step, which the killer reads
        self.say("importing")
        orders, self._kills = plan["kills"], len(list(folder.glob("kill.*")))
        # The job cannot end before the last kill: no start comes further than its share.
        self._reach = plan["steps"] // max(1, len(orders))
        next_one = orders[self._kills : self._kills + 1]
        mine = [order for order in next_one if order["rank"] == RANK]
        self._order: dict[str, Any] = mine[0] if mine else {"moment": ""}
        if self._order["moment"] in ("start", "training") and os.fork() == 0:
            self._kill_parent(os.getppid())

    def say(self, word: str, step: int = 0) -> None:
        self._doing[:] = f"{word} {step}".ljust(40).encode()
        if word == "training" and self._began:
            # From the first word to the first step, for the kills of starts.
            (self._folder / "start_seconds").write_text(str(time.monotonic() - self._began))
            self._began = 0.0

    def share(self) -> float | None:
        """The share of its first checkpoint after which this rank dies, if it is to.

        At 1 it dies before the file gets its name, and at 2 right after.
        """
        if self._order["moment"] != "writing":
            return None
        shares: list[float] = [self._order["when"]] * 3 + [1, 2]
        return shares[int(5 * self._order["where"])]

    def die(self) -> None:
        self._note()
        os.kill(os.getpid(), signal.SIGKILL)

    def _said(self) -> tuple[str, int]:
        word, step = self._doing[:].decode().split()
        return word, int(step)

    def _kill_parent(self, parent: int) -> None:
        """Kills the process that has forked this one, which ends as well."""
        if self._order["moment"] == "start":
            file = self._folder / "start_seconds"
            time.sleep(self._order["where"] * (float(file.read_text()) if file.exists() else 4.0))
        else:
            self._until(parent, lambda: self._said()[0] == "training")
            goal = self._said()[1] + int(self._order["where"] * self._reach)
            self._until(parent, lambda: self._said()[1] >= goal)
            time.sleep(self._order["when"] * STEP_SECONDS)
        if os.getppid() == parent:
            os.kill(parent, signal.SIGKILL)
            self._note()
        os._exit(0)

    def _until(self, parent: int, condition: Callable[[], bool]) -> None:
        while not condition() and os.getppid() == parent:
            time.sleep(POLL)

    def _note(self) -> None:
        """Writes what the kill has struck."""
        word, step = self._said()
        kill = {
            "rank": RANK,
            "moment": self._order["moment"],
            "found": word,
            "step": step,
            "unfinished": word == "saving" and any(self._folder.glob(f"*.{RANK}.unfinished")),
            "newest": [max(saved(self._folder, rank), default=0) for rank in range(WORLD)],
        }
        file = self._folder / f"kill.{self._kills:04}"
        part = self._folder / f"unfinished_kill.{RANK}"
        part.write_text(json.dumps(kill))
        part.replace(file)


class DyingFile:
    """A file that lets its process die once so many bytes have been written."""

    def __init__(self, file: IO[bytes], size: int, die: Callable[[], None]) -> None:
        self._file, self._left, self._die = file, size, die

    def write(self, data: bytes) -> int:
        self._file.write(bytes(data)[: self._left])
        self._left -= len(data)
        if self._left <= 0:
            self._file.flush()
            self._die()
        return len(data)

    def flush(self) -> None:
        self._file.flush()


def save(state: dict[str, Any], path: Path, fate: Fate) -> None:
    """Writes a checkpoint under another name, and gives it its name when it is on the disk."""
    import torch

    share = fate.share()
    unfinished = path.with_suffix(".unfinished")
    with unfinished.open("wb") as file:
        if share is not None and share < 1:
            size = max(1, int(share * sum(tensor.nbytes for tensor in tensors_in(state))))
            torch.save(state, cast(IO[bytes], DyingFile(file, size, fate.die)))
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    if share == 1:
        fate.die()
    os.replace(unfinished, path)
    if share is not None:
        fate.die()


def tensors_in(state: Any) -> list[torch.Tensor]:
    import torch

    if isinstance(state, torch.Tensor):
        return [state]
    parts = list(state.values()) if isinstance(state, dict) else []
    return [tensor for part in parts for tensor in tensors_in(part)]


def saved(folder: Path, rank: int) -> set[int]:
    """The steps that a rank has saved."""
    return {int(file.name.split(".")[0]) for file in folder.glob(f"*.{rank}.pt")}


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    generator = torch.Generator().manual_seed(1000 * step + RANK)
    inputs = torch.randn(16, 64, generator=generator)
    return inputs, (inputs.sum(1, keepdim=True) / 8).sin()


def make() -> tuple[DistributedDataParallel, Compression, torch.optim.Optimizer]:
    """The attached model, its compression and its optimizer."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    import torch_powersgd as tp

    torch.manual_seed(0)
    layers = [torch.nn.Linear(64, 128), torch.nn.Tanh(), torch.nn.Linear(128, 96), torch.nn.Tanh()]
    # Several buckets, so that a kill finds one in its first half and another in its second.
    ddp = DistributedDataParallel(
        torch.nn.Sequential(*layers, torch.nn.Linear(96, 1)), bucket_cap_mb=0.02
    )
    compression = tp.attach(ddp, tp.Options(matrix_approximation_rank=4))
    return ddp, compression, torch.optim.AdamW(ddp.parameters(), lr=1e-3)


def train(folder: Path, steps: int, save_every: int, fate: Fate) -> dict[str, Any]:
    """Trains from the last checkpoint to the end. Returns what the rank ended with."""
    import torch

    fate.say("attaching")
    ddp, compression, optimizer = make()
    by_rank = [saved(folder, rank) for rank in range(WORLD)]
    begin = max(set.intersection(*by_rank), default=0)
    losses = torch.zeros(steps, dtype=torch.float64)
    if begin:
        fate.say("loading", begin)
        state = torch.load(folder / f"{begin}.{RANK}.pt")
        compression.load_state_dict(state["powersgd"])
        ddp.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        losses[:begin] = state["losses"]
    for step in range(begin, steps):
        fate.say("training", step)
        inputs, target = batch(step)
        loss = torch.nn.functional.mse_loss(ddp(inputs), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses[step] = loss.detach()
        done = step + 1
        if done % save_every == 0 and done < steps:
            fate.say("saving", step)
            state = {
                "model": ddp.module.state_dict(),
                "optimizer": optimizer.state_dict(),
                "powersgd": compression.state_dict(per_rank=True),
                "losses": losses[:done].clone(),
            }
            save(state, folder / f"{done}.{RANK}.pt", fate)
            (folder / f"{done - 2 * save_every}.{RANK}.pt").unlink(missing_ok=True)
    return {
        "restarts": int(os.environ["TORCHELASTIC_RESTART_COUNT"]),
        "began": begin,
        "loss": f"{float(losses[-1]):.9f}",
        "losses": digest([losses]),
        "parameters": digest(ddp.parameters()),
        "state": digest(tensors_in(compression.state_dict(per_rank=True))),
    }


def main() -> None:
    folder = Path(sys.argv[1])
    plan = json.loads((folder / "plan").read_text())
    fate = Fate(folder, plan)
    # These are imported late, so that a kill may also find a rank that imports it.
    import torch.distributed as dist

    import torch_powersgd  # noqa: F401 - registers the backend

    fate.say("joining")
    dist.init_process_group("cpu:powersgd")
    result = train(folder, plan["steps"], plan["save_every"], fate)
    fate.say("leaving")
    (folder / f"result.{RANK}").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
