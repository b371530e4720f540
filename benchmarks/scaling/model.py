# SPDX-License-Identifier: BSD-3-Clause
"""Models the communication of a step in groups of up to 1024 processes.

The bytes and schedules come from the package itself. The link is assumed: there is no group of that
size to measure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import shapes
import torch

import torch_powersgd as tp
from torch_powersgd._core import _C
from torch_powersgd.cli.footprint import (
    BUCKET_BYTES,
    Layout,
    buckets_of,
    elements_of,
    footprint_of,
    matrices_of,
)
from torch_powersgd.options import to_core

RANK = 16  # of the matrices
EXACT_STEPS = 2  # the minimum for torch's hook
WIRES = ("bfloat16", "int8")
METHODS = ("plain", "hook", *WIRES)  # a wire dtype stands for this project with it
ONE_BUCKET = 1 << 20  # MiB

MEASURED_MODEL, TIMED_MODEL = "demo", "gpt2"
COUNTED_WORLDS = (64, 256, 1024)  # in addition to those that are measured
TIMED_WORLDS = (2, 32, 128, 1024)
RATES = (1, 10)  # of the links, in Gbit/s
MESSAGE_US = 50  # the latency of a message
HANDLING_US = 25  # the CPU time of sending and receiving a message
# The methods that are timed, each with DDP's buckets or with a single one.
TIMED = (
    ("plain", None),
    ("int8", None),
    ("plain", ONE_BUCKET),
    ("hook", ONE_BUCKET),
    ("int8", ONE_BUCKET),
)

# The rounds of messages of a payload. In each, a rank sends one message to every other rank.
ROUNDS = {"one-shot": 1, "two-shot": 2}

# The bytes that Gloo sends to each other rank in addition to a payload, to synchronize: the maximum
# that was measured. A message saves 48 of them if its receive is posted early.
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
        waits for P and Q of the bucket with the most rounds.
        """
        payloads = [payload for bucket in buckets for payload in bucket]
        rings = sum(schedule == "all-reduce" for schedule, _ in payloads)
        rounds = [sum(ROUNDS.get(schedule, 0) for schedule, _ in bucket) for bucket in buckets]
        chain = 2 * (world - 1) * rings + max(rounds)
        handled = (world - 1) * sum(rounds)
        sent = sum(sent for _, sent in payloads)
        return chain * self.message + handled * self.handling + sent * self.per_byte


def options_of(wire: str | None) -> tp.Options:
    return tp.Options(
        matrix_approximation_rank=RANK, start_powerSGD_iter=EXACT_STEPS, wire_dtype=wire
    )


def cap_of(method: str) -> int | None:
    """The bucket_cap_mb with which a method is measured; None: DDP's default."""
    return ONE_BUCKET if method == "hook" else None


def layout_of(model: str, cap: int | None) -> Layout:
    """DDP's buckets. An explicit cap also applies to the first bucket."""
    limits = BUCKET_BYTES if cap is None else [cap << 20]
    return buckets_of([list(shape) for shape in shapes.MODELS[model]()], torch.float32, limits)


def bytes_in_ring(size: int, world: int) -> int:
    """The bytes that a rank sends in a ring all-reduce of ``size`` bytes."""
    return 2 * (world - 1) * size // world


def reductions_of(layout: Layout, method: str, world: int) -> list[Bucket]:
    """The payloads that the reductions of a step send.

    torch's hook all-reduces factors in float32, and raw gradients in a separate reduction. This
    project sends those together with P.
    """
    options = options_of(method if method in WIRES else None)
    # A backend that sums by itself, such as NCCL, all-reduces float32.
    device = "cuda" if method == "hook" else "cpu"
    found: list[Bucket] = []
    for bucket in layout:
        if method != "plain" and matrices_of(bucket, options):
            payloads = _C.traffic_of(bucket, to_core(options), torch.float32, device, world)
            found.append([(payload.schedule, payload.sent_bytes) for payload in payloads])
        else:
            found.append([("all-reduce", bytes_in_ring(4 * elements_of(bucket), world))])
    return [*found, [("all-reduce", 0)]] if method == "hook" else found


def sent_bytes(layout: Layout, method: str, world: int) -> int:
    """The bytes that a rank sends in a compressed step, with Gloo's own but without TCP headers."""
    payloads = [each for bucket in reductions_of(layout, method, world) for each in bucket]
    return sum(sent + (world - 1) * GLOO_BYTES[schedule] for schedule, sent in payloads)


def memory_bytes(layout: Layout, method: str, world: int) -> int:
    """The memory of this project beyond that of a plain all-reduce, as `plan` predicts it."""
    return footprint_of(layout, options_of(method), torch.float32, world).memory_bytes


def predict() -> dict[str, Any]:
    """The bytes of the measured model, and the milliseconds of a larger one."""
    counted = {
        method: [
            sent_bytes(layout_of(MEASURED_MODEL, cap_of(method)), method, world)
            for world in COUNTED_WORLDS
        ]
        for method in METHODS
    }
    timed = [
        {
            "gbit": gbit,
            "method": method,
            "one_bucket": cap is not None,
            "ms": _ms(link, method, cap),
        }
        for gbit in RATES
        for link in [Link(MESSAGE_US / 1e6, HANDLING_US / 1e6, 8 / (gbit * 1e9))]
        for method, cap in TIMED
    ]
    return {
        "message_us": MESSAGE_US,
        "handling_us": HANDLING_US,
        "counted_worlds": COUNTED_WORLDS,
        "sent_bytes": counted,
        "timed_worlds": TIMED_WORLDS,
        "milliseconds": timed,
    }


def _ms(link: Link, method: str, cap: int | None) -> list[float]:
    layout = layout_of(TIMED_MODEL, cap)
    return [
        round(1e3 * link.seconds(reductions_of(layout, method, world), world), 2)
        for world in TIMED_WORLDS
    ]
