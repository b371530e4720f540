# SPDX-License-Identifier: BSD-3-Clause
"""Saving and resuming: no residual is lost, on the same or another number of ranks."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import torch_powersgd as tp
from support import ranks
from support.ddp import make_compressed, step, train
from support.ledger import Ledger, residuals_of
from support.log_records import LogRecords
from support.on_ranks import all_agree, on_ranks
from support.states import from_bytes, own_part, to_bytes
from support.synthetic import COMPRESSED, SHAPES, Synthetic, gradients, mean_gradients
from support.tensors import Tensors, relative_error, same

# Two exact steps come first: a job that resumes must not begin its warm-up again.
OPTIONS = tp.Options.hook_defaults(start_powerSGD_iter=2, matrix_approximation_rank=2)
WEIGHTS = {f"weights.{name}" for name in COMPRESSED}
SAVED = 6  # steps
# The reference's, because the residuals are rounded differently.
OUTPUT_TOLERANCE = 2e-5


def save(rank: int, options: tp.Options = OPTIONS, device: str = "cpu") -> tuple[bytes, bytes]:
    """Trains. Returns the state and the ledger."""
    ddp, compression = make_compressed(SHAPES, options, device=device)
    train(ddp, range(SAVED), ledger := Ledger())
    state = compression.state_dict()
    assert all_agree(to_bytes(state))
    assert state["parameters"].keys() == WEIGHTS
    return to_bytes(state), to_bytes((ledger.outputs, ledger.means))


def resume(
    rank: int, saved: tuple[bytes, bytes], options: tp.Options = OPTIONS, device: str = "cpu"
) -> None:
    """Trains on from a saved state, and loses nothing."""
    ddp, compression = make_compressed(SHAPES, options, device=device)
    compression.load_state_dict(from_bytes(saved[0]))
    _assert_loaded(compression, from_bytes(saved[0])["parameters"])
    ledger = Ledger()
    ledger.outputs, ledger.means = from_bytes(saved[1])
    train(ddp, range(SAVED, SAVED + 5), ledger)
    ledger.check(compression)
    assert compression.state_dict()["step"] == SAVED + 5


def _assert_loaded(compression: tp.Compression, saved: dict[str, Tensors]) -> None:
    """The mean of equal residuals is rounded once. Q is cut, or its new rows are random."""
    entries = compression.state_dict()["parameters"]
    assert entries.keys() == WEIGHTS
    for name, entry in entries.items():
        assert relative_error(entry["residual"], saved[name]["residual"]) < 1e-6
        old, q = saved[name]["q"], entry["q"]
        assert len(q) == compression.options.matrix_approximation_rank
        assert torch.equal(q[: len(old)], old[: len(q)])
        assert (q.norm(dim=1) > 0.1).all(), "new rows can be used"


@pytest.fixture(scope="module")
def saved() -> tuple[bytes, bytes]:
    """The state and the ledger of two ranks after some steps."""
    found: tuple[bytes, bytes] = ranks.run(2, save)[0]
    return found


@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 4), (4, 2), (2, 1)])
def test_resume_keeps_the_residuals(before: int, after: int) -> None:
    ranks.run(after, resume, ranks.run(before, save)[0])


@pytest.mark.parametrize(
    ("wire", "before", "after"), [("bfloat16", 2, 3), ("int8", 4, 2), ("int4", 2, 3)]
)
def test_resume_keeps_what_a_wire_has_rounded_off(wire: str, before: int, after: int) -> None:
    options = dataclasses.replace(OPTIONS, wire_dtype=wire)
    found = ranks.run(before, save, options)[0]
    for resumed in (options, OPTIONS):  # on the same wire, and without it
        ranks.run(after, resume, found, resumed)


@pytest.mark.parametrize("new_rank", [1, 3])
def test_another_rank_takes_over_residual_and_q(saved: tuple[bytes, bytes], new_rank: int) -> None:
    options = dataclasses.replace(OPTIONS, matrix_approximation_rank=new_rank)
    ranks.run(2, resume, saved, options)


def test_the_state_is_complete(saved: tuple[bytes, bytes]) -> None:
    state = from_bytes(saved[0])
    assert (state["version"], state["step"], state["grad_scale"]) == (1, SAVED, 1)
    assert state["options"]["matrix_approximation_rank"] == 2
    assert state["options"].keys() == {field.name for field in dataclasses.fields(tp.Options)}
    for name, entry in state["parameters"].items():
        assert entry["residual"].shape == SHAPES[name.removeprefix("weights.")]
        assert entry["q"].shape == (2, entry["residual"][0].numel())
        assert entry["residual"].norm() > 1


@on_ranks(2)
def test_resume_goes_on_as_if_there_had_been_no_end(rank: int, saved: tuple[bytes, bytes]) -> None:
    # The outputs depend on the mean residual, on Q and on the step alone.
    whole, _ = make_compressed(SHAPES, OPTIONS)
    train(whole, range(SAVED))
    resumed, compression = make_compressed(SHAPES, OPTIONS)
    records = LogRecords()
    compression.load_state_dict(from_bytes(saved[0]))
    said = records.matching("loaded the state of step 6, with the residuals of 3 parameters")
    assert len(said) == (rank == 0)
    steps = range(SAVED, SAVED + 5)
    for expected, outputs in zip(train(whole, steps), train(resumed, steps), strict=True):
        for name, output in outputs.items():
            assert relative_error(output, expected[name]) < OUTPUT_TOLERANCE, name


@on_ranks(2)
def test_a_parameter_that_is_not_in_the_model_is_dropped_with_a_warning(
    rank: int, saved: tuple[bytes, bytes]
) -> None:
    shapes = {name: SHAPES[name] for name in SHAPES if name != "tall"}
    _ddp, compression = make_compressed(shapes, OPTIONS)
    records = LogRecords()
    compression.load_state_dict(from_bytes(saved[0]))
    assert residuals_of(compression).keys() == set(COMPRESSED) - {"tall"}
    assert [level for level, _ in records.matching("weights.tall")] == ["WARNING"]


@pytest.mark.parametrize("scale", [1.0, 1024.0])
@on_ranks(2)
def test_a_residual_that_is_no_longer_compressed_is_added_to_the_next_gradient(
    rank: int, saved: tuple[bytes, bytes], scale: float
) -> None:
    # No matrix pays at rank 12.
    options = dataclasses.replace(OPTIONS, matrix_approximation_rank=12)
    ddp, compression = make_compressed(SHAPES, options)
    records = LogRecords()
    compression.load_state_dict(from_bytes(saved[0]))
    assert residuals_of(compression) == {}
    assert [level for level, _ in records.matching("weights.tall")] == ["INFO"]
    compression.grad_scale = scale
    for i in range(2):
        mine = {name: tensor * scale for name, tensor in gradients(SHAPES, rank, i).items()}
        outputs, means = step(ddp, mine), mean_gradients(SHAPES, 2, i)
        for name in SHAPES:
            added = outputs[name].double() / scale - means[name]
            if i == 0 and name in COMPRESSED:
                added -= from_bytes(saved[0])["parameters"][f"weights.{name}"]["residual"]
            # The sum is rounded once, in float32, and its elements are below 10.
            assert added.abs().max() < 10 * 2**-23, (i, name)


@on_ranks(2)
def test_parameters_that_are_not_named_keep_what_they_have(
    rank: int, saved: tuple[bytes, bytes]
) -> None:
    ddp, compression = make_compressed(SHAPES, OPTIONS)
    train(ddp, range(4))
    before = residuals_of(compression)
    state = from_bytes(saved[0])
    state["parameters"] = {"weights.tall": state["parameters"]["weights.tall"]}
    compression.load_state_dict(state)
    after = residuals_of(compression)
    assert all(torch.equal(before[name], after[name]) for name in ("conv", "wide"))
    loaded = state["parameters"]["weights.tall"]["residual"]
    assert relative_error(after["tall"], loaded) < 1e-6
    assert compression.stats()["steps"] == SAVED


@on_ranks(2)
def test_complex_parameters_resume(rank: int) -> None:
    """A complex parameter's state is real, and goes on to the bit."""

    def make() -> tuple[DistributedDataParallel, tp.Compression]:
        values = {"c": torch.zeros(20, 24, dtype=torch.complex64).t()}
        ddp = DistributedDataParallel(Synthetic(values))
        return ddp, tp.attach(ddp, OPTIONS)

    def take_step(ddp: DistributedDataParallel, i: int) -> torch.Tensor:
        pairs = gradients({"c": (24, 20, 2)}, rank, i)["c"]
        return step(ddp, {"c": torch.view_as_complex(pairs)})["c"]

    first, compression = make()
    for i in range(3):
        take_step(first, i)
    states = [from_bytes(to_bytes(compression.state_dict(per_rank))) for per_rank in (False, True)]
    mean = states[0]["parameters"]["weights.c"]
    assert mean["residual"].shape == (24, 20, 2)
    assert mean["q"].shape == (2, 2 * 24)  # The matrix has the order of the memory: 20 x 48.
    expected = take_step(first, 3)
    for per_rank in (False, True):
        ddp, compression = make()
        compression.load_state_dict(states[per_rank])
        again = own_part(compression.state_dict(per_rank))["parameters"]["weights.c"]
        assert again["crc32"] == own_part(states[per_rank])["parameters"]["weights.c"]["crc32"]
        output = take_step(ddp, 3)
        assert torch.equal(output, expected) if per_rank else torch.allclose(output, expected)


@on_ranks(2)
def test_a_saved_state_is_a_copy_and_that_before_any_step_can_be_loaded(rank: int) -> None:
    """Before the first compressed step it is the state that this step starts from."""
    (ddp, compression), (other, of_other) = (make_compressed(SHAPES, OPTIONS) for _ in "ab")
    fresh = compression.state_dict()
    assert not any(entry["residual"].any() for entry in fresh["parameters"].values())
    assert all(entry["q"].any() for entry in fresh["parameters"].values())
    compression.load_state_dict(fresh)
    outputs, expected = train(ddp, range(4)), train(other, range(4))
    assert all(same(a.values(), b.values()) for a, b in zip(outputs, expected, strict=True))
    state = compression.state_dict()
    before = to_bytes(state)
    assert before == to_bytes(of_other.state_dict())
    compression.load_state_dict(state)
    train(ddp, range(4, 7))
    assert to_bytes(state) == before


@pytest.mark.parametrize("last", [False, True], ids=["from-contiguous", "from-channels-last"])
@on_ranks(2)
def test_the_state_does_not_depend_on_the_memory_format(rank: int, last: bool) -> None:
    # The columns of a channels_last weight are permuted. Residual and Q are saved in the order of
    # the contiguous weight, or the next output would differ.
    shapes = {"conv": (16, 5, 3, 3)}
    contiguous, permuted = torch.zeros(shapes["conv"]), torch.zeros(shapes["conv"])
    permuted = permuted.to(memory_format=torch.channels_last)
    weights = (permuted, contiguous) if last else (contiguous, permuted)
    first, second = (DistributedDataParallel(Synthetic({"conv": weight})) for weight in weights)
    of_first, of_second = (tp.attach(ddp, OPTIONS) for ddp in (first, second))
    train(first, range(4))
    of_second.load_state_dict(of_first.state_dict())
    expected, output = (train(ddp, [9])[0]["conv"] for ddp in (first, second))
    assert relative_error(output, expected) < OUTPUT_TOLERANCE
