# SPDX-License-Identifier: BSD-3-Clause
"""Checkpoints of the state of an attached model: its residuals and factors."""

from __future__ import annotations

from typing import Any

from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from torch_powersgd import checksum, fsdp, loading
from torch_powersgd._core import _C
from torch_powersgd.attach import attachment_of
from torch_powersgd.loading import LOCAL_FIELDS, VERSION
from torch_powersgd.lookup import find_backends
from torch_powersgd.options import Options
from torch_powersgd.proposal import Module
from torch_powersgd.rewrapping import note_saved
from torch_powersgd.store_agreement import error_as_arguments, next_call


def state_dict(module: Module, per_rank: bool = False) -> dict[str, Any]:
    """Returns the state of an attached module: residuals and factors.

    It is collective without ``per_rank``.

    The ``residual`` of a parameter is the mean over the ranks: the part of its gradients that no
    step has sent yet. It has the parameter's shape, in units of the averaged gradient at
    ``grad_scale``.

    Args:
        module: Attached module.
        per_rank: False: the state is the same on all ranks and can be loaded on any number of
            ranks. True: the state is this rank's own. Each rank saves it and loads it again, and
            the job goes on bit for bit as if it had not been interrupted.

    Returns:
        A dictionary of ``version``, ``options`` (field: value), ``step``, ``grad_scale`` and
        ``parameters``, which has an entry for every compressed parameter: its ``residual`` and
        ``q``, which is [r, m] for a parameter seen as n x m.

        With ``per_rank`` the dictionary also has ``rank`` and ``world_size``. An entry is then this
        rank's ``memory`` [n, m] (None without error feedback), ``p_hat`` [n, r], ``q_local`` and
        ``q_warm`` [r, m], and ``grad_scale``.

        The parameters of an FSDP2 module are this rank's shards, padded as FSDP2 pads them. The
        mean is over the ranks that have the same shard. ``shard`` names it: [which, of how many].
        A complex parameter is seen as ``torch.view_as_real`` shows it, here and in its factors.

        Every entry has the checksum ``crc32`` of its content, and the dictionary has one of all
        but ``parameters``. ``load_state_dict`` compares them.

    Raises:
        ValueError: If the module is not attached.
    """
    model = attachment_of(module).model
    state: dict[str, Any] = {
        "version": VERSION,
        "options": Options._from_core(model.options)._plain(),
        "step": model.step,
        "grad_scale": model.grad_scale,
    }
    state |= _place(module, per_rank)
    if per_rank:
        state["parameters"] = {local.name: _of_local(local) for local in model.export_local()}
    else:
        state["parameters"] = {
            parameter.name: _of_mean(parameter)
            for parameter in model.export_state()
            if parameter.residual is not None
        }
    checksum.add(state)
    if isinstance(module, DistributedDataParallel):
        note_saved(module, model)
    return state


def load_state_dict(module: Module, state: dict[str, Any]) -> None:
    """Restores what ``state_dict`` returned. It is collective, and needs ``attach`` before it.

    A state without ``per_rank`` is the same on all ranks, of this or another number. Every rank
    takes the mean residual, so that the mean over the ranks is what it was. A ``q`` of another rank
    r is cut, or extended by the random start.

    Args:
        module: Attached module.
        state: Dictionary that ``state_dict`` returned.

    Raises:
        ValueError: On every rank alike and before anything changes, if the module is not attached
            or the state does not fit. A state of another form or shape does not fit, nor does one
            that is damaged or has a number that is not finite, nor do the ranks' states of
            different steps or, without ``per_rank``, of different content. A state of ``per_rank``
            fits only its own rank and number of ranks.
    """
    attachment = attachment_of(module)
    model, group = attachment.model, attachment.group
    per_rank = isinstance(state, dict) and "rank" in state
    local: list[_C.LocalExport] = []
    mean: list[_C.ParameterExport] = []
    plain: dict[str, Any] = {}
    try:
        saved = loading.read(state, _place(module, per_rank))
        if per_rank:
            local = [loading.to_local(name, entry) for name, entry in saved.parameters.items()]
        else:
            mean = [loading.to_mean(name, entry, saved) for name, entry in saved.parameters.items()]
        content = checksum.check(state)
        if per_rank:
            model.check_local(local)
        else:
            model.check_state(mean)
        plain = {
            "per_rank": per_rank,
            "step": saved.step,
            "content": 0 if per_rank else content,
        }
    except Exception as invalid:  # The other ranks wait for this rank's error, of any type.
        plain = error_as_arguments(invalid)
    timeout = find_backends(group)[0].options._timeout
    next_call(group, "load_state_dict", timeout).agree(plain, _compare)
    if per_rank:
        model.load_local(local, saved.step)
    else:
        model.load_state(mean, saved.step, saved.grad_scale)


class CompressionState:
    """``state_dict`` and ``load_state_dict`` of an attached module as an object.

    Libraries that save objects take it: torch's ``Stateful`` protocol, as in
    ``dcp.save({"powersgd": CompressionState(ddp)})``, and Accelerate's
    ``register_for_checkpointing``. Both methods are collective.

    Args:
        module: Attached module.
        per_rank: Meaning as in ``state_dict``, for libraries that save an object of each rank.
    """

    def __init__(self, module: Module, per_rank: bool = False) -> None:
        self.module = module
        self.per_rank = per_rank

    def state_dict(self) -> dict[str, Any]:
        """Returns the module's state, as the function ``state_dict`` does."""
        return state_dict(self.module, self.per_rank)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the module's state, as the function ``load_state_dict`` does."""
        load_state_dict(self.module, state_dict)


def _place(module: Module, per_rank: bool) -> dict[str, Any]:
    """Returns the shard of an FSDP2 module and, with ``per_rank``, the rank of a state."""
    place: dict[str, Any] = {}
    if isinstance(module, FSDPModule):
        place["shard"] = fsdp.shard_place(module)
    if per_rank:
        group = attachment_of(module).group
        place |= {"rank": group.rank(), "world_size": group.size()}
    return place


def _compare(everyone: list[dict[str, Any]]) -> str:
    """Returns nothing if the ranks load the same, else the message of the error."""
    first = everyone[0]
    for rank, mine in enumerate(everyone):
        if (mine["step"], mine["per_rank"]) != (first["step"], first["per_rank"]):
            return (
                f"the checkpoints must be of one step and kind, got step {first['step']} on rank 0 "
                f"and {mine['step']} on rank {rank}, per_rank {first['per_rank']} and "
                f"{mine['per_rank']}"
            )
        if mine["content"] != first["content"]:
            return (
                f"a checkpoint made without per_rank must be the same on all ranks: that of rank "
                f"{rank} differs from rank 0's"
            )
    return ""


def _of_mean(parameter: _C.ParameterExport) -> dict[str, Any]:
    return {"residual": parameter.residual, "q": parameter.q}


def _of_local(local: _C.LocalExport) -> dict[str, Any]:
    return {field: getattr(local, field) for field in LOCAL_FIELDS}
