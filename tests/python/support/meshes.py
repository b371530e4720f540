# SPDX-License-Identifier: BSD-3-Clause
"""Meshes of all ranks with a dimension of replicas."""

from __future__ import annotations

import math
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


def mesh_of(replicate: Any, *others: tuple[str, int], **backends: Any) -> DeviceMesh:
    """A CPU mesh whose first dimension is "replicate".

    Args:
        replicate: the backend of the replicas, or a tuple of it and its options.
        others: name and size of each other dimension; default: "shard" of two ranks.
        backends: backends of other dimensions, if not Gloo.
    """
    others = others or (("shard", 2),)
    replicas = dist.get_world_size() // math.prod(size for _, size in others)
    names, sizes = zip(("replicate", replicas), *others, strict=True)
    override = {**dict.fromkeys(names, "gloo"), "replicate": replicate, **backends}
    return init_device_mesh("cpu", sizes, mesh_dim_names=names, backend_override=override)
