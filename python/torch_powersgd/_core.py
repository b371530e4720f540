# SPDX-License-Identifier: BSD-3-Clause
"""The compiled core, loaded after torch and only if the two match."""

import torch

try:
    from torch_powersgd import _C
except ImportError as error:  # Usually it is not built, or is built against another torch.
    raise ImportError(
        "torch_powersgd's compiled core could not be loaded with torch "
        f"{torch.__version__} ({error}). Build it in this environment: "
        "pip install --no-build-isolation -e ."
    ) from error

# The C++ classes of torch differ between releases, and pybind11 does not notice. A core that was
# built for another release loads and then corrupts memory.
if _C.torch_version.split("+")[0] != torch.__version__.split("+")[0]:
    raise ImportError(
        f"torch_powersgd was built against torch {_C.torch_version} and is being loaded by torch "
        f"{torch.__version__}. Install the wheel for this torch, or rebuild it in this "
        "environment: pip install --no-build-isolation --force-reinstall --no-deps ."
    )

__all__ = ["_C"]
