# SPDX-License-Identifier: BSD-3-Clause
"""Programs on the benchmarks' hosts, and the marks of tests that need hosts or emulated links."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from launcher import emulated_links, hosts


def _missing() -> list[str]:
    """The requirements of hosts that are missing, also where root may not make them."""
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
    """Starts a Python program on a host, with its number as the first argument."""
    words = [sys.executable, "-c", program, str(host), *map(str, arguments)]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        ["ip", "netns", "exec", cluster.names[host], *words], stdin=pipe, stdout=pipe, text=True
    )


def said(process: subprocess.Popen[str], line: str = "") -> str:
    """What the program says next, once it is told a line."""
    assert process.stdin
    assert process.stdout
    if line:
        process.stdin.write(f"{line}\n")
        process.stdin.flush()
    return process.stdout.readline().strip()
