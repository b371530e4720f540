# SPDX-License-Identifier: BSD-3-Clause
"""Other libraries' training loops. Each module needs its library, which this package does not."""
