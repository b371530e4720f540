# SPDX-License-Identifier: BSD-3-Clause
"""The parts of benchmarks/bench_reliability.py, for docs/reliability.md.

faults.py tries the faults of cases.py, each in a trial.py, whose ranks run training.py; kills.py
ends one of them. starts.py starts many jobs. restarts.py has the ranks of job.py killed, each by
its fate.py. endurance.py trains for long, as long_run.py says, and counts resources.py. tables.py
has the tables of the page.
"""
