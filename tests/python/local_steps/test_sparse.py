# SPDX-License-Identifier: BSD-3-Clause
"""Local steps of which a share of the changes is sent: their largest numbers."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from support import ranks
from support.groups import world
from support.ledger import TOLERANCE
from support.local_job import EVERY, Job
from support.on_ranks import all_agree, models_agree, on_ranks
from support.refusals import refuses
from support.sparse import mean_of, sent_of
from support.states import from_bytes, to_bytes
from support.synthetic import gradient
from support.tensors import relative_error, same
from torch_powersgd.sparse import BLOCK, PART, Sparse, pack, unpack

DENSITY = 1 / 16
# Two rows of blocks, the second with an end; one full block; then what is sent whole.
SHAPES: dict[str, tuple[int, ...]] = {
    "matrix": (70, 61),
    "vector": (BLOCK,),
    "low": (70, 61),
    "double": (BLOCK,),
    "bias": (61,),
    "one": (1,),
    "empty": (0, 5),
}
DTYPES = {"low": torch.bfloat16, "double": torch.float64}
SPARSE = ("matrix", "vector", "low")


@pytest.mark.parametrize("count", [1, 3, 16, PART])
def test_a_packet_holds_the_largest_of_each_part(count: int) -> None:
    blocks = gradient((3, BLOCK), "packet")
    packets = pack(blocks, count)
    assert packets.shape == (3, 20 * count + 8)
    places, values = unpack(packets, count)
    sent = torch.zeros_like(blocks, dtype=torch.bool).scatter_(1, places, True)
    for part, mine in zip(blocks.abs().view(-1, PART), sent.view(-1, PART), strict=True):
        assert mine.sum() == count
        assert mine.all() or part[mine].min() >= part[~mine].max()
    for block, at, found in zip(blocks, places, values, strict=True):
        there = block[at]
        assert torch.equal(there < 0, found < 0)
        large = there.abs() > there.abs().mean()
        for of in (large, ~large):
            wanted = there[of].abs().double().mean()
            assert relative_error(found[of].abs(), wanted.expand(int(of.sum()))) < 1e-6


@pytest.mark.parametrize("value", [0.0, 1.0, -1e-30, 1e30])
def test_a_packet_of_equal_numbers_is_exact(value: float) -> None:
    values = unpack(pack(torch.full((2, BLOCK), value), 5), 5)[1]
    assert values.unique().tolist() == pytest.approx([value], rel=1e-6, abs=0)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_number_that_is_not_finite_spoils_its_block(value: float) -> None:
    blocks = gradient((2, BLOCK), "packet")
    blocks[1, 5] = value
    assert unpack(pack(blocks, 5), 5)[1].isfinite().all(1).tolist() == [True, False]


def _tensor(name: str, rank: int, i: int) -> torch.Tensor:
    found = gradient(SHAPES[name], name, rank, i, dtype=DTYPES.get(name, torch.float32))
    if found.dtype == torch.bfloat16:  # all different, or the largest would not be determined
        bits = 0x3C00 + found.flatten().float().argsort(stable=True).to(torch.int16)
        return bits.view(torch.bfloat16).view(found.shape) * found.sign()
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3])
@on_ranks()
def test_each_number_is_averaged_over_its_senders(rank: int, world_size: int) -> None:
    """And what is sent, and what is kept, is what was there."""
    for names in ([*SHAPES], ["bias", "one"]):
        _check_averages(names, rank, world_size)


def _check_averages(names: list[str], rank: int, world_size: int) -> None:
    sparse = Sparse([_tensor(name, rank, 0) for name in names], DENSITY, world())
    residuals = [dict.fromkeys(names, torch.zeros(())) for _ in range(world_size)]
    for i in range(3):
        tensors, memory = sparse.allocate()
        for tensor, name in zip(tensors, names, strict=True):
            tensor.copy_(_tensor(name, rank, i))
        average = sparse.send(memory, "")
        average.wait()
        found, _, agreement = average.receive()
        means = dict(zip(names, found, strict=True))
        average.keep([True] * len(means))
        assert all_agree([mean.tolist() for mean in means.values()])
        held = dict(zip(names, sparse.residuals(), strict=True))
        product = square = torch.zeros((), dtype=torch.float64)
        for name in names:
            everyone = [_tensor(name, r, i).double() + of[name] for r, of in enumerate(residuals)]
            mine = held[name]
            if name not in SPARSE:
                assert mine is None
                assert relative_error(means[name], torch.stack(everyone).mean(0)) < 1e-6
                continue
            sent = [sent_of(numbers, DENSITY) for numbers in everyone]
            assert relative_error(means[name], mean_of(sent)) < 1e-6
            for of, numbers, gone in zip(residuals, everyone, sent, strict=True):
                of[name] = numbers - gone
            assert mine is not None
            assert relative_error(mine, residuals[rank][name]) < 1e-6
            others = torch.stack([*sent]).ne(0).sum(0) > 1
            product = product + (sum(sent) * sent[rank] * others).sum()
            square = square + (sent[rank].square() * others).sum()
        torch.testing.assert_close(
            agreement.double(), product / square, rtol=1e-4, atol=1e-4, equal_nan=True
        )


class Net(nn.Module):
    """Two matrices of more than a block, one in bfloat16, and others that are sent whole."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(24, 200)
        self.low = nn.Parameter((0.1 * torch.randn(200, 24)).bfloat16())
        self.complex = nn.Parameter(0.1 * torch.randn(24, 90, dtype=torch.complex64))
        self.wide = nn.Parameter(torch.ones(5000, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x)).bfloat16() @ self.low
        total: torch.Tensor = (x.float() @ self.complex.abs()).square().mean()
        return total + (self.wide * x.float().mean()).square().mean()


class SparseJob(Job):
    def __init__(self, outer: bool = False, **others: Any) -> None:
        super().__init__(outer, make=Net, **{"warmup_steps": 1, "density": DENSITY, **others})

    def residuals(self) -> list[torch.Tensor]:
        assert all(fragment.sparse is not None for fragment in self.steps._fragments)
        found = [fragment.sparse.residuals() for fragment in self.steps._fragments]  # type: ignore[union-attr]
        return [residual for of in found for residual in of if residual is not None]


@pytest.mark.parametrize("outer", [False, True], ids=["LocalSGD", "DiLoCo"])
@pytest.mark.parametrize("delay", [0, 3])
@on_ranks(2)
def test_local_steps(rank: int, outer: bool, delay: int) -> None:
    """Anchors are equal, a process keeps its share, and the end is the exact mean."""
    job = SparseJob(outer, fragment_sync_delay=delay)
    job.train(rank, 0, 1 + 3 * EVERY)
    job.steps.sync()
    assert len(job.residuals()) == 3
    assert all(residual.norm() > 0 for residual in job.residuals())
    for fragment in job.steps._fragments:
        assert all_agree([anchor.tolist() for anchor in fragment.anchors.values()])
        held = fragment.sparse.residuals()  # type: ignore[union-attr]
        for (name, p), residual in zip(fragment.parameters.items(), held, strict=True):
            start = fragment.anchors[name].clone()
            if residual is not None:
                (torch.view_as_real(start) if start.is_complex() else start).sub_(
                    residual, alpha=fragment.kept
                )
            assert torch.equal(p, start.to(p.dtype)), name
    everyone: list[Any] = [None] * 2
    dist.all_gather_object(everyone, [p.detach() for p in job.model.parameters()])
    job.steps.sync(exact=True)
    for p, mine, theirs in zip(job.model.parameters(), *everyone, strict=True):
        tolerance = 1e-2 if p.dtype == torch.bfloat16 else TOLERANCE[torch.float32]
        assert relative_error(p, (mine + theirs) / 2) < tolerance
    assert models_agree(job.model)
    assert job.steps.stats()["round_ratio"] > EVERY
    job.steps.detach()


@pytest.mark.parametrize("outer", [False, True], ids=["LocalSGD", "DiLoCo"])
@on_ranks(2)
def test_each_process_goes_on_to_the_bit(rank: int, outer: bool) -> None:
    for end in (1 + EVERY, 3 * EVERY + 2):
        whole, resumed = SparseJob(outer), SparseJob(outer)
        whole.train(rank, 0, end)
        resumed.load(whole.save())
        for job in (whole, resumed):
            job.train(rank, end, end + 2 * EVERY)
        assert same(resumed.model.parameters(), whole.model.parameters())


def _saved(rank: int) -> tuple[bytes, bytes]:
    job = SparseJob()
    job.train(rank, 0, 1 + 2 * EVERY)
    means = [residual.clone() for residual in job.residuals()]
    for mean in means:
        dist.all_reduce(mean)
    return to_bytes(job.steps.state_dict()), to_bytes([mean / 2 for mean in means])


def _resumed(rank: int, saved: bytes, means: bytes) -> None:
    job = SparseJob()
    job.train(rank, 0, 1)
    job.steps.load_state_dict(from_bytes(saved))
    assert models_agree(job.model)
    for mine, mean in zip(job.residuals(), from_bytes(means), strict=True):
        assert relative_error(mine, mean) < 1e-6
    job.train(rank, 1, 1 + 2 * EVERY)


@pytest.mark.parametrize("after", [1, 3])
def test_any_number_of_ranks_takes_over(after: int) -> None:
    ranks.run(after, _resumed, *ranks.run(2, _saved)[0])


@on_ranks(2)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(rank: int) -> None:
    job = SparseJob()
    job.train(rank, 0, 1 + EVERY)
    changes: list[tuple[Callable[[Any], object], str]] = [
        (lambda own: own["low"]["residual"].add_(1), "does not match its crc32"),
        (lambda own: own.pop("low"), "a dict with 'low'"),
        (lambda own: own.update(low=torch.ones(2)), "must be a dict, got Tensor"),
        (lambda own: own["low"].update(residual=torch.ones(2)), "a dense tensor, torch.float"),
        (lambda own: own["low"]["residual"].fill_(torch.nan), "must be finite, got nan"),
    ]
    for per_rank in (False, True):
        state = job.steps.state_dict(per_rank)
        before = to_bytes(state)
        for change, message in changes:
            broken = from_bytes(before)
            parts = [p for p in broken["fragments"].values() if "low" in p["anchors"]]
            own = parts[0]["compression"]
            change(own.get(f"process {rank} of 2", own)["parameters"])
            place = r"fragments\['[01]'\]\['compression'\]\['parameters'\]"
            with pytest.raises(ValueError, match=f"{place}.*{re.escape(message)}"):
                job.steps.load_state_dict(broken)
        assert to_bytes(job.steps.state_dict(per_rank)) == before
    factors = SparseJob(density=None)
    refuses(lambda: factors.steps.load_state_dict(state), "must be a dict with 'grad_scale', as")


@pytest.mark.parametrize("delay", [0, 3])
@on_ranks(2)
def test_a_round_that_is_not_finite_changes_nothing(rank: int, delay: int) -> None:
    job = SparseJob(fragments=1, fragment_sync_delay=delay)
    job.train(rank, 0, 1 + EVERY)
    job.steps.sync()
    before = [p.detach().clone() for p in job.model.parameters()]
    residuals = [residual.clone() for residual in job.residuals()]
    if rank == 1:
        with torch.no_grad():
            job.model.get_parameter("first.weight")[3, 5] = torch.nan
    job.steps.sync()
    assert job.steps.stats()["dropped_rounds"] == 1
    assert same(job.model.parameters(), before)
    assert same(job.residuals(), residuals)


@on_ranks(2)
def test_densities_that_do_not_fit_are_refused(rank: int) -> None:
    wrong: list[tuple[Any, str]] = [
        (0, "a finite number > 0"),
        (1.5, "a number <= 1 such as 1/16, or None"),
        ("x", "a finite number > 0"),
    ]
    for density, message in wrong:
        refuses(partial(SparseJob, density=density), f"density must be {message}, got")
    refuses(
        lambda: SparseJob(density=DENSITY * (1 + rank)), "density is 0.0625 on rank 0 and 0.125 on"
    )
