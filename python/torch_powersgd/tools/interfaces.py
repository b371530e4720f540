# SPDX-License-Identifier: BSD-3-Clause
"""The network interfaces of this host, and the address that Gloo listens on."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct

_SIOCGIFADDR = 0x8915  # netdevice(7)
_NAME_BYTES = 16


def gloo_address() -> str:
    """The address of the interface that GLOO_SOCKET_IFNAME names first, else of the host's name.

    Empty if the interface has none.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    return address_of(interface) if interface else host_address()


def host_address() -> str:
    """The first address of this host's own name that it has itself, else a loopback address.

    Gloo chooses in the same way.
    """
    found = []
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    for family, kind, protocol, _, address in found:
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
            return str(address[0])
    return "127.0.0.1"


def address_of(interface: str) -> str:
    """The IPv4 address of an interface. Empty if it has none."""
    request = struct.pack(f"{_NAME_BYTES}s24x", interface.encode()[: _NAME_BYTES - 1])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, request)
        except OSError:
            return ""
    return socket.inet_ntoa(answer[_NAME_BYTES + 4 : _NAME_BYTES + 8])


def interface_of(address: str) -> str:
    """The interface that has an IPv4 address. Empty if no interface of this host has it."""
    names = (name for _, name in socket.if_nameindex())
    return next((name for name in names if address_of(name) == address), "")


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback
