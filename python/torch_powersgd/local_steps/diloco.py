# SPDX-License-Identifier: BSD-3-Clause
"""DiLoCo: an outer optimizer uses the averaged changes as gradients."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from torch_powersgd.local_steps.counting import delegate_of
from torch_powersgd.local_steps.fragment import Fragment, Tensors, like_anchor
from torch_powersgd.local_steps.steps import LocalSGD
from torch_powersgd.option_values import require
from torch_powersgd.options import Options


class DiLoCo(LocalSGD):
    """Local steps whose mean changes are the gradients of an outer optimizer, compressed.

    It works like ``LocalSGD`` except in a round. There, the mean change becomes the gradient with
    which ``outer_optimizer`` moves the anchor: the parameter as of the last round, the same on all
    processes. DiLoCo (Douillard et al., arXiv:2311.08105) uses SGD with a learning rate of 0.7 and
    Nesterov momentum of 0.9. With few processes, less momentum learns better.

        outer = torch.optim.SGD(model.parameters(), lr=0.8, momentum=0.3, nesterov=True)
        with torch_powersgd.DiLoCo(model, optimizer, outer, sync_every=10):
            ...

    Args:
        outer_optimizer: Optimizer of the model's parameters. Until the end, its parameters are
            replaced by the anchors, which are float32 or wider. Schedulers of its learning rate
            keep working. The rounds of the warm-up don't use it.
        others: The other arguments of ``LocalSGD``.

    Raises:
        ValueError: As ``LocalSGD``, or if the outer optimizer lacks a trainable parameter.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        outer_optimizer: Optimizer,
        sync_every: int,
        options: Options | Mapping[str, Any] | None = None,
        **others: Any,
    ) -> None:
        self.outer_optimizer: Optimizer = delegate_of(outer_optimizer)
        super().__init__(model, optimizer, sync_every, options, **others)
        self._hold_anchors()

    def _check_trained(self, trained: Tensors) -> None:
        outer = self.outer_optimizer
        fits = isinstance(outer, Optimizer)
        require(fits, "outer_optimizer", "a torch.optim.Optimizer", type(outer))
        differs = all(outer is not optimizer for optimizer in self.optimizers)
        wanted = "another optimizer than optimizer, because its steps are the rounds"
        require(differs, "outer_optimizer", wanted, type(outer))
        held = {p for group in outer.param_groups for p in group["params"]}
        if missing := [name for name, p in trained.items() if p not in held]:
            raise ValueError(
                "outer_optimizer must hold all trainable parameters of the model, but it lacks "
                f"{missing[0]!r}"
            )

    def _hold_anchors(self) -> None:
        """Replaces the parameters in the outer optimizer with the anchors, until ``_end``."""
        groups = self.outer_optimizer.param_groups
        self._anchor_of = {
            fragment.parameters[name]: anchor
            for fragment in self._fragments
            for name, anchor in fragment.anchors.items()
        }
        self._given = [group["params"] for group in groups]
        idle = [p for given in self._given for p in given if p not in self._anchor_of]
        state = self.outer_optimizer.state
        self._idle = {p: state.pop(p) for p in idle if p in state}
        for group in groups:
            group["params"] = [self._anchor_of[p] for p in group["params"] if p in self._anchor_of]
        for parameter, anchor in self._anchor_of.items():
            self._move_state(parameter, anchor)

    def _end(self) -> None:
        super()._end()
        for group, given in zip(self.outer_optimizer.param_groups, self._given, strict=False):
            group["params"] = given
        self.outer_optimizer.state.update(self._idle)
        for parameter, anchor in self._anchor_of.items():
            self._move_state(anchor, parameter)

    def _move_state(self, before: torch.Tensor, after: torch.Tensor) -> None:
        state = self.outer_optimizer.state
        if before in state:
            state[after] = state.pop(before)

    def _move(self, fragment: Fragment, means: Tensors) -> None:
        for name, mean in means.items():
            anchor = fragment.anchors[name]
            anchor.grad = like_anchor(mean, anchor)
        self.outer_optimizer.step()
        for name in means:
            fragment.anchors[name].grad = None

    def _outer_optimizer_state(self) -> dict[str, Any]:
        """Returns the state with an entry for every anchor: ``dcp.load`` loads only these."""
        moved = [*self.outer_optimizer.state_dict()["state"]]
        as_is = {id(anchor): anchor for anchor in self.outer_optimizer.state}  # saves memory
        outer = copy.deepcopy(self.outer_optimizer, as_is)
        for group in outer.param_groups:
            for anchor in group["params"]:
                if anchor not in outer.state:
                    anchor.grad = torch.zeros_like(anchor)
        outer.step()
        return {**outer.state_dict(), "moved": moved}

    def _load_outer_optimizer(self, state: dict[str, Any]) -> None:
        moved = {i: entry for i, entry in state["state"].items() if i in state["moved"]}
        pairs = zip(self.outer_optimizer.param_groups, state["param_groups"], strict=True)
        groups = [{**present, **saved} for present, saved in pairs]
        loaded = {"state": moved, "param_groups": groups}
        self.outer_optimizer.load_state_dict(copy.deepcopy(loaded))
