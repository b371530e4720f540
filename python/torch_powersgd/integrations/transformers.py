# SPDX-License-Identifier: BSD-3-Clause
"""The Trainer of transformers.

    from torch_powersgd.integrations.transformers import attach

    dist.init_process_group("cpu:powersgd")  # before the TrainingArguments, which take it
    trainer = Trainer(model, TrainingArguments(...), ...)
    attach(trainer)

examples/with_transformers.py is a whole program.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from torch_powersgd.attach import attach as attach_module
from torch_powersgd.checkpoint import load_state_dict, state_dict
from torch_powersgd.options import Options

try:
    from transformers import Trainer, TrainerCallback
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"torch_powersgd.integrations.transformers needs transformers ({error}): "
        "pip install transformers accelerate"
    ) from error

FILE = "powersgd.pt"  # in the folder of a checkpoint


def attach(trainer: Trainer, options: Options | None = None) -> None:
    """Compresses the gradients of a trainer's model. Each of its checkpoints holds the state.

    The module is attached when ``trainer.train`` has made it, and resumes from the checkpoint that
    the trainer resumes from. A checkpoint without the state starts compression anew.

    Args:
        trainer: The Trainer, before ``train``.
        options: Options, or None for ``Options.recommended()``.
    """
    trainer.add_callback(Compression(trainer, options or Options.recommended()))


class Compression(TrainerCallback):
    """The callback that ``attach`` adds."""

    def __init__(self, trainer: Trainer, options: Options) -> None:
        self.trainer = trainer
        self.options = options

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        ddp = self._ddp()
        attach_module(ddp, self.options, scaler=self.trainer.accelerator.scaler)
        file = _file(args, state)
        if file.exists():
            load_state_dict(ddp, torch.load(file, weights_only=True))

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        saved = state_dict(self._ddp())  # on all ranks
        if state.is_world_process_zero:
            torch.save(saved, _file(args, state))

    def _ddp(self) -> DistributedDataParallel:
        ddp = self.trainer.model_wrapped
        if not isinstance(ddp, DistributedDataParallel):
            raise ValueError(
                f"the Trainer must wrap its model in DistributedDataParallel, got "
                f"{type(ddp).__name__}: start it with torchrun, and make the process group first"
            )
        return ddp


def _file(args: Any, state: Any) -> Path:
    return Path(args.output_dir, f"checkpoint-{state.global_step}", FILE)
