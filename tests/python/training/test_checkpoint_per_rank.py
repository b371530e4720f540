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
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.nn.parallel import DistributedDataParallel

import torch_powersgd as tp
from support import ranks
from support.synthetic import (
    COMPRESSED,
    SHAPES,
    Arrays,
    from_bytes,
    gradients,
    make_attached,
    step,
    to_bytes,
    to_numpy,
    without_checksums,
)

OPTIONS = tp.Options(start_powerSGD_iter=1, matrix_approximation_rank=2)
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no-feedback": {"use_error_feedback": False},
    "half-residual": {"residual_dtype": torch.bfloat16},
    "cold": {"warm_start": False},
    **{wire: {"wire_dtype": wire} for wire in ("bfloat16", "float16", "int8", "int4")},
    "noise": {"warm_start_noise": 0.5},
}
SAVED, ENDED = 4, 8  # steps

State = dict[str, Any]  # as torch_powersgd.state_dict returns it
Spoil = Callable[[int, list[State]], State]


def _outputs(
    ddp: DistributedDataParallel, rank: int, steps: range, scale: float = 1.0
) -> list[Arrays]:
    result = []
    for i in steps:
        tp.set_grad_scale(scale * 2 ** (i % 3))  # changes the units of the residual
        result.append(to_numpy(step(ddp, gradients(SHAPES, rank, i))))
    return result


def _uninterrupted(
    rank: int, options: tp.Options, ddp_arguments: dict[str, Any]
) -> tuple[bytes, list[Arrays]]:
    """This rank's state at SAVED, and the outputs after it."""
    ddp = make_attached(SHAPES, options, **ddp_arguments)
    _outputs(ddp, rank, range(SAVED))
    state = to_bytes(tp.state_dict(ddp, per_rank=True))
    return state, _outputs(ddp, rank, range(SAVED, ENDED))


def _resumed(
    rank: int, states: list[bytes], options: tp.Options, ddp_arguments: dict[str, Any]
) -> list[Arrays]:
    ddp = make_attached(SHAPES, options, **ddp_arguments)
    tp.load_state_dict(ddp, from_bytes(states[rank]))
    return _outputs(ddp, rank, range(SAVED, ENDED))


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
        for one, other in zip(expected, outputs, strict=True):
            assert one.keys() == other.keys() == SHAPES.keys()
            for name in one:
                np.testing.assert_array_equal(one[name], other[name], err_msg=name)


def test_resumes_bit_for_bit_with_other_buckets() -> None:
    """The state belongs to parameters: it does not matter which bucket holds them."""
    jobs = ranks.run(2, _uninterrupted, OPTIONS, {})
    states = [state for state, _ in jobs]
    resumed = ranks.run(2, _resumed, states, OPTIONS, {"bucket_cap_mb": 1e-4})
    for (_, expected), outputs in zip(jobs, resumed, strict=True):
        for one, other in zip(expected, outputs, strict=True):
            for name in one:
                np.testing.assert_array_equal(one[name], other[name], err_msg=name)


@pytest.fixture(scope="module")
def states() -> list[bytes]:
    return [state for state, _ in ranks.run(2, _uninterrupted, OPTIONS, {})]


def _refused(
    rank: int,
    states: list[bytes],
    spoil: Spoil,
    options: tp.Options = OPTIONS,
) -> tuple[str, bool]:
    """The message of load_state_dict, and whether it left everything unchanged."""
    ddp = make_attached(SHAPES, options)
    _outputs(ddp, rank, range(2))
    before = to_bytes(tp.state_dict(ddp, per_rank=True))
    state = spoil(rank, [without_checksums(from_bytes(state)) for state in states])
    with pytest.raises(ValueError, match="checkpoint|per-rank") as raised:
        tp.load_state_dict(ddp, state)
    return str(raised.value), before == to_bytes(tp.state_dict(ddp, per_rank=True))


def _own(rank: int, states: list[State]) -> State:
    return states[rank]


def _swapped(rank: int, states: list[State]) -> State:
    return states[(rank + 1) % 2]


def _one_swapped(rank: int, states: list[State]) -> State:
    return states[0]


def _one_older(rank: int, states: list[State]) -> State:
    states[rank]["step"] -= rank
    return states[rank]


def _one_shape(rank: int, states: list[State]) -> State:
    if rank == 1:
        first = next(iter(states[1]["parameters"].values()))
        first["p_hat"] = first["p_hat"][:-1]
    return states[rank]


def _one_missing(rank: int, states: list[State]) -> State:
    if rank == 0:
        del next(iter(states[0]["parameters"].values()))["memory"]
    return states[rank]


def _sent_p(rank: int, states: list[State], sent_p: bool = True) -> State:
    """The state as the option ``alternating`` saved it, after a step that sent P or Q."""
    for saved in states[rank]["parameters"].values():
        saved |= {"p_local": saved["p_hat"].clone(), "sent_p": sent_p}
    return states[rank]


def _renamed(rank: int, states: list[State]) -> State:
    parameters = states[rank]["parameters"]
    parameters["weights.other"] = parameters.pop("weights.conv")
    return states[rank]


@pytest.mark.parametrize(
    ("spoil", "parts"),
    [
        (_swapped, ["rank", "this rank's own"]),
        (_one_swapped, ["this rank's own, 1, got 0"]),
        (_one_older, ["step 4", "3 on rank 1"]),
        (_one_shape, ["weights.", "saved with other options"]),
        (_one_missing, ["must have", "memory"]),
        (_renamed, ["'weights.other' is not in the model"]),
        (_sent_p, ["sent_p", "'weights.", "must be False, got True"]),
    ],
    ids=["swapped", "one-swapped", "one-older", "one-shape", "one-missing", "renamed", "sent-p"],
)
def test_a_state_that_is_not_this_ranks_is_refused_everywhere(
    states: list[bytes], spoil: Spoil, parts: list[str]
) -> None:
    for message, unchanged in ranks.run(2, _refused, states, spoil):
        assert unchanged
        for part in parts:
            assert part in message, message


def test_another_number_of_ranks_or_rank_of_the_factors_is_refused(states: list[bytes]) -> None:
    three = [*states, states[0]]
    for message, unchanged in ranks.run(3, _refused, three, _own):
        assert unchanged
        assert "world_size" in message
        assert "any number of ranks" in message
    higher = dataclasses.replace(OPTIONS, matrix_approximation_rank=3)
    for message, unchanged in ranks.run(2, _refused, states, _own, higher):
        assert unchanged
        assert "saved with other options" in message


def _loaded(rank: int, states: list[bytes]) -> bool:
    ddp = make_attached(SHAPES, OPTIONS)
    earlier = [without_checksums(from_bytes(state)) for state in states]
    tp.load_state_dict(ddp, _sent_p(rank, earlier, sent_p=False))
    return to_bytes(tp.state_dict(ddp, per_rank=True)) == states[rank]


def test_a_state_that_alternating_saved_after_it_sent_q_is_loaded(states: list[bytes]) -> None:
    assert all(ranks.run(2, _loaded, states))


# torch.distributed.checkpoint.


def _saves(rank: int, folder: Path, per_rank: bool) -> tuple[bytes, list[Arrays]]:
    ddp = make_attached(SHAPES, OPTIONS)
    _outputs(ddp, rank, range(SAVED))
    state = tp.CompressionState(ddp, per_rank)
    key = f"powersgd.{rank}" if per_rank else "powersgd"
    dcp.save({key: state}, checkpoint_id=folder)
    return to_bytes(state.state_dict()), _outputs(ddp, rank, range(SAVED, ENDED))


def _loads(rank: int, folder: Path, per_rank: bool) -> tuple[bytes, list[Arrays]]:
    ddp = make_attached(SHAPES, OPTIONS)
    key = f"powersgd.{rank}" if per_rank else "powersgd"
    state = tp.CompressionState(ddp, per_rank)
    dcp.load({key: state}, checkpoint_id=folder)
    loaded = to_bytes(state.state_dict())
    dist.barrier()
    return loaded, _outputs(ddp, rank, range(SAVED, ENDED))


def _assert_same_state(one: bytes, other: bytes) -> None:
    state, loaded = from_bytes(one), from_bytes(other)
    assert state["step"] == loaded["step"] == SAVED
    assert len(state["parameters"]) == len(COMPRESSED)
    for name, tensors in state["parameters"].items():
        for field, value in tensors.items():
            if torch.is_tensor(value):
                torch.testing.assert_close(loaded["parameters"][name][field], value)


def test_distributed_checkpoint_of_the_mean(tmp_path: Path) -> None:
    saved = ranks.run(2, _saves, str(tmp_path), False)
    for world_size in (2, 3):
        for loaded, _ in ranks.run(world_size, _loads, str(tmp_path), False):
            _assert_same_state(saved[0][0], loaded)


def test_distributed_checkpoint_of_each_rank(tmp_path: Path) -> None:
    saved = ranks.run(2, _saves, str(tmp_path), True)
    for (state, expected), (loaded, outputs) in zip(
        saved, ranks.run(2, _loads, str(tmp_path), True), strict=True
    ):
        _assert_same_state(state, loaded)
        for one, other in zip(expected, outputs, strict=True):
            for name in one:
                np.testing.assert_array_equal(one[name], other[name], err_msg=name)
