# SPDX-License-Identifier: BSD-3-Clause
"""The faults to try: for each, what happens to the hosts and when."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.emulated_links import Link

MOST_STEPS = 60
EXACT_STEPS = 6
FAULT_STEP = 12

IN_STATE_DICT = "in state_dict"
ONE_BUCKET = ("while P is on its way", "while q is on its way")
# Stages for which the links become slow at the step of the fault, and the victim counts its bytes.
AIMED = (*ONE_BUCKET, IN_STATE_DICT)
EXACT = "in an exact step, between buckets"
STAGES = (
    "in init_process_group",
    "in attach",
    "before its forward pass",
    "in backward, between buckets",
    EXACT,
    *AIMED,
    "in optimizer.step",
)


@dataclass(frozen=True)
class Case:
    """A fault.

    Attributes:
        name: the name in the table.
        kind: "link": the links are bad all the time. "slow", "cut", "stop": what happens to the
            victim for some seconds. "kill": the victim kills itself. "none": nothing happens.
        seconds: how long the fault lasts.
        stage: the stage at which the victim kills itself.
    """

    name: str
    kind: str
    world: int = 2
    victim: int = 1
    seconds: float = 0
    stage: str = ""
    link: Link | None = None
    delay_ms: float = 0
    steps: int = 30
    one_bucket: bool = False  # of DDP, instead of one for each layer

    def undisturbed(self) -> Case:
        """The run whose digests this one must match. Many cases share it."""
        one_bucket = self.one_bucket
        return Case("nothing happens", "none", self.world, one_bucket=one_bucket, steps=MOST_STEPS)


def _kill(stage: str, victim: int = 1) -> Case:
    whom = "rank 0, which serves the store," if victim == 0 else "a rank"
    one_bucket = stage in ONE_BUCKET
    return Case(f"{whom} killed {stage}", "kill", 3, victim, stage=stage, one_bucket=one_bucket)


def _lossy(percent: float) -> Case:
    link = Link(loss=percent / 100, seed=1)
    return Case(f"{percent:g} % of the frames are lost", "link", link=link, steps=MOST_STEPS)


def _lasting(name: str, kind: str, seconds: float, world: int = 2) -> Case:
    return Case(f"{name} for {seconds:g} s", kind, world, seconds=seconds)


_REORDERED = Link(reordering=0.1, seed=1)
_JITTERY = Link(jitter=0.195, seed=1)

CASES = (
    *(_lossy(percent) for percent in (0.1, 1, 5)),
    Case("10 % of the frames are overtaken", "link", link=_REORDERED, steps=MOST_STEPS),
    Case("delays of 5 to 200 ms", "link", link=_JITTERY, delay_ms=5, steps=20),
    _lasting("the links drop to 1 Mbit/s", "slow", 10),
    *(_lasting("a rank is cut off", "cut", seconds) for seconds in (2, 10, 40)),
    _lasting("one rank of three is cut off", "cut", 40, world=3),
    *(_lasting("a rank is stopped", "stop", seconds) for seconds in (2, 40)),
    *(_kill(stage) for stage in STAGES),
    *(_kill(stage, victim=0) for stage in (STAGES[0], STAGES[2])),
)
