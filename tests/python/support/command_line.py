# SPDX-License-Identifier: BSD-3-Clause
"""The command line, run in the process of a test."""

from __future__ import annotations

import contextlib
import io
import sys

import torch_powersgd.__main__


def run(*arguments: str) -> tuple[object, str]:
    """Runs a command in this process; returns its exit status and what it says."""
    sys.argv = ["torch_powersgd", *arguments]
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        try:
            return torch_powersgd.__main__.main(), said.getvalue()
        except SystemExit as error:
            return error.code, said.getvalue()
