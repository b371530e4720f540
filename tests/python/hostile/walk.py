# SPDX-License-Identifier: BSD-3-Clause
"""One rank of a walk through the API, which draws calls in random order, wrong ones among them.

Both ranks must reply alike. Each holds the exact model: the sum of outputs and the mean residual is
that of the gradients.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import torch_powersgd as tp
from support import ranks
from support.ddp import make_ddp, outputs_of, weights_of
from support.deadline import UNLIMITED
from support.ledger import Ledger, residuals_of
from support.state_damage import VALUES, Damage, Outcome, outcome_of, places
from support.states import from_bytes, own_part, to_bytes
from support.synthetic import SHAPES, gradients, mean_gradients
from support.tensors import Tensors, digest, relative_error

WORLD_SIZE = 2
# The identity over some 20 steps in float32, as in test_identity; loading rounds once more.
TOLERANCE = 5e-5
EXACT = 1e-6  # a mean of two float32 numbers is rounded once or twice

OPTIONS: dict[str, list[Any]] = {
    "scope": ["backward", "backward", "attached", "never"],
    "start_powerSGD_iter": [0, 1, 2, 10**9],
    "matrix_approximation_rank": [1, 2, 3],
    "use_error_feedback": [True, True, True, False],
    "warm_start": [True, False],
    "wire_dtype": [None, None, "bfloat16", "int8", "int4"],
    "residual_dtype": ["float32", "float32", "bfloat16"],
    "check_every": [0, 0, 1, 3],
}
WRONG_OPTIONS = [5, "always", [], {"rank": 1}, {5: 1}, {"scope": None}, {"min_numel": 10**400}]
SCALES = [1.0, 4, 2.0**15]
WRONG_SCALES: list[Any] = [0, -1, None, "2", float("nan"), 10**400, []]
# Collectives whose arguments no backend takes, or that it refuses on every rank.
WRONG_COLLECTIVES: list[Callable[[], Any]] = [
    lambda: dist.broadcast(torch.ones(3), group_src=WORLD_SIZE),
    lambda: dist.all_reduce(torch.ones(3), dist.ReduceOp.BAND),
    lambda: dist.all_reduce(torch.ones(3).to(torch.float8_e4m3fn)),
    lambda: dist.all_to_all_single(torch.empty(3), torch.ones(4)),
    lambda: dist.all_reduce_coalesced([torch.ones(3), torch.ones(3).int()]),
]


class Walk:
    """One rank's groups, module and model. All ranks draw the same calls."""

    def __init__(self, rank: int, seed: int) -> None:
        self.rank, self.seed, self.store = rank, seed, ranks.side_store()
        self.random = random.Random(seed)
        self.called: list[str] = []
        self.replies = 0
        self.grouped = False
        self.clear()

    def run(self, calls: int, among: dict[Callable[[Walk], None], Callable[[Walk], bool]]) -> None:
        """Makes so many of those calls that are allowed."""
        self.begin()
        for _ in range(calls):
            call = self.random.choice([call for call, allowed in among.items() if allowed(self)])
            self.called.append(call.__name__)
            call(self)
        if self.grouped:
            self.check()
            self.end()

    def clear(self) -> None:
        self.ddp: DistributedDataParallel | None = None
        self.groups: list[Any] = []
        self.saved: list[tuple[bytes, Ledger, bool, Any]] = []
        self.forget()

    def forget(self) -> None:
        self.compression: tp.Compression | None = None
        self.ledger, self.known = Ledger(), True  # known: the ledger accounts for every step
        self.dead = False
        # DDP reduces in the pass after one that raised before its gradients, also under no_sync.
        self.reduces_next = False
        self.scale, self.steps = 1.0, 0

    @property
    def attached(self) -> bool:
        return self.compression is not None and not self.compression.ended

    @property
    def handle(self) -> tp.Compression:
        assert self.compression is not None
        return self.compression

    def agreed(self, reply: Any) -> None:
        """Asserts that all ranks have this reply."""
        self.replies += 1
        key = f"reply {self.replies} of walk {self.seed} on rank"
        self.store.set(f"{key} {self.rank}", repr(reply))
        other = self.store.get(f"{key} {1 - self.rank}").decode()
        assert other == repr(reply), (reply, other)

    def tries(self, call: Callable[[], Any]) -> Outcome:
        """A call that may be refused on all ranks, with a ValueError that says why."""
        kind, message = outcome = outcome_of(call)
        self.agreed(outcome)
        assert kind in ("", "ValueError"), outcome
        assert len(message) < 800, message
        return outcome

    def succeeds(self, call: Callable[[], Any]) -> bool:
        return not self.tries(call)[0]

    def options(self) -> dict[str, Any]:
        return {name: self.random.choice(values) for name, values in OPTIONS.items()}

    def given(self) -> Any:
        """A mapping to lay over the options of the group, which may be wrong."""
        return self.random.choice(
            [None, None, {}, self.random.choice(WRONG_OPTIONS), self.options()]
        )

    # Groups.

    def begin(self) -> None:
        self.clear()
        ranks.init_group("cpu:powersgd", self.options(), UNLIMITED)
        self.grouped = True
        self.agreed(tp.stats()["starts_at"])
        if self.random.random() < 0.7:
            self.make()
            self.attach()
            self.step()
            if self.attached:
                self.save()

    def end(self) -> None:
        self.groups = []
        dist.destroy_process_group()
        self.grouped = False

    def make_a_group(self) -> None:
        options = self.given()
        self.tries(
            lambda: self.groups.append(dist.new_group(backend="cpu:powersgd", pg_options=options))
        )

    def destroy_a_group(self) -> None:
        dist.destroy_process_group(self.groups.pop(self.random.randrange(len(self.groups))))

    def all_reduce(self) -> None:
        """Of integers, which no scope compresses."""
        group = self.random.choice([None, *self.groups])
        numel, op = self.random.choice([0, 1, 7, 300]), self.random.choice(["SUM", "MAX", "MIN"])
        tensor = torch.arange(numel) + self.rank
        dist.all_reduce(tensor, getattr(dist.ReduceOp, op), group=group)
        plain = torch.arange(numel)
        expected = {"SUM": 2 * plain + 1, "MAX": plain + 1, "MIN": plain}[op]
        assert torch.equal(tensor, expected), (op, numel)

    def wrong_collective(self) -> None:
        kind, _ = outcome_of(self.random.choice(WRONG_COLLECTIVES))
        self.agreed(kind)
        assert kind

    # The module.

    def make(self) -> None:
        self.forget()
        arguments: dict[str, Any] = self.random.choice(
            [{}, {"bucket_cap_mb": 0.002}, {"find_unused_parameters": True}]
        )
        dtype = self.random.choice([torch.float32, torch.float32, torch.float64])
        self.ddp = make_ddp(SHAPES, dtype, **arguments)

    def attach(self) -> None:
        before, options = self.attached, self.given()
        if self.succeeds(lambda: self._attach(options)):
            assert not before, "a second attach is an error"
            used = self.handle.options
            # A residual in a narrower type is rounded at every step.
            self.known = used.residual_dtype == torch.float32 and used.use_error_feedback
            self.ledger, self.scale = Ledger(), 1.0

    def _attach(self, options: Any) -> None:
        assert self.ddp is not None
        self.compression = tp.attach(self.ddp, options)

    def detach(self) -> None:
        self.check()
        before = self.attached
        assert self.succeeds(self.handle.detach) == before
        self.scale = 1.0

    def step(self) -> None:
        """Some steps, in a block with a scope or not."""
        override = self.random.choice([None, None, None, "always", "never"])
        for _ in range(self.random.randint(1, 3)):
            self._step(override)

    def step_without_synchronization(self) -> None:
        self._step(None, no_sync=True)

    def _step(self, override: str | None, no_sync: bool = False) -> None:
        assert self.ddp is not None
        if self.dead:
            self.agreed(outcome_of(lambda: self._backward(gradients(SHAPES, 0, 0)))[0])
            return
        mine = self._scaled(gradients(SHAPES, self.rank, self.steps))
        means = mean_gradients(SHAPES, WORLD_SIZE, self.steps)
        self.steps += 1
        block = nullcontext() if override is None else tp.scope(override)
        with self.ddp.no_sync() if no_sync else block:
            outputs = self._backward(mine)
        if no_sync and not self.reduces_next:
            return
        self.reduces_next = False
        outputs = {name: value.double() / self.scale for name, value in outputs.items()}
        self.agreed(digest(outputs.values()))
        assert all(bool(value.isfinite().all()) for value in outputs.values())
        if not self.attached and override != "always":
            errors = {name: relative_error(outputs[name], means[name]) for name in means}
            assert max(errors.values()) < EXACT, errors
        self.known &= self.attached or override != "always"
        self.ledger.add(outputs, means)

    def _scaled(self, tensors: Tensors) -> Tensors:
        return {name: tensor * self.scale for name, tensor in tensors.items()}

    def _backward(self, coefficients: Tensors) -> Tensors:
        assert self.ddp is not None
        for parameter in self.ddp.parameters():
            parameter.grad = None
        self.ddp(coefficients).backward()
        return outputs_of(self.ddp)

    def fail(self) -> None:
        """A step that raises in the forward pass, or early or late in the backward pass."""
        assert self.ddp is not None
        where = self.random.choice(["forward", "early", "late"])
        mine = self._scaled(gradients(SHAPES, self.rank, "never"))
        if self.dead:  # DDP itself refuses any pass.
            return
        if where == "forward":
            kind, _ = outcome_of(lambda: self._backward({"absent": torch.ones(1)}))
        elif where == "early":
            self.reduces_next = True
            loss = self.ddp(mine)
            loss.register_hook(_raise)
            kind, _ = outcome_of(loss.backward)
        else:
            handle = weights_of(self.ddp)["wide"].register_hook(_raise)
            kind, _ = outcome_of(lambda: self._backward(mine))
            handle.remove()
            self.dead, self.known = True, False
        self.agreed(kind)
        assert kind in ("AttributeError", "KeyError", "ArithmeticError"), kind

    def skip(self) -> None:
        """The optimizer has not applied the last step."""
        assert self.succeeds(self.handle.step_skipped) == self.attached
        self.known = False

    def set_scale(self) -> None:
        scale: Any = self.random.choice([*SCALES, *WRONG_SCALES])
        right = self.attached and scale in SCALES
        assert self.succeeds(lambda: setattr(self.handle, "grad_scale", scale)) == right
        if right:
            self.scale = float(scale)

    # The state.

    def check(self) -> None:
        """Checks that the sum of outputs and the residual is the sum of the gradients."""
        checks = self.attached and self.known and bool(self.ledger.means)
        self.agreed(checks)
        if checks:
            errors = self.ledger.errors(residuals_of(self.handle))
            assert max(errors.values()) < TOLERANCE, (errors, self.handle.options)

    def save(self) -> None:
        per_rank, states = self.random.random() < 0.5, []
        before = self.attached
        assert self.succeeds(lambda: states.append(self.handle.state_dict(per_rank))) == before
        for state in states:
            ledger = copy.deepcopy(self.ledger)
            self.saved.append((to_bytes(state), ledger, self.known, self.handle.options))

    def load(self) -> None:
        """Loads an earlier state of a module with the same options, or a damaged one."""
        data, ledger, known, options = self.random.choice(self.saved)
        state, damage = from_bytes(data), None
        if self.random.random() < 0.5:
            place = self.random.choice([*places(own_part(state))])
            value, only = self.random.choice([*VALUES]), self.random.choice([None, None, 0, 1])
            damage = Damage(place, value, only)
        elif options != self.handle.options:
            return
        before = to_bytes(self.handle.state_dict(True)) if self.attached else b""
        if damage is not None:
            state = damage.apply(state, self.rank)
        kind, message = self.tries(lambda: self.handle.load_state_dict(state))
        if kind and self.attached:
            after = to_bytes(self.handle.state_dict(True))
            assert before == after, "a refused state has changed something"
            assert damage or "per" in message, message
        elif not kind:
            self.ledger = copy.deepcopy(ledger)
            self.known = damage is None and known and not self.dead

    def stats(self) -> None:
        found = self.handle.stats(per_layer=True) if self.attached else tp.stats()
        assert found["bytes_before"] >= 0
        assert found["bytes_after"] >= 0
        if self.attached and self.random.random() < 0.5:
            self.handle.reset_stats()
        self.agreed((found["compressed_calls"], found["exact_calls"]))


def _raise(gradient: torch.Tensor) -> None:
    raise ArithmeticError("this backward pass fails")
