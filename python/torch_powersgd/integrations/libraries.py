# SPDX-License-Identifier: BSD-3-Clause
"""The versions of other libraries that the integrations are tested with, and checks of others.

A newer version usually works, so none is refused. But if it doesn't call a method any more that a
class of an integration overrides, it would train or save as if there were no compression.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from typing import TypeVar

# pyproject.toml installs these for the tests.
TESTED = {
    "accelerate": "1.15.0",
    "lightning": "2.6.6",
    "ray": "2.60.0",
    "torchft": "0.2.0",
    "torchtitan": "0.3.0",
    "transformers": "5.24.0",
}

Class = TypeVar("Class", bound=type)


def overrides(library: str, *private: str) -> Callable[[Class], Class]:
    """Decorates a class that extends one of a library's.

    Args:
        library: The library's name.
        private: Names of overridden methods that begin with an underscore. All public methods
            override one as well.

    Raises:
        ImportError: If the library has no such method to override.
    """

    def check(extension: Class) -> Class:
        names = [name for name in vars(extension) if not name.startswith("_")]
        for name in (*names, *private):
            if not any(hasattr(base, name) for base in extension.__bases__):
                bases = ", ".join(base.__name__ for base in extension.__bases__)
                raise ImportError(unfit(library, f"{bases} has no {name}"))
        return extension

    return check


def unfit(library: str, fact: str) -> str:
    """The message of an error about a version that an integration can't work with."""
    return (
        f"torch_powersgd.integrations.{library} doesn't fit {library} "
        f"{importlib.metadata.version(library)}: {fact}. It was tested with "
        f"{library} {TESTED[library]}: pip install {library}=={TESTED[library]}"
    )
