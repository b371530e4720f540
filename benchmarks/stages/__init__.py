# SPDX-License-Identifier: BSD-3-Clause
"""The parts of the benchmarks of the four stages: bench_stages, bench_instructions, bench_model."""
