# SPDX-License-Identifier: BSD-3-Clause
"""Models that Accelerate prepares."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from support import launch
from support.integrations import EXACTLY, OPTIONS, needs
from support.on_ranks import all_agree, on_ranks
from support.states import to_bytes


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
