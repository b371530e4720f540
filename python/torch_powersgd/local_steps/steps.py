# SPDX-License-Identifier: BSD-3-Clause
"""Local steps: each process trains on its own, and the changes are averaged at intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer

from torch_powersgd import log
from torch_powersgd.agreement import agree, equality_of
from torch_powersgd.checkpoint import PerRank
from torch_powersgd.group_backends import find_backends
from torch_powersgd.local_steps import admission, counting, state, summary
from torch_powersgd.local_steps.admission import Arguments
from torch_powersgd.local_steps.exact import Frozen
from torch_powersgd.local_steps.fragment import Fragment, Tensors, reshard
from torch_powersgd.local_steps.rounds import Rounds
from torch_powersgd.local_steps.schedule import Schedule, lay_under
from torch_powersgd.local_steps.state import Progress
from torch_powersgd.local_steps.watch import Watch
from torch_powersgd.options import Options, from_core, with_fields

if TYPE_CHECKING:
    from typing_extensions import Self

_BROADCAST_BYTES = 250 << 20  # as DDP's


class LocalSGD(Stateful):
    """Averages how far the parameters have moved, compressed, every ``sync_every`` steps.

    Between two rounds each process trains on its own, and nothing is sent. In a round, the mean of
    the processes' changes since the last round is added to the parameters of that round. What the
    low-rank factors miss of the changes stays in the residual for later rounds, so nothing is lost.
    Each process keeps a share of its own residual in its parameters, so they differ a little even
    after a round. (Local SGD as in Stich, arXiv:1805.09767, averages the parameters themselves. A
    residual of those would soon be out of date.)

    It starts when you create it: all processes get rank 0's parameters and buffers, and DDP stops
    averaging gradients. A hook of the optimizer counts the steps, so your training loop stays as it
    is:

        ddp = DistributedDataParallel(model)  # or the model itself
        optimizer = torch.optim.AdamW(ddp.parameters())
        with torch_powersgd.LocalSGD(ddp, optimizer, sync_every=10):
            for batch in batches:
                optimizer.zero_grad()
                loss_of(ddp, batch).backward()
                optimizer.step()

    At the end of the block, or in ``detach`` if there is none, the models become their exact mean.
    Every process must take the same number of steps. It is a torch ``Stateful``, for ``dcp.save``.

    Args:
        model: Module whose trainable parameters are averaged. DDP over the processes of ``group``
            counts as the module inside it, and averages nothing until the end. DDP over other
            processes, or FSDP2, keeps averaging gradients in every step, within a host or a
            replica.
        optimizer: Optimizer whose steps are counted, or a list of several, such as Muon and AdamW,
            that share the model. A step then counts once each of them has taken it.
        sync_every: Number of steps from one round of a parameter to its next.
        options: As in ``attach``. A step of the options is a round. Matrix rank 32 and int4 take
            the place of the defaults 16 and int8. Unless you set ``start_powerSGD_iter``, only the
            rounds of the warm-up are exact.
        fragments: Number of parts of the model, of about the same size, that take turns: one of
            them has a round every ``sync_every / fragments`` steps (Streaming DiLoCo,
            arXiv:2501.18512). It must divide ``sync_every``.
        fragment_sync_delay: Number of steps that training continues while a round is in flight,
            less than ``sync_every``. The round keeps what they have changed.
        warmup_steps: Number of steps at the start that each end with a round of all parameters.
        density: Share of the changes that a process sends, > 0 and <= 1. Of 256 numbers side by
            side, the largest are sent in 10 bits each, and the rest stays in the residual. The
            sum of a number over W processes is divided by how many sent it (as in SparseLoCo,
            arXiv:2508.15706), or by sqrt(W / 2) if that is more. None sends low-rank factors.
        average_buffers: Whether rounds also average persistent floating-point buffers, such as the
            statistics of batch normalization. They are sent whole, and numbers that aren't finite
            are left out of the mean.
        group: Group to average over, with a powersgd backend for the parameters' device. None is
            the default group. If DDP or FSDP2 works inside, it has one process of each replica.
        scaler: ``GradScaler`` of the training. The steps that it skips then count as well.
        fields: Fields of the options, as in ``attach``.

    Raises:
        ValueError: On every process, if an argument is not valid, or if arguments or parameters
            differ between processes.
    """

    @torch.inference_mode(False)
    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        sync_every: int,
        options: Options | Mapping[str, Any] | None = None,
        *,
        fragments: int = 1,
        fragment_sync_delay: int = 0,
        warmup_steps: int = 10,
        density: float | None = None,
        average_buffers: bool = True,
        group: dist.ProcessGroup | None = None,
        scaler: torch.amp.GradScaler | None = None,
        **fields: Any,
    ) -> None:
        model = getattr(model, "_orig_mod", model)  # what torch.compile has wrapped
        several = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
        self.optimizers: list[Optimizer] = [counting.delegate_of(one) for one in several]
        self.schedule = Schedule(sync_every, fragments, fragment_sync_delay, warmup_steps)
        arguments = Arguments(
            model,
            self.optimizers,
            self.schedule,
            average_buffers,
            density,
            group,
            scaler,
            self._check_trained,
        )
        kind = type(self).__name__
        found = admission.agree(kind, arguments)
        self.group, self._model = found.group, found.model
        shared = [*found.shared.values()]
        dist._broadcast_coalesced(self.group, shared, _BROADCAST_BYTES, 0)
        of_group = from_core(find_backends(self.group)[0].options.compression)
        options = lay_under(with_fields(options, fields), warmup_steps, of_group)
        self._rounds = Rounds(kind, found, self.schedule, options, self._move, density)
        self._fragments = self._rounds.fragments
        self._frozen = Frozen(self._model)
        self._watch = Watch(self._rounds, found, self.optimizers, scaler)
        self._ended = False
        self._last_stats: dict[str, Any] = {}  # once it has ended
        log.of(self.group).notice(summary.announcement(self._rounds))

    def sync(self, exact: bool = False) -> None:
        """Runs a round of all fragments now. Collective.

        Call it before a checkpoint or, with ``exact``, an evaluation. The schedule of later rounds
        doesn't change.

        Args:
            exact: Whether to set the parameters to their exact mean over the processes, which makes
                the models equal: the changes are sent whole, and an outer optimizer isn't used.

        Raises:
            ValueError: On every process, if one doesn't call it, or they have begun different
                rounds or pass a different ``exact``.
        """
        self._check_running()
        self._agree("sync", {"exact": exact})
        self._rounds.sync(exact)

    def step_skipped(self, optimizer: Optimizer | None = None) -> None:
        """Counts a step that this process's optimizer did not take.

        Each process counts its own steps to know when a round is due. Call this instead of
        ``optimizer.step()`` on a process that skips it, for example because a gradient is not
        finite. ``scaler=`` calls it for you.

        Args:
            optimizer: Which of several optimizers did not take the step. None: all that have not
                taken it yet.
        """
        self._watch.counter.skip(counting.delegate_of(optimizer))

    def stats(self) -> dict[str, Any]:
        """Returns this process's counts. It is not collective.

        Returns:
            A dictionary. ``steps`` of the optimizer and ``rounds`` of fragments, including those
            before a checkpoint that was loaded. ``dropped_rounds``, in which a parameter was not
            finite. ``bytes_before``: what averaging the gradients in every step would have sent, in
            their own type. ``bytes_after``: what was sent. ``ratio`` of the two. ``round_ratio``:
            the same for compressed rounds and the steps between them.
        """
        return dict(self._last_stats or summary.stats_of(self._rounds))

    @torch.inference_mode(False)
    def state_dict(self, per_rank: bool = False) -> dict[str, Any]:
        """Returns the state. Collective without ``per_rank``.

        It holds no buffers and no frozen parameters: save the model as well. Copy the model's state
        afterwards, because a round in flight ends first and moves the parameters. As in the state
        of ``Compression``, each part has a checksum ``crc32``.

        Args:
            per_rank: As in ``Compression.state_dict``. If False, any number of processes can load
                the state, and they continue from the last round; call ``sync`` first to keep the
                local steps since. If True, each process saves its own state, along with its model
                and optimizer, and continues bit for bit.
        """
        self._check_running()
        self._rounds.finish_all()
        return state.of(self._progress, self._fragments, per_rank)

    @torch.inference_mode(False)
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what ``state_dict`` returned. Collective.

        A state without ``per_rank`` sets the parameters to those of the last round on all
        processes. With ``per_rank``, load the model and the optimizer as well.

        Raises:
            ValueError: On every process and before anything changes, if the state doesn't fit or
                is damaged. It names the entry.
        """
        self._check_running()
        reshard(self._model)
        found = state.load(self._progress, self.group, self._fragments, state_dict)
        self._watch.loaded()
        self._rounds.steps, self._rounds.rounds = found["step"], found["rounds"]
        if found["outer_optimizer"]:
            self._load_outer_optimizer(found["outer_optimizer"])
        kind = type(self).__name__
        log.of(self.group).notice(f"{kind}: loaded the state of step {found['step']}")

    @property
    def ended(self) -> bool:
        """Whether ``detach`` was called, or a ``with`` block has ended."""
        return self._ended

    @property
    def per_rank(self) -> Stateful:
        """A view whose ``state_dict`` has ``per_rank``, for ``dcp.save``."""
        return PerRank(self)

    def detach(self) -> None:
        """Ends the local steps, with ``sync(exact=True)`` if any process took one. Collective.

        DDP averages gradients again. The residuals are lost unless you call ``state_dict`` first.
        Each process keeps its own optimizer state, such as AdamW's moments, with which DDP's
        replicas would drift apart: to continue with DDP, create a new optimizer.
        """
        everyone = self._agree("detach", {}, [self._rounds.moved, self._frozen.changed()])
        if any(moved for moved, _ in everyone):
            self._rounds.sync(exact=True)
        reshard(self._model)
        changed = {name for _, names in everyone for name in names}
        self._rounds.buffers.sent += self._frozen.average(changed, self.group)
        self._last_stats = self.stats()
        self._end()
        for fragment in self._fragments:
            fragment.compression.detach()

    def _check_running(self) -> None:
        if self._ended:
            raise ValueError(
                f"{type(self).__name__} has ended: sync it, or save or load its state, before "
                "that, inside the block"
            )

    def _agree(self, method: str, mine: dict[str, Any], own: Any = None) -> list[Any]:
        """Returns ``own`` of all processes, once they have made the same call. Collective."""
        function = f"{type(self).__name__}.{method}"
        same = equality_of(f"the calls of {function}")
        given = {"call": {**mine, "number of rounds begun": self._rounds.begun}, "own": own}
        _, everyone = agree(
            self.group,
            function,
            lambda: (None, given),
            lambda everyone: same([of["call"] for of in everyone]),
            lambda everyone: [of["own"] for of in everyone],
        )
        return list(everyone)

    def _end(self) -> None:
        self._watch.end()
        self._ended = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:  # The other processes may not get here.
            self._end()
        elif not self._ended:
            self.detach()

    def __str__(self) -> str:
        return summary.text_of(self._rounds, self.stats())

    __repr__ = __str__

    @property
    def _progress(self) -> Progress:
        return {
            "kind": type(self).__name__,
            "step": self._rounds.steps,
            "rounds": self._rounds.rounds,
            "outer_optimizer": self._outer_optimizer_state(),
        }

    def _move(self, fragment: Fragment, means: Tensors) -> None:
        """Moves the anchors of a fragment by the mean changes."""
        fragment.subtract(means)

    def _check_trained(self, trained: Tensors) -> None:
        """Raises a ValueError if an argument doesn't fit these parameters."""

    def _outer_optimizer_state(self) -> dict[str, Any] | None:
        """Returns the state of the outer optimizer, if there is one."""
        return None

    def _load_outer_optimizer(self, state: dict[str, Any]) -> None:
        """Loads what ``_outer_optimizer_state`` returned."""
