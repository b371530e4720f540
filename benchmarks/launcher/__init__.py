# SPDX-License-Identifier: BSD-3-Clause
"""Starts the processes of all benchmarks, locally or on hosts with shaped links.

ranks.py starts processes, hosts.py builds hosts from network namespaces, emulated_links.py forwards
frames between them, and mps.py lets processes share a GPU. signals.py makes sure that a program
cleans up when it is ended.
"""
