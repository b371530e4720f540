# SPDX-License-Identifier: BSD-3-Clause
"""Jobs that are killed, that run for long, and that make and destroy groups."""
