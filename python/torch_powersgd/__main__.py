# SPDX-License-Identifier: BSD-3-Clause
"""The command line.

python -m torch_powersgd --version
python -m torch_powersgd doctor
python -m torch_powersgd plan MODULE:FACTORY --rank 16 --wire-dtype int8
torchrun ... -m torch_powersgd advise MODULE:FACTORY --step MODULE:FUNCTION
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import math
import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from torch_powersgd._core import _C
from torch_powersgd._version import __version__
from torch_powersgd.lookup import PLAIN_BACKENDS
from torch_powersgd.option_values import dtype_name
from torch_powersgd.options import Options
from torch_powersgd.tools import advise, doctor, report
from torch_powersgd.tools.plan import print_plan
from torch_powersgd.tools.quality import errors_of_training
from torch_powersgd.tools.rehearsal import UserStep
from torch_powersgd.tools.verdict import RECOMMENDED_RANK, wire_of

RANKS = [1, 2, 4, 8, 16, 32]
WIRES = ["float32", "bfloat16", "float16", "int8", "int4"]
COMPARED_WIRES = ["float32", "bfloat16", "int8", "int4"]

PLAN = """\
Shows which parameters of a model PowerSGD compresses, and how many bytes a step then sends.
It needs no process group and no GPU.
"""
DOCTOR = """\
Shows versions, kernels, inner backends, network interfaces and environment variables, and what
would be refused here and why. An issue on this package should have this output.
It needs no process group. The exit status is 1 if there is a problem.
"""
ADVISE = """\
Says whether compression pays on this group of machines, and which setting to take.
Start it with torchrun, on the machines and with the number of ranks that will train.
It rehearses steps of DDP for about a minute: without averaging, with the plain all-reduce
and at each rank. It predicts those of the other wires. It recommends the highest rank whose
step is within 5 % of the fastest. A stand-in computes in place of your backward pass; give
--step or --backward-ms, so that it takes as long as yours.
"""
ADVISE_EXAMPLE = """\
example of a step, in mymodels.py:
  def make_model(): return MyModel()
  def train_step(model): model(BATCH).mean().backward()

  torchrun --nproc_per_node 2 -m torch_powersgd advise mymodels:make_model \\
      --step mymodels:train_step
"""


def _callable(path: str, placeholder: str) -> Callable[..., Any]:
    """The callable that MODULE:NAME names. The working directory is searched first."""
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise ValueError(f"{placeholder} must name a module and a callable in it, got {path!r}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    found = getattr(importlib.import_module(module_name), name)
    if not callable(found):
        raise ValueError(f"{path} must be a callable, got {type(found).__name__}")
    result: Callable[..., Any] = found
    return result


def _make_model(path: str) -> torch.nn.Module:
    """Calls FACTORY of MODULE, which takes no arguments and returns a module."""
    model = _callable(path, "MODULE:FACTORY")()
    if not isinstance(model, torch.nn.Module):
        raise ValueError(f"{path} must return a torch.nn.Module, got {type(model).__name__}")
    return model


def _milliseconds(value: str) -> float:
    milliseconds = float(value)
    if not 0 <= milliseconds < math.inf:
        raise argparse.ArgumentTypeError(f"milliseconds must be at least 0, got {value}")
    return milliseconds


def _count(value: str) -> int:
    count = int(value)
    if count < 1:
        raise argparse.ArgumentTypeError(f"a count must be at least 1, got {value}")
    return count


def _version() -> str:
    cuda = "yes" if _C.has_kernels("cuda") else "no"
    built = f"built against torch {_C.torch_version}; CUDA kernels: {cuda}"
    return f"torch_powersgd {__version__}, {built}"


def _add_plan(commands: Any) -> None:
    plan = commands.add_parser(
        "plan", help="parameters that are compressed, and bytes of a step", description=PLAN
    )
    plan.add_argument(
        "--rank", type=int, default=RECOMMENDED_RANK, help="rank of the factors (%(default)s)"
    )
    plan.add_argument(
        "--wire-dtype", choices=WIRES, default=dtype_name(wire_of(Options.recommended())),
        metavar="DTYPE", help=f"dtype in which factors travel: {', '.join(WIRES)} (%(default)s)",
    )  # fmt: skip
    shown = plan.add_mutually_exclusive_group()
    shown.add_argument(
        "--top", type=_count, default=10, metavar="N", help="rows of the table (%(default)s)"
    )
    shown.add_argument("--all", action="store_true", help="one row for each parameter")
    _add_common(plan)


def _add_advise(commands: Any) -> None:
    command = commands.add_parser(
        "advise",
        help="measurement, under torchrun, of whether compression pays and with which setting",
        description=ADVISE,
        epilog=ADVISE_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument(
        "--ranks", type=int, nargs="+", metavar="RANK",
        default=RANKS, help="ranks to compare (1 2 4 8 16 32)",
    )  # fmt: skip
    command.add_argument(
        "--wire-dtype", choices=WIRES, nargs="+", default=COMPARED_WIRES, metavar="DTYPE",
        help=f"dtypes to compare, in which factors travel: {', '.join(WIRES)} (all but float16)",
    )  # fmt: skip
    step = command.add_mutually_exclusive_group()
    step.add_argument(
        "--step", metavar="MODULE:FUNCTION",
        help="function that takes the model, runs its forward pass and calls backward() on the "
        "loss, once; each rank times it",
    )  # fmt: skip
    step.add_argument(
        "--backward-ms", type=_milliseconds, metavar="MS",
        help="milliseconds that the backward pass of your model takes on one rank, without "
        "averaging (200)",
    )  # fmt: skip
    command.add_argument(
        "--shadow", type=_count, metavar="STEPS",
        help="number of steps that train exactly with AdamW, to measure the error of each rank's "
        "gradients beside; it needs --step, and memory for a residual of each rank",
    )  # fmt: skip
    command.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="device that trains (%(default)s)"
    )
    _add_common(command)


def _add_common(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "model",
        metavar="MODULE:FACTORY",
        help="function without arguments that returns the model",
    )
    command.add_argument(
        "--min-compression-rate", type=float, default=2, metavar="RATE",
        help="least ratio of a weight's elements to its factors' that is compressed (%(default)s)",
    )  # fmt: skip


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m torch_powersgd")
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(required=True, dest="command")
    _add_plan(commands)
    _add_advise(commands)
    commands.add_parser(
        "doctor", help="versions, kernels and network here, and what is refused", description=DOCTOR
    )
    return parser


def _plan(arguments: argparse.Namespace) -> None:
    options = Options(
        matrix_approximation_rank=arguments.rank,
        min_compression_rate=arguments.min_compression_rate,
        wire_dtype=arguments.wire_dtype,
    )
    print_plan(_make_model(arguments.model), options, None if arguments.all else arguments.top)


def _options_of(arguments: argparse.Namespace) -> list[Options]:
    """The settings that advise compares."""
    ranks = sorted(set(arguments.ranks))
    wires = dict.fromkeys(arguments.wire_dtype)
    return [
        Options(
            matrix_approximation_rank=rank,
            min_compression_rate=arguments.min_compression_rate,
            start_powerSGD_iter=0,
            wire_dtype=wire,
        )
        for wire, rank in itertools.product(wires, ranks)
    ]


def _step_of(
    arguments: argparse.Namespace, model: torch.nn.Module, device: torch.device
) -> tuple[UserStep, str]:
    """The step to rehearse, and a sentence on it. Collective."""
    if arguments.step is not None:
        function = advise.on_every_rank(lambda: _callable(arguments.step, "MODULE:FUNCTION"))
        step = advise.time_on_all_ranks(model, function, device)
        return step, (
            f"The step is that of {arguments.step}: {1e3 * step.backward:.1f} ms of backward and "
            f"{1e3 * step.rest:.1f} ms before it, on the slowest rank."
        )
    if arguments.backward_ms is not None:
        step = UserStep(arguments.backward_ms / 1e3)
        return step, f"The step is a backward pass of {arguments.backward_ms:g} ms."
    step = advise.STAND_IN
    return step, (
        f"The step is a backward pass of {1e3 * step.backward:.0f} ms, which is a guess: --step "
        "measures yours."
    )


def _errors_of(
    arguments: argparse.Namespace,
    model: torch.nn.Module,
    options: list[Options],
    device: torch.device,
) -> dict[Options, float]:
    """The errors that --shadow asks for. Collective."""
    if arguments.shadow is None:
        return {}
    function = _callable(arguments.step, "MODULE:FUNCTION")
    known = advise.measured_options(options)
    errors = errors_of_training(model, function, known, device, arguments.shadow)
    return dict(zip(known, errors, strict=True))


def _advise(arguments: argparse.Namespace) -> None:
    with advise.joined(arguments.device) as device:
        options = advise.on_every_rank(lambda: _options_of(arguments))
        model = advise.on_every_rank(lambda: _make_model(arguments.model))
        step, note = _step_of(arguments, model, device)
        errors = _errors_of(arguments, model, options, device)
        job = advise.job_of(model, step, options)
        world, first = torch.distributed.get_world_size(), torch.distributed.get_rank() == 0
        advise.quiet()
        with report.progress(first) as progress:
            measured = advise.measure(job, device, report=progress)
    if first:  # the group is gone, so that no rank waits for this one
        measured = advise.with_errors(measured, errors)
        inner = PLAIN_BACKENDS[arguments.device]
        report.print_advice(measured, note, world, inner)


def main() -> int:
    parser = _parser()
    arguments = parser.parse_args()
    if arguments.command == "doctor":
        return 0 if doctor.print_report() else 1
    if arguments.command == "advise" and arguments.shadow and not arguments.step:
        parser.error("--shadow needs --step, which computes the gradients")
    try:
        (_plan if arguments.command == "plan" else _advise)(arguments)
    except advise.RanksError as error:
        if os.environ["RANK"] == "0":
            parser.error(str(error))
        return 2  # rank 0 has said it
    except (ValueError, ImportError, AttributeError) as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
