"""A run in memory: data, sharded model, optimizer, schedule and progress, and what of them goes into checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from terrazzo.checkpoint import Resumed
from terrazzo.checkpoint.series.partner_hosts import CopyResult
from terrazzo.config import Config, without_passwords
from terrazzo.engine import engine_of
from terrazzo.exchange import on_first
from terrazzo.launch.rank.process_group import Ranks
from terrazzo.launch.rank.restart_note import Restart
from terrazzo.train.checkpoints.resume import data_changes, stamps
from terrazzo.train.checkpoints.run_checkpoints import RunCheckpoints
from terrazzo.train.data import Loader, TokenData, evaluated
from terrazzo.train.session.data_share import DataShare
from terrazzo.train.session.dpo_reference import reference_state
from terrazzo.train.session.run_progress import RunProgress
from terrazzo.train.session.sampling import Sampling
from terrazzo.train.settings.optimizer import resume_schedule
from terrazzo.train.settings.plan import empty_rows, evaluation_limit, micro_batches_per_rank

__all__ = ["Origin", "RestoreOutcome", "Session"]


@dataclass
class Origin:
    """The origin of a run's state.

    Attributes:
        initial: the settings that determine the weights before the first step, which DPO's reference model has.
        optimizer: hyper-parameters restored with the optimizer's state, whatever the configuration says.
        same_evaluation: whether validations read the same sequences as the checkpoint's.
        restart: what these ranks were told, if they were started again after a failure.
    """

    initial: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    same_evaluation: bool = True
    restart: Restart | None = None


EXTRA = ("step", "tokens", "best", "schedule", "data", "evaluation", "config")
"""The keys that the extra of every checkpoint of a run has; earlier versions wrote only these."""


class RestoreOutcome(NamedTuple):
    """What a session has restored.

    Attributes:
        resumed: what was read.
        rate: the learning rate of the next step in the run that saved.
        tp: `plan.mesh.tp` of that run.
        draws_anew: whether random generators were seeded anew, since the saved ones are of other ranks.
    """

    resumed: Resumed
    rate: float
    tp: int
    draws_anew: bool


@dataclass
class Session:
    """The objects of a run.

    Attributes:
        flops_per_token: floating-point operations of training on a token; 0 where they are not known.
        base_bytes: what was resident before the model took memory, on a CPU.
        notes: what is to be said of it before the first step, in lines.
    """

    config: Config
    ranks: Ranks
    share: DataShare
    data: TokenData
    loader: Loader
    model: nn.Module
    optimizer: Any
    schedule: LambdaLR
    checkpoints: RunCheckpoints
    sampling: Sampling
    flops_per_token: int
    base_bytes: int
    notes: list[str]
    origin: Origin
    progress: RunProgress = field(default_factory=RunProgress)

    @property
    def step(self) -> int:
        """Finished optimizer steps."""
        return self.progress.step

    @property
    def micro_batches(self) -> int:
        """Micro-batches per step on each rank."""
        return micro_batches_per_rank(self.config.batch, self.ranks.world_size, self.config.plan.mesh)

    def places_per_step(self, *, empty: bool) -> int:
        """Tokens that go through the model in a step over all ranks, learnt or not; those of `empty` rows if asked."""
        config, size = self.config, self.ranks.world_size
        rows = config.batch.global_batch + empty * empty_rows(config.batch, size, config.plan.mesh)
        return rows * config.sequences_per_sample * config.batch.sequence_length

    @property
    def validation_fingerprint(self) -> str | None:
        """Of the sequences that a validation reads, whose number follows readers and micro-batch; None without any.

        Losses of two validations are compared where it is the same.
        """
        if (dataset := self.data.validation) is None:
            return None
        limit = evaluation_limit(self.config, self.share.readers)
        return f"{dataset.fingerprint}-{len(evaluated(dataset, limit))}"

    def flops_per_s(self, steps: int, seconds: float) -> float:
        """Floating-point operations per second on each rank, of so many steps; 0 where a token's are not known."""
        return steps * self.places_per_step(empty=True) / seconds / self.ranks.world_size * self.flops_per_token

    def seed_from(self, step: int, drawer: int | None = None) -> int:
        """The seed for what is drawn from `step` on.

        Args:
            drawer: ranks with the same number draw the same; default: `DataShare.drawer`, which only ranks along tp
                share.
        """
        return self.config.train.seed + 1 + (self.share.drawer if drawer is None else drawer) + step * 1_000_003

    def save(self) -> str:
        """Save a checkpoint of the current step; returns its path. Collective."""
        return self.checkpoints.save(self.model, self.optimizer, on_first(self._extra))

    def save_locally(self) -> CopyResult | None:
        """Save the current step on each host; returns how copying the one before to partners went. Collective."""
        return self.checkpoints.save_locally(self.model, self.optimizer, on_first(self._extra))

    def _extra(self) -> dict[str, Any]:
        return {
            **self.progress.as_extra(),
            "sure": self.checkpoints.sure_step,
            "schedule": self.schedule.state_dict(),
            "data": self.loader.state_dict(),
            "files": stamps(self.data.files),
            "evaluation": self.validation_fingerprint,
            "reference": reference_state(self.data),
            "initial": dict(self.origin.initial),
            "tokenizer": self.data.tokenizer.fingerprint,
            "config": self._config_in_use(),
        }

    def restore(self) -> RestoreOutcome:
        """Restore model, optimizer, schedule, data and progress from the newest whole checkpoint. Collective."""
        config, resumed = self.config, self.checkpoints.restore(self.model, self.optimizer, EXTRA)
        extra = resumed.extra
        self.progress.take_up(extra, same_evaluation=extra["evaluation"] == self.validation_fingerprint)
        rate = self.optimizer.param_groups[0]["lr"]
        resume_schedule(self.schedule, extra["schedule"])
        why = data_changes(config, extra, self.data.files)
        self.loader.load_state_dict(extra["data"], config.checkpoint.allow_changed_data, why)
        tp = extra["config"]["plan"].get("mesh", {}).get("tp", 1)
        draws_anew = not resumed.generators or tp != config.plan.mesh.tp  # ranks along tp draw alike, and others did
        if draws_anew:
            torch.manual_seed(self.seed_from(self.step))
        return RestoreOutcome(resumed, rate, tp, draws_anew)

    def _config_in_use(self) -> dict[str, Any]:
        config: dict[str, Any] = without_passwords(self.config.model_dump(mode="json"))
        config["optimizer"] |= self.origin.optimizer
        return config

    def close(self) -> None:
        """Remove the run's swap files: ranks end without the interpreter's teardown."""
        engine_of(self.model).close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Release the folder, and close. If the run failed, the loader's pending reads are not waited for."""
        try:
            self.checkpoints.abandon()
            if kind is None:
                self.loader.close()
        finally:
            self.close()
