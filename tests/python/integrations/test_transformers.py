# SPDX-License-Identifier: BSD-3-Clause
"""transformers' callback, on real trainers."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import torch_powersgd as tp
from support import launch
from support.integrations import OPTIONS, needs, with_and_without_local_steps
from support.on_ranks import all_agree, on_ranks


@needs("transformers", "accelerate")
@on_ranks(1, backend=None)
def test_transformers_that_change_train_are_an_error(rank: int) -> None:
    from torch_powersgd.integrations.transformers import attach

    def trainer_of(train: Any) -> Any:
        return SimpleNamespace(train=train, add_callback=lambda callback: None)

    with pytest.raises(RuntimeError, match="no argument resume_from_checkpoint"):
        attach(trainer_of(lambda checkpoint=None: None))
    trainer = trainer_of(lambda trial=None, resume_from_checkpoint=None: None)
    attach(trainer)
    with pytest.raises(RuntimeError, match="has not called on_train_begin"):
        trainer.train(resume_from_checkpoint="folder")


@needs("transformers")
@on_ranks(1, backend=None)
def test_a_trainer_without_ddp_is_refused(rank: int) -> None:
    from torch_powersgd.integrations.transformers import CompressionCallback

    accelerator = SimpleNamespace(scaler=None)
    trainer: Any = SimpleNamespace(model_wrapped=torch.nn.Linear(2, 2), accelerator=accelerator)
    callback = CompressionCallback(trainer, tp.Options())
    with pytest.raises(ValueError, match="must wrap its model in DistributedDataParallel, got Lin"):
        callback.on_train_begin(None, None, None)


class _Loss(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(48, 48)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.layer(x) - labels).square().mean()}


@with_and_without_local_steps
@needs("transformers", "accelerate")
@on_ranks(2)
def test_transformers_resumes_from_another_folder(rank: int, make: Any, tmp_path: Path) -> None:
    """Trains 6 steps, and the last 3 of them again, with another folder to save to, compiled.

    Each rank is the only one of its machine, which has folders of its own. The second training
    fails in its first attempt. Every model that is evaluated or saved is the same on all processes.
    """
    launch.enter(rank, 2, 0)
    os.environ["LOCAL_RANK"] = "0"
    folder = tmp_path / str(rank)
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from torch_powersgd.integrations.transformers import attach, local_steps

    torch.manual_seed(1)
    data = [{"x": torch.randn(48), "labels": torch.randn(48)} for _ in range(64)]

    class Watch(TrainerCallback):
        def __init__(self, fails: bool) -> None:
            self.fails = fails

        def on_evaluate(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            assert all_agree([p.tolist() for p in given["model"].parameters()])
            if self.fails:
                self.fails = False
                raise MemoryError

        on_save = on_evaluate

    def train(name: str, resumed: str | None, fails: bool) -> torch.Tensor:
        settings = TrainingArguments(
            str(folder / name),
            use_cpu=True,
            per_device_train_batch_size=4,
            max_steps=6,
            save_steps=3,
            eval_strategy="steps",
            eval_steps=2,
            save_on_each_node=True,
            optim="sgd",
            lr_scheduler_type="constant",
            learning_rate=0.1,
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
            torch_compile=True,
            torch_compile_backend="eager",
        )
        model = _Loss()
        evaluated = data[:8]
        watch = Watch(fails)
        trainer = Trainer(
            model, settings, train_dataset=data, eval_dataset=evaluated, callbacks=[watch]
        )
        callback = attach(trainer, OPTIONS) if make is None else local_steps(trainer, make)
        with pytest.raises(MemoryError) if fails else nullcontext():
            trainer.train(resume_from_checkpoint=resumed)
        if fails:
            trainer.train(resume_from_checkpoint=resumed)
        assert all_agree(model.layer.weight.tolist())
        assert callback.compression is not None
        return model.layer.weight.detach()

    whole = train("first", None, fails=False)
    resumed = train("second", str(folder / "first/checkpoint-3"), fails=True)
    # In local steps, each process then has the mean residual, of which it keeps another share.
    tolerance = 1e-5 if make is None else 0.02
    moved = whole - _Loss().layer.weight.detach()
    assert (resumed - whole).norm() < tolerance * moved.norm()
