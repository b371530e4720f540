# SPDX-License-Identifier: BSD-3-Clause
"""Saving and restoring what an attached model remembers."""

from __future__ import annotations

from typing import Any

from torch.nn.parallel import DistributedDataParallel

from torch_powersgd._core import _C
from torch_powersgd.ddp import attached_model, option_fields

VERSION = 1


def state_dict(ddp: DistributedDataParallel) -> dict[str, Any]:
    """The state of an attached module. Collective; the result is the same on all ranks.

    Returns:
        ``version``, ``options`` (field: value), ``step``, ``grad_scale`` and ``parameters``:
        {name: {"residual", "q"}} of the parameters compressed so far. ``residual`` has the
        parameter's shape and the units of the averaged gradient at ``grad_scale``; it is the mean
        over ranks, which is what the sum of all future outputs still owes. ``q`` is [r, m], the
        parameter seen as n x m.

    Raises:
        ValueError: if the module is not attached.
    """
    model = attached_model(ddp)
    return {
        "version": VERSION,
        "options": option_fields(model.options),
        "step": model.step,
        "grad_scale": model.grad_scale,
        "parameters": {
            parameter.name: {"residual": parameter.residual, "q": parameter.q}
            for parameter in model.export_state()
            if parameter.residual is not None
        },
    }


def load_state_dict(ddp: DistributedDataParallel, state: dict[str, Any]) -> None:
    """Restores what ``state_dict`` returned, on this or another number of ranks.

    Every rank takes the mean residual: the mean over ranks is then what it was. To be called on
    all ranks with the same state, after ``attach``.

    Raises:
        ValueError: if the module is not attached, ``state`` is not of this version's form, or a
            shape is not its parameter's. Nothing has been changed then.
    """
    model = attached_model(ddp)
    version = state.get("version")
    if version != VERSION:
        raise ValueError(f"version of the checkpoint must be {VERSION}, got {version!r}")
    missing = {"step", "grad_scale", "parameters"} - state.keys()
    if missing:
        raise ValueError(f"the checkpoint has no {', '.join(sorted(missing))}")
    parameters = []
    for name, tensors in state["parameters"].items():
        if not {"residual", "q"} <= tensors.keys():
            raise ValueError(f"the checkpoint's {name!r} must have a residual and a q")
        parameter = _C.ParameterExport()
        parameter.name, parameter.residual, parameter.q = name, tensors["residual"], tensors["q"]
        parameters.append(parameter)
    model.load_state(parameters, state["step"], state["grad_scale"])
