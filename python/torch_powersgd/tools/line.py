# SPDX-License-Identifier: BSD-3-Clause
"""A connection between two doctors, and what it measures of the link."""

from __future__ import annotations

import json
import socket
import statistics
import time
from typing import Any

ANSWER_SECONDS = 20.0  # A slow link takes half of it for the smallest message of a measurement.
LONGEST = 65536  # bytes of a message
ROUND_TRIPS = 15
SMALLEST, LARGEST = 1 << 14, 1 << 26  # bytes that are sent to measure the bandwidth
LONG_ENOUGH = 0.5  # seconds


class Line:
    """JSON messages, one per line, and plain bytes between them. Every wait is bounded."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(ANSWER_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._received = connection.makefile("rb")

    def send(self, message: object) -> None:
        self._socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> Any:
        text = self._received.readline(LONGEST)
        if not text.endswith(b"\n"):
            raise ConnectionResetError("the other side has closed the connection")
        return json.loads(text)

    def exchange(self, mine: object) -> Any:
        """Sends a message, and returns the one that the other side sends meanwhile."""
        self.send(mine)
        return self.receive()

    def measure(self) -> tuple[float, float]:
        """The round trip in seconds, and the bytes per second to the other side, which echoes."""
        trips = [self._timed(0) for _ in range(ROUND_TRIPS)]
        trip, size = statistics.median(trips), SMALLEST
        while (seconds := self._timed(size)) < LONG_ENOUGH and size < LARGEST:
            size *= 4
        self.send(None)
        return trip, size / max(seconds - trip, 1e-6)

    def echo(self) -> None:
        """Answers what the other side sends to measure the link."""
        while (size := self.receive()) is not None:
            left = min(int(size), LARGEST)
            while left and (read := len(self._received.read1(left))):
                left -= read
            self.send(size)

    def _timed(self, size: int) -> float:
        begin = time.perf_counter()
        self.send(size)
        self._socket.sendall(bytes(size))
        self.receive()
        return time.perf_counter() - begin
