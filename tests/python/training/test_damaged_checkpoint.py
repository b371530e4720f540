# SPDX-License-Identifier: BSD-3-Clause
"""A checkpoint that is damaged on one rank is an error on every rank and changes nothing."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import torch_powersgd as tp
from support import ranks
from support.synthetic import (
    SHAPES,
    from_bytes,
    gradients,
    make_compressed,
    own_part,
    step,
    to_bytes,
    weights_of,
)

OPTIONS = tp.Options.hook_defaults(
    start_powerSGD_iter=1, matrix_approximation_rank=2, wire_dtype="int8"
)
RANDOM_FLIPS = 24
COUNTS = ("steps", "skipped_steps", "compressed_calls", "exact_calls", "bytes_before")

State = dict[str, Any]
Damage = Callable[[bytes], bytes]


def _flip(data: bytes, place: int, bit: int) -> bytes:
    flipped = bytearray(data)
    flipped[place] ^= 1 << bit
    return bytes(flipped)


def _flip_in(field: str) -> Damage:
    """Flips the highest bit of the mantissa of an element, which torch.load does not notice."""

    def flip(data: bytes) -> bytes:
        entry = own_part(from_bytes(data))["parameters"]["weights.tall"]
        tensor = entry[field].contiguous()
        place = data.index(tensor.numpy().tobytes()) + 4 * (tensor.numel() // 2)
        flipped = _flip(data, place + 2, 6)
        changed = own_part(from_bytes(flipped))["parameters"]["weights.tall"][field]
        assert changed.isfinite().all()
        assert not torch.equal(changed, tensor)
        return flipped

    return flip


def _foreign(data: bytes) -> bytes:
    return to_bytes({"version": 1, "epoch": 3})


FILES: dict[str, Damage] = {
    "empty": lambda data: b"",
    "cut off at the start": lambda data: data[:100],
    "cut off in the middle": lambda data: data[: len(data) // 2],
    "cut off at the end": lambda data: data[:-1],
    "text": lambda data: b"a file of another kind\n" * 50,
    "of another program": _foreign,
    "a list": lambda data: to_bytes([1, 2]),
}
TENSORS = {False: ("residual", "q"), True: ("memory", "p_hat", "q_local", "q_warm")}


def _load(compression: tp.Compression, file: Path) -> str:
    """Loads a file as docs/training.md says. Returns the error's message."""
    try:
        state = torch.load(file)
    except Exception:
        state = None
    try:
        compression.load_state_dict(state)
    except ValueError as error:
        return str(error)
    return ""


def _everything(
    ddp: DistributedDataParallel, compression: tp.Compression
) -> tuple[bytes, dict[str, float], bytes]:
    """The residuals and factors, the counts, and the parameters of this rank."""
    stats = compression.stats()
    counts = {name: stats[name] for name in COUNTS}
    weights = {name: weight.detach() for name, weight in weights_of(ddp).items()}
    return to_bytes(compression.state_dict(per_rank=True)), counts, to_bytes(weights)


def _trained(rank: int, per_rank: bool) -> tuple[DistributedDataParallel, tp.Compression, bytes]:
    """A model after some steps, and an older state of it."""
    ddp, compression = make_compressed(SHAPES, OPTIONS)
    for i in range(4):
        step(ddp, gradients(SHAPES, rank, i))
    saved = to_bytes(compression.state_dict(per_rank=per_rank))
    for i in range(4, 6):
        step(ddp, gradients(SHAPES, rank, i))
    return ddp, compression, saved


def _damaged(rank: int, folder: Path, per_rank: bool) -> dict[str, tuple[str, bool]]:
    """The message of each damage to rank 1's file, and whether nothing has changed."""
    ddp, compression, saved = _trained(rank, per_rank)
    before = _everything(ddp, compression)
    damages = {**FILES, **{field: _flip_in(field) for field in TENSORS[per_rank]}}
    found = {}
    for name, damage in damages.items():
        file = folder / f"{name} {rank}"
        file.write_bytes(damage(saved) if rank == 1 else saved)
        message = _load(compression, file)
        found[name] = message, _everything(ddp, compression) == before
    found["missing"] = _load(compression, folder / f"{0 if rank else name} {rank}"), True
    assert _load(compression, _written(folder / f"whole {rank}", saved)) == ""
    assert to_bytes(compression.state_dict(per_rank=per_rank)) == saved
    step(ddp, gradients(SHAPES, rank, 9))
    return found


def _written(file: Path, data: bytes) -> Path:
    file.write_bytes(data)
    return file


@pytest.mark.parametrize("per_rank", [False, True], ids=["mean", "per-rank"])
def test_a_damaged_file_of_one_rank_is_an_error_on_all(tmp_path: Path, per_rank: bool) -> None:
    first, second = ranks.run(2, _damaged, tmp_path, per_rank)
    assert first == second
    assert set(first) == {*FILES, *TENSORS[per_rank], "missing"}
    for name, (message, unchanged) in first.items():
        assert message.startswith("rank 1: "), (name, message)
        assert unchanged, name
    for field in TENSORS[per_rank]:
        assert "'weights.tall' does not match its crc32" in first[field][0]
    assert "must be a dict, got list" in first["a list"][0]
    assert "the checkpoint has no " in first["of another program"][0]


def _flipped_anywhere(rank: int, folder: Path) -> list[tuple[int, str, bool]]:
    """Flips bits of rank 1's file by chance. A flip is noticed, or makes no difference."""
    ddp, compression, saved = _trained(rank, per_rank=True)
    now = to_bytes(compression.state_dict(per_rank=True))
    chance, found = random.Random(5), []
    for _ in range(RANDOM_FLIPS):
        place, bit = chance.randrange(len(saved)), chance.randrange(8)
        data = _flip(saved, place, bit) if rank == 1 else saved
        message = _load(compression, _written(folder / f"flipped {rank}", data))
        state = to_bytes(compression.state_dict(per_rank=True))
        found.append((place, message, state == (now if message else saved)))
        if not message:
            compression.load_state_dict(from_bytes(now))
    return found


def test_a_bit_that_is_flipped_anywhere_is_noticed_or_makes_no_difference(tmp_path: Path) -> None:
    first, second = ranks.run(2, _flipped_anywhere, tmp_path)
    assert [message for _, message, _ in first] == [message for _, message, _ in second]
    assert all(right for _, _, right in (*first, *second)), (first, second)
    # Most of the file are tensors, whose flips only the checksums notice.
    assert sum("crc32" in message for _, message, _ in first) > RANDOM_FLIPS / 4


def _spoiled(rank: int) -> list[tuple[str, bool]]:
    ddp, compression, saved = _trained(rank, per_rank=True)
    before = _everything(ddp, compression)
    found = []
    for spoil in SPOILS:
        state = from_bytes(saved)
        spoil(own_part(state))
        with pytest.raises(ValueError, match="crc32") as raised:
            compression.load_state_dict(state)
        found.append((str(raised.value), _everything(ddp, compression) == before))
    return found


def _step(state: State) -> None:
    state["step"] += 1


def _renamed(state: State) -> None:
    state["parameters"]["weights.tale"] = state["parameters"].pop("weights.tall")


def _scale(state: State) -> None:
    state["parameters"]["weights.tall"]["grad_scale"] = 2.0


SPOILS = {_step: "the checkpoint does", _renamed: "'weights.tale' does", _scale: "tall' does"}


def test_the_checksums_cover_numbers_and_names() -> None:
    for found in ranks.run(2, _spoiled):
        for (message, unchanged), part in zip(found, SPOILS.values(), strict=True):
            assert f"{part} not match its crc32" in message
            assert unchanged
