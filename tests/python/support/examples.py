# SPDX-License-Identifier: BSD-3-Clause
"""Settings of hypothesis for tests that take any input."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# The examples are the same at each call: a test fails for the change that it tests. The first
# example of a pool of ranks waits for their start, so none has a limit of time.
FIXED = settings(
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=100,
    suppress_health_check=list(HealthCheck),
)
