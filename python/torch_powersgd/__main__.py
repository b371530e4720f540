# SPDX-License-Identifier: BSD-3-Clause
"""The command line: ``powersgd``, or ``python -m torch_powersgd``.

powersgd --version
powersgd doctor [--listen | --peer HOST]
powersgd plan MODULE:FACTORY --rank 16 --wire-dtype int8
torchrun ... -m torch_powersgd advise MODULE:FACTORY --step MODULE:FUNCTION
"""

from __future__ import annotations

import argparse
import functools
import importlib
import inspect
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from torch_powersgd import ports
from torch_powersgd._core import _C
from torch_powersgd._version import __version__
from torch_powersgd.option_values import dtype_name
from torch_powersgd.options import Options
from torch_powersgd.tools import advice, advise, doctor, peer
from torch_powersgd.tools.advice import RECOMMENDED
from torch_powersgd.tools.plan import print_plan
from torch_powersgd.tools.stand_in import StandIn
from torch_powersgd.tools.tables import progress
from torch_powersgd.units import ms_text, size_text

RANKS = [4, 8, 16, 32]
WIRES = ["float32", "bfloat16", "float16", "int8", "int4"]
RECOMMENDED_WIRE = dtype_name(RECOMMENDED.wire_dtype or torch.float32)
GUESSED_BACKWARD_MS = 200.0

PLAN = """\
Shows which parameters of a model PowerSGD compresses, and how many bytes a step then sends.
It needs no process group and no GPU.
"""
DOCTOR = """\
Says what would be refused here and why, and shows versions, kernels, inner backends, network
interfaces and environment variables. An issue on this package should have this output.
It needs no process group. The exit status is 1 if there is a problem.
With --listen on one host and --peer on another, it examines the link between the two instead: the
ports, the addresses, the round trip and the bandwidth. Start it in the environment of the training.
"""
ADVISE = """\
Measures if compression pays on this group of machines, and with which setting.
Start it with torchrun, on the machines and with the number of processes that will train.
For about a minute, it runs steps of DDP in turns: without averaging, with the plain backend, and
with each setting. It recommends the highest matrix rank whose step is within 5 % of the fastest,
and another size of DDP's buckets if that is faster still. It also says how far apart the processes
are: the delay of a small message, one way.
Give --step, so that the steps are your own; otherwise a stand-in computes in place of your model.
"""
ADVISE_EXAMPLE = """\
example, in mymodels.py:
  def make_model(): return MyModel()
  def train_step(model): model(BATCH).mean().backward()

  torchrun --nproc_per_node 2 -m torch_powersgd advise mymodels:make_model \\
      --step mymodels:train_step
"""
FACTORY_FORM = "def make_model(): return MyModel()"
STEP_FORM = "def train_step(model): model(inputs).mean().backward()"


def _callable(path: str, placeholder: str, form: str, *arguments: object) -> Callable[..., Any]:
    """The callable that MODULE:NAME names. The working directory is searched first.

    Args:
        path: MODULE:NAME.
        placeholder: the name of ``path`` in the usage.
        form: an example of such a function.
        arguments: what it is called with.
    """
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise ValueError(f"{placeholder} must name a module and a callable in it, got {path!r}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    found = getattr(importlib.import_module(module_name), name)
    if not callable(found):
        raise ValueError(f"{path} must be a callable, got {type(found).__name__}")
    signature = inspect.signature(found)
    try:
        signature.bind(*arguments)
    except TypeError:
        raise ValueError(f"{path} must be of the form {form!r}, got {name}{signature}") from None
    result: Callable[..., Any] = found
    return result


def _make_model(path: str) -> torch.nn.Module:
    """Calls FACTORY of MODULE, which takes no arguments and returns a module."""
    model = _callable(path, "MODULE:FACTORY", FACTORY_FORM)()
    if not isinstance(model, torch.nn.Module):
        raise ValueError(f"{path} must return a torch.nn.Module, got {type(model).__name__}")
    return model


def _milliseconds(value: str) -> float:
    milliseconds = float(value)
    if not 0 <= milliseconds < math.inf:
        raise argparse.ArgumentTypeError(f"milliseconds must be at least 0, got {value}")
    return milliseconds


def _port(value: str) -> int:
    if not value.isdecimal() or not 1 <= int(value) <= 65535:
        raise argparse.ArgumentTypeError(f"a port must be 1 to 65535, got {value!r}")
    return int(value)


def _peer(value: str) -> tuple[str, int]:
    host, _, port = value.partition(":")
    return host, _port(port) if port else peer.STORE_PORT


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
        "--rank", type=int, default=RECOMMENDED.matrix_approximation_rank,
        help="matrix rank of the factors (%(default)s)",
    )  # fmt: skip
    plan.add_argument(
        "--wire-dtype", choices=WIRES, default=RECOMMENDED_WIRE, metavar="DTYPE",
        help=f"dtype in which factors travel: {', '.join(WIRES)} (%(default)s)",
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
        "--ranks", type=int, nargs="+", default=RANKS, metavar="RANK",
        help="matrix ranks to compare (4 8 16 32)",
    )  # fmt: skip
    command.add_argument(
        "--wire-dtype", choices=WIRES, nargs="+", default=[RECOMMENDED_WIRE], metavar="DTYPE",
        help=f"dtypes to compare, in which factors travel: {', '.join(WIRES)} ({RECOMMENDED_WIRE})",
    )  # fmt: skip
    step = command.add_mutually_exclusive_group()
    step.add_argument(
        "--step", metavar="MODULE:FUNCTION",
        help="function of one argument, the model wrapped in DDP, on the device that trains: it "
        f"runs a forward pass and calls backward() on the loss, as in '{STEP_FORM}'",
    )  # fmt: skip
    step.add_argument(
        "--backward-ms", type=_milliseconds, metavar="MS",
        help="milliseconds of the stand-in's backward pass, without averaging "
        f"({GUESSED_BACKWARD_MS:.0f})",
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


def _add_doctor(commands: Any) -> None:
    command = commands.add_parser(
        "doctor", help="what is refused here, versions, kernels and network", description=DOCTOR
    )
    side = command.add_mutually_exclusive_group()
    side.add_argument(
        "--listen", type=_port, nargs="?", const=peer.STORE_PORT, metavar="PORT",
        help=f"wait for --peer of another host, on the port of the training ({peer.STORE_PORT})",
    )  # fmt: skip
    side.add_argument(
        "--peer", type=_peer, metavar="HOST[:PORT]",
        help="examine the link to the host where --listen waits",
    )  # fmt: skip


def _doctor(arguments: argparse.Namespace) -> bool:
    if arguments.listen is None and arguments.peer is None:
        return doctor.print_report()
    ports.allowed()  # raises an error if POWERSGD_PORTS is wrong
    if found := [*doctor.network_refused()]:
        doctor.print_verdict(found)
        return False
    return peer.visit(*arguments.peer) if arguments.peer else peer.listen(arguments.listen)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="powersgd")
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(required=True, dest="command")
    _add_plan(commands)
    _add_advise(commands)
    _add_doctor(commands)
    return parser


def _plan(arguments: argparse.Namespace) -> None:
    options = Options(
        matrix_approximation_rank=arguments.rank,
        min_compression_rate=arguments.min_compression_rate,
        wire_dtype=arguments.wire_dtype,
    )
    print_plan(_make_model(arguments.model), options, None if arguments.all else arguments.top)


def _job_of(arguments: argparse.Namespace, device: torch.device) -> advise.Job:
    """The steps and settings that advise compares."""
    settings = [
        Options(
            matrix_approximation_rank=rank,
            min_compression_rate=arguments.min_compression_rate,
            start_powerSGD_iter=0,
            wire_dtype=wire,
        )
        for wire, rank in itertools.product(
            dict.fromkeys(arguments.wire_dtype), sorted(set(arguments.ranks))
        )
    ]
    model = _make_model(arguments.model).to(device)
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError("the model has no parameter that requires a gradient")
    if arguments.step is not None:
        step = _callable(arguments.step, "MODULE:FUNCTION", STEP_FORM, "model")
        return advise.Job(model, step, settings)
    stand_in = StandIn(model, _backward_ms(arguments) / 1e3, device)
    return advise.Job(stand_in, lambda ddp: ddp().backward(), settings)


def _backward_ms(arguments: argparse.Namespace) -> float:
    given = arguments.backward_ms
    return GUESSED_BACKWARD_MS if given is None else float(given)


def _introduction(arguments: argparse.Namespace, job: advise.Job, world: int, delay: float) -> str:
    """Says what was measured."""
    if arguments.step is not None:
        step = f"that of {arguments.step}, forward and backward"
    else:
        step = f"a stand-in, whose backward pass takes {_backward_ms(arguments):g} ms"
        step += "" if arguments.backward_ms is not None else ", a guess: --step measures yours"
    processes = f"{world} processes, {ms_text(delay)} ms apart one way"
    return f"{processes}, {size_text(job.gradient_bytes)} of gradients. The step is {step}."


def _advise(arguments: argparse.Namespace) -> None:
    with advise.joined(arguments.device) as device:
        job = advise.on_every_process(lambda: _job_of(arguments, device), advise.Job.outline)
        world, first = torch.distributed.get_world_size(), torch.distributed.get_rank() == 0
        rehearsal = advise.Rehearsal(job, device)
        delay, measured = rehearsal.delay(), advise.settings_of(job, device)
        with progress("measuring steps", shown=first) as report:
            advise.measure(rehearsal, measured, report=report)
        chosen, _ = advice.verdict(measured)  # the same on all processes
        sizes = advise.bucket_sizes(job, chosen) if chosen else []
        if len(sizes) > 1:
            with progress("measuring buckets", shown=first) as report:
                may_pay = functools.partial(advice.may_pay, sizes)
                advise.measure(rehearsal, sizes, advise.BUCKETS_SECONDS, report, may_pay)
        waits = advice.waits(measured, sizes)
        round_seconds = rehearsal.round_seconds(advice.OF_A_ROUND) if waits else 0.0
        del rehearsal  # before the group
    if first:  # The group has ended, so no process waits for this one.
        introduction = _introduction(arguments, job, world, delay)
        advice.print_advice(measured, introduction, sizes, round_seconds)


def _tell_torchrun(error: Exception) -> None:
    """Makes the error the end of torchrun's report, which would hide it otherwise."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        said = {"message": str(error), "extraInfo": {"timestamp": str(int(time.time()))}}
        Path(file).write_text(json.dumps({"message": said}))


def main() -> int:
    parser = _parser()
    arguments = parser.parse_args()
    try:
        if arguments.command == "doctor":
            return 0 if _doctor(arguments) else 1
        (_plan if arguments.command == "plan" else _advise)(arguments)
    except (ValueError, ImportError, AttributeError) as error:
        _tell_torchrun(error)
        if isinstance(error, advise.SharedError) and os.environ["RANK"] != "0":
            return 2  # The first process says it.
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
