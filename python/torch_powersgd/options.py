# SPDX-License-Identifier: BSD-3-Clause
"""The options of a process group or a model, and the places that they come from."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from torch_powersgd._core import _C

if TYPE_CHECKING:
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

_DTYPES = {name: getattr(torch, name) for name in ("float32", "float64", "bfloat16", "float16")}


@dataclass(frozen=True)
class Options:
    """The configuration of one process group or one attached model.

    The first eight fields have the names, meanings and defaults of
    ``torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook.PowerSGDState``.

    Args:
        matrix_approximation_rank: Rank r of the factors that are sent for each weight, 1 to 1024. A
            higher rank sends more and approximates better.
        start_powerSGD_iter: Number of steps that are averaged exactly before compression starts.
        min_compression_rate: Least gain for which a weight is compressed. An n x m weight is
            compressed only if (n + m) * r * min_compression_rate < n * m.
        use_error_feedback: Whether the part of a gradient that a step does not send is added to the
            next step's gradient.
        warm_start: Whether a step starts from the last step's Q. Otherwise it starts from a random
            Q.
        orthogonalization_epsilon: Relative size at which a column counts as zero: its squared norm
            outside of the columns before it, over the sum of all squared norms. The least value in
            effect is 2**-46.
        random_seed: Seed of the random start. torch's own generators are not touched.
        compression_stats_logging_frequency: Number of steps between two summaries in the log.
        scope: Tensors that may be compressed. ``"backward"``: attached models, and large flat
            tensors that are reduced during a backward pass. ``"attached"``: attached models alone.
            ``"always"``: every eligible tensor. ``"never"``: nothing.
        min_numel: Least number of elements of a flat tensor that ``"backward"`` compresses.
        inner: Name of the backend to wrap. ``"auto"``: gloo on a CPU, nccl on CUDA.
        wire_dtype: Data type of the payloads: float32, bfloat16 or float16. The residual keeps the
            part that a rank rounds off, but not the rounding of the sum. None: float32, or float64
            for float64 gradients.
        residual_dtype: Data type of the residual: float32, bfloat16 or float16. Residuals of
            float64 gradients are always float64. A value beyond the type's largest is cut off.
            ``stats()["saturated_steps"]`` counts the steps in which that happens in float16.
        alternating: Whether P and Q are sent in turns, one in each step. A step then sends half of
            the bytes in one collective, and the approximation is slower. It needs ``warm_start``.
            Tensors without a name are compressed in the plain mode.
        check_every: Number of steps between two comparisons of the factors, which are equal on all
            ranks. Where they differ, a warning names the parameter and the ranks, all ranks take
            rank 0's, and ``stats()["differences"]`` counts it. 0: no comparison.

    Raises:
        ValueError: If a value is not allowed. The message names the field, the value and what is
            allowed.
    """

    matrix_approximation_rank: int = 1
    start_powerSGD_iter: int = 1000
    min_compression_rate: float = 2
    use_error_feedback: bool = True
    warm_start: bool = True
    orthogonalization_epsilon: float = 0
    random_seed: int = 0
    compression_stats_logging_frequency: int = 10_000
    scope: str = "backward"
    min_numel: int = 1 << 17
    inner: str = "auto"
    wire_dtype: torch.dtype | None = None
    residual_dtype: torch.dtype = torch.float32
    alternating: bool = False
    check_every: int = 0

    # torch's DeviceMesh reads the time-out of a group from its options; None: the default.
    @property
    def _timeout(self) -> None:
        return None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = _typed(field.name, str(field.type), getattr(self, field.name))
            object.__setattr__(self, field.name, value)
        self._core().validate()

    def _core(self) -> _C.Options:
        """The same as the C++ core's value."""
        core = _C.Options()
        for name, value in self._plain().items():
            try:
                setattr(core, name, value)
            except TypeError:  # out of the C++ type's range
                raise ValueError(f"{name} must be an integer of 64 bits, got {value!r}") from None
            except ValueError as error:  # not the name of a scope or dtype
                raise ValueError(f"{name}: {error}") from None
        return core

    def _plain(self) -> dict[str, Any]:
        """The fields as JSON types, for messages and checkpoints."""
        return {
            name: str(value).removeprefix("torch.") if _is_dtype(value) else value
            for name, value in dataclasses.asdict(self).items()
        }

    @classmethod
    def from_hook_state(cls, state: PowerSGDState, **fields: Any) -> Options:
        """Returns the options that match the state of torch's powerSGD_hook.

        Args:
            state: State of the hook. Its random seed cannot be read back from it.
            fields: Values of fields that replace those of the state.
        """
        shared = {
            name: getattr(state, name)
            for name in (
                "matrix_approximation_rank",
                "start_powerSGD_iter",
                "min_compression_rate",
                "use_error_feedback",
                "warm_start",
                "orthogonalization_epsilon",
                "compression_stats_logging_frequency",
            )
        }
        return cls(**{**shared, **fields})


_configured: Options | None = None


def configure(options: Options | None) -> None:
    """Sets the options of the process groups that this process creates from now on.

    The options take the place of the ``POWERSGD_*`` environment variables. The ``pg_options`` of a
    group come before them.

    Args:
        options: Options of all later groups. None: those of the environment, as at first.

    Raises:
        ValueError: If ``options`` is neither ``Options`` nor None.
    """
    global _configured
    if options is not None and not isinstance(options, Options):
        raise ValueError(f"configure takes torch_powersgd.Options or None, got {options!r}")
    _configured = options


def resolve(pg_options: object) -> Options:
    """``pg_options``, then ``configure``, then POWERSGD_* variables, then the defaults.

    Args:
        pg_options: Options, a mapping of some of its fields, or None.
    """
    if isinstance(pg_options, Options):
        return pg_options
    base = _configured if _configured is not None else _from_environment()
    if pg_options is None:
        return base
    if isinstance(pg_options, Mapping):
        _check_names(pg_options)
        return dataclasses.replace(base, **pg_options)
    raise ValueError(
        "pg_options of the powersgd backend must be torch_powersgd.Options or a mapping of its "
        f"fields, got {type(pg_options).__name__}"
    )


def _check_names(fields: Mapping[str, Any]) -> None:
    names = [field.name for field in dataclasses.fields(Options)]
    for name in fields:
        if name not in names:
            raise ValueError(f"{name!r} is not an option; allowed: {', '.join(names)}")


def _from_environment() -> Options:
    fields = {}
    for field in dataclasses.fields(Options):
        variable = f"POWERSGD_{field.name.upper()}"
        text = os.environ.get(variable)
        if text is not None:
            fields[field.name] = _parse(variable, str(field.type), text)
    return Options(**fields)


def _parse(variable: str, type_name: str, text: str) -> Any:
    """A field's value from the text of its environment variable."""
    if type_name == "str":
        return text
    if "dtype" in type_name:
        allowed = {**_DTYPES, **({"none": None} if "None" in type_name else {})}
    elif type_name == "bool":
        allowed = {"1": True, "true": True, "0": False, "false": False}
    else:
        try:
            return int(text) if type_name == "int" else float(text)
        except ValueError:
            raise ValueError(f"{variable} must be of type {type_name}, got {text!r}") from None
    if text.lower() not in allowed:
        raise ValueError(f"{variable} must be one of {', '.join(allowed)}, got {text!r}")
    return allowed[text.lower()]


def _typed(name: str, type_name: str, value: Any) -> Any:
    """The value as exactly the field's type; a numpy scalar is taken for a Python one."""
    if type_name == "int" and not isinstance(value, bool) and hasattr(value, "__index__"):
        return int(value)
    if type_name == "float" and not isinstance(value, (bool, str, bytes)):
        with contextlib.suppress(TypeError, ValueError):
            return float(value)
    kinds = {"bool": bool, "str": str, "torch.dtype": torch.dtype}
    for kind in type_name.split(" | "):
        if (kind == "None" and value is None) or (kind in kinds and isinstance(value, kinds[kind])):
            return value
    raise ValueError(f"{name} must be of type {type_name}, got {value!r}")


def _is_dtype(value: object) -> bool:
    return isinstance(value, torch.dtype)
