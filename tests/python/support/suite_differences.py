# SPDX-License-Identifier: BSD-3-Clause
"""The tests of torch's suite that end over this backend in another way than over gloo, and why."""

from __future__ import annotations

from dataclasses import dataclass

from support.torch_suite import ATTACHED, POWERSGD


@dataclass(frozen=True)
class Difference:
    """A test that passes over gloo and fails here.

    Attributes:
        reason: The reason, for the documentation.
        error: A part of the error.
        backends: The backends that it fails over.
        ranks: The numbers of ranks that it fails on. On others it ends before it gets there.
    """

    reason: str
    error: str
    backends: tuple[str, ...] = (POWERSGD, ATTACHED)
    ranks: tuple[int, ...] = (2, 3)


_NAME = Difference(
    "it asserts that DDP logs the name gloo, and DDP logs custom for each backend of a plugin",
    "'custom' != 'gloo'",
)
_MONITORED = "monitored_barrier of torch.distributed refuses groups that are not named gloo"
_GLOO_ALONE = "monitored_barrier is only implemented for GLOO backend"
_HOOK = Difference(
    "it registers a hook of its own, and DDP takes one",
    "register_comm_hook or register_builtin_comm_hook can only be called once",
    (ATTACHED,),
)

DIFFERENCES = {
    "test_ddp_logging_data_cpu": _NAME,
    "test_monitored_barrier_gloo": Difference(_MONITORED, _GLOO_ALONE),
    "test_monitored_barrier_gloo_subgroup": Difference(_MONITORED, _GLOO_ALONE),
    "test_monitored_barrier_failure_order": Difference(_MONITORED, _GLOO_ALONE, ranks=(3,)),
    "test_monitored_barrier_wait_all_ranks": Difference(_MONITORED, _GLOO_ALONE, ranks=(3,)),
    "test_accumulate_gradients_no_sync_allreduce_hook": _HOOK,
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook": _HOOK,
    "test_ddp_hook_parity_allreduce": _HOOK,
    "test_ddp_hook_parity_allreduce_process_group": _HOOK,
    "test_ddp_hook_parity_post_localSGD": _HOOK,
    "test_ddp_hook_parity_powerSGD": _HOOK,
    "test_ddp_comm_hook_logging": Difference(
        "it asserts that a module has no hook before it registers one",
        "torch_powersgd is not None",
        (ATTACHED,),
    ),
    "test_ddp_native_mixed_precision_ignored_params": Difference(
        "it uses DDP's own mixed_precision, which attach refuses",
        "attach does not work with DDP's own mixed_precision",
        (ATTACHED,),
    ),
}


def expected(backend: str, ranks: int) -> dict[str, Difference]:
    """The differences of a backend on a number of ranks, by test."""
    return {
        name: difference
        for name, difference in DIFFERENCES.items()
        if backend in difference.backends and ranks in difference.ranks
    }
