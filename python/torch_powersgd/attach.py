# SPDX-License-Identifier: BSD-3-Clause
"""``attach``, where compression begins."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from torch_powersgd import grad_scaler, log
from torch_powersgd._core import _C
from torch_powersgd.attachment import Attachment
from torch_powersgd.compression import Compression
from torch_powersgd.group_backends import find_backends
from torch_powersgd.hosts import in_two_levels
from torch_powersgd.matrices import as_reals, beyond_the_rate, exact_dtypes, highest_rank, is_exact
from torch_powersgd.options import Options, rank_text, to_core, with_fields
from torch_powersgd.proposal import agree
from torch_powersgd.sparse import Sparse
from torch_powersgd.targets import Target, target_of
from torch_powersgd.units import size_text


def attach(
    target: DistributedDataParallel | FSDPModule | Mapping[str, torch.Tensor],
    options: Options | Mapping[str, Any] | None = None,
    *,
    scaler: torch.amp.GradScaler | None = None,
    group: dist.ProcessGroup | None = None,
    register_hook: bool = True,
    previous: Compression | None = None,
    **fields: Any,
) -> Compression:
    """Compresses gradients layer by layer. Collective.

    Each weight is compressed as a matrix of shape[0] rows. Its residual and factors belong to the
    parameter, so they survive when DDP rebuilds its buckets.

    For a DDP module, ``attach`` registers a C++ communication hook, so no Python runs in the
    backward pass. For a module that FSDP2's ``fully_shard`` or ``replicate`` was called with, it
    compresses the average over the replicas, after FSDP2's own reduce-scatter. Average named
    tensors yourself, with ``Compression.all_reduce``.

    Every process of the group must call it. If one doesn't, all of them raise an error that names
    it.

    Args:
        target: A DDP module, the root of a module that FSDP2 has sharded or replicated, or dense
            floating-point or complex tensors by name. Only the shapes, dtypes and devices of
            tensors count. Of a DTensor, this process's shard is averaged.
        options: A complete ``Options``, or a mapping of the fields that differ from the options of
            the process group. None: the options of the process group.
        scaler: The GradScaler of the training, if any. It rescales the residuals when the loss
            scale changes, and restores them when it skips a step.
        group: For an FSDP2 module whose mesh has no dimension of replicas, the group of the
            processes that hold the same shards. For tensors, the group to average over, with a
            powersgd backend for their device; None is the default group. A DDP module has its own.
        register_hook: If False, register ``Compression.comm_hook`` yourself. For DDP modules only.
        previous: The compression of the same gradients over a former group, which may have ended.
            Its residuals, factors, step, counts and options carry over to this group, and it ends.
            Processes that are new in the group leave it out, and take over the factors and the
            step. If an optimizer did not apply the last step, call ``step_skipped`` or
            ``discard_step`` of the returned handle on every process. After an error, as when a
            process dies meanwhile, ``previous`` is as it was.
        fields: Fields of the options, as in ``attach(ddp, matrix_approximation_rank=8)``.

    Returns:
        A handle, for statistics, checkpoints and steps that are not applied. The compression lasts
        as long as the module, even if you drop the handle.

    Raises:
        ValueError: If the target can't be attached or already is, if targets or options differ
            between processes or from those of ``previous``, or if a process doesn't call
            ``attach``. It is raised on every process, unless the group was destroyed on this one.
    """
    found = target_of(target)
    before = previous.attachment if previous is not None else None
    options = with_fields(options, fields)
    compression = compress(found, options, found.group(group), scaler, register_hook, before)
    _announce(compression, found)
    return compression


def compress(
    target: Target,
    options: Options | Mapping[str, Any] | None,
    group: dist.ProcessGroup,
    scaler: torch.amp.GradScaler | None = None,
    register_hook: bool = True,
    previous: Attachment | None = None,
    apart: bool = False,
    density: float | None = None,
) -> Compression:
    """``attach`` without the log message. The attachment may be ``apart``.

    With a ``density``, nothing is compressed by factors, and the attachment has a ``Sparse``.
    """
    if density:
        options = _without_factors(options)
    reducer, described = make_reducer(target, options, group, scaler, previous, register_hook)
    try:
        if register_hook:
            target.register(reducer, group)
        if scaler is not None:
            grad_scaler.follow(scaler, reducer, target.index())
        attachment = Attachment(target, reducer, group, described, previous, apart)
        if density:
            tensors = [as_reals(gradient) for gradient in target.gradients().values()]
            attachment.sparse = Sparse(tensors, density, group)
    except BaseException:
        reducer.detach()  # hooks that it has by now average exactly
        raise
    if previous is not None:
        previous.end("it was passed to attach as previous")
    reducer.note_attached()
    return Compression(attachment)


def _without_factors(options: Any) -> Any:
    if isinstance(options, Options):
        return dataclasses.replace(options, scope="never")
    return {**(options or {}), "scope": "never"} if isinstance(options, Mapping | None) else options


def make_reducer(
    target: Target,
    options: Options | Mapping[str, Any] | None,
    group: dist.ProcessGroup,
    scaler: torch.amp.GradScaler | None = None,
    previous: Attachment | None = None,
    register_hook: bool = False,
) -> tuple[_C.BucketReducer, list[str]]:
    """Returns the reducer of ``attach``, and its gradients in words. Collective.

    It has copies of the states of ``previous``, which goes on if another process fails meanwhile.
    """
    agreed, source = agree(target, options, scaler, group, previous, register_hook)
    reducer = _C.BucketReducer(
        agreed.backend,
        list(agreed.gradients),
        list(agreed.gradients.values()),
        to_core(agreed.options),
        previous.kept if previous is not None else None,
    )
    if source is not None:
        reducer.states.agree_with(source.rank, source.step)
    return reducer, agreed.described


def _announce(compression: Compression, target: Target) -> None:
    """Logs what is compressed, what a step sends, when compression starts, and advice."""
    group, options = compression.group, compression.options
    say = log.of(group, target.shard(group))
    if group.size() == 1:
        say.notice("attached, but the group has only one process, so there is nothing to send")
        return
    if options.scope == "never":
        say.notice("attached, but scope='never' compresses nothing")
        return
    rank, rate = options.matrix_approximation_rank, options.min_compression_rate
    outline = compression.attachment.reducer.states.outline()
    gradients = [*target.gradients().values()]
    exact = exact_dtypes(gradients)
    if outline.compressed_parameters == 0:
        if all(map(is_exact, gradients)):
            say.warning(f"no parameter is compressed: gradients in {exact} are averaged exactly")
            return
        remedy = (
            f"Use a matrix rank of at most {highest}"
            if (highest := highest_rank(gradients, options))
            else "They are too small for any matrix rank"
        )
        say.warning(
            f"no parameter is compressed: with matrix_approximation_rank={rank}, no parameter's "
            f"factors are min_compression_rate={rate:g} times smaller than its gradient. {remedy}"
            + (f". Those in {exact} are averaged exactly" if exact else "")
        )
        return
    hosts = find_backends(group)[0].hosts
    per_host = Counter(hosts).values()
    on_one_host = (
        "; all processes run on this host, where plain all-reduce may be just as fast"
        if len(per_host) == 1
        else ""
    )
    fewest, most = min(per_host), max(per_host)
    sender = "a step sends" if len(hosts) == 2 else "the payload of a step is"
    if in_two_levels(hosts) and len(per_host) == 2:
        sender = f"in a step, each host of {most} processes sends"
    share = 100 * outline.compressed_numel / outline.numel
    those = f"; those in {exact} are averaged exactly" if exact else ""
    say.notice(
        f"{outline.compressed_parameters} of {outline.parameters} parameters ({share:.1f} % of the "
        f"elements) are compressed at matrix rank {rank_text(options)}{those}; {sender} "
        f"{size_text(outline.bytes_after)} instead of {size_text(outline.bytes_before)}, from "
        f"step {options.start_powerSGD_iter} on{on_one_host}"
    )
    for name, own in beyond_the_rate(target.gradients(), options).items():
        say.warning(
            f"{name!r} is averaged exactly: at matrix rank {own}, which matrix_ranks sets, its "
            f"factors are not min_compression_rate={rate:g} times smaller than its gradient"
        )
    if fewest != most:
        say.notice(
            f"hosts have {fewest} to {most} processes, so each process sends for itself. With "
            "equally many, a host would send the sum of its processes"
        )
    if advice := target.advice(outline.bytes_before):
        say.notice(advice)
