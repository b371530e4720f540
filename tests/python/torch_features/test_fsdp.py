# SPDX-License-Identifier: BSD-3-Clause
"""FSDP2's hybrid sharding: shards inside a replica, compression between the replicas."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

import torch_powersgd as tp
from support import ranks
from support.fsdp_cases import CASES
from support.fsdp_pairs import (
    REPLICAS,
    SHARDS,
    Net,
    backward,
    gradients,
    make_modules,
    make_pair,
    mesh_of,
    sharded,
)
from support.log_records import LogRecords
from support.paired_training import STEPS, WARM_UP, Facts, same
from support.synthetic import Ledger, gradient
from torch_powersgd.fsdp import only_subset, packed

WORLD_SIZE = REPLICAS * SHARDS
TOLERANCE = 1e-5  # the identity in float32, as in test_identity


def _run_all(rank: int) -> dict[str, Facts]:
    return {name: run(rank) for name, run in CASES.items()}


@pytest.fixture(scope="module")
def results() -> list[dict[str, Facts]]:
    """The facts of each case, by rank. One launch runs all cases."""
    return ranks.run(WORLD_SIZE, _run_all, backend="gloo", timeout=240)


def _check(by_rank: list[Facts]) -> None:
    for facts in by_rank:
        assert facts.warm_up == [True] * WARM_UP
        assert all(facts.exact)
        assert not any(facts.compressed)
        for parameter, error in facts.errors.items():
            assert error < TOLERANCE, (parameter, error)
    for first, second in ((0, 2), (1, 3)):  # these have the same shards
        mine, other = (by_rank[rank].replica for rank in (first, second))
        assert mine == other
        assert len(set(mine)) == len(mine)  # the parameters do change


@pytest.mark.parametrize("name", CASES)
def test_case(results: list[dict[str, Facts]], name: str) -> None:
    _check([result[name] for result in results])


@pytest.mark.long
def test_blocks_compiled_by_inductor() -> None:
    compiled = CASES["native_compiled_blocks"]
    _check(ranks.run(WORLD_SIZE, compiled, "inductor", backend="gloo", timeout=240))


@pytest.mark.parametrize("name", ["plain", "native_plain"])
def test_stats_say_what_was_compressed(results: list[dict[str, Facts]], name: str) -> None:
    for result in results:
        stats, text = result[name].extra
        assert (stats["compressing"], stats["starts_at"], stats["steps"]) == (True, WARM_UP, STEPS)
        assert stats["compressed_calls"] == 3 * (STEPS - WARM_UP)  # one for each unit
        assert stats["residual_norms"].keys() == {name for name, _ in Net().named_parameters()}
        assert stats["compressed_ratio"] > 3
        assert "3 of 7 parameters at matrix rank 2" in text
        assert f"step {STEPS}: the next one is compressed" in text


@pytest.mark.parametrize("name", ["unit_of_modules", "output_backward_by_itself"])
def test_a_step_ends_with_the_rest_of_its_units(results: list[dict[str, Facts]], name: str) -> None:
    if name not in CASES:
        pytest.skip("torch is too old")
    assert {r[case].extra for r in results for case in (name, f"native_{name}")} == {STEPS}


def test_the_loss_scale_grew_and_fell(results: list[dict[str, Facts]]) -> None:
    # It doubled after three steps and after three more; the bad step in between halved it.
    assert {r[name].extra for r in results for name in ("loss_scale", "native_loss_scale")} == {
        8.0 * 2 * 0.5 * 2
    }


def _by_hand(rank: int) -> tuple[list[bool], int, int]:
    """The same training, attached on the whole mesh, and on the shards with a group.

    Returns:
        Whether all is equal, and the bytes of the gradients and those sent between replicas.
    """
    native, _, of_native = make_modules(native=True)
    by_hand, _, of_by_hand = make_modules()
    equal = []
    for i in range(STEPS):
        equal.append(same(*(backward(module, rank, i) for module in (native, by_hand))))
        norms: list[Any] = [
            nn.utils.clip_grad_norm_(m.parameters(), 0.1) for m in (native, by_hand)
        ]
        equal.append(same(*([norm.full_tensor()] for norm in norms)))
    before, after = (
        {compression.stats()[name] for compression in (of_native, of_by_hand)}
        for name in ("bytes_before", "bytes_after")
    )
    equal.append(len(before) == len(after) == 1)
    return equal, before.pop(), after.pop()


def test_a_mesh_with_replicas_is_attached_as_by_hand() -> None:
    # Padded shards of 13, 13, 17 rows and their biases, and the gain.
    numel = 2 * (13 * 25 + 13) + 17 * 25 + 17 + 1
    factors = 2 * (2 * (13 + 25)) + 2 * (17 + 25) + 13 + 13 + 17 + 1
    counts = 2 * 3  # the use of each matrix, and the non-finite count of each unit
    for equal, before, after in ranks.run(WORLD_SIZE, _by_hand, backend="gloo"):
        assert all(equal)
        assert before == 4 * STEPS * numel
        assert after == 4 * (WARM_UP * numel + (STEPS - WARM_UP) * (factors + counts))


def _half_precision(rank: int) -> dict[str, float]:
    """FSDP2 divides float16 gradients before and after the reduction."""
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float16)
    return make_pair(native=True, mp_policy=policy).train(rank).errors


def test_the_identity_holds_for_gradients_in_float16() -> None:
    # An output is rounded to 11 bits: 2^-11 = 4.9e-4 at most.
    for errors in ranks.run(WORLD_SIZE, _half_precision, backend="gloo"):
        assert max(errors.values()) < 4.9e-4


def _unused(
    rank: int, native: bool, one_unit: bool
) -> tuple[dict[bool, list[str]], list[tuple[str, str]], int]:
    """Leaves a block unused, or one of the root's own parameters.

    FSDP2's hooks do not learn which. As a part of one unit, the block is as large as another.
    """
    attached, plain, compression = make_modules(native, units=() if one_unit else None)
    arguments: dict[str, Any] = {"skip": 0} if one_unit else {"gained": False}
    warnings = LogRecords(logging.WARNING).seen
    exact = {}
    for told in (False, True):
        for module in (attached, plain):
            module.set_reduce_scatter_unused_params(told)
        for i in range(STEPS):
            for module in (attached, plain):
                backward(module, rank, i, **arguments)
        found, wanted = gradients(attached), gradients(plain)
        exact[told] = [n for n, g in found.items() if "weight" in n and same([g], [wanted[n]])]
    return exact, warnings, compression.stats()["steps"]


@pytest.mark.skipif(
    not hasattr(FSDPModule, "set_reduce_scatter_unused_params"), reason="torch is too old"
)
@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("one_unit", [False, True])
def test_unused_parameters_are_exact_unless_the_size_tells_which(
    native: bool, one_unit: bool
) -> None:
    results = ranks.run(WORLD_SIZE, _unused, native, one_unit, backend="gloo")
    for rank, (exact, warnings, steps) in enumerate(results):
        unknown = ["blocks.1.weight", "out.weight"] if one_unit else []
        # The unused block has no residual: its gradient is zero with compression or without.
        assert exact == {False: unknown, True: ["blocks.0.weight"] if one_unit else []}
        told = sum("set_reduce_scatter_unused_params" in message for _, message in warnings)
        assert told == (one_unit and rank < WORLD_SIZE // 2)  # the first of each group
        assert steps == 2 * STEPS


def test_a_part_of_a_unit_is_known_by_its_size_if_no_other_part_has_it() -> None:
    assert only_subset([5, 3, 9], 17) == [0, 1, 2]
    assert only_subset([5, 3, 9], 14) == [0, 2]
    assert only_subset([5, 3, 9], 7) == []
    assert only_subset([5, 3, 8], 8) == []  # the first two, or the last
    assert only_subset([4, 4, 9], 13) == []
    assert only_subset([4, 4, 9], 8) == [0, 1]
    assert only_subset([1] * 17, 17) == list(range(17))
    assert only_subset([2**i for i in range(17)], 1) == []  # too many to try


# All units have flat gradients of more elements than min_numel. As in test_identity, each step
# whose gradients are almost zero drains two of some 20 dimensions of each unit's matrix.
DRAIN_STEPS, QUIET = 24, 1e-20
FLAT = tp.Options.hook_defaults(start_powerSGD_iter=0, matrix_approximation_rank=2, min_numel=64)


def _native(rank: int) -> tuple[list[bool], float, float, int]:
    """FSDP2's own HSDP, with its all-reduces in backward compressed as flat tensors."""
    mesh = mesh_of(("cpu:powersgd", FLAT))
    flat, plain = sharded(mesh), sharded(mesh_of("gloo"))
    exact, ledger = [], Ledger()
    for i in range(STEPS + DRAIN_STEPS):
        for module in (flat, plain):
            module.zero_grad()
            loss = module(gradient((6, 25), "input", rank, i)).square().mean()
            (loss if i < STEPS else QUIET * loss).backward()
        found, wanted = gradients(flat), gradients(plain)
        exact.append(same(found.values(), wanted.values()))
        # The identity holds for the whole of a unit's all-reduce, in which the gradients lie side
        # by side.
        ledger.add(
            *({"all": torch.cat([g.flatten() for g in x.values()])} for x in (found, wanted))
        )
        if i == STEPS - 1:
            before_drain = ledger.errors()["all"]
    calls = tp.stats(mesh.get_group("replicate"))["compressed_calls"]
    return exact[:STEPS], before_drain, ledger.errors()["all"], calls


def test_native_hsdp_is_compressed_flat() -> None:
    for exact, before, error, calls in ranks.run(WORLD_SIZE, _native, backend="gloo"):
        # A flat gradient is exact in its first passes.
        assert exact == [True] * 2 + [False] * (STEPS - 2)
        assert before > 0.01
        assert error < TOLERANCE
        assert calls == 3 * (STEPS + DRAIN_STEPS - 2)


def test_gradients_may_be_packed_in_another_order_than_the_shards() -> None:
    shards = ["first", "second", "third"]
    assert packed(SimpleNamespace(fsdp_params=shards)) == shards  # before torch 2.15
    reordered = SimpleNamespace(fsdp_params=shards, _reduce_scatter_param_indices=[0, 2, 1])
    assert packed(reordered) == ["first", "third", "second"]
