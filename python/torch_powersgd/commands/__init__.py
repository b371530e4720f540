# SPDX-License-Identifier: BSD-3-Clause
"""The subcommands of ``powersgd``. Each has ``add``, which adds its parser, and ``run``."""
