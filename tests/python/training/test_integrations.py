# SPDX-License-Identifier: BSD-3-Clause
"""Errors and checkpoints of torch_powersgd.integrations. test_trainers.py runs their examples."""

from __future__ import annotations

import ast
import functools
import os
import sys
from contextlib import nullcontext
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import torch_powersgd as tp
from support import launch
from support.on_ranks import all_agree, on_ranks
from support.states import to_bytes
from torch_powersgd.integrations import libraries
from torch_powersgd.integrations.libraries import overrides

OPTIONS = tp.Options.hook_defaults(start_powerSGD_iter=1, matrix_approximation_rank=1)
_ON_TWO_RANKS: dict[str, Any] = {  # arguments of Lightning's Trainer, which leaves no files
    "accelerator": "cpu",
    "devices": 2,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
EVERY_THREE = functools.partial(
    tp.LocalSGD,
    sync_every=3,
    options={"matrix_approximation_rank": 1, "wire_dtype": None},
    warmup_steps=0,
)
# The models are then equal after each round.
EXACTLY = functools.partial(EVERY_THREE, options={"scope": "never"})


def needs(*packages: str) -> pytest.MarkDecorator:
    missing = [package for package in packages if find_spec(package) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}")


@pytest.mark.parametrize(
    ("library", "package"),
    [
        ("lightning", "lightning"),
        ("ray", "'ray[train]'"),
        ("torchtitan", "torchtitan"),
        ("transformers", "transformers"),
    ],
)
@on_ranks(1, backend=None)
def test_a_missing_library_is_named(rank: int, library: str, package: str) -> None:
    modules: dict[str, Any] = sys.modules
    modules[library] = None  # so that it cannot be imported
    with pytest.raises(ModuleNotFoundError) as raised:
        import_module(f"torch_powersgd.integrations.{library}")
    assert str(raised.value).startswith(f"torch_powersgd.integrations.{library} needs")
    assert f"pip install {package}" in str(raised.value)


@on_ranks(1, backend=None)
def test_the_package_imports_none_of_the_libraries(rank: int) -> None:
    import_module("torch_powersgd.integrations.accelerate")
    assert not {"accelerate", "lightning", "ray", "torchtitan", "transformers"} & {*sys.modules}


class _Base:
    def called(self) -> None: ...
    def _also_called(self) -> None: ...


@needs("lightning")
def test_a_library_without_an_overridden_method_is_an_error() -> None:
    @overrides("lightning", "_also_called")
    class Fits(_Base):
        def called(self) -> None: ...
        def _also_called(self) -> None: ...
        def _own(self) -> None: ...

    class Misfit(Fits):
        def configure(self) -> None: ...

    with pytest.raises(ImportError, match=r"fit lightning .*: Fits has no configure\. .*=="):
        overrides("lightning")(Misfit)
    with pytest.raises(ImportError, match="Fits has no _create"):
        overrides("lightning", "_create")(type("Misfit", (Fits,), {}))


def test_all_classes_that_extend_a_library_are_checked() -> None:
    """The integration of torchft has checks of its own."""
    found = 0
    for file in Path(libraries.__file__).parent.glob("*.py"):
        tree = ast.parse(file.read_text())
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and node.bases:
                assert any(
                    f"overrides('{file.stem}'" in ast.unparse(d) for d in node.decorator_list
                )
                found += 1
    assert found == 5


@needs("lightning")
@on_ranks(1, backend=None)
def test_a_lightning_that_does_not_begin_compression_is_an_error(rank: int) -> None:
    from torch_powersgd.integrations.lightning import PowerSGDStrategy

    with pytest.raises(RuntimeError, match="lightning 2.*before it has called configure_ddp"):
        PowerSGDStrategy().training_step()


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


def _accelerate(rank: int) -> tuple[Any, Any]:
    """Accelerate's class, and what attaches its models."""
    launch.enter(rank, 2, 0)
    integration = import_module("torch_powersgd.integrations.accelerate")
    return import_module("accelerate").Accelerator, integration.attach


@needs("accelerate")
@on_ranks(2)
def test_accelerate_compiles_a_model_and_frees_it_with_its_state(rank: int, tmp_path: Path) -> None:
    """Prepares a second compiled model instead of the first, as after an error of memory."""
    Accelerator, attach = _accelerate(rank)
    accelerator = Accelerator(cpu=True, dynamo_backend="eager")
    for _ in range(2):
        accelerator.free_memory()
        ddp = accelerator.prepare(torch.nn.Linear(48, 48))
        assert not isinstance(ddp, DistributedDataParallel)
        compression = attach(accelerator, ddp, OPTIONS)
        for _ in range(3):
            accelerator.backward(ddp(torch.randn(4, 48)).square().sum())
    accelerator.save_state(str(tmp_path))
    ddp(torch.randn(4, 48)).square().sum().backward()
    accelerator.load_state(str(tmp_path))
    assert compression.stats()["steps"] == 3
    assert [path.name for path in tmp_path.glob("powersgd*")] == ["powersgd_0.pt"]


@needs("accelerate")
@on_ranks(2)
def test_accelerate_goes_from_plain_to_compressed_and_back(rank: int, tmp_path: Path) -> None:
    Accelerator, attach = _accelerate(rank)
    plain, compressed = Accelerator(cpu=True), Accelerator(cpu=True)
    for accelerator in (plain, compressed):
        ddp = accelerator.prepare(torch.nn.Linear(48, 48))
    compression = attach(compressed, ddp, OPTIONS)
    plain.save_state(str(tmp_path / "plain"))
    dist.barrier()
    compressed.load_state(str(tmp_path / "plain"))
    for i in range(3):
        assert compression.stats()["compressing"] is (i > 0)
        compressed.backward(ddp(torch.randn(4, 48)).square().sum())
    compressed.save_state(str(tmp_path / "compressed"))
    dist.barrier()
    plain.load_state(str(tmp_path / "compressed"))

    file = tmp_path / "compressed" / "powersgd_0.pt"
    dist.barrier()
    if rank == 0:
        file.write_bytes(file.read_bytes()[:1000])
    dist.barrier()
    before = to_bytes(compression.state_dict())
    with pytest.raises(ValueError, match="must be a dict with 'version'"):
        compressed.load_state(str(tmp_path / "compressed"))
    assert to_bytes(compression.state_dict()) == before


@needs("accelerate")
@on_ranks(2)
def test_accelerate_finds_each_state_when_another_has_ended(rank: int, tmp_path: Path) -> None:
    Accelerator, attach = _accelerate(rank)
    accelerator, later = Accelerator(cpu=True), Accelerator(cpu=True)
    ddps = [accelerator.prepare(torch.nn.Linear(48, 16 * (i + 1))) for i in range(4)]
    first, second = (attach(accelerator, ddp, OPTIONS) for ddp in ddps[:2])
    for steps in (2, 1):
        for _ in range(steps):
            accelerator.backward(ddps[1](torch.randn(4, 48)).square().sum())
        accelerator.save_state(str(tmp_path / f"both {steps}"))
    first.detach()
    dist.barrier()
    accelerator.load_state(str(tmp_path / "both 2"))
    assert second.stats()["steps"] == 2
    accelerator.save_state(str(tmp_path / "second"))
    dist.barrier()  # Rank 0 writes the file.
    assert [path.name for path in (tmp_path / "second").glob("powersgd*")] == ["powersgd_1.pt"]

    third = attach(accelerator, ddps[2], OPTIONS)  # takes the first one's place, not its state
    with pytest.raises(ValueError, match="must have the parameter's shape"):
        accelerator.load_state(str(tmp_path / "both 2"))
    attach(later, ddps[3], OPTIONS)
    with pytest.raises(ValueError, match="powersgd_0.pt does not exist, but powersgd_1.pt does"):
        later.load_state(str(tmp_path / "second"))
    assert third.stats()["steps"] == 0


@needs("accelerate")
@on_ranks(2)
def test_accelerate_takes_local_steps(rank: int, tmp_path: Path) -> None:
    accelerator = _accelerate(rank)[0](cpu=True)
    model = torch.nn.Linear(48, 48)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    ddp, optimizer = accelerator.prepare(model, sgd)
    steps = EXACTLY(ddp, optimizer, scaler=accelerator.scaler)
    accelerator.register_for_checkpointing(steps)
    torch.manual_seed(rank)
    for i in range(6):
        if i == 3:
            accelerator.save_state(str(tmp_path))
        with accelerator.no_sync(ddp):
            loss = ddp(torch.randn(4, 48)).square().sum()
        with accelerator.trigger_sync_in_backward(ddp):
            accelerator.backward(loss)
        assert not all_agree(model.weight.grad.tolist())  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
        assert all_agree(model.weight.tolist()) is ((i + 1) % 3 == 0)
    accelerator.load_state(str(tmp_path))
    assert steps.stats()["steps"] == 3


@pytest.mark.parametrize("make", [None, EVERY_THREE], ids=["every step", "local steps"])
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


class _Loss(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(48, 48)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.layer(x) - labels).square().mean()}


@pytest.mark.parametrize("make", [None, EVERY_THREE], ids=["every step", "local steps"])
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
