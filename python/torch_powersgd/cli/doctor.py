# SPDX-License-Identifier: BSD-3-Clause
"""``powersgd doctor``: what this installation would refuse, and what it consists of."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from torch_powersgd._backend import NAME
from torch_powersgd._core import _C
from torch_powersgd._version import __version__
from torch_powersgd.cli.arguments import count
from torch_powersgd.cli.group_check import Rows, check, gloo_listening, is_loopback
from torch_powersgd.cli.tables import say
from torch_powersgd.group_backends import device_types
from torch_powersgd.options import Options, from_environment, to_core, unknown_variables

PACKAGES = (
    "accelerate", "composer", "deepspeed", "lightning", "numpy", "pytorch-lightning", "ray",
    "torchft", "torchft-nightly", "torchtitan", "transformers",
)  # fmt: skip
# Variables that change what this package, torch.distributed, Gloo or NCCL does.
VARIABLES = re.compile(
    r"(POWERSGD|GLOO|NCCL|TORCH_NCCL|TORCH_DISTRIBUTED|TORCH_CPP|TP)_\w+"
    r"|(LOCAL_|GROUP_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|CUDA_(VISIBLE_DEVICES|HOME)"
    r"|(OMP|MKL)_NUM_THREADS"
)
ONLY_LOCAL = ", which no other machine reaches: set GLOO_SOCKET_IFNAME to an interface"
TCP = Path("/proc/sys/net/ipv4")
SLOW_START = (
    "after a pause of a second, a message of 200 kB takes 4 round trips instead of one. Near links "
    "don't show it. Over far ones, run sysctl -w net.ipv4.tcp_slow_start_after_idle=0 on every "
    "host, as root; for a container, use docker run --sysctl"
)
STORE_PORT = 29500  # of torchrun's --master-port

DOCTOR = """\
Reports what would be refused on this machine and why, and shows versions, kernels, inner backends,
network interfaces and environment variables. Please include its output in an issue.
It needs no process group. The exit status is 1 if there is a problem.
With --master, and the same command on every other host, it checks that the hosts can train
together, and shows the round trip and the bandwidth. Run it in the environment that you train in.
Started by torchrun, it needs none of the options, and shows which processes share a host's link.
"""


def _address(value: str) -> tuple[str, int]:
    host, _, port = value.partition(":")
    port = port or str(STORE_PORT)
    if not host or not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise argparse.ArgumentTypeError(f"it must be HOST or HOST:PORT, got {value!r}")
    return host, int(port)


def _torchrun_store() -> tuple[str, int] | None:
    """Where the processes of torchrun meet, if it has started this one and others."""
    variables = os.environ
    if "TORCHELASTIC_RUN_ID" not in variables or variables["WORLD_SIZE"] == "1":
        return None
    return variables["MASTER_ADDR"], int(variables["MASTER_PORT"])


def add(commands: Any) -> None:
    command = commands.add_parser(
        "doctor",
        help="show what is refused here, versions, kernels and network",
        description=DOCTOR,
    )
    command.add_argument(
        "--master", type=_address, metavar="HOST[:PORT]", default=_torchrun_store(),
        help=f"check the group of hosts that meets at the first one (port {STORE_PORT})",
    )  # fmt: skip
    command.add_argument(
        "--hosts", type=count, metavar="N", default=os.environ.get("GROUP_WORLD_SIZE", "2"),
        help="hosts in all (those of torchrun, or 2)",
    )  # fmt: skip
    command.add_argument(
        "--per-host", type=count, metavar="N", default=os.environ.get("LOCAL_WORLD_SIZE", "1"),
        help="processes on each host that run this (those of torchrun, or 1)",
    )  # fmt: skip
    command.add_argument(
        "--wait", type=count, default=300, metavar="SECONDS",
        help="how long to wait for the other hosts (%(default)s)",
    )  # fmt: skip
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    found, facts = problems(), sections()
    first = os.environ.get("LOCAL_RANK", "0") == "0"  # of the processes that torchrun starts here
    devices = " and ".join(filter(_C.has_kernels, device_types()))
    good = f"No problems found: gradients on {devices} can be compressed."
    if arguments.master and not found:
        processes, seconds = arguments.hosts * arguments.per_host, arguments.wait
        where = "{} port {}".format(*arguments.master)
        if first:
            say(f"Waiting for {processes} processes at {where} ({seconds} seconds at most).")
        found, rows = check(arguments.master, processes, seconds)
        good, facts = "These hosts can train together.", {"network": rows} if rows else {}
    if first:
        _print_report(found, good, facts)
    return 1 if found else 0


def sections() -> dict[str, Rows]:
    """The facts about this process and its machine, as pairs of a name and a value."""
    return {
        "versions": _versions(),
        "kernels": _kernels(),
        "inner backends": _inner_backends(),
        "network": _network(),
        "environment": sorted(each for each in os.environ.items() if VARIABLES.fullmatch(each[0])),
    }


def problems() -> list[str]:
    """What is refused or fails here, each in two sentences: what is wrong, and the remedy."""
    return [*_options_refused(), *_kernels_refused(), *_network_refused(), *_failing_kernels()]


def _print_report(found: list[str], good: str, facts: dict[str, Rows]) -> None:
    """Prints the problems, or what is good without any, and then the facts."""
    if found:
        numbered = [(f"{number}.", problem) for number, problem in enumerate(found, 1)]
        _print_rows("Something is refused or fails here:", numbered)
    else:
        say(good)
    for title, rows in facts.items():
        print()
        _print_rows(title, rows)


def _print_rows(title: str, rows: Rows) -> None:
    print(title)
    rows = rows or [("none", "")]
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        say(f"{name:{width}}  {value}", indent="  ", hanging=" " * (width + 4))


def _versions() -> Rows:
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    built = f"built against torch {_C.torch_version}"
    rows = [
        ("torch_powersgd", f"{__version__}, {built}, in {Path(__file__).parents[1]}"),
        ("torch", f"{torch.__version__}, in {Path(torch.__file__).parent}"),
        ("python", f"{platform.python_version()}, {system}, {' '.join(platform.libc_ver())}"),
    ]
    if torch.version.cuda:
        rows.append(("CUDA of torch", torch.version.cuda))
    if dist.is_nccl_available():
        rows.append(("NCCL", ".".join(map(str, torch.cuda.nccl.version()))))
    return rows + [(name, version) for name in PACKAGES if (version := _installed(name))]


def _installed(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _kernels() -> Rows:
    cores = len(os.sched_getaffinity(0))
    rows = [("cpu", f"{_C.cpu_instruction_set()}, {torch.get_num_threads()} of {cores} cores")]
    rows.append(("cuda", _C.cuda_architectures.replace(",", ", ") or "not built"))
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        memory = f"{gpu.total_memory / 2**30:.0f} GiB"
        rows.append((f"cuda:{index}", f"{gpu.name}, sm_{gpu.major}{gpu.minor}, {memory}"))
    return rows


def _inner_backends() -> Rows:
    """The backends that can be wrapped, with the devices for which "auto" takes them."""
    auto = dist.Backend.default_device_backend_map
    builtin = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    plugins = [name.lower() for name in dist.Backend._plugins if name.lower() != NAME]
    rows = []
    for name in dict.fromkeys([*builtin, *plugins]):
        devices = [device for device in ("cpu", "cuda") if auto.get(device) == name]
        default = f', "auto" for {", ".join(devices)}' if devices else ""
        here = builtin.get(name, True)
        rows.append((name, f"available{default}" if here else "not in this build of torch"))
    return rows


def _network() -> Rows:
    rows = [("hostname", f"{socket.gethostname()}; {_gloo()}")]
    for _, name in socket.if_nameindex():
        folder = Path("/sys/class/net") / name
        speed = _read(folder / "speed")
        known = speed.isdigit() and int(speed) > 0
        about = [_read(folder / "operstate"), f"{speed} Mbit/s" if known else "speed unknown"]
        rows.append((name, ", ".join(filter(None, about))))
    return rows + _tcp()


def _tcp() -> Rows:
    """What happens to a connection's window after a pause, such as a backward pass.

    By ``tcp_slow_start_after_idle`` (RFC 2861), Linux halves it for each retransmission timeout in
    which the connection sends nothing, unless the congestion control sets its own rate, as BBR.
    """
    control = _read(TCP / "tcp_congestion_control")
    restarts = _read(TCP / "tcp_slow_start_after_idle")
    if not control:
        return []
    found = f"tcp_congestion_control={control}, tcp_slow_start_after_idle={restarts}"
    if restarts == "0" or control.startswith("bbr"):
        return [("TCP", f"{found}: the window stays open after a pause")]
    return [("TCP", f"{found}: {SLOW_START}")]


def _gloo() -> str:
    try:
        with gloo_listening() as addresses:
            names = [address for address, _ in addresses]
    except RuntimeError as error:  # _network_refused names the cause.
        return f"Gloo cannot listen: {error}"
    return f"Gloo listens on {', '.join(names)}{ONLY_LOCAL if any(map(is_loopback, names)) else ''}"


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:  # The kernel reports no speed for a virtual interface.
        return ""


def _options_refused() -> Iterator[str]:
    try:
        from_environment()
    except ValueError as error:
        yield f"No process group can be created: {error}. Correct or unset the variable."
    for message in unknown_variables():
        yield f"{message}{'' if message.endswith('?') else '.'} Correct or unset the variable."


def _kernels_refused() -> Iterator[str]:
    if torch.cuda.is_available() and not _C.has_kernels("cuda"):
        yield (
            "CUDA gradients are refused: this build has no CUDA kernels. Rebuild it with "
            "POWERSGD_BUILD_CUDA=1, and CUDA_HOME set to the CUDA toolkit."
        )
        return
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        if not runs_on(_C.cuda_architectures, major, minor):
            yield (
                f"cuda:{index} is sm_{major}{minor}, but the kernels were built for "
                f"{_C.cuda_architectures}. Rebuild the package with "
                f'TORCH_CUDA_ARCH_LIST="{major}.{minor}".'
            )


def runs_on(architectures: str, major: int, minor: int) -> bool:
    """Whether code for architectures such as "sm_80,sm_90,compute_120" runs on a GPU.

    Binary code runs on the same major and the same or a higher minor version, and PTX (compute_120)
    on all newer ones. (CUDA C++ Programming Guide, "Application Compatibility".)
    """
    for kind, number in re.findall(r"(sm|compute)_(\d+)", architectures):
        built = divmod(int(number), 10)
        if (kind == "compute" or built[0] == major) and built <= (major, minor):
            return True
    return False


def _network_refused() -> Iterator[str]:
    names = {name for _, name in socket.if_nameindex()}
    for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(","):
        if name and name not in names:
            yield (
                f"GLOO_SOCKET_IFNAME names the interface {name}, which this machine lacks. Use one "
                f"of {', '.join(sorted(names))}."
            )


def _failing_kernels() -> Iterator[str]:
    """Compresses a matrix of rank 1 on each device, which must come back intact."""
    rows, columns = torch.arange(1.0, 49), torch.arange(1.0, 33)
    for device in device_types():
        if not _C.has_kernels(device):
            continue
        gradient = torch.outer(rows, columns).to(device).flatten() / (48 * 32)
        output = gradient.clone()
        try:
            core = to_core(Options.hook_defaults(start_powerSGD_iter=0))
            compressor = _C.BucketCompressor([[48, 32]], core, torch.float32, device)
            compressor.project(output, 0)
            compressor.orthogonalize()
            compressor.back_project()
            compressor.reconstruct()
            error = (output - gradient).abs().max().item()
        except RuntimeError as failure:
            yield f"The kernels fail on {device}: {failure}. Rebuild the package."
            continue
        if not error < 1e-4:  # Rounding makes 1e-6. NaN is an error as well.
            yield (
                f"The kernels compute wrong numbers on {device}: a matrix of rank 1 comes back "
                f"with an error of {error}. Please report it, with all of this output."
            )
