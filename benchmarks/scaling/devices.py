# SPDX-License-Identifier: BSD-3-Clause
"""Models a step's communication over NCCL on hosts with several devices, one link for each host.

The payloads come from the package itself, and the latencies of rings and trees from NCCL's own
model (src/graph/tuning.cc). A host's link and those between its devices are assumed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from scaling.model import layout_of, options_of
from torch_powersgd._core import _C
from torch_powersgd.cli.footprint import elements_of
from torch_powersgd.options import to_core

MODEL, BUCKET_MB = "gpt2", 100
HOSTS = (2, 4)
DEVICES = 8  # of a host
GBIT = 10  # of a host's link
MESSAGE_US, DEVICE_US = 50, 3  # latencies: between hosts, and between devices of a host
DEVICE_GBYTES = 200  # what a device sends in a second to those of its host


# The collectives of a bucket on so many hosts.
Method = Callable[[list[list[int]], int], "list[Cost]"]


class Cost(NamedTuple):
    """What a collective takes: the bytes that pass a link, and messages that wait for another."""

    sent: float = 0  # by the busiest host
    messages: int = 0  # between hosts
    inside: float = 0  # by a device, to those of its host
    steps: int = 0  # between devices of a host

    def seconds(self) -> float:
        """The seconds of a collective. The links between devices are busy at the same time."""
        waits = self.messages * MESSAGE_US * 1e-6 + self.steps * DEVICE_US * 1e-6
        return waits + max(self.sent * 8 / (GBIT * 1e9), self.inside / (DEVICE_GBYTES * 1e9))


def ring(size: float, hosts: int) -> Cost:
    """An all-reduce as a ring, which passes each host's link once."""
    world = hosts * DEVICES
    sent = 2 * (world - 1) / world * size
    return Cost(sent, 2 * hosts, sent, 2 * (world - 1) - 2 * hosts)


def tree(size: float, hosts: int) -> Cost:
    """An all-reduce as two trees of hosts, each with half of the data.

    A host is a leaf of one and has up to two children in the other. Its devices are a chain.
    """
    sent = size if hosts == 2 else 2 * size
    return Cost(sent, 2 * int(math.log2(hosts)), 2 * size, 2 * (DEVICES - 1))


def _all_gather(size: float, hosts: int, devices: int) -> Cost:
    """`size` bytes in all, by a ring of these devices of each host."""
    world = hosts * devices
    sent = (world - 1) / world * size
    return Cost(sent if hosts > 1 else 0, hosts - 1, sent, world - hosts)


def one_level(size: float, elements: float, hosts: int) -> list[Cost]:
    """Two-shot between all devices: an all-to-all and an all-gather of packets."""
    world = hosts * DEVICES
    away = DEVICES * (world - DEVICES) / world * size
    return [Cost(away, 1, (DEVICES - 1) / world * size, 1), _all_gather(size, hosts, DEVICES)]


def two_levels(size: float, elements: float, hosts: int) -> list[Cost]:
    """Elements are summed within a host. The packet of a slice goes to the other hosts."""
    inside = (DEVICES - 1) / DEVICES * elements
    one_shot = [_all_gather(hosts * size, hosts, 1)]
    two_shot = [Cost((hosts - 1) / hosts * size, 1), _all_gather(size, hosts, 1)]
    between = min(one_shot, two_shot, key=_seconds)
    return [Cost(inside=inside, steps=1), *between, _all_gather(elements, 1, DEVICES)]


def _seconds(costs: Iterable[Cost]) -> float:
    return sum(cost.seconds() for cost in costs)


def _factors(bucket: list[list[int]], wire: str | None, hosts: int) -> list[int]:
    """The bytes of the two payloads of a bucket."""
    core = to_core(options_of(wire))
    payloads = _C.traffic_of(bucket, core, torch.float32, "cuda", hosts * DEVICES)
    return [payload.payload_bytes for payload in payloads]


def _in_packets(levels: Callable[[float, float, int], list[Cost]]) -> Method:
    def costs(bucket: list[list[int]], hosts: int) -> list[Cost]:
        sizes = zip(*(_factors(bucket, wire, hosts) for wire in ("int8", None)), strict=True)
        return [cost for packet, elements in sizes for cost in levels(packet, elements, hosts)]

    return costs


def _of_nccl(bucket: list[list[int]], hosts: int) -> list[Cost]:
    """Factors in float32, which NCCL sums as a ring or as a tree."""
    sizes = _factors(bucket, None, hosts)
    return [min(ring(n, hosts), tree(n, hosts), key=Cost.seconds) for n in sizes]


METHODS: dict[str, Method] = {
    "plain all-reduce, as a ring": lambda bucket, n: [ring(4 * elements_of(bucket), n)],
    "plain all-reduce, as a tree": lambda bucket, n: [tree(4 * elements_of(bucket), n)],
    "ours, float32": _of_nccl,
    "ours, int8, in one level": _in_packets(one_level),
    "ours, int8": _in_packets(two_levels),
}


def predict() -> dict[str, Any]:
    """The bytes that a host sends in a step, and the milliseconds that all collectives take."""
    layout = layout_of(MODEL, BUCKET_MB)
    rows = []
    for method, costs_of in METHODS.items():
        costs = [[cost for bucket in layout for cost in costs_of(bucket, n)] for n in HOSTS]
        rows.append(
            {
                "method": method,
                "sent_bytes": [round(sum(cost.sent for cost in each)) for each in costs],
                "ms": [round(1e3 * _seconds(each), 2) for each in costs],
            }
        )
    return {"hosts": HOSTS, "devices": DEVICES, "gbit": GBIT, "methods": rows}
