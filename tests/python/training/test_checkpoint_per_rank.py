# SPDX-License-Identifier: BSD-3-Clause
"""Each rank's own state, which resumes bit for bit, and torch.distributed.checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.stateful import Stateful
from torch.nn.parallel import DistributedDataParallel

import torch_powersgd as tp
from support import ranks
from support.synthetic import (
    COMPRESSED,
    SHAPES,
    Arrays,
    from_bytes,
    gradients,
    make_compressed,
    own_part,
    step,
    to_bytes,
    to_numpy,
    without_checksums,
)

OPTIONS = tp.Options.hook_defaults(start_powerSGD_iter=1, matrix_approximation_rank=2)
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no-feedback": {"use_error_feedback": False},
    "half-residual": {"residual_dtype": torch.bfloat16},
    "cold": {"warm_start": False},
    **{wire: {"wire_dtype": wire} for wire in ("bfloat16", "float16", "int8", "int4")},
    "noise": {"warm_start_noise": 0.5},
}
SAVED, ENDED = 4, 8  # steps

State = dict[str, Any]
Spoil = Callable[[int, list[State]], State]


def _train(
    rank: int, ddp: DistributedDataParallel, compression: tp.Compression, steps: range
) -> list[Arrays]:
    outputs = []
    for i in steps:
        compression.grad_scale = 2 ** (i % 3)  # changes the units of the residual
        outputs.append(to_numpy(step(ddp, gradients(SHAPES, rank, i))))
    return outputs


def _uninterrupted(
    rank: int, options: tp.Options, ddp_arguments: dict[str, Any]
) -> tuple[bytes, list[Arrays]]:
    """This rank's state at SAVED, and the outputs after it."""
    ddp, compression = make_compressed(SHAPES, options, **ddp_arguments)
    _train(rank, ddp, compression, range(SAVED))
    state = to_bytes(compression.state_dict(per_rank=True))
    return state, _train(rank, ddp, compression, range(SAVED, ENDED))


def _resumed(
    rank: int, states: list[bytes], options: tp.Options, ddp_arguments: dict[str, Any]
) -> list[Arrays]:
    ddp, compression = make_compressed(SHAPES, options, **ddp_arguments)
    compression.load_state_dict(from_bytes(states[rank]))
    return _train(rank, ddp, compression, range(SAVED, ENDED))


def _assert_same(expected: list[Arrays], outputs: list[Arrays]) -> None:
    for one, other in zip(expected, outputs, strict=True):
        assert one.keys() == other.keys() == SHAPES.keys()
        for name in one:
            np.testing.assert_array_equal(one[name], other[name], err_msg=name)


@pytest.mark.parametrize(
    ("variant", "world_size"), [*((variant, 2) for variant in VARIANTS), ("plain", 3)]
)
def test_resumes_bit_for_bit(variant: str, world_size: int) -> None:
    options = dataclasses.replace(OPTIONS, **VARIANTS[variant])
    # DDP rebuilds its buckets in another order after the first step. The sum of three ranks depends
    # on the place of its elements in a buffer, compressed or not. The sum of two ranks does not.
    fixed_buckets = {"find_unused_parameters": world_size > 2}
    jobs = ranks.run(world_size, _uninterrupted, options, fixed_buckets)
    states = [state for state, _ in jobs]
    if variant == "plain":
        assert states[0] != states[1], "each rank's own"
    resumed = ranks.run(world_size, _resumed, states, options, fixed_buckets)
    for (_, expected), outputs in zip(jobs, resumed, strict=True):
        _assert_same(expected, outputs)


def test_resumes_bit_for_bit_with_other_buckets() -> None:
    """The state belongs to parameters: it does not matter which bucket holds them."""
    jobs = ranks.run(2, _uninterrupted, OPTIONS, {})
    states = [state for state, _ in jobs]
    resumed = ranks.run(2, _resumed, states, OPTIONS, {"bucket_cap_mb": 1e-4})
    for (_, expected), outputs in zip(jobs, resumed, strict=True):
        _assert_same(expected, outputs)


@pytest.fixture(scope="module")
def states() -> list[bytes]:
    return [state for state, _ in ranks.run(2, _uninterrupted, OPTIONS, {})]


def _refused(
    rank: int, states: list[bytes], spoil: Spoil, options: tp.Options = OPTIONS
) -> tuple[str, bool]:
    """The message of load_state_dict, and whether it left everything unchanged."""
    ddp, compression = make_compressed(SHAPES, options)
    _train(rank, ddp, compression, range(2))
    before = to_bytes(compression.state_dict(per_rank=True))
    state = spoil(rank, [without_checksums(from_bytes(state)) for state in states])
    with pytest.raises(ValueError, match="checkpoint|per-rank") as raised:
        compression.load_state_dict(state)
    return str(raised.value), before == to_bytes(compression.state_dict(per_rank=True))


def _own(rank: int, states: list[State]) -> State:
    return states[rank]


def _first(rank: int, states: list[State]) -> State:
    return states[0]


def _one_older(rank: int, states: list[State]) -> State:
    own_part(states[rank])["step"] -= rank
    return states[rank]


def _one_shape(rank: int, states: list[State]) -> State:
    if rank == 1:
        first = next(iter(own_part(states[1])["parameters"].values()))
        first["p_hat"] = first["p_hat"][:-1]
    return states[rank]


def _one_missing(rank: int, states: list[State]) -> State:
    if rank == 0:
        del next(iter(own_part(states[0])["parameters"].values()))["memory"]
    return states[rank]


def _renamed(rank: int, states: list[State]) -> State:
    parameters = own_part(states[rank])["parameters"]
    parameters["weights.other"] = parameters.pop("weights.conv")
    return states[rank]


@pytest.mark.parametrize(
    ("spoil", "parts"),
    [
        (_first, ["rank 1: ", "must have the part 'process 1 of 2'", "process 0 of 2"]),
        (_one_older, ["step 4", "3 on rank 1"]),
        (_one_shape, ["weights.", "saved with other options"]),
        (_one_missing, ["must have", "memory"]),
        (_renamed, ["'weights.other' is not in the model"]),
    ],
    ids=["another-process", "one-older", "one-shape", "one-missing", "renamed"],
)
def test_a_state_that_is_not_this_ranks_is_refused_everywhere(
    states: list[bytes], spoil: Spoil, parts: list[str]
) -> None:
    for message, unchanged in ranks.run(2, _refused, states, spoil):
        assert unchanged
        for part in parts:
            assert part in message, message


def test_another_number_of_ranks_or_rank_of_the_factors_is_refused(states: list[bytes]) -> None:
    for message, unchanged in ranks.run(3, _refused, [*states, states[0]], _own):
        assert unchanged
        assert "must have the part 'process 0 of 3'" in message
        assert "without per_rank it can be loaded on any number of processes" in message
    higher = dataclasses.replace(OPTIONS, matrix_approximation_rank=3)
    for message, unchanged in ranks.run(2, _refused, states, _own, higher):
        assert unchanged
        assert "saved with other options" in message


# torch.distributed.checkpoint, to which every process gives its part under the same name.


def _stateful(compression: tp.Compression, per_rank: bool) -> dict[str, Stateful]:
    return {"powersgd": compression.per_rank if per_rank else compression}


def _saves(rank: int, folder: str, per_rank: bool) -> tuple[bytes, list[Arrays]]:
    ddp, compression = make_compressed(SHAPES, OPTIONS)
    _train(rank, ddp, compression, range(SAVED))
    dcp.save(_stateful(compression, per_rank), checkpoint_id=folder)
    state = to_bytes(compression.state_dict(per_rank))
    return state, _train(rank, ddp, compression, range(SAVED, ENDED))


def _loads(rank: int, folder: str, per_rank: bool) -> tuple[bytes, list[Arrays]]:
    ddp, compression = make_compressed(SHAPES, OPTIONS)
    dcp.load(_stateful(compression, per_rank), checkpoint_id=folder)
    state = to_bytes(compression.state_dict(per_rank))
    return state, _train(rank, ddp, compression, range(SAVED, ENDED))


def test_distributed_checkpoint_of_the_mean(tmp_path: Path) -> None:
    saved = from_bytes(ranks.run(2, _saves, str(tmp_path), False)[0][0])
    assert saved["parameters"].keys() == {f"weights.{name}" for name in COMPRESSED}
    for world_size in (2, 3):
        for state, _ in ranks.run(world_size, _loads, str(tmp_path), False):
            loaded = from_bytes(state)
            assert loaded["step"] == SAVED
            for name, entry in saved["parameters"].items():
                for field in ("residual", "q"):
                    torch.testing.assert_close(loaded["parameters"][name][field], entry[field])


def test_distributed_checkpoint_of_each_rank(tmp_path: Path) -> None:
    saved = ranks.run(2, _saves, str(tmp_path), True)
    for (state, expected), (loaded, outputs) in zip(
        saved, ranks.run(2, _loads, str(tmp_path), True), strict=True
    ):
        assert loaded == state
        _assert_same(expected, outputs)
