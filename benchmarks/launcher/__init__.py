# SPDX-License-Identifier: BSD-3-Clause
"""Starts the ranks of all benchmarks, as local processes or on hosts with shaped links.

ranks.py starts ranks, hosts.py makes hosts of network namespaces, and emulated_links.py forwards
frames between them. signals.py sees to it that nothing is left when a program is ended.
"""
