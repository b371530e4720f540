# SPDX-License-Identifier: BSD-3-Clause
"""Tensors that are attached by name, for training loops of one's own."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torch_powersgd as tp
import torch_powersgd.attachment
from support import ranks
from support.ddp import make_ddp
from support.ledger import TOLERANCE, Ledger, residuals_of
from support.on_ranks import on_ranks
from support.operators import Operators
from support.refusals import refuses
from support.synthetic import gradient
from support.tensors import Tensors, same
from torch_powersgd.matrices import as_reals
from torch_powersgd.targets import target_of

OPTIONS = tp.Options.hook_defaults(start_powerSGD_iter=1, matrix_approximation_rank=2)
WIRES = (None, "int8")
# By the number of ranks: two have a bucket for each dtype, and three have several.
BUCKET_BYTES = {2: 25 << 20, 3: 4000}
STEPS = 6

SHAPES: dict[str, tuple[int, ...]] = {
    "wide": (11, 67),
    "tall": (83, 13),
    "conv": (16, 3, 5, 5),
    "transposed": (24, 50),
    "gaps": (20, 33),
    "bias": (16,),
    "scalar": (),
    "empty": (0, 5),
    "double": (30, 25),
    "half": (32, 28),
    "complex": (20, 24),
}
DTYPES = {"double": torch.float64, "half": torch.bfloat16, "complex": torch.complex64}
RAW = {"bias", "scalar", "empty", "double"}
# Each output in bfloat16 is rounded once, as in test_identity.
TOLERANCES = {
    "double": TOLERANCE[torch.float64],
    "half": STEPS / 4 * torch.finfo(torch.bfloat16).eps / 2,
}


def _values(rank: int, i: object) -> Tensors:
    """The gradients of a rank at a step, some of them with gaps or another order in memory."""
    found = {name: gradient(shape, name, rank, i) for name, shape in SHAPES.items()}
    found["conv"] = found["conv"].to(memory_format=torch.channels_last)
    found["transposed"] = found["transposed"].t().contiguous().t()
    found["gaps"] = torch.stack([found["gaps"]] * 2, 2)[:, :, 0]
    imaginary = gradient(SHAPES["complex"], "imaginary", rank, i)
    found["complex"] = torch.complex(found["complex"], imaginary)
    return {name: value.to(DTYPES.get(name, value.dtype)) for name, value in found.items()}


def _reals(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    return {name: as_reals(tensor.clone()).double() for name, tensor in tensors.items()}


def _means(i: object) -> Tensors:
    by_rank = [_reals(_values(rank, i)) for rank in range(dist.get_world_size())]
    return {name: torch.stack([v[name] for v in by_rank]).mean(0) for name in SHAPES}


def _attach(**fields: Any) -> tp.Compression:
    torch_powersgd.attachment.BUCKET_BYTES = BUCKET_BYTES[dist.get_world_size()]
    return tp.attach(_values(0, "attach"), dataclasses.replace(OPTIONS, **fields))


def _step(compression: tp.Compression, rank: int, i: object) -> Tensors:
    compression.all_reduce(tensors := _values(rank, i)).wait()
    return tensors


with_any_buckets = pytest.mark.parametrize("world_size", BUCKET_BYTES)


@with_any_buckets
@on_ranks()
def test_nothing_is_lost(rank: int, world_size: int) -> None:
    for wire in WIRES:
        compression, ledger = _attach(wire_dtype=wire), Ledger()
        for i in range(STEPS):
            ledger.add(_reals(_step(compression, rank, i)), _means(i))
        ledger.check(compression, **TOLERANCES)
        assert all(ledger.errors()[name] > 0.1 for name in SHAPES.keys() - RAW)
        assert residuals_of(compression).keys() == SHAPES.keys() - RAW
        stats = compression.stats()
        assert stats["steps"] == STEPS
        assert stats["compressed_ratio"] > 1.5


@with_any_buckets
@on_ranks()
def test_the_memory_of_a_tensor_does_not_matter(rank: int, world_size: int) -> None:
    one, other = _attach(), _attach()
    for i in range(3):
        outputs = _step(one, rank, i)
        tensors = {name: value.contiguous() for name, value in _values(rank, i).items()}
        given = dict(reversed(tensors.items())) if i % 2 else [*tensors.values()]
        other.all_reduce(given).wait()
        assert all(torch.equal(outputs[name], tensors[name]) for name in SHAPES)
    layers = other.stats(per_layer=True)["layers"]
    assert (layers["conv"]["rows"], layers["conv"]["cols"]) == (16, 75)
    assert (layers["transposed"]["rows"], layers["transposed"]["cols"]) == (24, 50)


@with_any_buckets
@on_ranks()
def test_a_work_ends_in_any_way(rank: int, world_size: int) -> None:
    waited, other = _attach(), _attach()
    for i, end in enumerate(("wait", "synchronize", "get_future", "wait")):
        outputs, tensors = _step(waited, rank, i), _values(rank, i)
        work = other.all_reduce(tensors)
        ended = getattr(work, end)()
        if end == "get_future":
            ended.wait()
        for returned in (work.get_future().wait(), work.get_future().wait(), work.result()):
            assert all(a is b for a, b in zip(tensors.values(), returned, strict=True))
            assert all(torch.equal(tensors[name], outputs[name]) for name in SHAPES)
        work.wait()  # again, which changes nothing
        assert all(torch.equal(tensors[name], outputs[name]) for name in SHAPES)
        assert work.is_completed()


@on_ranks(2)
def test_the_tensors_of_attach_are_not_kept(rank: int) -> None:
    tensors = _values(rank, "attach")
    alive = [weakref.ref(tensor) for tensor in tensors.values()]
    compression = tp.attach(tensors, OPTIONS)
    tensors.clear()
    gc.collect()
    assert not any(reference() is not None for reference in alive)
    _step(compression, rank, 0)


@on_ranks(2)
def test_what_does_not_fit_is_refused(rank: int) -> None:
    compression, tensors = _attach(), _values(rank, 0)
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    less = {name: tensor for name, tensor in tensors.items() if name != "tall"}
    wide = tensors["wide"]
    wrong: list[tuple[Any, str]] = [
        (less, "all_reduce takes the tensors that were attached: 'tall' is missing"),
        ({**tensors, "new": wide}, "the tensors that were attached: 'new' was not"),
        ([*less.values()], "all_reduce takes the 11 tensors that were attached, got 10"),
        ({**tensors, "wide": wide.t()}, "'wide' must be Float"),
        ({**tensors, "wide": wide.double()}, "'wide' must be Float"),
        ({**tensors, "wide": wide.to_sparse()}, "'wide' must be Float"),
        ({**tensors, "wide": wide.to("meta")}, "'wide' must be Float"),
        ({**tensors, "wide": None}, "'wide' must be a tensor, got NoneType"),
        ([1.5] * 11, "'wide' must be a tensor, got float"),
    ]
    for given, message in wrong:
        refuses(lambda g=given: compression.all_reduce(g), message)  # type: ignore[misc]
    assert all(torch.equal(tensors[name], before[name]) for name in SHAPES)
    assert compression.stats()["steps"] == 0
    refuses(lambda: compression.comm_hook, "comm_hook is only for a DDP module")
    of_module = tp.attach(ddp := make_ddp({"w": (20, 30)}))
    refuses(lambda: of_module.all_reduce([*ddp.parameters()]), "were attached by name")


@on_ranks(2)
def test_what_has_no_gradients_is_not_attached(rank: int) -> None:
    ones = torch.ones(3, 3)
    wrong: list[tuple[Any, str]] = [
        ({}, "attach needs at least one tensor, got an empty dict"),
        ({5: ones}, "tensor names must be strings, got 5"),
        ({"w": ones.int()}, "'w' must be floating-point or complex, got torch.int32"),
        (
            {"w": ones.to_sparse()},
            "'w' must be a dense tensor, got <Tensor: torch.float32, torch.s",
        ),
        ({"w": [1.0]}, "'w' must be a dense tensor, got [1.0]"),
        ({"w": ones[rank:]}, "rank 0 has 'w' float32 [3, 3] where rank 1 has 'w' float32 [2, 3]"),
        ({f"w{rank}": ones}, "rank 0 has 'w0' float32 [3, 3] where rank 1 has 'w1' float32"),
        ({"w": ones.double() if rank else ones}, "where rank 1 has 'w' float64 [3, 3]"),
        (
            dict.fromkeys("ba" if rank else "ab", ones),
            "in the same order, but rank 0 has 'a' float32",
        ),
        (dict.fromkeys("ab"[: 1 + rank], ones), "rank 0 has nothing where rank 1 has 'b' float32"),
    ]
    for given, message in wrong:
        refuses(lambda g=given: tp.attach(g), message)  # type: ignore[misc]
    scaler = torch.amp.GradScaler("cpu")
    refuses(lambda: tp.attach({"w": ones}, scaler=scaler), "takes a scaler only with a module")


@pytest.mark.parametrize("start", [0, 1])
@on_ranks(3, op_timeout=2)
def test_a_process_that_does_not_call_is_named_by_all_others(rank: int, start: int) -> None:
    """In a step that is compressed, and in an exact one."""
    options = dataclasses.replace(OPTIONS, start_powerSGD_iter=start)
    compression = tp.attach({"weight": torch.zeros(64, 64)}, options)
    store = ranks.side_store()
    if rank == 1:
        store.wait(["0", "2"])
        return
    work = compression.all_reduce([torch.ones(64, 64)])
    named = "^rank 1 has not called all_reduce in step 0: "
    for wait in (work.wait, work.get_future().wait):
        with pytest.raises(RuntimeError, match=named):
            wait()
    store.set(str(rank), "")


# The buckets: how large, and where in memory.

SMALL = {"wide": (11, 67), "bias": (16,), "scalar": (), "empty": (0, 5), "tall": (83, 13)}


def _small(rank: int, i: int) -> Tensors:
    return {name: gradient(shape, name, rank, i) for name, shape in SMALL.items()}


def _in_one_buffer(values: Tensors, order: int, gap: int) -> Tensors:
    """Copies of values, in an order and so far apart, in the middle of a buffer."""
    buffer = torch.zeros(1000 + sum(value.numel() + gap for value in values.values()))
    placed, offset = {}, 501
    for name in [*values][::order]:
        placed[name] = buffer[offset:][: values[name].numel()].view(values[name].shape)
        placed[name].copy_(values[name])
        offset += values[name].numel() + gap
    return {name: placed[name] for name in values}


@pytest.mark.parametrize(("order", "gap"), [(1, 0), (1, 3), (-1, 0)])
@on_ranks(2)
def test_tensors_side_by_side_are_averaged_where_they_are(rank: int, order: int, gap: int) -> None:
    apart, together = (tp.attach(_small(0, 0), OPTIONS) for _ in range(2))
    for i in range(4):
        values = _small(rank, i)
        tensors = _in_one_buffer(values, order, gap)
        with Operators() as operators:
            work = together.all_reduce(tensors)
        work.wait()
        assert ("cat" in operators.names) is ((order, gap) != (1, 0))
        apart.all_reduce(values).wait()
        assert same(tensors.values(), values.values())


@pytest.mark.parametrize(("device", "megabytes"), [("cpu", 25), ("meta", 100)])
def test_buckets_are_larger_on_gpus(device: str, megabytes: int) -> None:
    target = target_of({"w": torch.zeros(3, 3, device=device)})
    assert torch_powersgd.attachment.bucket_bytes(target) == megabytes << 20
