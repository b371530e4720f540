# SPDX-License-Identifier: BSD-3-Clause
"""The commands ``python -m torch_powersgd plan`` and ``advise``; training does without them."""
