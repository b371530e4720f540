# SPDX-License-Identifier: BSD-3-Clause
"""The marks of tests that need the benchmarks' hosts or the emulated links."""

from __future__ import annotations

import os

import pytest
from cluster import emulated_links, hosts


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
