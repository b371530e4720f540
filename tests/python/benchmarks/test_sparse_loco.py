# SPDX-License-Identifier: BSD-3-Clause
"""The codec of SparseLoCo, which the benchmarks compare with."""

from __future__ import annotations

import pytest
import torch
from cluster.sparse_loco import BINS, BLOCK, pack, unpack

from support.synthetic import gradient

KEPT = 128


@pytest.mark.parametrize("numel", [1, 5, BLOCK, BLOCK + 1, 3 * BLOCK + 1000])
def test_a_packet_holds_the_largest_of_each_block(numel: int) -> None:
    numbers = gradient((numel,), "codec")
    packet = pack(numbers, KEPT)
    places, values = unpack(packet, numel, KEPT)
    full, rest = divmod(numel, BLOCK)
    count = full * KEPT + (max(1, round(rest * KEPT / BLOCK)) if rest else 0)
    assert places.unique().numel() == places.numel() == count
    assert packet.numel() == 4 * BINS + 7 * -(-count // 4)
    sent = torch.zeros(numel, dtype=torch.bool)
    sent[places] = True
    for block, mine in zip(numbers.abs().split(BLOCK), sent.split(BLOCK), strict=True):
        assert mine.all() or block[mine].min() >= block[~mine].max()
    # A value is the mean of those in its bin.
    assert values.unique().numel() <= BINS
    for value in values.unique():
        assert numbers[places][values == value].mean() == pytest.approx(value.item(), rel=1e-5)


def test_a_packet_of_zeros() -> None:
    assert not unpack(pack(torch.zeros(99), KEPT), 99, KEPT)[1].any()
