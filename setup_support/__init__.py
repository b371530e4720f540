# SPDX-License-Identifier: BSD-3-Clause
"""Parts of setup.py, which do not need torch and are tested on their own."""
