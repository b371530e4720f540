# SPDX-License-Identifier: BSD-3-Clause
"""The methods of averaging gradients to compare. To add one, add an entry to METHODS.

On the command line, a method has its matrix ranks, "plain hook-1-bucket:4 int8-wire:8,16". This
project's also have settings: fields of Options, DDP's bucket_cap_mb, variables of NCCL, the
arguments of local steps, or one level of sums where hosts have several processes, as in
"int8-wire+min_compression_rate=3:4", "local-sgd+sync_every=30:16" and "int8-wire+levels=1:16".
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

import torch_powersgd as tp
from cluster import local_methods
from cluster.trainees import EXACT_STEPS, Author, Make, Method, Parallel, Trainee

REFERENCES = ("none", "ddp-alone")  # methods that average nothing

_CAP, _LEVELS = "bucket_cap_mb", "levels"
_TOLD = {_CAP: "buckets of {} MB", _LEVELS: "in one level"}
_VARIABLES = ("NCCL_ALGO", "NCCL_PROTO")
_SETTINGS = (*tp.Options.__dataclass_fields__, *_TOLD, *_VARIABLES)


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


def _hooked(title: str, hook: Callable[..., Any]) -> Method:
    def make(model: nn.Module, rank: int, seed: int) -> Trainee:
        trainee = Parallel(model)
        trainee.ddp.register_comm_hook(None, hook)
        return trainee

    return Method(title, make, approximates=False)


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


def _attached(title: str, **settings: Any) -> Method:
    """This project, attached with these settings."""
    variables = {name: str(settings[name]) for name in _VARIABLES if name in settings}
    fields = {name: settings[name] for name in settings if name not in (*_TOLD, *_VARIABLES)}
    one_level = _LEVELS in settings
    if one_level and settings[_LEVELS] != 1:
        raise ValueError(f"levels can only be 1, got {settings[_LEVELS]!r}")

    def options(rank: int, seed: int) -> tp.Options:
        return _options(rank, seed, **fields)

    options(1, 0)  # refuses wrong values

    def make(model: nn.Module, rank: int, seed: int) -> Trainee:
        trainee = Parallel(model, bucket_cap_mb=settings.get(_CAP))
        trainee.compression = tp.attach(trainee.ddp, options(rank, seed))
        return trainee

    vary = functools.partial(_attached, **settings)
    return Method(
        title,
        make,
        options,
        one_level=one_level,
        variables=variables,
        settings=_SETTINGS,
        vary=vary,
    )


METHODS = {
    "none": Method(
        "no synchronization", lambda model, rank, seed: Trainee(model), approximates=False
    ),
    # DDP keeps the gradients' memory from step to step. A bare model allocates it each time.
    "ddp-alone": _hooked("DDP, averaging nothing", _average_nothing),
    "plain": Method("plain all-reduce", _parallel, approximates=False),
    "fp16": _hooked("torch's fp16 hook", default_hooks.fp16_compress_hook),
    "bf16": _hooked("torch's bf16 hook", _in_bfloat16),
    "hook": Method("torch's PowerSGD hook", _power_sgd_hooked()),
    # On Gloo, the order in which the hook issues the collectives of several buckets can differ
    # between ranks: most runs hang or abort. With one bucket there is only one order.
    "hook-1-bucket": Method(
        "torch's PowerSGD hook, one bucket", _power_sgd_hooked(bucket_cap_mb=1 << 20)
    ),
    "author": Method(
        "the author's powersgd", lambda model, rank, seed: Author(model, rank), needs="powersgd"
    ),
    **local_methods.METHODS,
    "attached": _attached("ours, float32 wire"),
    "flat": Method("ours, flat", _parallel, _options),
    "bf16-wire": _attached("ours, bf16 wire", wire_dtype=torch.bfloat16),
    "int8-wire": _attached("ours, int8 wire", wire_dtype="int8"),
    "int4-wire": _attached("ours, int4 wire", wire_dtype="int4"),
}


class Contender(NamedTuple):
    """A method at a matrix rank, which is None if nothing is approximated."""

    method: str
    rank: int | None

    @property
    def name(self) -> str:
        """The name of the contender on the command line and in a record."""
        return self.method if self.rank is None else f"{self.method}:{self.rank}"

    @property
    def title(self) -> str:
        how = self.how
        measure = how.measure if how.every else "every"
        return how.title if self.rank is None else f"{how.title}, {measure} {self.rank}"

    @property
    def how(self) -> Method:
        return find(self.method)

    def make(self, model: nn.Module, seed: int) -> Trainee:
        return self.how.make(model, self.rank or 0, seed)

    def options(self, seed: int) -> tp.Options | None:
        """The options of its group, if that is this project's."""
        return self.how.options(self.rank or 0, seed) if self.how.options else None

    @property
    def every(self) -> int:
        """The number of steps from one average to the next."""
        return self.how.every or self.rank or 1

    @property
    def learns(self) -> bool:
        """True if the method averages, so that its loss is meaningful."""
        return self.method not in REFERENCES

    @property
    def lacks(self) -> str:
        """Why it cannot run here, or an empty string."""
        needs = self.how.needs
        missing = needs and not importlib.util.find_spec(needs)
        return f"no module {needs} (see bench_all.py)" if missing else ""


def find(name: str) -> Method:
    """The method of this name: one of METHODS, or METHOD+SETTING=VALUE+SETTING=VALUE.

    Raises:
        ValueError: If there is no such method or setting, or its value is wrong.
    """
    base, *words = name.split("+")
    if base not in METHODS:
        raise ValueError(f"invalid choice: {base!r} (choose from {', '.join(METHODS)})")
    method = METHODS[base]
    settings = dict(map(_setting, words))
    if unknown := [setting for setting in settings if setting not in method.settings]:
        raise ValueError(f"{base} has no setting {unknown[0]!r}")
    if not settings or not method.vary:
        return method
    told = [
        _TOLD.get(setting, setting.replace("_", " ") + " {}").format(value)
        for setting, value in settings.items()
    ]
    return method.vary(", ".join([method.title, *told]), **settings)


def _setting(word: str) -> tuple[str, Any]:
    """Parses SETTING=VALUE. A value that is not JSON is a string, such as a dtype."""
    setting, equals, value = word.partition("=")
    if not equals:
        raise ValueError(f"expected SETTING=VALUE, got {word!r}")
    try:
        return setting, json.loads(value)
    except json.JSONDecodeError:
        return setting, value


def parse(text: str) -> list[Contender]:
    """Reads METHOD or METHOD:RANK,RANK, where a METHOD may have settings."""
    method, colon, ranks = text.rpartition(":") if ":" in text else (text, "", "")
    try:
        found = find(method)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if not found.approximates:
        if colon:
            raise argparse.ArgumentTypeError(f"{method} has no matrix rank, got {text!r}")
        return [Contender(method, None)]
    words = ranks.split(",")
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise argparse.ArgumentTypeError(f"matrix ranks are integers of at least 1, got {text!r}")
    return [Contender(method, int(word)) for word in words]


def joined(parsed: Iterable[Iterable[Contender]]) -> list[Contender]:
    """The contenders of several arguments, without duplicates."""
    return list(dict.fromkeys(each for of_argument in parsed for each in of_argument))


def named(words: str) -> list[Contender]:
    return joined(map(parse, words.split()))
