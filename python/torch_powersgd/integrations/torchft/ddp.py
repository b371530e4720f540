# SPDX-License-Identifier: BSD-3-Clause
"""torchft's DDP module, with a hook that survives an error."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torchft

if TYPE_CHECKING:
    from torchft.manager import Manager


class DistributedDataParallel(torchft.DistributedDataParallel):
    """torchft's module, with a hook that survives an error.

    When another replica leaves, the hook of torchft 0.2.0 fails an assertion in that bucket and in
    every bucket after it. This ends the process, with any process group.
    """

    @staticmethod
    def _comm_hook(state: Manager, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        state.allreduce(buffer).wait()  # the manager keeps the error
        devices: Any = [] if buffer.device.type == "cpu" else [buffer.device]
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
        done.set_result(buffer)
        return done

    _comm_hook.__annotations__.clear()  # DDP compares them with types, and these are strings.
