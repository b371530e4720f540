# SPDX-License-Identifier: BSD-3-Clause
"""Keeps DDP from averaging gradients and buffers while local steps run.

``require_backward_grad_sync`` isn't enough, because training loops and libraries set it in each
step, and some of them call ``prepare_for_backward`` themselves. All of them go through
``ddp.reducer``.
"""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from torch_powersgd import log
from torch_powersgd.targets.ddp import in_local_steps


class IdleReducer:
    """Takes the place of DDP's reducer, and does nothing where that would begin an average.

    DDP's reducer then sees all backward passes as passes within ``no_sync``. What else it is asked
    for, it does.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self.reducer = ddp.reducer
        # Whether a static graph has had its first averaged pass. None: the graph isn't static.
        self.first_pass = getattr(ddp, "_static_graph_delay_allreduce_enqueued", None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.reducer, name)

    def _nothing(self, *_: object) -> None:
        pass

    prepare_for_forward = prepare_for_backward = _nothing
    _rebuild_buckets = _delay_all_reduce = _nothing

    def _set_forward_pass_work_handle(self, *_: object) -> None:
        raise ValueError(
            "ddp.join() does not work with local steps: leave it out, and call step_skipped() for "
            "each step that this process does not take but others do"
        )


def stop(ddp: DistributedDataParallel) -> None:
    """Makes DDP average nothing until ``go_on``. A copy of the module is not affected."""
    if not isinstance(ddp.reducer, IdleReducer):
        ddp.reducer = IdleReducer(ddp)  # type: ignore[assignment]
    ddp.modules_buffers = []  # what the forward pass broadcasts
    in_local_steps.add(ddp)


def go_on(ddp: DistributedDataParallel) -> None:
    """Makes DDP average again."""
    idle = ddp.reducer
    if isinstance(idle, IdleReducer):
        ddp.reducer = idle.reducer
        if idle.first_pass is False:
            _renew_reducer(ddp)
    ddp._assign_modules_buffers()
    in_local_steps.discard(ddp)


def _renew_reducer(ddp: DistributedDataParallel) -> None:
    """Gives DDP a new reducer, as loading a pickled module does.

    The reducer of a static graph has taken its first backward pass, which it learns the graph from,
    for one that is averaged.
    """
    ddp.reducer._remove_autograd_hooks()
    parameters, sparse = ddp._build_params_for_reducer()
    names = ddp._build_debug_param_to_name_mapping(parameters)
    ddp._ddp_init_helper(parameters, sparse, names, static_graph=True)
    assert ddp.logger is not None
    ddp.reducer._set_static_graph()
    ddp.logger._set_static_graph()
    ddp._static_graph_delay_allreduce_enqueued = False


def check(ddp: DistributedDataParallel) -> None:
    """Raises a ValueError if DDP would average gradients without its reducer."""
    for found, what, instead in (
        (ddp.mixed_precision is not None, "DDP's mixed_precision", "use torch.autocast"),
        (
            getattr(ddp, "_use_python_reducer", False),
            "torch._dynamo.config.optimize_ddp='python_reducer'",
            "use True, the default",
        ),
        (
            getattr(ddp, "_delay_all_reduce_params", []),
            "DDP's delay_all_reduce_named_params",
            "leave it out",
        ),
    ):
        if found:
            raise ValueError(
                f"local steps do not work with {what}, which averages gradients in every step: "
                f"{instead}"
            )


def wrappers_of(
    parameters: Collection[torch.Tensor], group: dist.ProcessGroup
) -> list[DistributedDataParallel]:
    """Returns what averages the gradients of parameters over the group.

    A module doesn't know its wrapper, so this looks at all objects. A wrapper with a hook, such as
    torch's post_localSGD_hook, averages what the hook says.
    """
    kinds = {DistributedDataParallel, *_subclasses_of(DistributedDataParallel)}
    found = []
    for ddp in [thing for thing in gc.get_objects() if type(thing) in kinds]:
        if ddp.__dict__.get("_comm_hooks", True) or not same_processes(ddp.process_group, group):
            continue
        trained = {p: name for name, p in ddp.module.named_parameters() if p.requires_grad}
        others = [name for p, name in trained.items() if p not in parameters]
        if len(others) == len(trained):
            continue
        if not others:
            found.append(ddp)
        else:
            log.of(group).warning(
                f"DDP averages all gradients in every step, because {others[0]!r} and others of "
                "its parameters take no local steps: pass the DDP module itself as model"
            )
    return found


def _subclasses_of(kind: type[Any]) -> Iterator[type[Any]]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from _subclasses_of(subclass)


def same_processes(one: dist.ProcessGroup | None, other: dist.ProcessGroup) -> bool:
    known = known_ranks()
    return one is other or (one in known and known[one] == known.get(other))


def known_ranks() -> dict[Any, dict[int, int]]:
    """The global ranks of the groups that torch knows."""
    return dist.distributed_c10d._world.pg_group_ranks
