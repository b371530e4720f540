# SPDX-License-Identifier: BSD-3-Clause
"""One process of the job that restarts.py kills, started by torchrun, and the kill that awaits it.

    torchrun ... --module reliability.fate FOLDER

The plan in FOLDER lists the steps and the remaining kills, one for each start. A process whose
kill falls into a checkpoint kills itself. Otherwise a forked process kills it, which nothing
that the process does can delay.
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
from typing import Any

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
POLL = 0.001  # seconds
STEP_SECONDS = 0.02  # A kill in training strikes within this time after a step begins.


class Fate:
    """The kill planned for this start, and what the process is doing, which its killer must know.

    Args:
        folder: the folder of the job.
        plan: the plan of the job.
    """

    def __init__(self, folder: Path, plan: dict[str, Any]) -> None:
        self._folder = folder
        self._began = time.monotonic()
        self._doing = mmap.mmap(-1, 40)  # a word and a step, which the killer reads
        self.say("importing")
        orders, self._kills = plan["kills"], len(list(folder.glob("kill.*")))
        # No start trains beyond its share of the steps, so the job cannot end before the last kill.
        self._reach = plan["steps"] // max(1, len(orders))
        next_one = orders[self._kills : self._kills + 1]
        mine = [order for order in next_one if order["rank"] == RANK]
        self._order: dict[str, Any] = mine[0] if mine else {"moment": ""}
        if self._order["moment"] in ("start", "training") and os.fork() == 0:
            self._kill_parent(os.getppid())

    def say(self, word: str, step: int = 0) -> None:
        self._doing[:] = f"{word} {step}".ljust(40).encode()
        if word == "training" and self._began:
            # From the first word to the first step. Kills of starting processes use it.
            (self._folder / "start_seconds").write_text(str(time.monotonic() - self._began))
            self._began = 0.0

    def share(self) -> float | None:
        """The share of its first checkpoint after which this process is killed, or None.

        At 1 it dies before the file is renamed, and at 2 right after.
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
        """Kills the process that forked this one, and exits."""
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
        """Records what the kill interrupted."""
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


def saved(folder: Path, rank: int) -> set[int]:
    """The steps that a rank has saved."""
    return {int(file.name.split(".")[0]) for file in folder.glob(f"*.{rank}.pt")}


def main() -> None:
    folder = Path(sys.argv[1])
    plan = json.loads((folder / "plan").read_text())
    fate = Fate(folder, plan)
    from reliability import job  # imports torch here, so that a kill can strike during the import

    result = job.run(folder, plan, fate)
    (folder / f"result.{RANK}").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
