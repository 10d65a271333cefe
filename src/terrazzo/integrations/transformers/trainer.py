"""A mixin that puts Terrazzo's Accelerator and checkpoints into a Trainer."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
import transformers
from torch import nn
from transformers.trainer import SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import sort_checkpoints

from terrazzo import checkpoint
from terrazzo.checkpoint.rng import capture_rng, restore_rng
from terrazzo.engine import ShardedModule
from terrazzo.errors import BadInput
from terrazzo.exchange import on_first
from terrazzo.integrations.accelerate import Accelerator
from terrazzo.integrations.shared.arguments import TerrazzoArguments
from terrazzo.integrations.shared.checkpoints import opened, resume, save_over, settle
from terrazzo.integrations.shared.engine_setup import EngineSetup
from terrazzo.integrations.shared.first_rank import warn_once
from terrazzo.integrations.transformers.requested import check_training, requested_setup

if TYPE_CHECKING:
    from transformers import Trainer as _Base
else:
    _Base = object

__all__ = ["TerrazzoTrainerMixin", "Trainer"]

_FOLDER = "terrazzo"
"""The folder of the sharded state, within checkpoint-N."""


class TerrazzoTrainerMixin(_Base):
    """Makes a trainer run on Terrazzo; it goes before the trainer's class.

    Checkpoints are `checkpoint-N/terrazzo`, which any plan and number of ranks resumes, beside what the Trainer writes
    itself. `save_model`, `evaluate` and `predict` are collective: call them on every rank.

    Args:
        terrazzo: plan and precision; by default the class's `terrazzo`, which leaves all to the TrainingArguments.

    Raises:
        BadInput: arguments that cannot be honoured, before anything is changed.
    """

    terrazzo = TerrazzoArguments()

    def __init__(self, *args: Any, terrazzo: TerrazzoArguments | None = None, **kwargs: Any) -> None:
        if terrazzo is not None:
            self.terrazzo = terrazzo
        super().__init__(*args, **kwargs)

    # -- what Accelerate would have done ---------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        with patch.object(transformers.trainer, "Accelerator", Accelerator):
            super().create_accelerator_and_postprocess()

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        """The arguments, with a setup in place of what would make Accelerate shard, cast or compile."""
        theirs, setup = super()._build_accelerator_args(**kwargs), self._setup()
        for name in ("fsdp_plugin", "deepspeed_plugin", "parallelism_config", "dynamo_plugin", "kwargs_handlers"):
            theirs.pop(name, None)  # the handlers are DDP's
        mixed = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(setup.autocast or torch.float32, "no")
        return {**theirs, "setup": setup, "mixed_precision": mixed, "dynamo_backend": "no"}

    def _setup(self) -> EngineSetup:
        """What the arguments and the model, once it is there, ask for."""
        setup, self.exports_checkpoints = requested_setup(self.args, self.model, self.terrazzo)
        return setup

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        check_training(self.args)
        self.accelerator.setup = self._setup()  # model_init may have made another model
        return super()._prepare_for_training(*args, **kwargs)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Nothing: that is left to the accelerator, when it shards."""

    @property
    def _sharded(self) -> bool:
        return isinstance(self.model, ShardedModule)

    # -- saving ----------------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write a folder that `from_pretrained` loads. Collective."""
        if output_dir is None or not _internal_call or self.exports_checkpoints:
            super().save_model(output_dir, _internal_call)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if state_dict is None and self._sharded:
            state_dict = self.accelerator.get_state_dict(self.model)
        dtypes = {each.dtype for each in (state_dict or {}).values() if each.is_floating_point()}
        super()._save(output_dir, state_dict)  # which empties the dict
        if dtypes and self.args.should_save and isinstance(self.model, transformers.PreTrainedModel):
            widest = max(dtypes, key=lambda dtype: dtype.itemsize)
            _name_dtype(self.model.config, widest, output_dir or self.args.output_dir)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        path, step = os.path.join(output_dir, _FOLDER), self.state.global_step
        # Over an older one: a run that begins again writes them anew.
        save_over(path, self.model, self.optimizer.optimizer, lambda: {"step": step})
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_NAME))

    # -- resuming --------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's; `resume_from_checkpoint=True` takes the newest checkpoint that is complete."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = on_first(lambda: newest_complete(self.args.output_dir), BadInput)
            if resume_from_checkpoint is None:
                raise BadInput(f"There is no complete checkpoint in '{self.args.output_dir}' to resume from.")
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Nothing yet: weights are loaded with the optimizer, once both are sharded."""
        opened(state_of(resume_from_checkpoint))

    def _load_optimizer_and_scheduler(self, resume_from_checkpoint: str | None) -> None:
        if resume_from_checkpoint is None:
            return
        path, optimizer = state_of(resume_from_checkpoint), self.optimizer.optimizer
        source = opened(path, self.model)
        if source.optimizer is None:
            warn_once(f"'{path}' has no optimizer state: it starts anew.")
            optimizer = None
        with same_random():  # the Trainer restores generators itself, once it has passed over seen batches
            resume(source, self.model, optimizer, files=False)
        schedule = os.path.join(resume_from_checkpoint, SCHEDULER_NAME)
        if os.path.isfile(schedule):
            self.lr_scheduler.load_state_dict(torch.load(schedule, weights_only=True))

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        if (path := state_of(best)) == best:  # save_only_model
            super()._load_best_model()
        else:
            opened(path)
            checkpoint.load_weights(self.model, path)


class Trainer(TerrazzoTrainerMixin, transformers.Trainer):
    """`transformers.Trainer` on Terrazzo; one more argument, `terrazzo`: a `TerrazzoArguments`."""


def _name_dtype(config: transformers.PretrainedConfig, dtype: torch.dtype, folder: str) -> None:
    """Name the masters' dtype: the config has that of the compute weights, in which `from_pretrained` would load."""
    before, config.dtype = config.dtype, dtype
    try:
        config.save_pretrained(folder)
    finally:
        config.dtype = before


def state_of(folder: str) -> str:
    """The sharded state in `checkpoint-N`, or the folder itself where another stack wrote it. Collective."""
    own = os.path.join(folder, _FOLDER)
    return own if settle(own) else folder


def newest_complete(output_dir: str) -> str | None:
    """The newest checkpoint whose last file has been written."""
    folders = sort_checkpoints(output_dir, use_mtime=False) if os.path.isdir(output_dir) else []
    return next((each for each in reversed(folders) if os.path.isfile(os.path.join(each, TRAINER_STATE_NAME))), None)


@contextmanager
def same_random() -> Iterator[None]:
    """Leaves the random generators as they were."""
    before = capture_rng()
    try:
        yield
    finally:
        restore_rng(before)
