# SPDX-License-Identifier: BSD-3-Clause
"""What benchmarks/bench_convergence.py and bench_noniid.py are made of."""
