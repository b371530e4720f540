# SPDX-License-Identifier: BSD-3-Clause
"""The measurements of advise: steps of DDP in turns, and the agreement of all processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import torch_powersgd as tp
from support import ranks
from support.groups import backend_of_world
from torch_powersgd.cli import processes, rehearsal
from torch_powersgd.cli.stand_in import StandIn

CPU = torch.device("cpu")
ROUNDS, STEPS = 2, 3  # of a setting, and of a setting in a round


def _settings(*matrix_ranks: int) -> list[tp.Options]:
    fields: dict[str, Any] = {"wire_dtype": None, "start_powerSGD_iter": 0}
    return [tp.Options(matrix_approximation_rank=rank, **fields) for rank in matrix_ranks]


class _Model(torch.nn.Module):
    """Two layers, and a small one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(300, 200), torch.nn.Linear(200, 300))
        self.unused = torch.nn.Linear(3, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.layers(inputs)
        return outputs


def _step(model: torch.nn.Module) -> None:
    assert isinstance(model, DistributedDataParallel)
    model(torch.randn(8, 300)).square().mean().backward()


def _measure(job: rehearsal.Job, **arguments: Any) -> list[rehearsal.Measured]:
    """A short measurement: its times do not matter here."""
    rehearsal.ROUNDS, rehearsal.BLOCK_STEPS = (ROUNDS, ROUNDS), (STEPS, STEPS)
    measured = rehearsal.settings_of(job, CPU)
    rehearsal.measure(rehearsal.Rehearsal(job, CPU), measured, 0.0, **arguments)
    return measured


def _measured(rank: int) -> tuple[list[rehearsal.Measured], list[tuple[int, int]], dict[str, Any]]:
    reports: list[tuple[int, int]] = []
    job = rehearsal.Job(_Model(), _step, _settings(1, 4))
    measured = _measure(job, report=lambda done, parts: reports.append((done, parts)))
    return measured, reports, backend_of_world().stats()


def test_every_setting_is_measured_in_every_round() -> None:
    results = ranks.run(2, _measured)
    for measured, reports, stats in results:
        assert [each.name for each in measured] == [
            "no averaging",
            "plain gloo",
            "matrix rank 1, float32",
            "matrix rank 4, float32",
        ]
        raw_and_counts = 508 + 2 + 1
        factors = [4 * (rank * 2 * 500 + raw_and_counts) for rank in (1, 4)]
        assert [each.sent_bytes for each in measured] == [0, 4 * 120_508, *factors]
        for each in measured:
            assert [len(seconds) for seconds in each.rounds] == [STEPS] * ROUNDS
            assert min(each.seconds) > 0
        assert reports == [(i + 1, 4 * ROUNDS) for i in range(4 * ROUNDS)]
        # A step more would come from a wrapper that is still at work.
        assert stats["steps"] == 2 * ROUNDS * (rehearsal.WARM_UP_STEPS + STEPS)
        assert stats["exact_calls"] == stats["skipped_steps"] == 0
    assert results[0][0] == results[1][0], "alike on all processes"


def _job_of_layers(width: int) -> rehearsal.Job:
    layers = [torch.nn.Linear(width, width, bias=False) for _ in range(8)]

    def step(model: torch.nn.Module) -> None:
        model(torch.randn(2, width)).square().mean().backward()

    return rehearsal.Job(torch.nn.Sequential(*layers), step, _settings(1))


def _sizes_of(job: rehearsal.Job) -> list[rehearsal.Measured]:
    return rehearsal.bucket_sizes(job, rehearsal.settings_of(job, CPU)[-1])


@pytest.mark.parametrize(
    ("width", "caps"),
    [
        (100, [None]),  # 40 kB a layer: one bucket in any case
        (300, [None, 5]),  # 360 kB: DDP's first bucket has 1 MB, so there are two, or else one
        (700, [None, 5, 100]),  # 2 MB: two, three, one
    ],
)
def test_only_sizes_that_make_other_numbers_of_buckets_are_measured(
    width: int, caps: list[int | None]
) -> None:
    sizes = _sizes_of(_job_of_layers(width))
    assert [size.bucket_cap_mb for size in sizes] == caps
    names = ["matrix rank 1, float32"]
    names += [f"matrix rank 1, float32, buckets of {cap} MB" for cap in caps[1:]]
    assert [size.name for size in sizes] == names


def _buckets_of(rank: int) -> tuple[int, int]:
    """The compressed buckets of three rounds of a step in buckets of 5 MB, and the rounds."""
    job = _job_of_layers(700)
    rehearsal.ROUNDS, rehearsal.BLOCK_STEPS = (3, 3), (1, 1)
    small = _sizes_of(job)[1]
    rehearsal.measure(
        rehearsal.Rehearsal(job, CPU), [small], 0.0, open_question=lambda: len(small.rounds) < 2
    )
    return int(backend_of_world().stats()["compressed_calls"]), len(small.rounds)


def test_buckets_have_the_size_that_is_measured_until_no_question_is_open() -> None:
    # In the first pass DDP has one bucket. Then it fills each up to the size: layers of 2 MB.
    assert ranks.run(2, _buckets_of) == [(2 * (1 + 3 * rehearsal.WARM_UP_STEPS), 2)] * 2


def _delay(rank: int) -> float:
    return rehearsal.Rehearsal(_job_of_layers(10), CPU).delay()


@pytest.mark.parametrize("world", [2, 4])
def test_all_processes_know_the_delay(world: int) -> None:
    delays = ranks.run(world, _delay)
    assert delays[0] > 0
    assert delays == delays[:1] * world


def _fails(rank: int, step: Any) -> str:
    job = rehearsal.Job(_Model(), step if rank == 1 else _step, _settings(4))
    with pytest.raises(processes.SharedError) as caught:
        _measure(job)
    return str(caught.value)


def _without_backward(model: torch.nn.Module) -> None:
    model(torch.randn(8, 300))


def _of_another_width(model: torch.nn.Module) -> None:
    model(torch.randn(8, 299))


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (_without_backward, "the step must call backward() on its loss and keep the gradients"),
        (_of_another_width, "RuntimeError: mat1 and mat2 shapes"),
    ],
)
def test_an_error_of_the_first_step_reaches_all_processes(step: Any, message: str) -> None:
    first, second = ranks.run(2, _fails, step)
    assert first == second
    assert first.startswith(f"rank 1: {message}")


def _fails_on_one(rank: int, failing: dict[int, Exception]) -> int | str:
    def make() -> int:
        if rank in failing:
            raise failing[rank]
        return rank

    try:
        return processes.on_every_process(make)
    except processes.SharedError as error:
        return str(error)


def test_an_error_of_one_process_ends_all() -> None:
    results = ranks.run(2, _fails_on_one, {1: ValueError("no such file")})
    assert results == ["rank 1: no such file"] * 2
    results = ranks.run(2, _fails_on_one, {0: MemoryError("full")})
    assert results == ["rank 0: MemoryError: full"] * 2
    same = ValueError("no such model")
    assert ranks.run(2, _fails_on_one, {0: same, 1: same}) == [str(same)] * 2
    assert ranks.run(2, _fails_on_one, {}) == [0, 1]


def _unlike_models(rank: int) -> None:
    job = rehearsal.Job(torch.nn.Linear(2, 2 + rank), _step, [])
    with pytest.raises(processes.SharedError, match="must be the same on all ranks"):
        processes.on_every_process(lambda: job, rehearsal.Job.outline)


def test_processes_with_unlike_models_are_named() -> None:
    ranks.run(2, _unlike_models)


def test_a_stand_in_gives_every_parameter_a_gradient_after_its_products(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(StandIn, "_calibrate", lambda self: 0.001)  # seconds of a product
    model = _Model().layers
    model[0].bias.requires_grad_(False)
    stand_in = StandIn(model, 0.02, CPU)
    multiplied: list[int] = []
    monkeypatch.setattr(stand_in, "_multiply", multiplied.append)
    stand_in().backward()
    assert [p.grad is None for p in model.parameters()] == [False, True, False, False]
    # Each weight has half of the elements, and the bias next to none.
    assert multiplied == [0, 10, 10]
