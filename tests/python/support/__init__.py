# SPDX-License-Identifier: BSD-3-Clause
"""What the tests share. conftest.py makes it importable, in the processes that tests start too."""
