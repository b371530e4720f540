# SPDX-License-Identifier: BSD-3-Clause
"""The parts of benchmarks/bench_reliability.py, for docs/reliability.md.

faults.py runs each fault of cases.py as a trial.py, whose processes run training.py; kills.py ends
one of them. starts.py starts many jobs. restarts.py has the processes of job.py killed, each by its
fate.py. endurance.py runs the long training of long_run.py, and samples resources.py. tables.py
makes the tables of the page.
"""
