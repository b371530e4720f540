# SPDX-License-Identifier: BSD-3-Clause
"""The methods of averaging gradients to compare. To add one, add an entry to METHODS.

find() also knows this project's methods with other options, "int8-wire+min_compression_rate=3",
DDP's bucket_cap_mb, or NCCL's variables, "attached+NCCL_PROTO=LL", and its local steps with other
arguments, "local-sgd+sync_every=30".
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

import torch_powersgd as tp
from cluster import local_methods
from cluster.trainees import (
    EXACT_STEPS,
    PLAIN,
    POWERSGD,
    Make,
    Method,
    Parallel,
    Trainee,
    refusal,
)

_CAP = "bucket_cap_mb"  # DDP's


class Author(Trainee):
    """github.com/epfml/powersgd, which averages after backward and keeps its residual in .grad."""

    def __init__(self, model: nn.Module, rank: int) -> None:
        import powersgd

        super().__init__(model)
        self.parameters = list(model.parameters())
        config = powersgd.Config(rank=rank, start_compressing_after_num_steps=EXACT_STEPS)
        self.aggregator = powersgd.PowerSGD(self.parameters, config)

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        residuals = [parameter.grad for parameter in self.parameters]
        averages = self.aggregator.aggregate(residuals)
        for parameter, average in zip(self.parameters, averages, strict=True):
            parameter.grad = average
        yield
        for parameter, residual in zip(self.parameters, residuals, strict=True):
            parameter.grad = residual

    def clear(self) -> None:
        """Keeps the residual in .grad, where backward adds the next gradient to it."""


def _parallel(model: nn.Module, rank: int, seed: int) -> Trainee:
    return Parallel(model)


def _average_nothing(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def _in_bfloat16(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """torch's hook under another name. DDP refuses it on CPUs by name, though Gloo can sum bf16."""
    return default_hooks.bf16_compress_hook(state, bucket)


for _hook in (_average_nothing, _in_bfloat16):
    _hook.__annotations__.clear()  # DDP compares them with types; these are strings


def _hooked(hook: Callable[..., Any]) -> Make:
    def make(model: nn.Module, rank: int, seed: int) -> Trainee:
        trainee = Parallel(model)
        trainee.ddp.register_comm_hook(None, hook)
        return trainee

    return make


def _power_sgd_hooked(**ddp: Any) -> Make:
    def make(model: nn.Module, rank: int, seed: int) -> Trainee:
        trainee = Parallel(model, **ddp)
        state = powerSGD_hook.PowerSGDState(
            None,
            matrix_approximation_rank=rank,
            start_powerSGD_iter=EXACT_STEPS,
            random_seed=seed,
        )
        trainee.ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        trainee.hook_state = state
        return trainee

    return make


def _options(rank: int, seed: int, **fields: Any) -> tp.Options:
    chosen = {"start_powerSGD_iter": EXACT_STEPS, "random_seed": seed, **fields}
    return tp.Options.hook_defaults(matrix_approximation_rank=rank, **chosen)


def _attached(title: str, bucket_cap_mb: int | None = None, **fields: Any) -> Method:
    """This project, attached with these options. It is unavailable if they are not allowed."""
    variables = {name: str(fields.pop(name)) for name in list(fields) if _is_variable(name)}

    def make(model: nn.Module, rank: int, seed: int) -> Trainee:
        trainee = Parallel(model, bucket_cap_mb=bucket_cap_mb)
        trainee.compression = tp.attach(trainee.ddp, _options(rank, seed, **fields))
        return trainee

    def options(rank: int, seed: int) -> tp.Options:
        return _options(rank, seed, **fields)

    return Method(
        title,
        POWERSGD,
        make,
        options,
        lambda: refusal(options),
        attached=True,
        fields=fields,
        variables=variables,
    )


def _is_variable(name: str) -> bool:
    """True for a variable of the environment that NCCL reads."""
    return name.startswith("NCCL_")


def _author_lacks() -> str:
    if importlib.util.find_spec("powersgd"):
        return ""
    # Its setup.cfg looks for packages in a folder that does not exist.
    return (
        "no module powersgd; what pip installs under that name is empty: clone "
        "https://github.com/epfml/powersgd and put the clone on PYTHONPATH"
    )


def _demo(model: nn.Module, top: int, seed: int) -> Trainee:
    """DeMo, an optimizer that does its own averaging. It replaces the task's optimizer.

    The trainer sets its learning rate.
    """
    from DeMo.demo import DeMo

    trainee = _hooked(_average_nothing)(model, top, seed)
    trainee.optimizer = DeMo(model.parameters(), compression_topk=top)
    return trainee


def _demo_lacks() -> str:
    if importlib.util.find_spec("DeMo") and importlib.util.find_spec("DeMo.demo"):
        return ""
    return (
        "no module DeMo.demo, which is not on PyPI: clone "
        "https://github.com/bloc97/DeMo and put the folder that holds the clone on PYTHONPATH"
    )


METHODS = {
    "none": Method(
        "no synchronization", PLAIN, lambda model, rank, seed: Trainee(model), approximates=False
    ),
    # DDP keeps the gradients' memory from step to step. A bare model allocates it each time.
    "ddp-alone": Method(
        "DDP, averaging nothing", PLAIN, _hooked(_average_nothing), approximates=False
    ),
    "plain": Method("plain all-reduce", PLAIN, _parallel, approximates=False),
    "fp16": Method(
        "torch's fp16 hook",
        PLAIN,
        _hooked(default_hooks.fp16_compress_hook),
        approximates=False,
    ),
    "bf16": Method(
        "torch's bf16 hook",
        PLAIN,
        _hooked(_in_bfloat16),
        approximates=False,
    ),
    "hook": Method("torch's PowerSGD hook", PLAIN, _power_sgd_hooked()),
    # On Gloo, the order in which the hook issues the collectives of several buckets can differ
    # between ranks: most runs hang or abort. With one bucket there is only one order.
    "hook-1-bucket": Method(
        "torch's PowerSGD hook, one bucket",
        PLAIN,
        _power_sgd_hooked(bucket_cap_mb=1 << 20),
    ),
    "author": Method(
        "the author's powersgd",
        PLAIN,
        lambda model, rank, seed: Author(model, rank),
        lacks=_author_lacks,
    ),
    **local_methods.METHODS,
    "demo": Method("DeMo", PLAIN, _demo, lacks=_demo_lacks, measure="top"),
    "attached": _attached("ours, float32 wire"),
    "flat": Method("ours, flat", POWERSGD, _parallel, _options),
    "bf16-wire": _attached("ours, bf16 wire", wire_dtype=torch.bfloat16),
    "int8-wire": _attached("ours, int8 wire", wire_dtype="int8"),
    "int4-wire": _attached("ours, int4 wire", wire_dtype="int4"),
}


def find(name: str) -> Method:
    """The method of this name: one of METHODS, or METHOD+OPTION=VALUE+OPTION=VALUE.

    Raises:
        ValueError: If there is no such method, or it has no options, or an option has no value.
    """
    base, *settings = name.split("+")
    if base not in METHODS:
        raise ValueError(f"invalid choice: {base!r} (choose from {', '.join(METHODS)})")
    method = METHODS[base]
    if not settings:
        return method
    fields = dict(map(_option, settings))
    if base in local_methods.TAKE_SETTINGS:
        return local_methods.with_settings(base, fields)
    if not method.attached:
        raise ValueError(f"{base} has no options, got {name!r}")
    allowed = (*tp.Options.__dataclass_fields__, _CAP)
    if unknown := [name for name in fields if name not in allowed and not _is_variable(name)]:
        raise ValueError(f"expected a field of Options or {_CAP}, got {unknown[0]!r}")
    titles = [
        f"buckets of {value} MB" if option == _CAP else f"{option.replace('_', ' ')} {value}"
        for option, value in fields.items()
    ]
    return _attached(", ".join([method.title, *titles]), **{**method.fields, **fields})


def _option(setting: str) -> tuple[str, Any]:
    """Parses OPTION=VALUE. A value that is not JSON is a string, such as a dtype."""
    option, equals, value = setting.partition("=")
    if not equals:
        raise ValueError(f"expected OPTION=VALUE, got {setting!r}")
    try:
        return option, json.loads(value)
    except json.JSONDecodeError:
        return option, value
