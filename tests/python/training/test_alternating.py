# SPDX-License-Identifier: BSD-3-Clause
"""P and Q in turns, one per step: the properties of the plain mode hold here as well.

test_reference.py compares the outputs with the reference. test_checkpoint_per_rank.py resumes bit
for bit.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import test_loss_scale
import torch

import torch_powersgd as tp
from support import ranks
from support.synthetic import (
    COMPRESSED,
    SHAPES,
    Array,
    Arrays,
    Ledger,
    from_bytes,
    gradients,
    make_attached,
    mean_gradients,
    reduce_in_backward,
    relative_error,
    residuals_of,
    step,
    to_bytes,
    to_numpy,
)

OPTIONS = tp.Options(start_powerSGD_iter=0, matrix_approximation_rank=2, alternating=True)
# As in test_identity: each step rounds M, the factor and the output once.
IDENTITY_TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-13}
STEPS = 12


def identity(
    rank: int,
    world_size: int,
    options: tp.Options,
    dtype: torch.dtype,
    same: bool = False,
    device: str = "cpu",
) -> tuple[dict[str, float], dict[str, float], dict[str, Any]]:
    """Trains and returns the identity's errors with and without the residual, and the statistics.

    Args:
        same: all ranks have the gradients of rank 0.
    """
    ddp = make_attached(SHAPES, options, dtype, device=device)
    ledger = Ledger()
    for i in range(STEPS):
        mine = gradients(SHAPES, 0 if same else rank, i, dtype)
        outputs = step(ddp, {name: tensor.to(device) for name, tensor in mine.items()})
        ledger.add(
            {name: tensor.cpu() for name, tensor in outputs.items()},
            mean_gradients(SHAPES, 1 if same else world_size, i, dtype),
        )
    residuals = {name: residual.cpu() for name, residual in residuals_of(ddp).items()}
    return ledger.errors(residuals), ledger.errors(), tp.stats()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("world_size", "rank"), [(2, 1), (2, 3), (4, 2)])
def test_outputs_and_residual_add_up_at_half_the_bytes(
    world_size: int, rank: int, dtype: torch.dtype
) -> None:
    options = dataclasses.replace(OPTIONS, matrix_approximation_rank=rank)
    # P and Q belong to matrices of 16 x 75, 12 x 41 and 50 x 9. Each step also sends 28 elements of
    # raw segments, three activities and the count.
    factors = rank * (16 + 75 + 12 + 41 + 50 + 9)
    sent = STEPS * (factors / 2 + 16 + 12 + 3 + 1) * dtype.itemsize
    for errors, without, stats in ranks.run(world_size, identity, world_size, options, dtype):
        assert max(errors.values()) < IDENTITY_TOLERANCE[dtype], errors
        assert min(without[name] for name in COMPRESSED) > 0.1, without
        assert stats["bytes_after"] == sent


@pytest.mark.parametrize("wire", [torch.bfloat16, torch.float16], ids=str)
def test_what_the_wire_rounds_off_is_part_of_the_residual(wire: torch.dtype) -> None:
    # As in test_wire, the sum of two equal numbers is exact.
    options = dataclasses.replace(OPTIONS, wire_dtype=wire)
    for errors, _, stats in ranks.run(2, identity, 2, options, torch.float32, True):
        assert stats["skipped_steps"] == 0
        for name in COMPRESSED:
            assert errors[name] < 1e-5, (name, errors)


def _constant_low_rank(rank: int) -> list[float]:
    """The relative error of the sum of the outputs after each step."""
    ddp = make_attached({"w": (24, 36)}, dataclasses.replace(OPTIONS, min_compression_rate=1))
    left, right = torch.linspace(-1, 1, 24), torch.linspace(1, 2, 36)
    same = torch.outer(left, right) + torch.outer(left**2, right**3)
    total, errors = torch.zeros(24, 36, dtype=torch.float64), []
    for i in range(1, 7):
        total += step(ddp, {"w": same})["w"].double()
        errors.append(relative_error(total / i, same))
    return errors


def test_a_constant_gradient_of_low_rank_is_delivered_with_every_second_step() -> None:
    # A step that sends P finds the columns' span, whatever Q is. The next step projects onto that
    # span and sends all of the gradient, with the residual of the first step.
    for errors in ranks.run(2, _constant_low_rank):
        assert max(errors[1::2]) < 1e-5, errors
        assert errors[0] > 0.1


def _many(rank: int, steps: int) -> tuple[Array, int]:
    ddp = make_attached(SHAPES, dataclasses.replace(OPTIONS, check_every=7))
    torch.set_num_threads(1 + rank)
    digest = torch.zeros(sum(torch.Size(shape).numel() for shape in SHAPES.values()))
    for i in range(steps):
        outputs = step(ddp, gradients(SHAPES, rank, i))
        digest = 0.5 * digest + torch.cat([output.flatten() for output in outputs.values()])
    return digest.numpy(), tp.stats()["differences"]


def test_the_ranks_stay_the_same_bit_for_bit() -> None:
    (one, found, *_), (other, *_) = ranks.run(2, _many, 300)
    assert found == 0
    assert np.array_equal(one, other)


def _warm_up(rank: int) -> list[dict[str, float]]:
    ddp = make_attached(SHAPES, dataclasses.replace(OPTIONS, start_powerSGD_iter=3))
    errors = []
    for i in range(5):
        outputs, means = step(ddp, gradients(SHAPES, rank, i)), mean_gradients(SHAPES, 2, i)
        errors.append({name: relative_error(outputs[name], means[name]) for name in SHAPES})
    return errors


def test_warm_up_and_what_is_raw_are_exact() -> None:
    for errors in ranks.run(2, _warm_up):
        for i, by_name in enumerate(errors):
            for name, error in by_name.items():
                assert (error < 1e-6) is (i < 3 or name not in COMPRESSED), (i, name)


def _trajectory(rank: int, bad: dict[int, int]) -> tuple[list[Arrays], list[bool], int]:
    """The outputs of the good steps.

    Args:
        bad: how many steps that are not finite precede each good step.
    """
    ddp = make_attached(SHAPES, OPTIONS)
    good, all_nan = [], []
    for i in range(7):
        for k in range(bad.get(i, 0)):
            mine = gradients(SHAPES, rank, f"bad {k}")
            if rank == 1:
                mine["wide"][3, 5] = float("nan")
            outputs = step(ddp, mine)
            all_nan.append(all(output.isnan().all().item() for output in outputs.values()))
        good.append(to_numpy(step(ddp, gradients(SHAPES, rank, i))))
    return good, all_nan, tp.stats()["skipped_steps"]


@pytest.mark.parametrize("bad", [{0: 2}, {3: 2}, {4: 2}, {2: 2, 5: 4}], ids=str)
def test_steps_that_are_not_finite_leave_no_trace(bad: dict[int, int]) -> None:
    # A skipped step is a turn, so the other factor is sent after it. Two of them restore the turn.
    expected = ranks.run(2, _trajectory, {})
    for (good, all_nan, skipped), (left_out, *_) in zip(
        ranks.run(2, _trajectory, bad), expected, strict=True
    ):
        assert all_nan == [True] * sum(bad.values())
        assert skipped == sum(bad.values())
        for one, other in zip(good, left_out, strict=True):
            for name in one:
                difference = np.linalg.norm(one[name] - other[name])
                assert difference < 2e-5 * np.linalg.norm(other[name]), name


@pytest.mark.parametrize("case", ["none", "one", "first-step", "twice"])
def test_a_scaler_that_skips_loses_nothing_of_the_other_buckets(case: str) -> None:
    options = dataclasses.replace(test_loss_scale.OPTIONS, alternating=True)
    bad = test_loss_scale.BAD[case]
    for errors, scales, _ in ranks.run(2, test_loss_scale.with_scaler, bad, True, "cpu", options):
        assert len(set(scales)) >= 3, "the scale has changed"
        assert max(errors.values()) < test_loss_scale.TOLERANCE, errors


def _in_and_out_of_use(rank: int) -> dict[str, float]:
    """Trains while no rank, one rank or both ranks use "wide"."""
    ddp = make_attached(SHAPES, OPTIONS, find_unused_parameters=True)
    ledger = Ledger()
    for i in range(STEPS):
        users = [r for r in range(2) if (i // (1 + r)) % 2 == 0]
        mine = gradients(SHAPES, rank, i)
        if rank not in users:
            del mine["wide"]
        outputs = step(ddp, mine)
        means = mean_gradients(SHAPES, 2, i)
        means["wide"] = torch.zeros(SHAPES["wide"], dtype=torch.float64)
        for user in users:
            means["wide"] += gradients(SHAPES, user, i)["wide"].double() / 2
        if not users:
            outputs["wide"] = torch.zeros(SHAPES["wide"])
        ledger.add(outputs, means)
    return ledger.errors(residuals_of(ddp))


def test_a_parameter_that_is_not_used_keeps_its_residual() -> None:
    for errors in ranks.run(2, _in_and_out_of_use):
        assert max(errors.values()) < 1e-5, errors


def _job(
    rank: int, world_size: int, steps: range, state: bytes | None, options: tp.Options
) -> tuple[bytes, list[Arrays], tuple[Arrays, Arrays], Arrays]:
    """Trains from a saved state or from nothing; returns the state, the outputs, sums and
    residuals.
    """
    ddp = make_attached(SHAPES, options)
    if state is not None:
        tp.load_state_dict(ddp, from_bytes(state))
    ledger, outputs = Ledger(), []
    for i in steps:
        outputs.append(step(ddp, gradients(SHAPES, rank, i)))
        ledger.add(outputs[-1], mean_gradients(SHAPES, world_size, i))
    residuals = to_numpy(residuals_of(ddp))
    sums = to_numpy(ledger.outputs), to_numpy(ledger.means)
    return to_bytes(tp.state_dict(ddp)), [to_numpy(o) for o in outputs], sums, residuals


@pytest.mark.parametrize("saved", [5, 6])
def test_resume_goes_on_as_if_there_had_been_no_end(saved: int) -> None:
    # One state is saved after a step that sends P, the other after one that sends Q.
    state = ranks.run(2, _job, 2, range(saved), None, OPTIONS)[0][0]
    whole = ranks.run(2, _job, 2, range(saved + 5), None, OPTIONS)[0][1]
    resumed = ranks.run(2, _job, 2, range(saved, saved + 5), state, OPTIONS)[0][1]
    for one, other in zip(resumed, whole[saved:], strict=True):
        for name in SHAPES:
            difference = np.linalg.norm(one[name] - other[name])
            assert difference < 2e-5 * np.linalg.norm(other[name]), name


PLAIN = dataclasses.replace(OPTIONS, alternating=False)
OF_RANK_3 = dataclasses.replace(OPTIONS, matrix_approximation_rank=3)


@pytest.mark.parametrize(
    ("before", "after", "world_sizes"),
    [
        (OPTIONS, OPTIONS, (2, 4)),
        (OPTIONS, OF_RANK_3, (2, 2)),
        (OF_RANK_3, OPTIONS, (2, 2)),
        (OPTIONS, PLAIN, (2, 2)),
        (PLAIN, OPTIONS, (4, 2)),
    ],
    ids=["more-ranks", "rank-2-to-3", "rank-3-to-2", "to-plain", "from-plain"],
)
def test_resume_in_another_form_keeps_the_residuals(
    before: tp.Options, after: tp.Options, world_sizes: tuple[int, int]
) -> None:
    first = ranks.run(world_sizes[0], _job, world_sizes[0], range(5), None, before)[0]
    second = ranks.run(world_sizes[1], _job, world_sizes[1], range(5, 11), first[0], after)[0]
    for name in SHAPES:
        outputs = first[2][0][name] + second[2][0][name] + second[3].get(name, 0)
        means = first[2][1][name] + second[2][1][name]
        assert np.linalg.norm(outputs - means) < 1e-5 * np.linalg.norm(means), name


def _flat(rank: int) -> tuple[float, bool]:
    """A flat tensor is compressed in the plain mode, also with these options."""
    ledger = Ledger()
    for i in range(30):
        quiet = 1e-20 if i >= 8 else 1
        mine = gradients({"flat": (1000,)}, rank, i)["flat"]
        ledger.add(
            {"flat": reduce_in_backward([quiet * mine])[0]},
            {"flat": quiet * 2 * mean_gradients({"flat": (1000,)}, 2, i)["flat"]},
        )
    stats = tp.stats()
    return ledger.errors()["flat"], stats["seconds"]["reduce_q"] > 0


def test_what_has_no_name_is_compressed_in_the_plain_mode() -> None:
    options = dataclasses.replace(OPTIONS, matrix_approximation_rank=4, min_numel=500)
    for error, sends_both in ranks.run(2, _flat, options=options):
        assert sends_both
        assert error < 1e-5
