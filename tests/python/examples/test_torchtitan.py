# SPDX-License-Identifier: BSD-3-Clause
"""torchtitan's own Trainer, unchanged, on CPUs: alone, and with compression between replicas."""

from __future__ import annotations

import importlib
import logging
import re
import sys
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torch_powersgd as tp
from support import launch, ranks
from support.log_records import LogRecords
from support.repository import ROOT
from support.states import from_bytes, to_bytes
from support.tensors import digest, relative_error
from support.torchrun import torchrun

EXAMPLES = ROOT / "examples"
for package in ("torchtitan", "triton"):  # importing them takes seconds
    if find_spec(package) is None:
        pytest.skip(f"needs {package}", allow_module_level=True)

WARM_UP, STEPS = 2, 6
# A rank's batch has 8 tokens. A layer's gradient is a sum of outer products, one for each token.
# So the rank of the mean over four ranks is 32 at most, and compression returns it whole.
TOKENS, WORLD_SIZE = 8, 4
FULL = tp.Options.hook_defaults(
    start_powerSGD_iter=WARM_UP,
    matrix_approximation_rank=TOKENS * WORLD_SIZE,
    min_compression_rate=1,
)
UNITS, TORN = 8, 1  # embedding, six layers, and norm with output layer, which is torn in two


@dataclass
class Trained:
    """The facts of a training on one rank."""

    losses: list[float] = field(default_factory=list)
    gradients: bytes = b""  # of the first step that is compressed, or would be
    digests: list[str] = field(default_factory=list)
    backends: set[str] = field(default_factory=set)
    stats: dict[str, Any] = field(default_factory=dict)  # of the model
    others: list[int] = field(default_factory=list)  # compressed calls of the other groups
    warnings: list[str] = field(default_factory=list)


def _config(replicas: int, options: tp.Options | None, folder: str) -> Any:
    sys.path.insert(0, str(EXAMPLES))
    on_cpu = importlib.import_module("torchtitan_on_cpu").on_cpu  # before torchtitan
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    from torch_powersgd.integrations.torchtitan import compressed

    config = on_cpu(llama3_debugmodel())
    config.training.local_batch_size, config.training.seq_len = 1, TOKENS
    config.training.mixed_precision_param = "float32"
    config.parallelism.data_parallel_replicate_degree = replicas
    config.dump_folder = folder
    config.debug.enable_structured_logging = False
    return compressed(config, options) if options is not None else config


def _train(
    rank: int, world_size: int, port: int, folder: str, replicas: int, options: tp.Options | None
) -> Trained:
    launch.enter(rank, world_size, port)
    warnings = LogRecords(logging.WARNING).seen
    trainer = _config(replicas, options, folder).build()
    if replicas < WORLD_SIZE:
        for module in trainer.model_parts[0].modules():
            if isinstance(module, torch.distributed.fsdp.FSDPModule):
                # Gloo has no PREMUL_SUM, which torchtitan's divide factor asks for.
                module.set_force_sum_reduction_for_comms(True)
    trained = Trained()
    trainer.metrics_processor.log = lambda step, loss, *_, **__: trained.losses.append(loss)
    batches = trainer.batch_generator(trainer.dataloader)
    for _ in range(STEPS):
        trainer.step += 1
        trainer.train_step(batches)
        parameters = dict(trainer.model_parts[0].named_parameters())
        gradients = {name: p.grad.to_local().clone() for name, p in parameters.items()}
        if trainer.step == WARM_UP + 1:
            trained.gradients = to_bytes(gradients)
        trained.digests.append(
            digest([*gradients.values(), *(p.to_local() for p in parameters.values())])
        )
    mesh = trainer.parallel_dims.get_mesh("dp_replicate")
    groups = [mesh.get_group(), *dist.distributed_c10d._world.pg_map]
    trained.backends = {dist.get_backend(group) for group in groups}
    if options is not None:
        (compression,) = trainer.compressions
        trained.stats = compression.stats()
        others = [group for group in groups if group is not compression.group]
        trained.others = [
            tp.stats(group)["compressed_calls"]
            for group in others
            if dist.get_backend(group) == "powersgd"
        ]
    trained.warnings = [message for _, message in warnings]
    trainer.close()
    return trained


def _run(
    folder: Path, replicas: int, options: tp.Options | None, world_size: int = WORLD_SIZE
) -> list[Trained]:
    arguments = (world_size, launch.free_port(), str(folder), replicas, options)
    return ranks.run(world_size, _train, *arguments, backend=None)


@pytest.fixture(scope="module", params=[4, 2], ids=["4x1", "2x2"])
def both(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[Trained], list[Trained], int]:
    """The same training on four ranks, plain and compressed, and the number of replicas."""
    folder = tmp_path_factory.mktemp("torchtitan")
    replicas = request.param
    return _run(folder, replicas, None), _run(folder, replicas, FULL), replicas


@pytest.mark.long
def test_exact_steps_are_torchtitans_to_the_bit(both: Any) -> None:
    for plain, mine in zip(*both[:2], strict=True):
        assert plain.backends - {"fake"} == {"gloo"}
        assert mine.backends - {"fake"} == {"powersgd"}
        assert mine.digests[:WARM_UP] == plain.digests[:WARM_UP]
        assert mine.digests[WARM_UP] != plain.digests[WARM_UP]


@pytest.mark.long
def test_gradients_of_low_rank_come_back_whole(both: Any) -> None:
    for plain, mine in zip(*both[:2], strict=True):
        # Both have made the same steps before this one.
        found = from_bytes(mine.gradients)
        for name, wanted in from_bytes(plain.gradients).items():
            if wanted.any():  # no token of the text has a row in the second half of the embedding
                assert relative_error(found[name], wanted) < 1e-4, name
            else:
                assert not found[name].any()
        assert mine.losses[: WARM_UP + 1] == plain.losses[: WARM_UP + 1]
        for loss, wanted in zip(mine.losses, plain.losses, strict=True):
            assert loss == pytest.approx(wanted, rel=1e-2)


@pytest.mark.long
def test_replicas_stay_equal_and_everything_is_compressed(both: Any) -> None:
    _, trained, replicas = both
    shards = WORLD_SIZE // replicas
    for rank, mine in enumerate(trained):
        assert mine.digests == trained[rank % shards].digests
        assert not [message for message in mine.warnings if "FSDP2" in message]
        stats = mine.stats
        assert stats["steps"] == STEPS
        compressed = STEPS - WARM_UP
        assert stats["compressed_calls"] == UNITS * compressed
        assert stats["exact_calls"] == (UNITS + TORN) * WARM_UP + TORN * compressed
        assert stats["compressed_ratio"] > 3
        # The groups of the shards, the loss and the world compress nothing.
        assert mine.others
        assert not any(mine.others)


@pytest.mark.long
def test_the_example_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    assert _example(tmp_path, 14) == (9 * 10 + 4, 8 * 4)
    # The step count was loaded: the warm-up has not begun anew. The norm is always exact.
    assert _example(tmp_path, 16) == (2, 8 * 2)


def _example(folder: Path, steps: int) -> tuple[int, int]:
    """The number of all-reduces that were exact, and that were compressed."""
    ended = torchrun(
        "--nproc-per-node=4",
        EXAMPLES / "with_torchtitan.py",
        f"--training.steps={steps}",
        f"--dump-folder={folder}",
    )
    said = re.search(r"(\d+) buckets sent exactly, (\d+) compressed", ended.stdout)
    assert said, ended.stdout
    return int(said[1]), int(said[2])


def test_one_replica_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ranks.RankFailed, match="data_parallel_replicate_degree must be at least"):
        _run(tmp_path, 1, FULL, world_size=1)


def test_another_config_is_refused() -> None:
    with pytest.raises(ranks.RankFailed, match="must be a torchtitan Trainer.Config, got str"):
        ranks.run(1, _refused, backend=None)


def _refused(rank: int) -> None:
    _config(2, FULL, "")
    from torch_powersgd.integrations.torchtitan import compressed

    compressed("llama3")
