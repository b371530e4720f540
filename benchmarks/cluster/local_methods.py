# SPDX-License-Identifier: BSD-3-Clause
"""Methods that take local steps: this project's, torch's, and torchft's DiLoCo."""

from __future__ import annotations

import functools
import socket
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer

import torch_powersgd as tp
from cluster.sparse_loco import SparseLoCo
from cluster.trainees import EXACT_STEPS, Method, Parallel, Trainee

# Arguments of LocalSGD, and of the outer SGD that makes it DiLoCo.
_SCHEDULE: dict[str, Any] = {
    "sync_every": 10,
    "fragments": 1,
    "fragment_sync_delay": 0,
    "warmup_steps": EXACT_STEPS,
    "density": None,
}
_OUTER = ("lr", "momentum")
_FIELDS = tuple(tp.Options.__dataclass_fields__)


class Local(Trainee):
    """A model trained with local steps, from when its optimizer is known."""

    def __init__(
        self, model: nn.Module, begin: Callable[[nn.Module, torch.optim.Optimizer], Any]
    ) -> None:
        super().__init__(model)
        self._begin = begin
        self._steps: Any = None

    def optimized_by(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        self._steps = self._begin(self.model, optimizer)
        return optimizer

    def end(self) -> None:
        self._steps.sync(exact=True)


def _outer(parameters: Iterable[nn.Parameter], lr: float, momentum: float) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr, momentum, nesterov=momentum > 0)


def _local(title: str, **settings: Any) -> Method:
    """This project's local steps. ``settings``: its arguments, the outer SGD's, and Options."""
    schedule = {name: settings.get(name, value) for name, value in _SCHEDULE.items()}
    outer = {name: settings[name] for name in _OUTER if name in settings}
    fields = {n: v for n, v in settings.items() if n not in _SCHEDULE and n not in _OUTER}

    def options(rank: int, seed: int) -> tp.Options:
        chosen = {"start_powerSGD_iter": schedule["warmup_steps"], "random_seed": seed, **fields}
        return tp.Options(matrix_approximation_rank=max(rank, 1), **chosen)  # 0: a density

    options(1, 0)  # refuses wrong values

    def make(model: nn.Module, rank: int, seed: int) -> Trainee:
        def begin(module: nn.Module, optimizer: torch.optim.Optimizer) -> tp.LocalSGD:
            if not outer:
                return tp.LocalSGD(module, optimizer, options=options(rank, seed), **schedule)
            by = _outer(module.parameters(), **{"momentum": 0.0, **outer})
            return tp.DiLoCo(module, optimizer, by, options=options(rank, seed), **schedule)

        return Local(model, begin)

    return Method(
        title,
        make,
        options,
        approximates=schedule["density"] is None,
        every=schedule["sync_every"],
        settings=(*_SCHEDULE, *_OUTER, *_FIELDS),
        vary=functools.partial(_local, **settings),
    )


class _PostLocal(Parallel):
    """torch's post-local SGD: averages gradients at first, and parameters later."""

    def __init__(self, model: nn.Module, every: int) -> None:
        super().__init__(model)
        alone = [dist.new_group([member]) for member in range(dist.get_world_size())]
        state = PostLocalSGDState(None, alone[dist.get_rank()], EXACT_STEPS, False)
        self.ddp.register_comm_hook(state, post_localSGD_hook)
        self._averager = PeriodicModelAverager(every, EXACT_STEPS)

    def optimized_by(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        return PostLocalSGDOptimizer(optimizer, self._averager)

    def end(self) -> None:
        self._averager.period = 1
        self._averager.average_parameters(self.model.parameters())


class _Torchft(Trainee):
    """torchft's DiLoCo, without warm-up. With options, this project compresses what it averages."""

    def __init__(
        self, model: nn.Module, every: int, lr: float, momentum: float, **options: Any
    ) -> None:
        super().__init__(model)
        self._every, self._lr, self._momentum, self._options = every, lr, momentum, options

    def optimized_by(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        from torchft.coordination import LighthouseServer
        from torchft.local_sgd import DiLoCo
        from torchft.manager import Manager
        from torchft.process_group import ProcessGroupGloo

        from torch_powersgd.integrations.torchft import ProcessGroupPowerSGD

        rank, world = dist.get_rank(), dist.get_world_size()
        address = [""]
        if rank == 0:
            self._lighthouse = LighthouseServer(bind="0.0.0.0:0", min_replicas=world)
            port = self._lighthouse.address().rpartition(":")[2]
            address[0] = f"http://{_own_address()}:{port}"
        dist.broadcast_object_list(address)
        self._store = dist.TCPStore(_own_address(), 0, is_master=True, wait_for_workers=False)
        limit = timedelta(seconds=120)
        options = {"start_powerSGD_iter": 1, **self._options}  # a round of ten steps
        density = options.pop("density", None)
        ours = ProcessGroupPowerSGD(limit, options) if self._options else None
        self._manager = Manager(
            pg=ours or ProcessGroupGloo(timeout=limit),
            load_state_dict=lambda state: None,
            state_dict=dict,
            min_replica_size=world,
            use_async_quorum=False,
            timeout=limit,
            quorum_timeout=limit,
            rank=0,
            world_size=1,
            store_addr=_own_address(),
            hostname=_own_address(),
            store_port=self._store.port,
            lighthouse_addr=address[0],
            replica_id=f"replica {rank}",
            init_sync=False,
        )
        by = _outer(self.model.parameters(), self._lr, self._momentum)
        self._steps = DiLoCo(self._manager, [self.model], optimizer, by, self._every)
        if ours:
            ours.attach_diloco(self._steps, self._manager, density)
        self._steps.__enter__()
        return optimizer

    def end(self) -> None:
        self._manager.shutdown()


def _own_address() -> str:
    """The address at which other hosts reach this one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("10.77.0.254", 9))  # sends nothing
        except OSError:  # no emulated hosts, and no other network
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def _torchft(title: str, **settings: Any) -> Method:
    compressed = any(name not in _OUTER for name in settings)
    return Method(
        title.replace("exact", "compressed") if compressed else title,
        lambda model, every, seed: _Torchft(model, every, **settings),
        every=None,
        needs="torchft",
        settings=(*_OUTER, *_FIELDS, "density"),
        vary=functools.partial(_torchft, **settings),
    )


def _sparse_loco(title: str, **settings: Any) -> Method:
    return Method(
        title,
        lambda model, kept, seed: SparseLoCo(model, kept, **settings),
        every=settings.get("sync_every", 10),
        measure="top",
        settings=("sync_every",),
        vary=_sparse_loco,
    )


METHODS = {
    "local-sgd": _local("ours, LocalSGD"),
    "diloco": _local("ours, DiLoCo", lr=0.8, momentum=0.3, fragments=5),
    "sparse": _local("ours, DiLoCo, sparse", lr=0.8, momentum=0.3, fragments=5, density=1 / 16),
    "sparse-loco": _sparse_loco("SparseLoCo, of 4096"),
    "torchft": _torchft("torchft's DiLoCo, exact", lr=0.7, momentum=0.9),  # DiLoCo's
    "post-local-sgd": Method(
        "torch's PostLocalSGDOptimizer",
        lambda model, every, seed: _PostLocal(model, every),
        every=None,
    ),
}
