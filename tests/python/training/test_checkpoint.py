# SPDX-License-Identifier: BSD-3-Clause
"""Saving and resuming: no residual is lost, on the same or another number of ranks."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import torch_powersgd as tp
from support import ranks
from support.log_records import LogRecords
from support.synthetic import (
    COMPRESSED,
    SHAPES,
    Array,
    Arrays,
    Ledger,
    Synthetic,
    from_bytes,
    gradients,
    make_compressed,
    mean_gradients,
    own_part,
    relative_error,
    residuals_of,
    step,
    to_bytes,
    to_numpy,
)

# Two exact steps come first: a job that resumes must not begin its warm-up again.
OPTIONS = tp.Options.hook_defaults(start_powerSGD_iter=2, matrix_approximation_rank=2)
WEIGHTS = {f"weights.{name}" for name in COMPRESSED}

# The state after loading and at the end; the outputs of each step; the sums of all outputs and of
# all mean gradients.
Job = tuple[bytes, bytes, list[Arrays], tuple[Arrays, Arrays]]


def _job(
    rank: int, world_size: int, steps: range, state: bytes | None, options: tp.Options = OPTIONS
) -> Job:
    """Runs steps of a job, from a saved state or from nothing."""
    ddp, compression = make_compressed(SHAPES, options)
    if state is not None:
        compression.load_state_dict(from_bytes(state))
    loaded = to_bytes(compression.state_dict())
    ledger, outputs = Ledger(), []
    for i in steps:
        outputs.append(step(ddp, gradients(SHAPES, rank, i)))
        ledger.add(outputs[-1], mean_gradients(SHAPES, world_size, i))
    ended = to_bytes(compression.state_dict())
    sums = to_numpy(ledger.outputs), to_numpy(ledger.means)
    return loaded, ended, [to_numpy(output) for output in outputs], sums


def _residuals(state: bytes) -> Arrays:
    return {n: saved["residual"].numpy() for n, saved in from_bytes(state)["parameters"].items()}


def _identity_errors(jobs: list[Job], state: bytes) -> dict[str, float]:
    """The identity's errors over jobs that followed each other and ended in `state`."""
    errors = {}
    residuals = _residuals(state)
    for name in SHAPES:
        outputs = sum(sums[0][name] for _, _, _, sums in jobs)
        means = sum(sums[1][name] for _, _, _, sums in jobs)
        lost = means - outputs - residuals.get(f"weights.{name}", 0)
        errors[name] = float(np.linalg.norm(lost) / np.linalg.norm(means))
    return errors


@pytest.fixture(scope="module")
def first_job() -> list[Job]:
    """The results of two ranks after six steps."""
    return ranks.run(2, _job, 2, range(6), None)


def test_the_state_is_equal_on_all_ranks_and_complete(
    first_job: list[Job],
) -> None:
    states = [from_bytes(ended) for _, ended, _, _ in first_job]
    for state in states:
        assert state["version"] == 1
        assert state["step"] == 6
        assert state["grad_scale"] == 1
        assert state["options"]["matrix_approximation_rank"] == 2
        assert set(state["options"]) == {field.name for field in dataclasses.fields(tp.Options)}
        assert set(state["parameters"]) == WEIGHTS
        for name, saved in state["parameters"].items():
            shape = SHAPES[name.removeprefix("weights.")]
            assert saved["residual"].shape == shape
            assert saved["q"].shape == (2, saved["residual"][0].numel())
            assert saved["residual"].norm() > 1
            for key in ("residual", "q"):
                assert torch.equal(saved[key], states[0]["parameters"][name][key])


@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 4), (4, 2), (2, 1)])
def test_resume_keeps_the_residuals(before: int, after: int) -> None:
    first = ranks.run(before, _job, before, range(6), None)[0]
    for second in ranks.run(after, _job, after, range(6, 11), first[1]):
        loaded, ended, _, _ = second
        saved = _residuals(first[1])
        for name, residual in _residuals(loaded).items():
            error = np.linalg.norm(residual - saved[name]) / np.linalg.norm(saved[name])
            assert error < 1e-6, (name, error)  # the mean of equal values is rounded once
        assert set(_residuals(loaded)) == WEIGHTS
        # As in test_identity, over 11 steps.
        errors = _identity_errors([first, second], ended)
        assert max(errors.values()) < 1e-5, errors
        assert from_bytes(ended)["step"] == 11


@pytest.mark.parametrize(("before", "after"), [(2, 3), (4, 2)])
@pytest.mark.parametrize("wire", ["bfloat16", "float16", "int8", "int4"])
def test_resume_keeps_what_a_wire_has_rounded_off(wire: str, before: int, after: int) -> None:
    options = dataclasses.replace(OPTIONS, wire_dtype=wire)
    first = ranks.run(before, _job, before, range(6), None, options)[0]
    assert set(_residuals(first[1])) == WEIGHTS
    for resumed in (options, OPTIONS):  # on the same wire, and without it
        for second in ranks.run(after, _job, after, range(6, 11), first[1], resumed):
            errors = _identity_errors([first, second], second[1])
            assert max(errors.values()) < 1e-5, errors


def test_resume_goes_on_as_if_there_had_been_no_end(
    first_job: list[Job],
) -> None:
    # The outputs depend on the mean residual, on Q and on the step alone. The tolerance is the
    # reference's, because the residuals are rounded differently.
    for whole, resumed in zip(
        ranks.run(2, _job, 2, range(11), None),
        ranks.run(2, _job, 2, range(6, 11), first_job[0][1]),
        strict=True,
    ):
        for i in range(5):
            for name, output in resumed[2][i].items():
                expected = whole[2][6 + i][name]
                assert np.linalg.norm(output - expected) < 2e-5 * np.linalg.norm(expected), name


@pytest.mark.parametrize("new_rank", [1, 3])
def test_another_rank_takes_over_residual_and_q(
    first_job: list[Job],
    new_rank: int,
) -> None:
    options = tp.Options.hook_defaults(start_powerSGD_iter=2, matrix_approximation_rank=new_rank)
    saved = from_bytes(first_job[0][1])["parameters"]
    for second in ranks.run(2, _job, 2, range(6, 10), first_job[0][1], options):
        loaded = from_bytes(second[0])["parameters"]
        for name, parameter in loaded.items():
            kept = min(2, new_rank)
            assert parameter["q"].shape[0] == new_rank
            assert torch.equal(parameter["q"][:kept], saved[name]["q"][:kept])
            assert (parameter["q"].norm(dim=1) > 0.1).all()  # new rows can be used
            assert relative_error(parameter["residual"], saved[name]["residual"]) < 1e-6
        errors = _identity_errors([first_job[0], second], second[1])
        assert max(errors.values()) < 1e-5, errors


def _load(compression: tp.Compression, data: bytes) -> tuple[Arrays, list[tuple[str, str]]]:
    """The residuals after loading, and the log records of loading."""
    records = LogRecords()
    compression.load_state_dict(from_bytes(data))
    return to_numpy(residuals_of(compression)), records.seen


def _load_without_tall(rank: int, data: bytes) -> tuple[Arrays, list[tuple[str, str]]]:
    shapes = {name: SHAPES[name] for name in SHAPES if name != "tall"}
    _ddp, compression = make_compressed(shapes, OPTIONS)
    return _load(compression, data)


def test_a_parameter_that_is_not_in_the_model_is_dropped_with_a_warning(
    first_job: list[Job],
) -> None:
    for residuals, log in ranks.run(2, _load_without_tall, first_job[0][1]):
        assert set(residuals) == set(COMPRESSED) - {"tall"}
        assert any(level == "WARNING" and "weights.tall" in text for level, text in log), log


def _no_longer_compressed(
    rank: int, data: bytes, scale: float
) -> tuple[dict[str, Any], list[tuple[str, str]], list[Arrays]]:
    """The outputs of two steps after loading, less the mean gradients: the saved residual."""
    # No matrix pays at rank 12.
    options = dataclasses.replace(OPTIONS, matrix_approximation_rank=12)
    ddp, compression = make_compressed(SHAPES, options)
    residuals, log = _load(compression, data)
    compression.grad_scale = scale
    extra = []
    for i in range(2):
        mine = {name: tensor * scale for name, tensor in gradients(SHAPES, rank, i).items()}
        outputs, means = step(ddp, mine), mean_gradients(SHAPES, 2, i)
        extra.append({name: outputs[name].double() / scale - means[name] for name in SHAPES})
    return residuals, log, [to_numpy(tensors) for tensors in extra]


@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_a_residual_that_is_no_longer_compressed_is_added_to_the_next_gradient(
    first_job: list[Job],
    scale: float,
) -> None:
    saved = _residuals(first_job[0][1])
    for residuals, log, (first, second) in ranks.run(
        2, _no_longer_compressed, first_job[0][1], scale
    ):
        assert residuals == {}
        assert any(level == "INFO" and "weights.tall" in text for level, text in log), log
        for name in SHAPES:
            expected = saved.get(f"weights.{name}", 0)
            # The sum is rounded once, in float32, and its elements are below 10.
            assert abs(first[name] - expected).max() < 10 * 2**-23, name
            assert abs(second[name]).max() < 10 * 2**-23, name


def _keep_what_is_not_named(rank: int, data: bytes) -> tuple[bool, float, int]:
    ddp, compression = make_compressed(SHAPES, OPTIONS)
    for i in range(4):
        step(ddp, gradients(SHAPES, rank, i))
    before = residuals_of(compression)
    state = from_bytes(data)
    state["parameters"] = {"weights.tall": state["parameters"]["weights.tall"]}
    compression.load_state_dict(state)
    after = residuals_of(compression)
    saved = state["parameters"]["weights.tall"]["residual"]
    kept = all(torch.equal(before[name], after[name]) for name in ("conv", "wide"))
    return kept, relative_error(after["tall"], saved), compression.state_dict()["step"]


def test_parameters_that_are_not_named_keep_what_they_have(
    first_job: list[Job],
) -> None:
    for kept, error, step_count in ranks.run(2, _keep_what_is_not_named, first_job[0][1]):
        assert kept
        assert error < 1e-6
        assert step_count == 6


def _complex(rank: int) -> None:
    """A complex parameter's state is real, and goes on to the bit."""

    def make() -> tuple[DistributedDataParallel, tp.Compression]:
        values = {"c": torch.zeros(20, 24, dtype=torch.complex64).t()}
        ddp = DistributedDataParallel(Synthetic(values))
        return ddp, tp.attach(ddp, OPTIONS)

    def train(ddp: DistributedDataParallel, i: int) -> torch.Tensor:
        pairs = gradients({"c": (24, 20, 2)}, rank, i)["c"]
        ddp.zero_grad()
        ddp({"c": torch.view_as_complex(pairs)}).backward()
        [weight] = ddp.parameters()
        assert weight.grad is not None
        return weight.grad

    first, compression = make()
    for i in range(3):
        train(first, i)
    states = [from_bytes(to_bytes(compression.state_dict(per_rank))) for per_rank in (False, True)]
    mean = states[0]["parameters"]["weights.c"]
    assert mean["residual"].shape == (24, 20, 2)
    assert mean["q"].shape == (2, 2 * 24)  # The matrix has the order of the memory: 20 x 48.
    expected = train(first, 3)
    for per_rank in (False, True):
        ddp, compression = make()
        compression.load_state_dict(states[per_rank])
        again = own_part(compression.state_dict(per_rank))["parameters"]["weights.c"]
        saved = own_part(states[per_rank])["parameters"]["weights.c"]
        assert again["crc32"] == saved["crc32"]
        output = train(ddp, 3)
        assert torch.equal(output, expected) if per_rank else torch.allclose(output, expected)


def test_complex_parameters_resume() -> None:
    ranks.run(2, _complex)


def _untouched(rank: int, load_fresh: bool) -> tuple[bool, bytes]:
    """A state is a copy. Before the first compressed step it is the state that this step starts
    from.
    """
    ddp, compression = make_compressed(SHAPES, OPTIONS)
    fresh = compression.state_dict()["parameters"]
    assert fresh.keys() == WEIGHTS
    assert not any(saved["residual"].any() for saved in fresh.values())
    assert all(saved["q"].any() for saved in fresh.values())
    if load_fresh:
        compression.load_state_dict(compression.state_dict())
    for i in range(4):
        step(ddp, gradients(SHAPES, rank, i))
    state = compression.state_dict()
    before = to_bytes(state)
    compression.load_state_dict(state)
    for i in range(4, 7):
        step(ddp, gradients(SHAPES, rank, i))
    return before == to_bytes(state), before


def test_a_saved_state_does_not_change_any_more() -> None:
    (kept, one), _ = loaded = ranks.run(2, _untouched, True)
    assert kept
    assert loaded[1][0]
    assert ranks.run(2, _untouched, False)[0][1] == one


def _next_output(
    rank: int, data: bytes | None, last: bool, new_options: tp.Options
) -> tuple[bytes, Array]:
    """Resumes with a weight of this memory format, or begins with it; returns the next output."""
    conv = torch.zeros(16, 5, 3, 3)
    if last:
        conv = conv.to(memory_format=torch.channels_last)
    ddp = DistributedDataParallel(Synthetic({"conv": conv}))
    compression = tp.attach(ddp, new_options)
    shapes = {"conv": conv.shape}
    if data is None:
        for i in range(4):
            step(ddp, gradients(shapes, rank, i))
        data = to_bytes(compression.state_dict())
    else:
        compression.load_state_dict(from_bytes(data))
    return data, to_numpy(step(ddp, gradients(shapes, rank, 9)))["conv"]


@pytest.mark.parametrize("last", [False, True], ids=["from-contiguous", "from-channels-last"])
def test_the_state_does_not_depend_on_the_memory_format(last: bool) -> None:
    # The columns of a channels_last weight are permuted. Residual and Q are saved in the order of
    # the contiguous weight, or the next output would differ. The tolerance is the reference's.
    (data, expected), _ = ranks.run(2, _next_output, None, last, OPTIONS)
    _, output = ranks.run(2, _next_output, data, not last, OPTIONS)[0]
    assert np.linalg.norm(output - expected) < 2e-5 * np.linalg.norm(expected)
