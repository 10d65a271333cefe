"""What a run consists of, put together: data, sharded model, optimizer, schedule, and what is resumed."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import terrazzo as tz
from terrazzo import checkpoint
from terrazzo.checkpoint.exchange import agree, gather_json
from terrazzo.train.build import (
    batch_arithmetic,
    build_mesh,
    build_optimizer,
    build_plan,
    build_precision,
    data_spec,
    prepare_model,
)
from terrazzo.train.config import Config
from terrazzo.train.data import Loader, LoaderConfig, TokenData, load_data
from terrazzo.train.huggingface import weight_files
from terrazzo.train.model import num_flops_per_token
from terrazzo.train.preflight import clear_checkpoints, resume_from
from terrazzo.train.ranks import Ranks
from terrazzo.train.resume import resume_notes
from terrazzo.train.schedule import build_schedule

__all__ = ["Session", "open_session"]


@dataclass
class Session:
    """The objects of a run. `step` counts finished optimizer steps, `tokens` the targets trained on.

    `resume_notes` has a line for each setting that differs from those of the checkpoint that was loaded.
    """

    config: Config
    ranks: Ranks
    data: TokenData
    loader: Loader
    model: nn.Module
    optimizer: Any
    schedule: LambdaLR
    flops_per_token: int
    step: int = 0
    tokens: int = 0
    resume_notes: list[str] = field(default_factory=list)

    @property
    def micro_batches(self) -> int:
        """Micro-batches per step on each rank."""
        return batch_arithmetic(self.config.batch, self.ranks.world_size)

    def save(self) -> Path:
        """Write a checkpoint of the current step and remove older ones; returns its folder. Collective."""
        folder = self.config.checkpoint_folder
        path = checkpoint.step_folder(folder, self.step)
        extra = {
            "step": self.step,
            "tokens": self.tokens,
            "schedule": self.schedule.state_dict(),
            "data": self.loader.state_dict(),
            "config": self.config.model_dump(mode="json"),
        }
        checkpoint.save(path, self.model, self.optimizer, extra)
        if self.ranks.is_first and self.config.checkpoint.keep_last is not None:
            checkpoint.prune(folder, self.config.checkpoint.keep_last)
        return path

    def load(self, path: Path) -> None:
        """Continue from a checkpoint. Collective."""
        extra = checkpoint.load(path, self.model, self.optimizer)
        self.step, self.tokens = extra["step"], extra["tokens"]
        self.schedule.load_state_dict(extra["schedule"])
        self.loader.load_state_dict(extra["data"])
        self.resume_notes = resume_notes(self.config, extra["config"])


def open_session(config: Config, ranks: Ranks) -> Session:
    """Build a run, or take up the one that the newest checkpoint holds. Collective."""
    newest = gather_json(str(resume_from(config) or ""))[0]  # rank 0 decides: file systems may lag
    data = load_data(data_spec(config), builds=ranks.builds_shared_files, agree=agree)
    loader = _loader(config, ranks, data)
    torch.manual_seed(config.train.seed)  # the same on every rank: initial weights do not depend on the plan
    model, flops_per_token = _model(config, data)
    optimizer = build_optimizer(config.optimizer, model)
    model, sharded = tz.shard(
        model,
        optimizer,
        plan=build_plan(config),
        units=config.plan.units,
        precision=build_precision(config),
        mesh=build_mesh(config, ranks.device, ranks.world_size),
        prefetch=config.plan.prefetch,
    )
    if config.model.weights == "pretrained" and config.model.path is not None and not newest:
        weight_files(config.model.path)
        checkpoint.load_weights(model, config.model.path)
    torch.manual_seed(config.train.seed + 1 + ranks.rank)  # dropout must differ between ranks
    schedule = build_schedule(config.schedule, config.train.steps, sharded)
    session = Session(config, ranks, data, loader, model, sharded, schedule, flops_per_token)
    if newest:
        session.load(Path(newest))
    elif ranks.is_first:  # last, so that nothing is lost to a run that cannot start
        clear_checkpoints(config)
    return session


def _loader(config: Config, ranks: Ranks, data: TokenData) -> Loader:
    settings = LoaderConfig(
        global_batch=config.batch.global_batch,
        micro_batch=config.batch.micro_batch,
        rank=ranks.rank,
        world_size=ranks.world_size,
        seed=config.train.seed,
    )
    return Loader(data.train, settings)


def _model(config: Config, data: TokenData) -> tuple[nn.Module, int]:
    """The model before it is sharded, and what a token costs in floating-point operations."""
    model = prepare_model(config, data.tokenizer.vocab_size)
    vocab_size = cast(Any, model).config.vocab_size
    data.check_vocabulary(vocab_size)
    return model, num_flops_per_token(model, config.batch.sequence_length)
