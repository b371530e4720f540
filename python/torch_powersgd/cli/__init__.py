# SPDX-License-Identifier: BSD-3-Clause
"""The command line. Each command is a module with ``add``, which adds its parser, and ``run``."""
