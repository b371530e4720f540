# SPDX-License-Identifier: BSD-3-Clause
"""The command line: ``powersgd``, or ``python -m torch_powersgd``.

powersgd --version
powersgd doctor [--master HOST]
powersgd plan MODULE:FACTORY --rank 16 --wire-dtype int8
torchrun ... -m torch_powersgd advise MODULE:FACTORY --step MODULE:FUNCTION
torchrun ... -m torch_powersgd shadow MODULE:FACTORY --step MODULE:FUNCTION
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

from torch_powersgd._core import _C
from torch_powersgd._version import __version__
from torch_powersgd.cli import advise, doctor, plan, shadow
from torch_powersgd.cli.processes import SharedError


def _version() -> str:
    cuda = "yes" if _C.has_kernels("cuda") else "no"
    built = f"built against torch {_C.torch_version}; CUDA kernels: {cuda}"
    return f"torch_powersgd {__version__}, {built}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="powersgd")
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(required=True)
    for command in (plan, advise, shadow, doctor):
        command.add(commands)
    return parser


def _tell_torchrun(error: Exception) -> None:
    """Puts the error at the end of torchrun's report, which would otherwise hide it."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        said = {"message": str(error), "extraInfo": {"timestamp": str(int(time.time()))}}
        Path(file).write_text(json.dumps({"message": said}))


def main() -> int:
    parser = _parser()
    arguments = parser.parse_args()
    try:
        status = int(arguments.run(arguments))
        print(end="", flush=True)
        return status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # as `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes at its exit
        return 1
    except ValueError as error:
        _tell_torchrun(error)
        if isinstance(error, SharedError) and os.environ["RANK"] != "0":
            return 2  # The first process reports it.
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
