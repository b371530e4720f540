# SPDX-License-Identifier: BSD-3-Clause
"""torch's own tests of a process group end over this backend as they do over gloo."""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import suite_record
import torch
from torch_suite import ATTACHED, GLOO, POWERSGD, Outcomes, outcomes

pytest.importorskip("expecttest", reason="torch's tests need expecttest")
OURS = (POWERSGD, ATTACHED)

# The quick part, which passes over gloo.
COLLECTIVES = [
    "test_Backend_enum_class",
    "test_all_gather_coalesced_with_empty",
    "test_all_reduce_coalesced_max_complex_unsupported",
    "test_all_reduce_coalesced_sum",
    "test_all_reduce_full_group_sum",
    "test_all_reduce_sum_async",
    "test_all_reduce_sum_complex",
    "test_batch_isend_irecv_gloo_tags",
    "test_destroy_full_group",
    "test_get_future",
    "test_monitored_barrier_gloo",
    "test_reduce_sum_twice",
    "test_send_recv_any_source",
    "test_sparse_all_reduce_sum",
]
PASSES = [  # of DDP
    "test_DistributedDataParallelCPU",
    "test_accumulate_gradients_no_sync",
    "test_accumulate_gradients_no_sync_allreduce_hook",
    "test_ddp_broadcast_buffer_via_hook",
    "test_ddp_buffer_hook_allreduce_return_future",
    "test_ddp_comm_hook_logging",
    "test_ddp_control_flow_different_across_ranks",
    "test_ddp_forward_backward_hook",
    "test_ddp_grad_div_uneven_inputs",
    "test_ddp_hook_parity_powerSGD",
    "test_ddp_ignore_params_arg",
    "test_ddp_join_model_equivalence",
    "test_ddp_logging_data_cpu",
    "test_ddp_multiple_nested_unused_params_error",
    "test_ddp_new_tensor_in_fwd_static_graph",
    "test_ddp_remove_autograd_hooks",
    "test_ddp_shared_grad_acc_unused_params",
    "test_ddp_static_graph_nested_types",
    "test_ddp_uneven_input_exception",
    "test_ddp_uneven_input_join_disable",
    "test_ddp_unused_params_rebuild_buckets_exception",
    "test_grads_same_across_ranks_with_no_sync",
    "test_post_localSGD_optimizer_parity_grad_is_view",
    "test_skip_all_reduce_unused_parameters",
    "test_stateless_api_with_ddp",
    "test_static_graph_api_cpu",
]
if torch.__version__ >= "2.13":  # On 2.11 it fails over gloo, too.
    PASSES.append("test_ddp_native_mixed_precision_ignored_params")


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
        "attach does not work with DDP's mixed_precision",
        (ATTACHED,),
    ),
}


def _compare(gloo: Outcomes, ours: Outcomes, backend: str, ranks: int) -> None:
    """Raises for a test that ends in another way and is not listed, or the other way round."""
    listed = {
        name: each
        for name, each in DIFFERENCES.items()
        if name in ours and backend in each.backends and ranks in each.ranks
    }
    different = [name for name in ours if ours[name][0] != gloo[name][0]]
    surprising = [name for name in different if name not in listed]
    if surprising:
        # Some of torch's tests wait for seconds, and may fail on a busy machine.
        warnings.warn(f"these are run once more: {surprising}", stacklevel=2)
        again, over_gloo = (outcomes(each, ranks, surprising) for each in (backend, GLOO))
        for name in surprising:
            assert again[name][0] == over_gloo[name][0], f"{name}: {again[name]}"
    assert set(listed) <= set(different), "a listed test ends as over gloo"
    for name, difference in listed.items():
        assert gloo[name][0] == "passed"
        assert difference.error in ours[name][1], f"{name}: {ours[name]}"


@pytest.mark.parametrize(
    ("backend", "names"), [(POWERSGD, [*COLLECTIVES, *PASSES]), (ATTACHED, PASSES)]
)
def test_quick_tests_end_as_over_gloo(backend: str, names: list[str]) -> None:
    passed = dict.fromkeys(names, ("passed", ""))
    _compare(passed, outcomes(backend, 2, names, 600), backend, 2)


@functools.cache
def _all_over_gloo(ranks: int) -> Outcomes:
    return outcomes(GLOO, ranks)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("backend", OURS)
def test_all_tests_end_as_over_gloo(backend: str, ranks: int) -> None:
    """A test that fails over gloo needs more of a GPU than its name, and is not compared."""
    gloo = _all_over_gloo(ranks)
    names = [name for name, (how, _) in gloo.items() if how != "failed"]
    ours = outcomes(backend, ranks, names)
    _compare(gloo, ours, backend, ranks)
    assert sum(how == "passed" for how, _ in ours.values()) > 140
    suite_record.add("torch", backend, ranks, _counted(gloo, ours))


def _counted(gloo: Outcomes, ours: Outcomes) -> dict[str, Any]:
    as_gloo = [name for name in ours if ours[name][0] == gloo[name][0]]
    different = [name for name in ours if name not in as_gloo]
    rerun = "it ended as over gloo when it was run once more"
    return {
        "tests": len(gloo),
        "passed": sum(ours[name][0] == "passed" for name in as_gloo),
        "skipped": sum(ours[name][0] == "skipped" for name in as_gloo),
        "fail over gloo": sum(how == "failed" for how, _ in gloo.values()),
        "differences": {n: DIFFERENCES[n].reason if n in DIFFERENCES else rerun for n in different},
    }
