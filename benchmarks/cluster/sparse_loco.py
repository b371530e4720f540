# SPDX-License-Identifier: BSD-3-Clause
"""Local steps whose changes are sent sparse, as SparseLoCo's (arXiv:2508.15706), to compare with.

In a round, the largest numbers of residual + change are sent, in blocks of 4096, as 12 bits of
their place and 2 bits of their value. Each number is averaged over the processes that sent it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from cluster.trainees import EXACT_STEPS, Trainee

BLOCK = 4096
DECAY = 0.95  # of the residual, in each round
BINS = 4  # of two bits
_CODES, _BYTES = 4, 7  # so many codes of 14 bits take so many bytes


class SparseLoCo(Trainee):
    """A model trained with local steps, from when its optimizer is known.

    Args:
        model: The model.
        kept: Of 4096 numbers, those that a round sends.
        sync_every: Number of steps from one round to the next.
    """

    def __init__(self, model: nn.Module, kept: int, sync_every: int = 10) -> None:
        super().__init__(model)
        self.kept, self.sync_every = kept, sync_every
        self.steps = 0
        self.anchors = _flat_copies(model)
        self.residuals = [torch.zeros_like(anchor) for anchor in self.anchors]

    def optimized_by(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        optimizer.register_step_post_hook(self._count)
        return optimizer

    def end(self) -> None:
        self._average()

    def _count(self, *_: Any) -> None:
        self.steps += 1
        if self.steps <= EXACT_STEPS:
            self._average()
        elif (self.steps - EXACT_STEPS) % self.sync_every == 0:
            self._have_round()

    @torch.no_grad()
    def _average(self) -> None:
        for parameter, anchor in zip(self.model.parameters(), self.anchors, strict=True):
            dist.all_reduce(parameter.data)
            parameter.div_(dist.get_world_size())
            anchor.copy_(parameter.view(-1))

    @torch.no_grad()
    def _have_round(self) -> None:
        parameters = [parameter.view(-1) for parameter in self.model.parameters()]
        for parameter, anchor, residual in zip(
            parameters, self.anchors, self.residuals, strict=True
        ):
            residual.mul_(DECAY).add_(anchor - parameter)
        packets = [pack(residual, self.kept) for residual in self.residuals]
        mine = torch.cat(packets)
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, mine)
        sent = [packed.split([packet.numel() for packet in packets]) for packed in everyone]
        for i, residual in enumerate(self.residuals):
            total, senders = torch.zeros_like(residual), torch.zeros_like(residual)
            for rank, packed in enumerate(sent):
                places, values = unpack(packed[i], residual.numel(), self.kept)
                total.index_add_(0, places, values)
                senders[places] += 1
                if rank == dist.get_rank():
                    residual[places] -= values
            self.anchors[i] -= total / senders.clamp(min=1)
            parameters[i].copy_(self.anchors[i])


def _flat_copies(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone().view(-1) for parameter in model.parameters()]


def pack(numbers: torch.Tensor, kept: int) -> torch.Tensor:
    """Returns the largest of some numbers as bytes: float32 for their mean and bins, then codes."""
    places = _blocks_of(numbers.numel(), kept) * BLOCK + _largest(numbers, kept)
    values = numbers[places]
    centered = values - values.mean()
    width = (6 / BINS * centered.std(correction=0)).clamp(min=torch.finfo(torch.float32).tiny)
    bins = (centered / width + BINS // 2).round().clamp(0, BINS - 1).long()
    counts = torch.bincount(bins, minlength=BINS).clamp(min=1)
    means = torch.zeros(BINS).index_add_(0, bins, values) / counts
    codes = nn.functional.pad(places % BLOCK * BINS + bins, (0, -places.numel() % _CODES))
    shifts = 14 * torch.arange(_CODES)
    words = (codes.view(-1, _CODES) << shifts).sum(1)
    tail = words.view(torch.uint8).view(-1, 8)[:, :_BYTES].reshape(-1)
    return torch.cat([means.view(torch.uint8), tail])


def unpack(packet: torch.Tensor, numel: int, kept: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the places and the values in a packet of so many numbers."""
    blocks = _blocks_of(numel, kept)
    means = packet[: 4 * BINS].clone().view(torch.float32)
    tail = packet[4 * BINS :].view(-1, _BYTES)
    words = nn.functional.pad(tail, (0, 8 - _BYTES)).view(torch.int64)
    codes = (words >> (14 * torch.arange(_CODES)) & (BLOCK * BINS - 1)).view(-1)[: blocks.numel()]
    return blocks * BLOCK + codes // BINS, means[codes % BINS]


def _blocks_of(numel: int, kept: int) -> torch.Tensor:
    """Returns the block of each number that is sent."""
    full, rest = divmod(numel, BLOCK)
    blocks = torch.arange(full).repeat_interleave(kept)
    last = max(1, round(rest * kept / BLOCK)) if rest else 0
    return torch.cat([blocks, torch.full((last,), full)])


def _largest(numbers: torch.Tensor, kept: int) -> torch.Tensor:
    """Returns the places, in their blocks, of the largest numbers."""
    full = numbers.numel() // BLOCK * BLOCK
    found = numbers[:full].view(-1, BLOCK).abs().topk(kept, sorted=False).indices.view(-1)
    if full < numbers.numel():
        rest = numbers[full:].abs()
        last = rest.topk(max(1, round(rest.numel() * kept / BLOCK)), sorted=False).indices
        found = torch.cat([found, last])
    return found
