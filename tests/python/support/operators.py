# SPDX-License-Identifier: BSD-3-Clause
"""What torch does on a device: its operators, the bytes that they move, and the host's waits."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Methods that read a number on the host.
_WAITS = {"tolist", "item", "__bool__", "__float__", "__int__", "cpu", "numpy", "equal"}


class Waits(TorchFunctionMode):
    """Counts where the host would wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += getattr(func, "__name__", "") in _WAITS
        return func(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    """Records the operators of this thread that run on a device.

    Attributes:
        names: Their names, in order.
        moved: The bytes that they read and write.
        allocated: The bytes of new tensors.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []
        self.moved = self.allocated = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        returned = func(*args, **(kwargs or {}))
        given, name = _tensors((args, kwargs)), func._schema.name.removeprefix("aten::")
        known = {tensor.untyped_storage().data_ptr() for tensor in given}
        made = [t for t in _tensors(returned) if t.untyped_storage().data_ptr() not in known]
        self.allocated += _bytes(made)
        in_place = name.endswith("_")
        changed = _tensors(args[0] if in_place else (kwargs or {}).get("out"))
        if "empty" in name or not (made or changed):
            return returned  # a view, or memory as it is
        self.names.append(name)
        self.moved += _bytes(given) + _bytes(made)
        if in_place and not name.endswith("copy_"):  # which does not read what it changes
            self.moved += _bytes(changed)
        return returned


def _tensors(of: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(of) if isinstance(leaf, torch.Tensor)]


def _bytes(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
