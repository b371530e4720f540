# SPDX-License-Identifier: BSD-3-Clause
"""One rank's side of a walk through the API: calls in any order, wrong ones among them.

Every method returns what must be equal on all ranks. It raises where the model of the walk is
broken: an exact step that is not exact, or gradients that were lost.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import torch_powersgd as tp
from support import ranks
from support.deadline import UNLIMITED
from support.state_damage import Damage, Outcome, outcome_of
from support.synthetic import (
    SHAPES,
    Ledger,
    Tensors,
    from_bytes,
    gradients,
    make_ddp,
    mean_gradients,
    outputs_of,
    relative_error,
    to_bytes,
    weights_of,
)

WORLD_SIZE = 2
# The identity over some 20 steps in float32, as in test_identity; loading rounds once more.
TOLERANCE = 5e-5
EXACT = 1e-6  # a mean of two float32 numbers is rounded once or twice


class Raise(torch.autograd.Function):
    """The identity, whose backward pass raises."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise ArithmeticError("this backward pass fails")


class ApiWalk:
    """The groups and the module of one rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.ddp: DistributedDataParallel | None = None
        self.compression: tp.Compression | None = None
        self.groups: list[Any] = []
        self.saved: list[tuple[bytes, Ledger, bool, Any]] = []
        self._forget()

    def _forget(self) -> None:
        self.compression = None
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

    # Groups.

    def begin(self, options: Mapping[str, Any]) -> str:
        """Makes the default group, after the end of all that there was."""
        self.end()
        self.ddp, self.saved = None, []
        self._forget()
        ranks.init_group("cpu:powersgd", dict(options), UNLIMITED)
        return repr(tp.stats()["starts_at"])

    def end(self) -> None:
        self.groups = []
        if dist.is_initialized():
            dist.destroy_process_group()

    def begin_with(self, options: Any) -> Outcome:
        """Makes one more group with options that may be wrong."""
        return outcome_of(
            lambda: self.groups.append(dist.new_group(backend="cpu:powersgd", pg_options=options))
        )

    def destroy_group(self, index: int) -> None:
        dist.destroy_process_group(self.groups.pop(index % len(self.groups)))

    def all_reduce(self, index: int, numel: int, op: str) -> str:
        """Sums integers, which no scope compresses."""
        group = self.groups[index % len(self.groups)] if self.groups else None
        tensor = torch.arange(numel) + self.rank
        dist.all_reduce(tensor, getattr(dist.ReduceOp, op), group=group)
        plain = torch.arange(numel)
        expected = {"SUM": 2 * plain + 1, "MAX": plain + 1, "MIN": plain}[op]
        assert torch.equal(tensor, expected), (op, numel)
        return op

    # The module.

    def make(self, dtype: str, arguments: Mapping[str, Any]) -> None:
        self._forget()
        self.ddp = make_ddp(SHAPES, getattr(torch, dtype), **arguments)

    def attach(self, options: Any) -> Outcome:
        return outcome_of(lambda: self._attach(options))

    def _attach(self, options: Any) -> None:
        assert self.ddp is not None
        self.compression = tp.attach(self.ddp, options)
        used = self.compression.options
        # A residual in a narrower type is rounded at every step.
        self.known = used.residual_dtype == torch.float32 and used.use_error_feedback
        self.ledger, self.scale = Ledger(), 1.0

    def detach(self) -> Outcome:
        outcome = outcome_of(lambda: self.handle.detach())
        self.scale = 1.0
        return outcome

    def step(self, override: str | None, no_sync: bool = False) -> str:
        """One step, in a block with a scope or not. Returns a hash of the averaged gradients."""
        assert self.ddp is not None
        if self.dead:
            return "dead: " + outcome_of(lambda: self._backward(gradients(SHAPES, 0, 0)))[0]
        mine = self._scaled(gradients(SHAPES, self.rank, self.steps))
        means = mean_gradients(SHAPES, WORLD_SIZE, self.steps)
        self.steps += 1
        block = contextlib.nullcontext() if override is None else tp.scope(override)
        with self.ddp.no_sync() if no_sync else block:
            outputs = self._backward(mine)
        if no_sync and not self.reduces_next:
            return "no_sync"
        self.reduces_next = False
        outputs = {name: value.double() / self.scale for name, value in outputs.items()}
        self._account(outputs, means, override)
        return _hash(outputs)

    def _scaled(self, tensors: Tensors) -> Tensors:
        return {name: tensor * self.scale for name, tensor in tensors.items()}

    def _backward(self, coefficients: Tensors) -> Tensors:
        assert self.ddp is not None
        for parameter in self.ddp.parameters():
            parameter.grad = None
        self.ddp(coefficients).backward()
        return outputs_of(self.ddp)

    def _account(self, outputs: Tensors, means: Tensors, override: str | None) -> None:
        assert all(bool(value.isfinite().all()) for value in outputs.values())
        if not self.attached:
            if override != "always":
                errors = {name: relative_error(outputs[name], means[name]) for name in means}
                assert max(errors.values()) < EXACT, errors
            else:
                self.known = False
        self.ledger.add(outputs, means)

    def fail(self, where: str) -> Outcome:
        """A step that raises in the forward pass, or early or late in the backward pass."""
        assert self.ddp is not None
        mine = self._scaled(gradients(SHAPES, self.rank, "never"))
        if self.dead:  # DDP itself refuses any pass.
            return "dead", ""
        if where == "forward":
            return outcome_of(lambda: self._backward({"absent": torch.ones(1)}))
        if where == "early":
            self.reduces_next = True
            return outcome_of(lambda: Raise.apply(self.ddp(mine)).backward())  # type: ignore
        handle = weights_of(self.ddp)["wide"].register_hook(_raise)
        outcome = outcome_of(lambda: self._backward(mine))
        handle.remove()
        self.dead, self.known = True, False
        return outcome

    def skip(self) -> Outcome:
        """The optimizer has not applied the last step."""
        outcome = outcome_of(lambda: self.handle.step_skipped())
        self.known = False
        return outcome

    def set_scale(self, scale: Any) -> Outcome:
        outcome = outcome_of(lambda: setattr(self.handle, "grad_scale", scale))
        if not outcome[0]:
            self.scale = float(scale)
        return outcome

    def use_orphan(self) -> list[str]:
        """Uses a module whose group was destroyed. Any error will do, but no hang."""
        assert self.ddp is not None
        calls: list[Callable[[], Any]] = [
            lambda: self._backward(gradients(SHAPES, self.rank, 0)),
            lambda: self.handle.state_dict(True),
            lambda: self.handle.step_skipped(),
            lambda: self.handle.stats(),
            lambda: self.handle.detach(),
            lambda: tp.attach(self.ddp),  # type: ignore[arg-type]
            lambda: tp.stats(self.ddp.process_group),  # type: ignore[union-attr]
        ]
        return [outcome_of(call)[0] for call in calls]

    # The state.

    def check(self) -> bool:
        """Checks that the sum of outputs and the residual is the sum of the gradients."""
        if not self.attached or not self.known or not self.ledger.means:
            return False
        state = self.handle.state_dict()
        residuals = {
            name.removeprefix("weights."): saved["residual"].double() / state["grad_scale"]
            for name, saved in state["parameters"].items()
        }
        errors = self.ledger.errors(residuals)
        assert max(errors.values()) < TOLERANCE, (errors, self.handle.options)
        return True

    def save(self, per_rank: bool) -> Outcome:
        states: list[Any] = []
        outcome = outcome_of(lambda: states.append(self.handle.state_dict(per_rank)))
        for state in states:
            ledger = copy.deepcopy(self.ledger)
            self.saved.append((to_bytes(state), ledger, self.known, self.handle.options))
        return outcome

    def load(self, index: int, damage: Damage | None) -> Outcome:
        """Loads an earlier state of a module with the same options, or a damaged one."""
        data, ledger, known, options = self.saved[index % len(self.saved)]
        if options != self.handle.options and damage is None:
            return "other options", ""
        state = from_bytes(data)
        before = to_bytes(self.handle.state_dict(True)) if self.attached else b""
        if damage is not None:
            state = damage.apply(state, self.rank)
        outcome = outcome_of(lambda: self.handle.load_state_dict(state))
        if outcome[0] and self.attached:
            after = to_bytes(self.handle.state_dict(True))
            assert before == after, "a refused state has changed something"
        elif not outcome[0] and damage is None:
            self.ledger, self.known = copy.deepcopy(ledger), known and not self.dead
        elif not outcome[0]:
            self.known = False
        return outcome

    def stats(self, reset: bool) -> tuple[int, int]:
        found = self.handle.stats(per_layer=True) if self.attached else tp.stats()
        assert found["bytes_before"] >= 0
        assert found["bytes_after"] >= 0
        if reset and self.attached:
            self.handle.reset_stats()
        return found["compressed_calls"], found["exact_calls"]

    def wrong_collective(self, which: int) -> str:
        """A collective whose arguments no backend takes, or that it refuses on every rank."""
        calls: list[Callable[[], Any]] = [
            lambda: dist.broadcast(torch.ones(3), group_src=WORLD_SIZE),
            lambda: dist.all_reduce(torch.ones(3), dist.ReduceOp.BAND),
            lambda: dist.all_reduce(torch.ones(3).to(torch.float8_e4m3fn)),
            lambda: dist.all_to_all_single(torch.empty(3), torch.ones(4)),
            lambda: dist.all_reduce_coalesced([torch.ones(3), torch.ones(3).int()]),
        ]
        return outcome_of(calls[which])[0]


def _raise(gradient: torch.Tensor) -> None:
    raise ArithmeticError("this backward pass fails")


def _hash(tensors: Tensors) -> str:
    bits = b"".join(tensors[name].numpy().tobytes() for name in sorted(tensors))
    return hashlib.sha256(bits).hexdigest()
