# SPDX-License-Identifier: BSD-3-Clause
"""Lightning's strategy, on real trainers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from support import launch
from support.integrations import EXACTLY, OPTIONS, needs, with_and_without_local_steps
from support.on_ranks import all_agree, on_ranks

_ON_TWO_RANKS: dict[str, Any] = {  # arguments of Lightning's Trainer, which leaves no files
    "accelerator": "cpu",
    "devices": 2,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


@needs("lightning")
@on_ranks(1, backend=None)
def test_a_lightning_that_does_not_begin_compression_is_an_error(rank: int) -> None:
    from torch_powersgd.integrations.lightning import PowerSGDStrategy

    with pytest.raises(RuntimeError, match="lightning 2.*before it has called configure_ddp"):
        PowerSGDStrategy().training_step()


@with_and_without_local_steps
@needs("lightning")
@on_ranks(2)
def test_lightning_saves_after_fit(rank: int, make: Any, tmp_path: Path) -> None:
    """The first training looks for a learning rate, with steps that diverge and are undone.

    Every model that is validated or saved is the same on all processes.
    """
    launch.enter(rank, 2, 0)
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import LearningRateFinder

    from torch_powersgd.integrations.lightning import KEY, PowerSGDStrategy

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(48, 48)

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            loss: torch.Tensor = self.layer(batch).square().mean()
            return loss

        def on_train_batch_end(self, *_: Any) -> None:
            if self.global_step == 1:
                self.trainer.save_checkpoint(tmp_path / "first.ckpt")

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            assert all_agree(checkpoint["state_dict"]["layer.weight"].tolist())

        def validation_step(self, batch: torch.Tensor, _: int) -> None:
            assert all_agree(self.layer.weight.tolist())
            self.log("validated", 1.0 + rank, sync_dist=True, batch_size=1 + 2 * rank)

        def configure_optimizers(self) -> list[torch.optim.Optimizer]:
            return [torch.optim.SGD(self.parameters(), lr=0.1)]

    def trainer(steps: int, *callbacks: Any) -> Trainer:
        return Trainer(
            callbacks=[*callbacks],
            strategy=PowerSGDStrategy(OPTIONS, make),
            max_steps=steps,
            val_check_interval=2,
            default_root_dir=tmp_path,
            **_ON_TWO_RANKS,
        )

    vectors: Any = torch.randn(64, 48)
    batches: Any = torch.utils.data.DataLoader(vectors, batch_size=4)
    file = tmp_path / "saved.ckpt"
    finder = LearningRateFinder(1e3, 1e6, 4, early_stop_threshold=None, update_attr=False)
    for steps, resumed, metrics, callbacks in (
        (3, None, {"validated": 1.75}, [finder]),  # weighted by the sizes of the batches
        (5, file, {"validated": 1.75}, []),
        (5, file, {}, []),  # nothing is left to train
    ):
        fitted = trainer(steps, *callbacks)
        module = Module()
        fitted.fit(module, batches, batches, ckpt_path=resumed)
        assert fitted.callback_metrics == metrics
        assert all_agree(module.layer.weight.tolist())
        assert module.layer.weight.abs().max() < 1
        fitted.save_checkpoint(file)
        assert torch.load(file, weights_only=False)[KEY]["step"] == steps


@needs("lightning")
@on_ranks(2)
def test_lightning_takes_local_steps_by_manual_optimization(rank: int, tmp_path: Path) -> None:
    launch.enter(rank, 2, 0)
    from lightning.pytorch import LightningModule, Trainer

    from torch_powersgd.integrations.lightning import PowerSGDStrategy

    agree = []

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(48, 48)
            self.automatic_optimization = False

        def training_step(self, batch: torch.Tensor, _: int) -> None:
            self.manual_backward(self.layer(batch).square().mean())
            gradients = all_agree(self.layer.weight.grad.tolist())  # type: ignore[union-attr]
            for optimizer in self.optimizers():  # type: ignore[union-attr]
                optimizer.step()
                optimizer.zero_grad()
            agree.append((gradients, all_agree(self.layer.weight.tolist())))

        def configure_optimizers(self) -> Any:
            weight, bias = self.layer.parameters()
            return [torch.optim.SGD([weight], lr=0.1), torch.optim.AdamW([bias], lr=0.1)]

    fitted = Trainer(
        strategy=PowerSGDStrategy(local_steps=EXACTLY),
        max_epochs=1,
        default_root_dir=tmp_path,
        **_ON_TWO_RANKS,
    )
    vectors: Any = torch.randn(6 * 2 * 4, 48)
    fitted.fit(Module(), torch.utils.data.DataLoader(vectors, batch_size=4))
    assert agree == [(False, i % 3 == 2) for i in range(6)]
