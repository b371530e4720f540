# SPDX-License-Identifier: BSD-3-Clause
"""Meshes of all ranks with a dimension of replicas."""

from __future__ import annotations

import math
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torch_powersgd.group_backends import PLAIN_BACKENDS


def mesh_of(
    replicate: Any, *others: tuple[str, int], device: str = "cpu", **backends: Any
) -> DeviceMesh:
    """A mesh whose first dimension is "replicate".

    Args:
        replicate: the backend of the replicas, or a tuple of it and its options.
        others: name and size of each other dimension; default: "shard" of two ranks.
        backends: backends of other dimensions, if not Gloo on the CPU and NCCL on a GPU.
    """
    others = others or (("shard", 2),)
    replicas = dist.get_world_size() // math.prod(size for _, size in others)
    names, sizes = zip(("replicate", replicas), *others, strict=True)
    plain = dict.fromkeys(names, PLAIN_BACKENDS[device])
    override = {**plain, "replicate": replicate, **backends}
    return init_device_mesh(device, sizes, mesh_dim_names=names, backend_override=override)
