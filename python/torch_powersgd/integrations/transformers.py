# SPDX-License-Identifier: BSD-3-Clause
"""The Trainer of transformers.

    from torch_powersgd.integrations.transformers import attach

    dist.init_process_group("cpu:powersgd")  # before the TrainingArguments, which take it
    trainer = Trainer(model, TrainingArguments(...), ...)
    attach(trainer)

With local steps, to average every ten steps:

    local_steps(trainer, functools.partial(torch_powersgd.LocalSGD, sync_every=10))

examples/with_transformers.py is a whole program.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from torch_powersgd.attach import attach as attach_module
from torch_powersgd.compression import Compression
from torch_powersgd.integrations import state_file
from torch_powersgd.integrations.libraries import overrides, unfit
from torch_powersgd.local_steps import LocalSGD
from torch_powersgd.options import Options

try:
    from transformers import Trainer, TrainerCallback
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"torch_powersgd.integrations.transformers needs transformers ({error}): "
        "pip install transformers accelerate"
    ) from error

FILE = "powersgd.pt"  # in the folder of a checkpoint
_RESUMES = "resume_from_checkpoint"


def attach(
    trainer: Trainer, options: Options | Mapping[str, Any] | None = None
) -> CompressionCallback:
    """Compresses the gradients of a trainer's model, and saves the state in its checkpoints.

    The module is attached once ``trainer.train`` has made it. If the trainer resumes from a
    checkpoint, so does the compression; from a checkpoint without its state, it starts anew.

    Args:
        trainer: The Trainer, before ``train``.
        options: As in ``torch_powersgd.attach``.

    Returns:
        The trainer's callback. Its ``compression`` is the handle, once training has begun.
    """
    return _add(CompressionCallback(trainer, options))


def local_steps(trainer: Trainer, make: Callable[..., LocalSGD]) -> CompressionCallback:
    """Makes a trainer take local steps, and saves their state in its checkpoints.

    Args:
        trainer: The Trainer, before ``train``.
        make: Function of the DDP module, the optimizer and ``scaler=`` that returns a ``LocalSGD``
            or ``DiLoCo``.

    Returns:
        As ``attach``.
    """
    return _add(CompressionCallback(trainer, None, make))


def _add(callback: CompressionCallback) -> CompressionCallback:
    trainer = callback.trainer
    train = trainer.train
    signature = inspect.signature(train)
    if _RESUMES not in signature.parameters:
        raise RuntimeError(unfit("transformers", f"Trainer.train has no argument {_RESUMES}"))
    trainer.add_callback(callback)

    # The trainer does not tell its callbacks where it resumes from.
    @functools.wraps(train)
    def resuming(*arguments: Any, **named: Any) -> Any:
        callback.resumed = signature.bind(*arguments, **named).arguments.get(_RESUMES)
        ended = train(*arguments, **named)
        if callback.compression is None:
            fact = "Trainer.train has not called on_train_begin, so nothing was compressed"
            raise RuntimeError(unfit("transformers", fact))
        return ended

    trainer.train = resuming  # type: ignore[method-assign]
    return callback


@overrides("transformers")
class CompressionCallback(TrainerCallback):
    """The callback that ``attach`` and ``local_steps`` add.

    Attributes:
        compression: What ``torch_powersgd.attach`` or ``make`` returned, once training has begun.
        resumed: What ``trainer.train`` resumes from: a folder, True for the trainer's last
            checkpoint, or False or None.
    """

    def __init__(
        self,
        trainer: Trainer,
        options: Options | Mapping[str, Any] | None,
        make: Callable[..., LocalSGD] | None = None,
    ) -> None:
        self.trainer = trainer
        self.options = options
        self.make = make
        self.compression: Compression | LocalSGD | None = None
        self.resumed: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.compression is not None and not self.compression.ended:
            self.compression.detach()  # The trainer has trained before, or failed to.
        scaler = self.trainer.accelerator.scaler
        if self.make is None:
            self.compression = attach_module(self._ddp(), self.options, scaler=scaler)
        else:
            self.compression = self.make(self._ddp(), self.trainer.optimizer, scaler=scaler)
        if self.resumed:
            last = self.resumed is True
            folder = _folder(args, state) if last else Path(self.resumed)
            state_file.load(self.compression, folder / FILE)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # The trainer now evaluates the models of all processes, and saves that of one.
        if isinstance(self.compression, LocalSGD) and (
            control.should_evaluate or control.should_save
        ):
            self.compression.sync(exact=True)

    on_epoch_end = on_step_end

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        assert self.compression is not None
        saved = self.compression.state_dict()  # on all processes
        if args.should_save:
            torch.save(saved, _folder(args, state) / FILE)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if isinstance(self.compression, LocalSGD):
            self.compression.detach()

    def _ddp(self) -> DistributedDataParallel:
        wrapped = self.trainer.model_wrapped
        ddp = getattr(wrapped, "_orig_mod", wrapped)  # torch_compile compiles the wrapped module.
        if not isinstance(ddp, DistributedDataParallel):
            raise ValueError(
                f"the Trainer must wrap its model in DistributedDataParallel, got "
                f"{type(ddp).__name__}: start it with torchrun, create the process group first, "
                "and call evaluate and predict only after train"
            )
        return ddp


def _folder(args: Any, state: Any) -> Path:
    return Path(args.output_dir, f"checkpoint-{state.global_step}")
