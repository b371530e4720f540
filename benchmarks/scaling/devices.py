# SPDX-License-Identifier: BSD-3-Clause
"""Models a step's communication over NCCL on hosts with several devices, one link for each host.

The payloads and schedules come from the package itself, and what rings and trees wait for from
NCCL's own model (src/graph/tuning.cc). The links are assumed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from scaling.model import MESSAGE_US, layout_of, options_of
from torch_powersgd._core import _C
from torch_powersgd.cli.footprint import elements_of
from torch_powersgd.options import to_core

MODEL, BUCKET_MB = "gpt2", 100
HOSTS, DEVICES = (2, 4), 8  # devices of each host
GBIT = 10  # of a host's link
DEVICE_US = 3  # the latency of a message within a host
DEVICE_GBYTES = 200  # what a device sends in a second to those of its host


class Cost(NamedTuple):
    """What a collective takes. Messages that are counted wait for one another."""

    sent: float  # bytes that the busiest host sends
    messages: int  # between hosts
    inside: float  # bytes that a device sends to those of its host
    steps: int  # messages between devices of a host

    @property
    def seconds(self) -> float:
        waits = 1e-6 * (self.messages * MESSAGE_US + self.steps * DEVICE_US)
        return waits + max(8e-9 * self.sent / GBIT, 1e-9 * self.inside / DEVICE_GBYTES)


Bucket = list[list[int]]  # shapes
Costs = Callable[[Bucket, int], list[Cost]]  # of a bucket on so many hosts


def ring(size: int, hosts: int) -> Cost:
    """An all-reduce as a ring, which passes each host's link once."""
    world = hosts * DEVICES
    sent = 2 * (world - 1) / world * size
    return Cost(sent, 2 * hosts, sent, 2 * (world - 1) - 2 * hosts)


def tree(size: int, hosts: int) -> Cost:
    """An all-reduce as two trees of hosts, with half of the data each.

    Above two hosts, some have two children in one tree, and are leaves of the other. The devices of
    a host are a chain.
    """
    sent = size if hosts == 2 else 2 * size
    return Cost(sent, 2 * int(math.log2(hosts)), 2 * size, 2 * (DEVICES - 1))


def _payloads(bucket: Bucket, wire: str | None, hosts: int, per_host: int) -> list[_C.Traffic]:
    core = to_core(options_of(wire))
    return [*_C.traffic_of(bucket, core, torch.float32, "cuda", hosts * DEVICES, per_host)]


def _of_nccl(bucket: Bucket, hosts: int) -> list[Cost]:
    """Payloads in float32, which NCCL sums."""
    sizes = [payload.payload_bytes for payload in _payloads(bucket, None, hosts, 1)]
    return [min(ring(n, hosts), tree(n, hosts), key=lambda cost: cost.seconds) for n in sizes]


def _one_level(bucket: Bucket, hosts: int) -> list[Cost]:
    """Two-shot among all devices: messages to all others, and an all-gather, which is a ring."""
    world = hosts * DEVICES
    costs = []
    for payload in _payloads(bucket, "int8", hosts, 1):
        part = payload.payload_bytes / world
        costs += [
            Cost(DEVICES * (world - DEVICES) * part, 1, (DEVICES - 1) * part, 1),
            Cost((world - 1) * part, hosts - 1, (world - 1) * part, world - hosts),
        ]
    return costs


def _two_levels(bucket: Bucket, hosts: int) -> list[Cost]:
    """Elements are summed within a host, and its packets go to the other hosts."""
    costs = []
    elements = _payloads(bucket, None, hosts, 1)
    for payload, of in zip(_payloads(bucket, "int8", hosts, DEVICES), elements, strict=True):
        within = Cost(0, 0, (DEVICES - 1) / DEVICES * of.payload_bytes, 1)
        messages = {"one-shot": 1, "two-shot": 2}[payload.schedule]
        costs += [within, Cost(payload.sent_bytes, messages, 0, 0), within]
    return costs


METHODS: dict[str, Costs] = {
    "plain all-reduce, as a ring": lambda bucket, n: [ring(4 * elements_of(bucket), n)],
    "plain all-reduce, as a tree": lambda bucket, n: [tree(4 * elements_of(bucket), n)],
    "ours, float32": _of_nccl,
    "ours, int8, in one level": _one_level,
    "ours, int8": _two_levels,
}


def predict() -> dict[str, Any]:
    """The bytes that a host sends in a step, and the milliseconds that its collectives take."""
    layout = layout_of(MODEL, BUCKET_MB)
    rows = []
    for method, of in METHODS.items():
        costs = [[cost for bucket in layout for cost in of(bucket, hosts)] for hosts in HOSTS]
        sent = [round(sum(cost.sent for cost in each)) for each in costs]
        ms = [round(1e3 * sum(cost.seconds for cost in each), 2) for each in costs]
        rows.append({"method": method, "sent_bytes": sent, "ms": ms})
    return {"hosts": HOSTS, "devices": DEVICES, "gbit": GBIT, "methods": rows}
