# SPDX-License-Identifier: BSD-3-Clause
"""Runs the command line in the test's process."""

from __future__ import annotations

import contextlib
import io
import sys
from unittest import mock

import torch_powersgd.__main__


def run(*arguments: str) -> tuple[object, str]:
    """Runs a command in this process. Returns its exit status and its output."""
    said = io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["torch_powersgd", *arguments]),
        contextlib.redirect_stderr(said),
        contextlib.redirect_stdout(said),
    ):
        try:
            return torch_powersgd.__main__.main(), said.getvalue()
        except SystemExit as error:
            return error.code, said.getvalue()
