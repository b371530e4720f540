# SPDX-License-Identifier: BSD-3-Clause
"""How long a test waits for something that takes seconds before it counts as a deadlock."""

DEADLOCK = 600.0  # seconds: no machine is so busy
