# SPDX-License-Identifier: BSD-3-Clause
"""How long a test waits before it calls something that takes seconds a deadlock.

A busy machine makes everything many times slower, and no test fails because of that. Only where a
time-out is itself what a test is about is it short.
"""

DEADLOCK = 600.0  # seconds, for a whole test or program
OPERATION = DEADLOCK / 2  # for what a test waits for in a process, so that its error comes first
UNLIMITED = 2 * DEADLOCK  # for a time-out that must not be what ends a wait
