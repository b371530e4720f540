# SPDX-License-Identifier: BSD-3-Clause
"""Sums over the replicas of a quorum, as works that torchft's manager waits for."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from torch_powersgd.matrices import as_reals
from torch_powersgd.sparse import Sparse
from torch_powersgd.targets import shard_of


class SparseSum(dist._Work):
    """Replaces changes with their sums over the replicas.

    Args:
        sparse: What averages them.
        changes: The changes.
        replicas: Number of replicas by which the manager divides the sums.

    Attributes:
        agreement: That of ``InFlight.receive``, once the sums are there.
    """

    def __init__(self, sparse: Sparse, changes: list[torch.Tensor], replicas: int) -> None:
        super().__init__()
        self._changes = [as_reals(shard_of(change)) for change in changes]
        self._replicas = replicas
        tensors, memory = sparse.allocate()
        torch._foreach_copy_(tensors, self._changes)
        self._average = sparse.send(memory, "begun a round")
        self._future = self._average.work.get_future().then(self._deliver)

    def _deliver(self, received: torch.futures.Future[Any]) -> None:
        received.value()  # raises the error of a work that failed
        means, _, self.agreement = self._average.receive(self._replicas)
        self._finite = torch.stack([mean.isfinite().all() for mean in means])
        torch._foreach_mul_(means, self._replicas)
        torch._foreach_copy_(self._changes, means)

    def keep(self) -> None:
        """Keeps what was not sent, because the sums were applied."""
        self._average.keep(self._finite.tolist())

    def wait(self, timeout: timedelta | None = None) -> bool:
        work = self._average.work
        work.wait() if timeout is None else work.wait(timeout)
        self._future.wait()
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        return self._future


class Sum(dist._Work):
    """A sum over the group. Its future is complete once ``wait`` has returned, as torchft expects.

    Args:
        leave: Called once if the sum has failed.
        work: The sum, if it has begun.
    """

    def __init__(self, leave: Callable[[], None], work: dist.Work | None = None) -> None:
        super().__init__()
        self._leave: Callable[[], None] | None = leave
        self._work: dist.Work | None = None
        if work is not None:
            self.begin(work)

    def begin(self, work: dist.Work) -> None:
        self._work, self._future = work, work.get_future()

    def wait(self, timeout: timedelta | None = None) -> bool:
        try:
            work = self._begun()
            work.wait() if timeout is None else work.wait(timeout)
            self._future.wait()
        except Exception:
            leave, self._leave = self._leave, None
            if leave is not None:
                leave()
            raise
        return True

    def _begun(self) -> dist.Work:
        if self._work is None:
            raise RuntimeError("the manager did not get all changes of the fragment")
        return self._work

    def get_future(self) -> torch.futures.Future[Any]:
        self._begun()
        return self._future

    def synchronize(self) -> None:
        self._begun().synchronize()

    def block_current_stream(self) -> None:
        self._begun().block_current_stream()
