# SPDX-License-Identifier: BSD-3-Clause
"""Averages to which each process sends its largest numbers, and keeps the rest for later ones.

The sum of a number over W processes is divided by how many sent it, as in SparseLoCo (Sarfi et
al., arXiv:2508.15706), or by the square root of W / 2 if that is more. Otherwise, many processes
would move the model too far, because each sends what the others have moved as well. Here a number
takes 10 bits instead of 14, because its place is one of 256, and the residual doesn't decay.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from torch_powersgd.agreement import naming_absent
from torch_powersgd.option_values import positive, require
from torch_powersgd.scope import scope

List = list[torch.Tensor]

BLOCK = 4096  # numbers that share the two magnitudes of their values
PART = 256  # numbers side by side, of which the largest are sent: the place of one takes a byte


@dataclass(frozen=True)
class InFlight:
    """An average that has begun. ``wait`` for it, ``receive`` the means, and ``keep`` the rest.

    Attributes:
        of: What it averages.
        work: Work that receives the packets.
        deed: What this process does, as in ``agreement.absent_from``.
        packets: Packets of all processes, one in each row.
        residual: What this process has not sent.
    """

    of: Sparse
    work: dist.Work
    deed: str
    packets: torch.Tensor
    residual: torch.Tensor

    def wait(self) -> None:
        with naming_absent(self.of.group, self.deed):
            self.work.wait()

    def receive(self, divisor: int | None = None) -> tuple[List, List, torch.Tensor]:
        """Returns the means and their memory, as of ``Sparse.allocate``, and the agreement.

        The agreement is that of the numbers which both this process and others sent, a tensor of
        one: near 0 if they cancel in the sum, 1 if they are independent, more if they are alike,
        and NaN if there are none.

        Args:
            divisor: Number of processes that have a part in the means. None: all of them.
        """
        return self.of._means(self.packets, divisor or len(self.packets))

    def keep(self, delivered: Sequence[bool]) -> None:
        """Keeps what was not sent of the tensors whose means were ``delivered``.

        The residuals of other tensors stay.
        """
        self.of._keep(self.residual, delivered)


def check_density(density: Any) -> None:
    """Raises a ValueError if a density is not valid."""
    fits = positive("density", density) <= 1
    require(fits, "density", "a number <= 1 such as 1/16, or None", density)


def round_bytes(tensors: List, density: float) -> int:
    """Returns the bytes that a process sends in an average of tensors like these."""
    row = _row_bytes(_count_of(density))
    return sum(_rows_of(t) * row if _is_sparse(t) else t.nbytes for t in tensors)


class Sparse:
    """The averages of some tensors, and what this process has not sent of them.

    Averages are in float32. A tensor of less than ``BLOCK`` numbers, or in float64, is sent whole
    instead, and its exact mean comes back.

    Args:
        tensors: Tensors like those to average.
        density: Share of the numbers to send, > 0 and <= 1. It is rounded to a multiple of 1/256.
        group: Group to average over.

    Attributes:
        group: The group.
        nbytes: The bytes that this process sends in an average.
        described: The density in words.
    """

    def __init__(self, tensors: List, density: float, group: dist.ProcessGroup) -> None:
        self.group, self._rounds = group, 0
        self._like = tensors
        self._count = _count_of(density)
        self.described = f"a density of {self._count}/{PART}"
        self._sparse = [i for i, tensor in enumerate(tensors) if _is_sparse(tensor)]
        rest = [i for i in range(len(tensors)) if i not in {*self._sparse}]
        dtypes = dict.fromkeys(tensors[i].dtype for i in rest)
        self._whole = [[i for i in rest if tensors[i].dtype == dtype] for dtype in dtypes]
        rows = sum(_rows_of(tensors[i]) for i in self._sparse)
        self._residual = tensors[0].new_zeros(rows, BLOCK, dtype=torch.float32)
        whole = [sum(tensors[i].nbytes for i in of) for of in self._whole]
        self._sizes = [rows * _row_bytes(self._count), *whole]
        self.nbytes = round_bytes(tensors, density)

    def allocate(self) -> tuple[List, List]:
        """Returns tensors of zeros to average, and their memory."""
        whole = [
            self._like[of[0]].new_zeros(sum(self._like[i].numel() for i in of))
            for of in self._whole
        ]
        memory = [torch.zeros_like(self._residual), *whole]
        found = self._in_blocks(memory[0])
        for of, flat in zip(self._whole, whole, strict=True):
            parts = flat.split([self._like[i].numel() for i in of])
            found |= {i: part.view(self._like[i].shape) for i, part in zip(of, parts, strict=True)}
        return [found[i] for i in range(len(found))], memory

    def send(self, memory: List, deed: str) -> InFlight:
        """Begins an average of the tensors with this memory, which are no longer needed."""
        residual = memory[0].add_(self._residual)
        packets = pack(residual, self._count)
        places, values = unpack(packets, self._count)
        _add(residual, places, -values)
        mine = torch.cat([each.view(-1).view(torch.uint8) for each in [packets, *memory[1:]]])
        everyone = mine.new_empty(self.group.size(), mine.numel())
        work = dist.all_gather([*everyone], mine, self.group, async_op=True)
        assert work is not None
        self._rounds += 1
        return InFlight(self, work, deed, everyone, residual)

    def _means(self, of_all: torch.Tensor, divisor: int) -> tuple[List, List, torch.Tensor]:
        means, memory = self.allocate()
        senders = torch.zeros_like(memory[0])
        for rank, packet in enumerate(of_all):
            packets, *whole = packet.split(self._sizes)
            rows = packets.view(len(senders), _row_bytes(self._count))
            places, values = unpack(rows, self._count)
            _add(memory[0], places, values)
            _add(senders, places, values.ne(0).float())
            if rank == self.group.rank():
                own = places, values
            for total, part in zip(memory[1:], whole, strict=True):
                total.add_(part.clone().view(total.dtype))
        places, values = own
        values *= senders.gather(1, places) > 1
        agreement = (memory[0].gather(1, places) * values).sum() / values.square().sum()
        memory[0].div_(senders.clamp_(min=max(1, math.sqrt(divisor / 2))))
        for total in memory[1:]:
            total.div_(divisor)
        return means, memory, agreement

    def _keep(self, residual: torch.Tensor, delivered: Sequence[bool]) -> None:
        before = self.held()
        for i, after in self._in_blocks(residual).items():
            if not delivered[i]:
                after.copy_(before[i])
        self._residual = residual

    def take_residuals(self, share: float, of: Sequence[int]) -> None:
        """Takes a share from the residuals of the tensors with these indices."""
        held = self.held()
        for i in of:
            if i in held:
                held[i].mul_(1 - share)

    def residuals(self) -> list[torch.Tensor | None]:
        """Returns what this process has not sent of each tensor. None: it is sent whole."""
        held = self.held()
        return [held.get(i) for i in range(len(self._like))]

    def reset_counts(self) -> None:
        self._rounds = 0

    def add_to(self, counts: dict[str, Any]) -> None:
        """Adds the averages so far to the counts of ``BucketReducer.stats``."""
        before, after = self._rounds * sum(t.nbytes for t in self._like), self._rounds * self.nbytes
        counts["compressed_calls"] += self._rounds
        for kind, sent in (("before", before), ("after", after)):
            counts[f"bytes_{kind}"] += sent
            counts[f"compressed_bytes_{kind}"] += sent

    def by_tensor(self) -> dict[int, dict[str, float]]:
        """Returns what ``Compression.stats`` says of the tensors that are not sent whole."""
        return {
            i: {
                "residual": residual.norm().item(),
                "bytes_after": _rows_of(residual) * _row_bytes(self._count),
            }
            for i, residual in self.held().items()
        }

    def held(self) -> dict[int, torch.Tensor]:
        """Returns the residuals, by the index of the tensor."""
        return self._in_blocks(self._residual)

    @torch.no_grad()
    def export(self, per_rank: bool) -> dict[int, torch.Tensor]:
        """Returns copies of what is ``held``, or without ``per_rank`` the mean. Then collective."""
        held = self._residual.clone()
        if not per_rank:
            with scope("never"):
                dist.all_reduce(held, group=self.group)
            held.div_(self.group.size())
        return self._in_blocks(held)

    @torch.no_grad()
    def load(self, residuals: Mapping[int, torch.Tensor]) -> None:
        """Takes over what ``export`` returned."""
        for i, residual in self.held().items():
            residual.copy_(residuals[i])

    def _in_blocks(self, blocks: torch.Tensor) -> dict[int, torch.Tensor]:
        """Returns views of blocks that are like the tensors, by their indices."""
        rows = [_rows_of(self._like[i]) for i in self._sparse]
        return {
            i: part.view(-1)[: self._like[i].numel()].view(self._like[i].shape)
            for i, part in zip(self._sparse, blocks.split(rows), strict=True)
        }


def pack(blocks: torch.Tensor, count: int) -> torch.Tensor:
    """Packs the largest numbers of each part.

    Args:
        blocks: Numbers [n, 4096] in float32.
        count: How many of each part to pack.

    Returns:
        Bytes [n, 20 count + 8]: the places of the numbers in their parts; in 2 bits, their signs
        and whether they are large; and the mean magnitudes of the small and of the large ones of a
        block. A number is large if it exceeds the mean magnitude, or zero if any of them is zero.
    """
    rows, many = len(blocks), BLOCK // PART * count
    parts = blocks.view(-1, PART)
    # As integers, magnitudes have the same order, and are compared faster.
    places = parts.abs().view(torch.int32).topk(count, sorted=False).indices
    values = parts.gather(1, places).view(rows, many)
    sizes = values.abs()
    large = sizes > (sizes.mean(1) * sizes.amin(1).ne(0)).unsqueeze(1)
    both = torch.stack([~large, large], 1)
    magnitudes = (sizes.unsqueeze(1) * both).sum(2) / both.sum(2).clamp(min=1)
    codes = ((values < 0).to(torch.uint8) << 1 | large).view(rows, many // 4, 4)
    joined = (codes << _shifts(codes)).sum(2).to(torch.uint8)
    return torch.cat(
        [places.view(rows, many).to(torch.uint8), joined, magnitudes.view(torch.uint8)], 1
    )


def unpack(packets: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the places in their blocks, and the values, of packed numbers, both [n, 16 count]."""
    many = BLOCK // PART * count
    places, joined, magnitudes = packets.split([many, many // 4, 8], 1)
    codes = (joined.unsqueeze(2) >> _shifts(joined) & 3).flatten(1)
    sizes = magnitudes.clone(memory_format=torch.contiguous_format).view(torch.float32)
    values = torch.cat([sizes, -sizes], 1).gather(1, codes.long())
    starts = torch.arange(0, BLOCK, PART, device=packets.device).repeat_interleave(count)
    return starts + places, values


def _is_sparse(tensor: torch.Tensor) -> bool:
    return tensor.dtype != torch.float64 and tensor.numel() >= BLOCK


def _count_of(density: float) -> int:
    """Returns how many numbers of each part are sent."""
    return max(1, round(PART * density))


def _rows_of(tensor: torch.Tensor) -> int:
    return -(-tensor.numel() // BLOCK)


def _row_bytes(count: int) -> int:
    """Returns the bytes of a packed block."""
    return BLOCK // PART * count * 5 // 4 + 8


def _shifts(like: torch.Tensor) -> torch.Tensor:
    """Returns where the codes of a byte begin, by which uint8 tensors can be shifted."""
    return torch.arange(0, 8, 2, dtype=torch.uint8, device=like.device)


def _add(to: torch.Tensor, places: torch.Tensor, values: torch.Tensor) -> None:
    """Adds values at places of each row, all different: the same bits on every device."""
    to.scatter_(1, places, to.gather(1, places) + values)
