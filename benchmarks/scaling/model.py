# SPDX-License-Identifier: BSD-3-Clause
"""Models the communication of a step in groups of up to 1024 processes.

The bytes and schedules come from the package itself. The link is assumed: there is no group of that
size to measure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from scaling.settings import METHODS, ONE_BUCKET, WIRES, Setting, layout_of, options_of
from torch_powersgd._core import _C
from torch_powersgd.cli.footprint import Layout, elements_of, matrices_of
from torch_powersgd.options import to_core

TIMED_WORLDS = (2, 8, 32, 128, 512, 1024)
TIMED_MODELS = ("100 M", "1 B")
COUNTED_WORLDS = (64, 256, 1024)  # in addition to those that are measured

# The rounds of messages of a payload. In each, a rank sends one message to every other rank.
ROUNDS = {"one-shot": 1, "two-shot": 2}

# The bytes that Gloo sends to each other rank in addition to a payload, to synchronize: the maximum
# that the part "ranks" has measured. A message saves 48 of them if its receive is posted early.
GLOO_BYTES = {"all-reduce": 576, "one-shot": 144, "two-shot": 288}

# The schedule of each payload of a bucket, and the bytes that it makes a rank send.
Bucket = list[tuple[str, int]]


@dataclass(frozen=True)
class Link:
    """The costs of a rank's messages, in seconds.

    Attributes:
        message: the latency of a message to another rank.
        handling: the CPU time of sending and receiving a message.
        per_byte: the time of each byte that a rank sends.
    """

    message: float
    handling: float
    per_byte: float

    def seconds(self, buckets: Sequence[Bucket], world: int) -> float:
        """The seconds of a step.

        All-reduces run one after another, each as a ring: a chain of 2 (W - 1) messages. The
        messages of other payloads go straight to all ranks, for all buckets at once. A step then
        waits for P and Q of the bucket with the most rounds. The part "hops" measures this.
        """
        payloads = [payload for bucket in buckets for payload in bucket]
        rings = sum(schedule == "all-reduce" for schedule, _ in payloads)
        rounds = [sum(ROUNDS.get(schedule, 0) for schedule, _ in bucket) for bucket in buckets]
        chain = 2 * (world - 1) * rings + max(rounds)
        handled = (world - 1) * sum(rounds)
        sent = sum(sent for _, sent in payloads)
        return chain * self.message + handled * self.handling + sent * self.per_byte


def bytes_in_ring(size: int, world_size: int) -> int:
    """The bytes that a rank sends in a ring all-reduce of ``size`` bytes."""
    return 2 * (world_size - 1) * size // world_size


def reductions_of(
    layout: Layout, method: str, world: int, dtype: torch.dtype = torch.float32
) -> list[Bucket]:
    """The payloads that the reductions of a step send.

    torch's hook all-reduces factors in float32, and raw gradients in a separate reduction. This
    project sends those together with P.
    """
    options = options_of(method if method in WIRES else "float32")
    # A backend that sums by itself, such as NCCL, all-reduces float32.
    device = "cuda" if method == "hook" else "cpu"
    found: list[Bucket] = []
    for shapes in layout:
        if method != "plain" and matrices_of(shapes, options):
            payloads = _C.traffic_of(shapes, to_core(options), dtype, device, world)
            found.append([(payload.schedule, payload.sent_bytes) for payload in payloads])
        else:
            sent = bytes_in_ring(dtype.itemsize * elements_of(shapes), world)
            found.append([("all-reduce", sent)])
    return [*found, [("all-reduce", 0)]] if method == "hook" else found


def bytes_of(
    layout: Layout, method: str, world: int, dtype: torch.dtype = torch.float32
) -> tuple[int, list[str]]:
    """The bytes that a rank sends in a compressed step, and the schedules of the payloads.

    They include Gloo's own bytes, but no TCP headers.
    """
    payloads = [each for bucket in reductions_of(layout, method, world, dtype) for each in bucket]
    schedules = [schedule for schedule, _ in payloads]
    total = sum(sent for _, sent in payloads)
    return total + (world - 1) * sum(map(GLOO_BYTES.__getitem__, schedules)), schedules


def predict_run(setting: Setting) -> dict[str, int]:
    """The prediction of `plan` for a run, and the predicted bytes on the wire."""
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


def predict(
    measured: str, rates: Sequence[float], message_us: float, handling_us: float
) -> dict[str, Any]:
    """The bytes of the measured model, and the milliseconds of larger ones."""
    return {
        "message_us": message_us,
        "handling_us": handling_us,
        "counted_worlds": COUNTED_WORLDS,
        "sent_bytes": {method: _sent(measured, method) for method in METHODS},
        "timed_worlds": TIMED_WORLDS,
        "milliseconds": [
            {"model": name, "gbit": gbit, **line}
            for name in TIMED_MODELS
            for gbit in rates
            for line in _lines(name, Link(message_us / 1e6, handling_us / 1e6, 8 / (gbit * 1e9)))
        ],
    }


def _sent(model: str, method: str) -> list[int]:
    layout = layout_of(model, ONE_BUCKET if method == "hook" else None)
    return [bytes_of(layout, method, world)[0] for world in COUNTED_WORLDS]


def _lines(name: str, link: Link) -> list[dict[str, Any]]:
    """A line for each method with DDP's buckets, and for some methods also with a single bucket."""
    wanted: list[tuple[str, int | None]]
    wanted = [(method, None) for method in METHODS if method not in ("hook", "int4")]
    wanted += [(method, ONE_BUCKET) for method in ("plain", "hook", "int8")]
    lines = []
    for method, cap in wanted:
        layout = layout_of(name, cap)
        ms = [
            round(1e3 * link.seconds(reductions_of(layout, method, world), world), 2)
            for world in TIMED_WORLDS
        ]
        lines.append({"method": method, "one_bucket": cap is not None, "ms": ms})
    return lines
