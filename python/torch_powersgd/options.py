# SPDX-License-Identifier: BSD-3-Clause
"""The options of a process group or a model, and where they come from."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib.metadata
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from torch_powersgd import hosts, log
from torch_powersgd._core import _C
from torch_powersgd.option_values import cut, dtype_name, must_be, parse, require, shown, typed

if TYPE_CHECKING:
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState


_PREFIX = "POWERSGD_"
# setup.py, the benchmarks and hosts.py read these.
_OTHER_VARIABLES = (f"{_PREFIX}BUILD_CUDA", f"{_PREFIX}COMMIT", hosts.VARIABLE)


@dataclass(frozen=True)
class Options:
    """The configuration of a process group or of an attached model.

    The first eight fields have the names and meanings of torch's
    ``torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook.PowerSGDState``. The defaults are a
    good start for most jobs: matrix rank 16 with factors in int8, after 10 exact steps.
    docs/convergence.md has the losses and bytes of this and other settings. ``hook_defaults``
    returns the defaults of torch's hook.

    Args:
        matrix_approximation_rank: Matrix rank r of the factors of each weight, from 1 to 1024. A
            higher rank approximates better and sends more. On CUDA, the stages take several times
            longer above 32.
        start_powerSGD_iter: Number of steps that are averaged exactly before compression starts.
        min_compression_rate: Minimum gain at which a weight is compressed. An n x m weight is
            compressed only if (n + m) * r * min_compression_rate < n * m.
        use_error_feedback: Whether to add what a step doesn't send to the next step's gradient.
        warm_start: Whether each step starts from the Q of the last one, instead of a random Q.
        orthogonalization_epsilon: Relative size below which a column of P counts as zero: its
            squared norm outside the span of the columns before it, over the sum of all squared
            norms. Values below 2**-46 act as 2**-46.
        random_seed: Seed of the random start. torch's own generators are not used.
        compression_stats_logging_frequency: Number of steps between two summaries in the log.
        scope: Which tensors may be compressed. ``"backward"``: attached models and, in a group
            where nothing was ever attached, large flat tensors that are reduced during a backward
            pass. ``"attached"``: attached models only. ``"never"``: nothing.
        min_numel: Minimum number of elements of a flat tensor that ``"backward"`` compresses.
        inner: Name of the backend to wrap: ``"gloo"``, ``"nccl"``, or one that was registered with
            torch before. ``"auto"``: gloo for CPUs, nccl for CUDA.
        wire_dtype: Data type in which factors are sent: ``"int8"``, ``"int4"`` or
            ``torch.bfloat16``. The quantization error goes to the residual. None: float32.
            Gradients that aren't compressed, such as all in float64, are never rounded.
        residual_dtype: Data type of the residual: ``torch.float32`` or ``torch.bfloat16``.
        check_every: Number of steps between two checks that the factors are equal on all processes.
            If they differ, a warning names the parameter and the ranks, all processes take rank
            0's factors, and ``Compression.stats()["differences"]`` counts it. 0: never check.
        allow_discard: Whether ``Compression.discard_step`` may be called. Each step then keeps a
            copy of its residuals and factors, which doubles their memory.
        matrix_ranks: Matrix ranks of single parameters, by name or by a pattern with stars:
            ``{"*.embedding.weight": 0, "blocks.*.mlp.*": 32}``. 0: averaged exactly. Of several
            that fit a name, the first counts. ``min_compression_rate`` applies to them as well.

    Raises:
        ValueError: If a value is not allowed, alone or in combination with others. The message
            names the field, the value and what is allowed.
    """

    matrix_approximation_rank: int = 16
    start_powerSGD_iter: int = 10
    min_compression_rate: float = 2
    use_error_feedback: bool = True
    warm_start: bool = True
    orthogonalization_epsilon: float = 0
    random_seed: int = 0
    compression_stats_logging_frequency: int = 10_000
    scope: str = "backward"
    min_numel: int = 1 << 17
    inner: str = "auto"
    wire_dtype: torch.dtype | str | None = "int8"
    residual_dtype: torch.dtype | str = torch.float32
    check_every: int = 0
    allow_discard: bool = False
    matrix_ranks: Mapping[str, int] | tuple[tuple[str, int], ...] = ()

    # torch's DeviceMesh reads a group's timeout from its options. None is the default.
    @property
    def _timeout(self) -> None:
        return None

    def __new__(cls, *values: Any, **fields: Any) -> Options:
        for name in fields:
            if name not in _NAMES:
                raise TypeError(f"Options: {_no_option(name)}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name, type_name in _types():
            object.__setattr__(self, name, typed(name, type_name, getattr(self, name)))
        to_core(self).validate()
        _check_inner(self.inner)

    @classmethod
    def hook_defaults(cls, **fields: Any) -> Options:
        """Returns the defaults of torch's powerSGD_hook: rank 1 in float32, after 1000 exact steps.

        Args:
            fields: Fields that differ from those defaults.
        """
        torchs = {
            "matrix_approximation_rank": 1,
            "wire_dtype": None,
            "start_powerSGD_iter": 1000,
        }
        return cls(**{**torchs, **fields})

    @classmethod
    def from_hook_state(cls, state: PowerSGDState, **fields: Any) -> Options:
        """Returns the options that match the state of torch's powerSGD_hook, in float32.

        Args:
            state: State of the hook. Its random seed can't be read and is not copied.
            fields: Fields that differ from the state's.

        Raises:
            ValueError: If ``state`` is not the state of such a hook, or a value is not allowed.
        """
        require(hasattr(state, _NAMES[0]), "state", "a PowerSGDState", type(state))
        shared = {name: getattr(state, name) for name in _NAMES if hasattr(state, name)}
        return cls.hook_defaults(**{**shared, **fields})


def _types() -> list[tuple[str, str]]:
    """Returns the name and the type of each field, as written in the class above."""
    return [(field.name, str(field.type)) for field in dataclasses.fields(Options)]


_NAMES = [name for name, _ in _types()]


def check_matrix_ranks(options: Options, names: Collection[str]) -> None:
    """Raises a ValueError if a pattern of ``matrix_ranks`` fits none of the parameters."""
    for pattern, _ in _own_ranks(options):
        if not any(_C.name_fits(pattern, name) for name in names):
            raise ValueError(
                f"matrix_ranks: no trainable parameter has the name {shown(pattern)}."
                f"{_similar(pattern.replace('*', ''), [*names])} The first are called "
                f"{', '.join([*names][:3])}"
            )


def rank_text(options: Options) -> str:
    """Returns the matrix rank, and those of single parameters: "16 (0 for *.head)"."""
    others = ", ".join(f"{rank} for {pattern}" for pattern, rank in _own_ranks(options))
    return f"{options.matrix_approximation_rank}" + (f" ({others})" if others else "")


def _own_ranks(options: Options) -> tuple[tuple[str, int], ...]:
    assert isinstance(options.matrix_ranks, tuple)
    return options.matrix_ranks


def to_core(options: Options) -> _C.Options:
    """Returns the same options as a value of the C++ core."""
    core = _C.Options()
    for name, value in to_plain(options).items():
        try:
            setattr(core, name, value)
        except TypeError:  # The value is out of the C++ type's range.
            raise must_be(name, "a 64-bit integer", value) from None
        except ValueError as error:  # The value names no scope or dtype.
            _, _, allowed = cut(str(error)).partition(" must be ")
            raise ValueError(f"{name} must be {allowed}") from None
    return core


def from_core(core: _C.Options) -> Options:
    """Returns the options that a value of the C++ core holds."""
    return Options(**{name: getattr(core, name) for name in _NAMES})


def to_plain(options: Options) -> dict[str, Any]:
    """Returns the fields as JSON types, for messages and checkpoints."""
    plain = dataclasses.asdict(options)
    for name, value in plain.items():
        if isinstance(value, torch.dtype):
            plain[name] = dtype_name(value)
        elif isinstance(value, tuple):
            plain[name] = [list(pair) for pair in value]
    return plain


_configured: Options | None = None


def configure(options: Options | None) -> None:
    """Sets the options of the process groups that this process creates from now on.

    They take precedence over the ``POWERSGD_*`` environment variables. A group's ``pg_options``
    take precedence over them.

    Args:
        options: Options of all later groups. None restores those of the environment.

    Raises:
        ValueError: If ``options`` is neither ``Options`` nor None.
    """
    global _configured
    fits = isinstance(options, Options | None)
    require(fits, "options of configure", "torch_powersgd.Options or None", options)
    _configured = options


def resolve(pg_options: object) -> Options:
    """Returns the options of a process group.

    The sources, in the order of precedence, are ``pg_options``, ``configure``, the POWERSGD_*
    variables and the defaults. A complete ``Options`` hides all later sources. A mapping replaces
    single fields of them.

    Args:
        pg_options: Options, a mapping of some of its fields, or None.
    """
    _warn_of_unknown_variables()
    if isinstance(pg_options, Options):
        return pg_options
    base = _configured if _configured is not None else from_environment()
    return lay_over(base, pg_options, "pg_options")


def lay_over(base: Options, given: object, source: str) -> Options:
    """Returns ``base`` with the fields of a mapping set, or ``given`` if it is a complete Options.

    Args:
        base: Options of the later sources.
        given: Options, a mapping of some of its fields, or None.
        source: Name of the origin of ``given`` in errors.

    Raises:
        ValueError: If ``given`` is not valid. The message names the source, the field, the value
            and what is allowed.
    """
    if given is None:
        return base
    if isinstance(given, Options):
        return given
    if not isinstance(given, Mapping):
        wanted = "torch_powersgd.Options or a mapping such as {'matrix_approximation_rank': 8}"
        raise must_be(source, wanted, type(given))
    for name in given:
        if name not in _NAMES:
            raise ValueError(f"{source}: {_no_option(name)}")
    try:
        return dataclasses.replace(base, **given)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None


def with_fields(options: Any, fields: Mapping[str, Any]) -> Any:
    """Returns the options of a call that gives some of their fields as keywords, unchecked."""
    if not fields or not isinstance(options, Options | Mapping | None):
        return options
    if isinstance(options, Options):
        options = {name: getattr(options, name) for name in _NAMES}
    return {**(options or {}), **fields}


def from_environment() -> Options:
    """Returns the options that the POWERSGD_* variables set, with the defaults for the rest.

    Raises:
        ValueError: If a variable's value is not allowed. The message names both.
    """
    options = Options()
    for name, type_name in _types():
        variable = _variable(name)
        text = os.environ.get(variable)
        if text is None:
            continue
        value = parse(variable, type_name, text)
        try:
            options = dataclasses.replace(options, **{name: value})
        except ValueError as error:
            raise ValueError(f"environment variable {variable}: {error}") from None
    return options


def _no_option(name: object) -> str:
    return f"{shown(name)} is not an option.{_similar(name, _NAMES)} Allowed: {', '.join(_NAMES)}"


def _variable(name: str) -> str:
    return f"{_PREFIX}{name.upper()}"


@functools.cache  # It warns once per process.
def _warn_of_unknown_variables() -> None:
    """Warns, in one process per machine, of variables that look like options but aren't."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        for message in unknown_variables():
            log.warning(message)


def unknown_variables() -> list[str]:
    """A message for each environment variable that looks like an option but isn't one."""
    known = {*map(_variable, _NAMES), *_OTHER_VARIABLES}
    unknown = [v for v in sorted(os.environ) if v.startswith(_PREFIX) and v not in known]
    return [_no_effect(variable, sorted(known)) for variable in unknown]


def _no_effect(variable: str, known: Sequence[str]) -> str:
    return f"{variable} is not an option and has no effect.{_similar(variable, known)}"


def _similar(name: object, known: Sequence[str]) -> str:
    """Returns " Did you mean ...?", or nothing."""
    if not isinstance(name, str) or not name:
        return ""
    # Names that contain the given words come before names with a similar spelling.
    words = name.removeprefix(_PREFIX)
    similar = [k for k in known if words in k] or difflib.get_close_matches(name, known, 1)
    return f" Did you mean {similar[0]}?" if similar else ""


def _check_inner(inner: str) -> None:
    """Raises a ValueError unless this package can make the backend or torch has a plugin for it."""
    allowed = {"auto", "gloo", "nccl", *(name.lower() for name in dist.Backend._plugins)}
    if inner not in allowed - {"powersgd"}:
        plugins = importlib.metadata.entry_points(group="torch.distributed.backends")
        # torch 2.14 also lists its own backends there, even those that its build lacks.
        allowed |= {p.name for p in plugins if p.dist is None or p.dist.name != "torch"}
    allowed -= {"powersgd"}
    require(inner in allowed, "inner", f"one of {', '.join(map(repr, sorted(allowed)))}", inner)
