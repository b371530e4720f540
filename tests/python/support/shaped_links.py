# SPDX-License-Identifier: BSD-3-Clause
"""Runs programs on the benchmarks' hosts. Marks tests that need hosts or emulated links."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from launcher import emulated_links, hosts


def _missing() -> list[str]:
    """What is missing for hosts, including permissions that root may lack."""
    missing: list[str] = hosts.missing()
    if not missing:
        try:
            with hosts.Hosts(2, "1gbit"):
                pass
        except hosts.ClusterError as error:  # in a container, for example
            missing = [str(error)]
    return missing


_MISSING = _missing()
needs_hosts = pytest.mark.skipif(bool(_MISSING), reason=f"missing: {', '.join(_MISSING)}")
needs_taps = pytest.mark.skipif(
    not os.access(emulated_links.CONTROL, os.W_OK), reason=f"needs {emulated_links.CONTROL}"
)


def start(
    cluster: hosts.Hosts, host: int, program: str, *arguments: object
) -> subprocess.Popen[str]:
    """Starts a Python program on a host, with the host's number as the first argument."""
    words = [sys.executable, "-c", program, str(host), *map(str, arguments)]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        ["ip", "netns", "exec", cluster.names[host], *words], stdin=pipe, stdout=pipe, text=True
    )


def said(process: subprocess.Popen[str], line: str = "") -> str:
    """Sends the program a line, if any, and returns the next line it prints."""
    assert process.stdin
    assert process.stdout
    if line:
        process.stdin.write(f"{line}\n")
        process.stdin.flush()
    return process.stdout.readline().strip()
