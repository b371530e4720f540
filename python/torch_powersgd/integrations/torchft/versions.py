# SPDX-License-Identifier: BSD-3-Clause
"""Whether the installed torchft is one that this package knows."""

from __future__ import annotations

import inspect
from importlib import metadata

from torch_powersgd.integrations.libraries import TESTED

SUPPORTED = f"torchft {TESTED['torchft']} and torchft-nightly 2026.10.26"

# The methods of torchft's process groups that make the group of a quorum, by ``_create_pg``.
_MAKES_GROUPS = ("configure", "reconfigure")


def check() -> None:
    """Raises an ImportError if torchft makes its process groups in a way that isn't known."""
    cause: ImportError | None = None
    try:
        from torchft.local_sgd import DiLoCo  # noqa: F401
        from torchft.process_group import ProcessGroupWrapper

        if any(_calls_create_pg(ProcessGroupWrapper, method) for method in _MAKES_GROUPS):
            return
        reason = "its ProcessGroupWrapper doesn't make groups by _create_pg"
    except ImportError as error:
        cause, reason = error, str(error)
    raise ImportError(
        f"torch_powersgd.integrations.torchft needs {SUPPORTED}, or a release like them, but found "
        f"{_installed()}: {reason}"
    ) from cause


def _calls_create_pg(wrapper: type, method: str) -> bool:
    function = inspect.unwrap(getattr(wrapper, method, lambda: None))
    return "_create_pg" in function.__code__.co_names


def _installed() -> str:
    found = []
    for name in ("torchft", "torchft-nightly"):
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return " and ".join(found) or "no torchft"
