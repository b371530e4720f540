# SPDX-License-Identifier: BSD-3-Clause
"""A checkpoint that is damaged on one rank is an error on every rank and changes nothing."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import torch_powersgd as tp
from support.on_ranks import all_agree, on_ranks
from support.synthetic import (
    SHAPES,
    from_bytes,
    make_compressed,
    to_bytes,
    train,
    weights_of,
)

OPTIONS = tp.Options.hook_defaults(
    start_powerSGD_iter=1, matrix_approximation_rank=2, wire_dtype="int8"
)
RANDOM_FLIPS = 24
COUNTS = ("steps", "skipped_steps", "compressed_calls", "exact_calls", "bytes_before")


def _flip(data: bytes, place: int, bit: int) -> bytes:
    flipped = bytearray(data)
    flipped[place] ^= 1 << bit
    return bytes(flipped)


# The damaged file, and a part of the error's message.
FILES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda data: b"", ""),
    "cut off at the start": (lambda data: data[:100], ""),
    "cut off in the middle": (lambda data: data[: len(data) // 2], ""),
    "cut off at the end": (lambda data: data[:-1], ""),
    "text": (lambda data: b"a file of another kind\n" * 50, ""),
    "of another program": (
        lambda data: to_bytes({"version": 1, "epoch": 3}),
        "the checkpoint must be a dict with 'step'",
    ),
    "a list": (lambda data: to_bytes([1, 2]), "must be a dict, got list"),
}


class Trained:
    """A model after some steps, and an older state of it, in a file."""

    def __init__(self, rank: int, per_rank: bool, folder: Path) -> None:
        self.rank, self.file = rank, folder / f"{rank}"
        self.ddp, self.compression = make_compressed(SHAPES, OPTIONS)
        train(self.ddp, range(4))
        self.saved = to_bytes(self.compression.state_dict(per_rank=per_rank))
        train(self.ddp, range(4, 6))

    def load(self, data: bytes | None) -> str:
        """Loads a file as docs/training.md says. Returns the message of the error, if any."""
        self.file.unlink(missing_ok=True)
        if data is not None:
            self.file.write_bytes(data)
        try:
            state = torch.load(self.file)
        except Exception:
            state = None
        message = ""
        try:
            self.compression.load_state_dict(state)
        except ValueError as error:
            message = str(error)
        assert all_agree(message)
        return message

    def load_damaged(self, data: bytes | None) -> str:
        """Loads a file that is damaged on rank 1 alone, and asserts that nothing has changed."""
        before = self.everything()
        message = self.load(data if self.rank == 1 else self.saved)
        assert self.everything() == before, message
        assert message.startswith("rank 1: "), message
        return message

    def everything(self) -> tuple[bytes, list[float], bytes]:
        """The residuals and factors, the counts, and the parameters of this rank."""
        stats = self.compression.stats()
        weights = {name: weight.detach() for name, weight in weights_of(self.ddp).items()}
        own = to_bytes(self.compression.state_dict(per_rank=True))
        return own, [stats[name] for name in COUNTS], to_bytes(weights)


@pytest.mark.parametrize("per_rank", [False, True], ids=["mean", "per-rank"])
@on_ranks(2)
def test_a_damaged_file_of_one_rank_is_an_error_on_all(
    rank: int, per_rank: bool, tmp_path: Path
) -> None:
    trained = Trained(rank, per_rank, tmp_path)
    for damage, part in FILES.values():
        assert part in trained.load_damaged(damage(trained.saved))
    trained.load_damaged(None)
    assert trained.load(trained.saved) == ""
    assert to_bytes(trained.compression.state_dict(per_rank=per_rank)) == trained.saved
    train(trained.ddp, [9])


@on_ranks(2)
def test_a_bit_that_is_flipped_anywhere_is_noticed_or_makes_no_difference(
    rank: int, tmp_path: Path
) -> None:
    """Flips bits of rank 1's file by chance."""
    trained = Trained(rank, True, tmp_path)
    now = to_bytes(trained.compression.state_dict(per_rank=True))
    chance, noticed = random.Random(5), 0
    for _ in range(RANDOM_FLIPS):
        flipped = _flip(trained.saved, chance.randrange(len(trained.saved)), chance.randrange(8))
        message = trained.load(flipped if rank == 1 else trained.saved)
        state = to_bytes(trained.compression.state_dict(per_rank=True))
        assert state == (now if message else trained.saved), message
        noticed += "crc32" in message
        trained.compression.load_state_dict(from_bytes(now))
    # Most of the file are tensors, whose flips only the checksums notice.
    assert noticed > RANDOM_FLIPS / 4
