# SPDX-License-Identifier: BSD-3-Clause
"""A model of the communication of a step in groups of up to 1024 ranks.

The bytes and schedules are the core's own. The link is made up: there is no such group to measure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from scaling.settings import METHODS, ONE_BUCKET, WIRES, Setting, layout_of, options_of
from torch_powersgd._core import _C
from torch_powersgd.tools.footprint import Layout, elements_of, footprint_of, matrices_of

WORLDS = [2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]
MODELS = ("100 M", "1 B")
MEASURED_MODEL = "10 M"  # whose bytes are measured up to 16 ranks

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
            payloads = _C.traffic_of(shapes, options._core(), dtype, world)
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


def predict_run(setting: Setting) -> dict[str, Any]:
    """The prediction of `plan` for a run, and that of the bytes on the wire."""
    dtype = getattr(torch, setting.dtype)
    sent, schedules = bytes_of(setting.layout, setting.method, setting.world, dtype)
    footprint = setting.footprint
    return {
        **vars(footprint),
        "memory_bytes": footprint.memory_bytes,
        "wire_bytes": sent,
        "schedules": dict(Counter(schedules)),
    }


def seconds_of(layout: Layout, method: str, link: Link, world: int) -> float:
    """The seconds that the collectives of a step take on a link that does nothing else."""
    return sum(link.seconds(*each) for each in reductions_of(layout, method, world))


def predict(rates: Sequence[float], message_us: float) -> dict[str, Any]:
    """The bytes, memory and milliseconds of every model, method, rate and number of ranks."""
    return {
        "worlds": WORLDS,
        "message_us": message_us,
        "bytes": _all_bytes(),
        "packet_memory": _packet_memory(),
        "milliseconds": [
            {"model": name, "gbit": gbit, **line}
            for name in MODELS
            for gbit in rates
            for line in _lines(name, gbit, message_us)
        ],
    }


def _all_bytes() -> list[dict[str, Any]]:
    lines = []
    for name in (MEASURED_MODEL, *MODELS):
        for method in METHODS:
            cap = ONE_BUCKET if method == "hook" else None
            layout = layout_of(name, cap)
            sent = [bytes_of(layout, method, world)[0] for world in WORLDS]
            lines.append({"model": name, "method": method, "sent": sent})
    return lines


def _packet_memory() -> list[int]:
    """The bytes of memory of the measured model in int8, by the number of ranks."""
    layout = layout_of(MEASURED_MODEL, None)
    options = options_of("int8")
    return [footprint_of(layout, options, torch.float32, each).memory_bytes for each in WORLDS]


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
            for world in WORLDS
        ]
        lines.append({"method": method, "one_bucket": cap is not None, "ms": ms})
    return lines
