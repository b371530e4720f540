# SPDX-License-Identifier: BSD-3-Clause
"""The helpers. conftest.py makes them importable, in the processes that tests start too."""
