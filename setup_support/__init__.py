# SPDX-License-Identifier: BSD-3-Clause
"""Parts of setup.py that do not need torch and are tested separately."""
