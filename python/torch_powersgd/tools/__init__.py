# SPDX-License-Identifier: BSD-3-Clause
"""What the commands of ``powersgd`` do; training does without it."""
