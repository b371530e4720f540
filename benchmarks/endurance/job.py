# SPDX-License-Identifier: BSD-3-Clause
"""The training job that bench_restarts.py kills: one rank, started by torchrun.

    torchrun ... --module endurance.job FOLDER STEPS SAVE_EVERY

It goes on from the last step that all ranks have saved. A file in FOLDER says what the rank does,
and an order in FOLDER makes it kill itself while it writes a checkpoint.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from bits import digest

if TYPE_CHECKING:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    from torch_powersgd import Compression

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
RESTART = int(os.environ["TORCHELASTIC_RESTART_COUNT"])


class Status:
    """The file that says what this rank does: its process, a word and the step."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        unfinished = folder / f"status.{RESTART}.{RANK}.unfinished"
        self._file = os.open(unfinished, os.O_WRONLY | os.O_CREAT)
        self.say("importing")
        unfinished.replace(folder / f"status.{RESTART}.{RANK}")

    def say(self, word: str, step: int = 0) -> None:
        os.pwrite(self._file, f"{os.getpid()} {word} {step}".ljust(40).encode(), 0)

    def order(self) -> float | None:
        """The share of a checkpoint after which this rank is to die, if there is such an order."""
        file = self._folder / f"order.{RESTART}.{RANK}"
        return float(file.read_text()) if file.exists() else None


class DyingFile:
    """A file that kills its process once so many bytes have been written."""

    def __init__(self, file: IO[bytes], size: int) -> None:
        self._file, self._left = file, size

    def write(self, data: bytes) -> int:
        self._file.write(bytes(data)[: self._left])
        self._left -= len(data)
        if self._left <= 0:
            self._file.flush()
            die()
        return len(data)

    def flush(self) -> None:
        self._file.flush()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def save(state: dict[str, Any], path: Path, share: float | None) -> None:
    """Writes a checkpoint under another name, and gives it its name when it is on the disk.

    Args:
        state: the state to save.
        path: the checkpoint's name.
        share: None, or the share of the bytes after which this rank dies. At 1 it dies before
            the file gets its name, and at 2 right after.
    """
    import torch

    unfinished = path.with_suffix(".unfinished")
    with unfinished.open("wb") as file:
        if share is not None and share < 1:
            size = sum(tensor.nbytes for tensor in tensors_in(state))
            torch.save(state, cast(IO[bytes], DyingFile(file, max(1, int(share * size)))))
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    if share == 1:
        die()
    os.replace(unfinished, path)
    if share is not None:
        die()


def tensors_in(state: Any) -> list[torch.Tensor]:
    import torch

    if isinstance(state, torch.Tensor):
        return [state]
    parts = list(state.values()) if isinstance(state, dict) else []
    return [tensor for part in parts for tensor in tensors_in(part)]


def last_saved(folder: Path) -> int:
    """The last step that all ranks have saved; 0 if there is none."""
    by_rank = [
        {int(file.name.split(".")[0]) for file in folder.glob(f"*.{rank}.pt")}
        for rank in range(WORLD)
    ]
    return max(set.intersection(*by_rank), default=0)


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


def train(folder: Path, steps: int, save_every: int, status: Status) -> dict[str, Any]:
    """Trains from the last checkpoint to the end. Returns what the rank ended with."""
    import torch

    status.say("attaching")
    ddp, compression, optimizer = make()
    begin, losses = last_saved(folder), torch.zeros(steps, dtype=torch.float64)
    if begin:
        status.say("loading", begin)
        state = torch.load(folder / f"{begin}.{RANK}.pt")
        compression.load_state_dict(state["powersgd"])
        ddp.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        losses[:begin] = state["losses"]
    for step in range(begin, steps):
        status.say("training", step)
        inputs, target = batch(step)
        loss = torch.nn.functional.mse_loss(ddp(inputs), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses[step] = loss.detach()
        done = step + 1
        if done % save_every == 0 and done < steps:
            status.say("saving", step)
            state = {
                "model": ddp.module.state_dict(),
                "optimizer": optimizer.state_dict(),
                "powersgd": compression.state_dict(per_rank=True),
                "losses": losses[:done].clone(),
            }
            save(state, folder / f"{done}.{RANK}.pt", status.order())
            (folder / f"{done - 2 * save_every}.{RANK}.pt").unlink(missing_ok=True)
    return {
        "began": begin,
        "loss": float(losses[-1]),
        "losses": digest([losses]),
        "parameters": digest(ddp.parameters()),
        "state": digest(tensors_in(compression.state_dict(per_rank=True))),
    }


def main() -> None:
    folder, steps, save_every = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    status = Status(folder)
    # These are imported late, so that a kill may also find a rank that imports it.
    import torch.distributed as dist

    import torch_powersgd  # noqa: F401 - registers the backend

    status.say("joining")
    dist.init_process_group("cpu:powersgd")
    result = train(folder, steps, save_every, status)
    status.say("leaving")
    (folder / f"result.{RANK}").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
