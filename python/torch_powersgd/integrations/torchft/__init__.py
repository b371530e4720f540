# SPDX-License-Identifier: BSD-3-Clause
"""torchft, which keeps a job running when replicas leave and join.

    from torch_powersgd.integrations.torchft import DistributedDataParallel, ProcessGroupPowerSGD
    from torchft import Manager, Optimizer

    group = ProcessGroupPowerSGD(timeout=timedelta(seconds=30))
    manager = Manager(pg=group, ...)
    ddp = DistributedDataParallel(manager, model)
    compression = group.attach(ddp, manager)

examples/with_torchft.py is a whole program.
"""

from torch_powersgd.integrations.torchft import versions

versions.check()

from torch_powersgd.integrations.torchft.ddp import DistributedDataParallel  # noqa: E402
from torch_powersgd.integrations.torchft.process_group import ProcessGroupPowerSGD  # noqa: E402

__all__ = ["DistributedDataParallel", "ProcessGroupPowerSGD"]
