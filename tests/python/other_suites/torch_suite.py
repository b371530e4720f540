# SPDX-License-Identifier: BSD-3-Clause
"""Runs torch's own tests of a process group, ``DistributedTest``, over gloo and over this backend.

The suite ships with torch. Its classes start the ranks of each test, and judge how they end. Here
this process forks the ranks, so that a start takes milliseconds. The bodies of the tests are as
torch has them. They ask for a backend named gloo in many places, and skip or fail with any other
name. So this backend stands behind the name gloo in the ranks' processes. A test then runs and
checks all that it does with gloo. ``cuda_on_cpu`` lets tests run that name a GPU.

    python tests/python/other_suites/torch_suite.py --ranks 2 --backend cpu:powersgd
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
import unittest
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import cuda_on_cpu

from support.deadline import DEADLOCK, OPERATION

GLOO = "gloo"
POWERSGD = "cpu:powersgd"
ATTACHED = "attached"  # cpu:powersgd, and every DDP module is attached, with steps that are exact
BACKENDS = (GLOO, POWERSGD, ATTACHED)
EXCLUDED = {"test_ddp_uneven_inputs"}  # Over gloo on a CPU it did not end within 400 s.

# The name of a test: "passed", "skipped" or "failed", and the error or the reason.
Outcomes = dict[str, tuple[str, str]]


def outcomes(
    backend: str, world_size: int, names: Iterable[str] = (), timeout: float = 6 * DEADLOCK
) -> Outcomes:
    """Runs tests, or all of them, in a process that torch reads its variables in."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "outcomes.json")
        command = [sys.executable, __file__, f"--ranks={world_size}"]
        ended = subprocess.run(
            [*command, f"--backend={backend}", f"--json={file}", *names],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr[-3000:]
        return {name: tuple(ended) for name, ended in json.loads(file.read_text()).items()}


def _suite(world_size: int) -> Any:
    """The suite of torch. Its decorators read these variables when its module is imported."""
    os.environ["WORLD_SIZE"] = str(world_size)
    os.environ["BACKEND"] = GLOO
    os.environ["INIT_METHOD"] = "file:///"  # Some tests run with no other method.
    os.environ["DISTRIBUTED_TESTS_DEFAULT_TIMEOUT"] = str(int(DEADLOCK))
    import torch
    import torch._dynamo
    from torch.testing._internal import common_distributed

    common_distributed.TIMEOUT_OVERRIDE.clear()
    cuda_on_cpu.open_gates(common_distributed)
    from torch.testing._internal.distributed import distributed_test

    # A rank may come late on a busy machine. The arguments are wait_for and the seconds.
    sync: Any = distributed_test.Barrier.sync
    sync.__func__.__defaults__ = (None, OPERATION)

    class Suite(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
        in_ranks: Callable[[], None]

        def setUp(self) -> None:
            super().setUp()  # type: ignore[no-untyped-call]
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

        @classmethod
        def _run(cls, *args: Any, **kwargs: Any) -> None:
            distributed_test.INIT_METHOD = os.environ["INIT_METHOD"]
            if world_size > 2:  # Groups of ranks 1 and 2 ask for eight ranks, but not with MPI.
                os.environ["BACKEND"] = "mpi"
            torch.set_num_threads(1)
            cuda_on_cpu.use()
            cls.in_ranks()
            super()._run(*args, **kwargs)  # type: ignore[no-untyped-call]

    return Suite


def _stand_in_for_gloo() -> None:
    """Makes this backend answer to the name gloo in the functions that the tests call."""
    import torch.distributed as dist

    import torch_powersgd  # noqa: F401 - registers the backend

    def renamed(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("backend") == GLOO:
                kwargs["backend"] = POWERSGD
            return function(*args, **kwargs)

        return call

    get_backend = dist.get_backend

    def name_of(*args: Any, **kwargs: Any) -> Any:
        name = get_backend(*args, **kwargs)
        return dist.Backend(GLOO) if "powersgd" in name else name

    names: dict[str, Any] = dict(vars(dist))
    for name in ("init_process_group", "new_group"):
        setattr(dist, name, renamed(names[name]))
    dist.get_backend = name_of


def _attach_everything() -> None:
    """Makes every DDP module attached once it is made, with steps that are all exact."""
    _stand_in_for_gloo()
    from torch.nn.parallel import DistributedDataParallel

    import torch_powersgd

    construct = DistributedDataParallel.__init__

    @functools.wraps(construct)
    def construct_and_attach(self: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        torch_powersgd.attach(self, {"start_powerSGD_iter": 10**9})

    DistributedDataParallel.__init__ = construct_and_attach  # type: ignore[method-assign]


IN_RANKS: dict[str, Callable[[], None]] = {
    GLOO: lambda: None,
    POWERSGD: _stand_in_for_gloo,
    ATTACHED: _attach_everything,
}


def _run(backend: str, world_size: int, names: Sequence[str]) -> Outcomes:
    suite = _suite(world_size)
    suite.in_ranks = staticmethod(IN_RANKS[backend])
    if backend != GLOO:
        import torch_powersgd  # noqa: F401 - the ranks that are forked then have it

    ended: Outcomes = {}
    for name in names or unittest.TestLoader().getTestCaseNames(suite):
        if name in EXCLUDED:
            continue
        result = unittest.TestResult()
        suite(name).run(result)
        problems = [text for _, text in result.errors + result.failures]
        reasons = [text for _, text in result.skipped]
        how = "failed" if problems else "skipped" if reasons else "passed"
        ended[name] = how, "\n".join(problems or reasons)[-6000:]
        print(name, how, flush=True)
    return ended


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2, help="ranks of each test (2)")
    parser.add_argument("--backend", choices=BACKENDS, default=POWERSGD)
    parser.add_argument("--json", type=Path, help="file for the outcomes")
    parser.add_argument("names", nargs="*", help="names of tests (all)")
    args = parser.parse_args()
    ended = _run(args.backend, args.ranks, args.names)
    if args.json:
        args.json.write_text(json.dumps(ended))


if __name__ == "__main__":
    main()
