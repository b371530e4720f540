# SPDX-License-Identifier: BSD-3-Clause
"""The commands ``powersgd plan``, ``advise`` and ``doctor``; training does without them."""
