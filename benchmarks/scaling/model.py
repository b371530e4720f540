# SPDX-License-Identifier: BSD-3-Clause
"""A model of the communication of a step in groups of up to 1024 ranks.

The bytes and schedules are the core's own. The link is made up: there is no such group to measure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from scaling.settings import METHODS, ONE_BUCKET, WIRES, Setting, layout_of, options_of
from torch_powersgd._core import _C
from torch_powersgd.tools.footprint import Layout, elements_of, matrices_of

TIMED_WORLDS = (2, 8, 32, 128, 512, 1024)
TIMED_MODELS = ("100 M", "1 B")
COUNTED_WORLDS = (64, 256, 1024)  # beside the bytes that are measured

# The bytes that Gloo sends besides a payload, to synchronize, for each other rank. They are what
# the part "ranks" has measured at 2 to 16 ranks, the same at all of them.
GLOO_BYTES = {"all-reduce": 576, "one-shot": 288, "two-shot": 432}


@dataclass(frozen=True)
class Link:
    """The costs of collectives, in seconds.

    Attributes:
        latency: a small all-reduce.
        gather: a small all-gather.
        scatter: a small all-to-all, which waits less than an all-gather among many ranks.
        per_byte: each byte that a rank sends.
    """

    latency: float
    gather: float
    scatter: float
    per_byte: float

    def seconds(self, schedule: str, sent_bytes: int) -> float:
        """The seconds of a reduction by its schedule, and by the bytes that leave a rank."""
        waits = {"one-shot": self.gather, "two-shot": self.scatter + self.gather}
        return waits.get(schedule, self.latency) + sent_bytes * self.per_byte


def bytes_in_ring(size: int, world_size: int) -> int:
    """The bytes that leave a rank in an all-reduce of ``size`` bytes."""
    return 2 * (world_size - 1) * size // world_size


def link_of(world: int, gbit: float, message_us: float) -> Link:
    """A link of this rate on which small collectives wait as Gloo's do.

    A chain of 2 (W - 1) messages makes an all-reduce, as it does an all-gather. An all-to-all has
    about two: a rank sends once it hears that the other is ready. The part "hops" measures it.
    """
    message = message_us * 1e-6
    ring = 2 * (world - 1) * message
    return Link(ring, gather=ring, scatter=2 * message, per_byte=8 / (gbit * 1e9))


def reductions_of(
    layout: Layout, method: str, world: int, dtype: torch.dtype = torch.float32
) -> list[tuple[str, int]]:
    """The schedule of each reduction of a step, and the bytes that it makes a rank send.

    The bytes are those of the payloads. torch's hook, whose factors are in float32, sends raw
    gradients in one more reduction, which this project sends together with P.
    """
    options = options_of(method) if method in WIRES else options_of("float32")
    found = []
    for shapes in layout:
        if method != "plain" and matrices_of(shapes, options):
            payloads = _C.traffic_of(shapes, options._core(), dtype, "cpu", world)
            found += [(payload.schedule, payload.sent_bytes) for payload in payloads]
        else:
            sent = bytes_in_ring(dtype.itemsize * elements_of(shapes), world)
            found.append(("all-reduce", sent))
    return [*found, ("all-reduce", 0)] if method == "hook" else found


def bytes_of(
    layout: Layout, method: str, world: int, dtype: torch.dtype = torch.float32
) -> tuple[int, list[str]]:
    """The bytes that a rank sends in a compressed step, and the schedules of the payloads.

    Those of Gloo are among them. The headers of TCP come on top.
    """
    reductions = reductions_of(layout, method, world, dtype)
    schedules = [schedule for schedule, _ in reductions]
    total = sum(sent for _, sent in reductions)
    return total + (world - 1) * sum(map(GLOO_BYTES.__getitem__, schedules)), schedules


def predict_run(setting: Setting) -> dict[str, int]:
    """The prediction of `plan` for a run, and that of the bytes on the wire."""
    sent, _ = bytes_of(setting.layout, setting.method, setting.world, getattr(torch, setting.dtype))
    footprint = setting.footprint
    return {
        "gradient_bytes": footprint.gradient_bytes,
        "residual_bytes": footprint.residual_bytes,
        "factor_bytes": footprint.factor_bytes,
        "kernel_bytes": footprint.table_bytes + footprint.workspace_bytes,
        "memory_bytes": footprint.memory_bytes,
        "wire_bytes": sent,
    }


def seconds_of(layout: Layout, method: str, link: Link, world: int) -> float:
    """The seconds that the collectives of a step take on a link that does nothing else."""
    return sum(link.seconds(*each) for each in reductions_of(layout, method, world))


def predict(measured: str, rates: Sequence[float], message_us: float) -> dict[str, Any]:
    """The bytes of the model that is measured, and the milliseconds of the larger ones."""
    return {
        "message_us": message_us,
        "counted_worlds": COUNTED_WORLDS,
        "sent_bytes": {method: _sent(measured, method) for method in METHODS},
        "timed_worlds": TIMED_WORLDS,
        "milliseconds": [
            {"model": name, "gbit": gbit, **line}
            for name in TIMED_MODELS
            for gbit in rates
            for line in _lines(name, gbit, message_us)
        ],
    }


def _sent(model: str, method: str) -> list[int]:
    layout = layout_of(model, ONE_BUCKET if method == "hook" else None)
    return [bytes_of(layout, method, world)[0] for world in COUNTED_WORLDS]


def _lines(name: str, gbit: float, message_us: float) -> list[dict[str, Any]]:
    """A line for each method with the buckets of DDP, and for some with all in one bucket."""
    wanted: list[tuple[str, int | None]]
    wanted = [(method, None) for method in METHODS if method not in ("hook", "int4")]
    wanted += [(method, ONE_BUCKET) for method in ("plain", "hook", "int8")]
    lines = []
    for method, cap in wanted:
        layout = layout_of(name, cap)
        ms = [
            round(1e3 * seconds_of(layout, method, link_of(world, gbit, message_us), world), 2)
            for world in TIMED_WORLDS
        ]
        lines.append({"method": method, "one_bucket": cap is not None, "ms": ms})
    return lines
