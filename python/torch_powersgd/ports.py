# SPDX-License-Identifier: BSD-3-Clause
"""The ports that this process listens on: those of POWERSGD_PORTS, or any free port."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from torch_powersgd._core import _C
from torch_powersgd.option_values import shown

VARIABLE = "POWERSGD_PORTS"


def allowed() -> range | None:
    """Returns the ports of POWERSGD_PORTS, or None if it is not set.

    Raises:
        ValueError: If its value is not allowed. The message names both.
    """
    text = os.environ.get(VARIABLE)
    if text is None:
        return None
    ends = re.fullmatch(r"(\d{1,5})-(\d{1,5})", text)
    first, last = map(int, ends.groups()) if ends else (0, 0)
    if not 1024 <= first <= last <= 65535:
        raise ValueError(
            "environment variable POWERSGD_PORTS: ports must be a range within 1024-65535, such "
            f"as 29600-29699, got {shown(text)}"
        )
    return range(first, last + 1)


def apply() -> None:
    """Makes Gloo listen on the ports of POWERSGD_PORTS from now on."""
    ports = allowed()
    if not _C.listen_within(*((ports[0], ports[-1]) if ports else (0, 0))):
        raise ValueError(
            "POWERSGD_PORTS does not work with this build of torch: unset it, and set the sysctl "
            "net.ipv4.ip_local_port_range instead"
        )


@contextmanager
def named() -> Iterator[None]:
    """Names POWERSGD_PORTS in the error of a block that fails because all of its ports are taken.

    Gloo's own error says so in one place, but elsewhere claims that the host has no address.
    """
    try:
        yield
    except RuntimeError as error:
        ports = allowed()
        if ports is None or any(map(_is_free, ports)):
            raise
        raise RuntimeError(
            f"no port in POWERSGD_PORTS={os.environ[VARIABLE]} is free on this host: each process "
            "listens on several, so use a wider range"
        ) from error


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
