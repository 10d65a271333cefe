"""What a run consists of, put together: data, sharded model, optimizer, schedule, and what is resumed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self, cast

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import terrazzo as tz
from terrazzo import checkpoint
from terrazzo.config import Config, without_passwords
from terrazzo.engine import engine_of
from terrazzo.errors import BadInput, TerrazzoError
from terrazzo.exchange import gather_json, on_first, patiently, together
from terrazzo.parallel import context_of
from terrazzo.telemetry import Console, resident_bytes
from terrazzo.train.checkpoints.keeping import Keeper
from terrazzo.train.checkpoints.resume import (
    clear_checkpoints,
    data_changes,
    is_restored,
    resume_from,
    resume_notes,
    saying_what_differs,
    seeded_anew,
    stamps,
)
from terrazzo.train.data import Asked, Loader, TokenData, evaluated, load_chat, load_data
from terrazzo.train.folders import absent_folders, make_log_folder, make_swap_folders, remove_empty
from terrazzo.train.launch.ranks import Ranks, agree_on_data
from terrazzo.train.model.causal_lm import num_flops_per_token
from terrazzo.train.model.huggingface import weight_files
from terrazzo.train.model.parallel import parallelize_model
from terrazzo.train.model.prepare import prepare_model
from terrazzo.train.objectives import objective_of
from terrazzo.train.optimizer import build_optimizer, build_schedule, resume_schedule
from terrazzo.train.parts import Parts, parts_of
from terrazzo.train.plan import (
    build_offload,
    build_plan,
    build_precision,
    mesh_shape,
    micro_batches_per_rank,
)
from terrazzo.train.reference import (
    check_same_initial,
    compute_reference,
    initial_model,
    reference_due,
    reference_state,
)

__all__ = ["Session", "evaluation_limit", "open_session"]


@dataclass
class Session:
    """The objects of a run. `step` counts finished optimizer steps, `tokens` the targets trained on.

    `newest` and `best` are the newest and the lowest validation `loss`, each with its `step`.
    `resume_notes` has a line for whatever is not as in the checkpoint that was loaded, and `same_evaluation` says
    whether the validation data are. `base_bytes` of a CPU run is
    what was resident before the model took memory, `notes` what was said of it before the start.
    `asked` is what samples answer, where they do, `initial` what the reference of DPO is of.
    """

    config: Config
    ranks: Ranks
    parts: Parts
    data: TokenData
    loader: Loader
    model: nn.Module
    optimizer: Any
    schedule: LambdaLR
    flops_per_token: int
    keeper: Keeper
    notes: Sequence[str]
    base_bytes: int
    step: int = 0
    tokens: int = 0
    newest: dict[str, Any] | None = None
    best: dict[str, Any] | None = None
    resume_notes: list[str] = field(default_factory=list)
    same_evaluation: bool = True
    _restored: dict[str, Any] = field(default_factory=dict)
    asked: Asked | None = None
    initial: dict[str, Any] = field(default_factory=dict)

    @property
    def micro_batches(self) -> int:
        """Micro-batches per step on each rank."""
        return micro_batches_per_rank(self.config.batch, self.ranks.world_size, self.config.plan.mesh)

    @property
    def places_per_step(self) -> int:
        """Tokens that go through the model in a step over all ranks, learnt or not."""
        return self.config.batch.global_batch * self.config.sequences_per_sample * self.config.batch.sequence_length

    @property
    def prompt(self) -> list[int]:
        """The tokens that samples go on from; none where there are no samples."""
        return _prompt(self.config, self.data, self.asked)

    def flops_per_s(self, steps: int, seconds: float) -> float:
        """Floating-point operations per second on each rank, of so many steps; 0 where a token's are not known."""
        return steps * self.places_per_step / seconds / self.ranks.world_size * self.flops_per_token

    def validated(self, loss: float) -> None:
        """Note a validation loss of the current step: its checkpoint is kept by it."""
        self.newest = {"loss": loss, "step": self.step}
        if self.best is None or loss < self.best["loss"]:
            self.best = self.newest

    def save(self) -> str:
        """Save a checkpoint of the current step; returns its path. Collective."""
        return self.keeper.save(self.model, self.optimizer, self._extra())

    def close(self) -> None:
        """Remove what the run has put on drives beside its checkpoints: ranks end without the interpreter's help."""
        engine_of(self.model).close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Leave the folder to others, and close. Of a run that failed, nothing that is being read is waited for."""
        try:
            self.keeper.abandon()
            if kind is None:
                self.loader.close()
        finally:
            self.close()

    @property
    def _evaluation(self) -> str | None:
        """The fingerprint of the validation data."""
        return None if self.data.validation is None else self.data.validation.fingerprint

    def _extra(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "tokens": self.tokens,
            "metric": None if self.newest is None or self.newest["step"] != self.step else self.newest["loss"],
            "best": self.best,
            "schedule": self.schedule.state_dict(),
            "data": self.loader.state_dict(),
            "files": stamps(self.data.files),
            "evaluation": self._evaluation,
            "reference": reference_state(self.data),
            "initial": self.initial,
            "tokenizer": self.data.tokenizer.fingerprint,
            "config": self._config_in_use(),
        }

    def _config_in_use(self) -> dict[str, Any]:
        """The configuration, with the optimizer's hyper-parameters as they came with its state."""
        config: dict[str, Any] = without_passwords(self.config.model_dump(mode="json"))
        config["optimizer"] |= self._restored
        return config

    def resume(self) -> None:
        """Continue from the newest whole checkpoint. Collective."""
        with saying_what_differs(self.config, self.keeper.folder):
            resumed = self.keeper.resume(self.model, self.optimizer)
        if resumed is None:  # it was there when this run began, and so nothing else has given the model its weights
            raise BadInput(
                f"{self.keeper.folder} had a checkpoint when this run began, and has none that can be read now: put it"
                " back, or start anew with checkpoint.resume=never."
            )
        extra, ranks = resumed.extra, self.ranks
        if missing := sorted({"step", "tokens", "best", "schedule", "data", "evaluation", "config"} - extra.keys()):
            raise BadInput(
                f"The newest checkpoint in {self.keeper.folder} is not of 'terrazzo train': its extra has no"
                f" {', '.join(missing)}. Go on with it by tz.checkpoint.load in a loop of your own, or use another"
                " checkpoint.folder."
            )
        self.step, self.tokens = extra["step"], extra["tokens"]
        self.best = extra["best"]
        group = self.optimizer.param_groups[0]
        due = group["lr"]
        resume_schedule(self.schedule, extra["schedule"])
        why = data_changes(self.config, extra, self.data.files)
        self.loader.load_state_dict(extra["data"], self.config.checkpoint.allow_changed_data, why)
        self.resume_notes = [f"resume: {path} is DAMAGED, not used: {why}" for path, why in resumed.refused.items()]
        self.resume_notes += resume_notes(self.config, extra["config"])
        self._restored = {
            key: value for key, value in extra["config"]["optimizer"].items() if is_restored(f"optimizer.{key}")
        }
        goes_on = self.step < self.config.train.steps
        if goes_on and not math.isclose(group["lr"], due, rel_tol=1e-9):  # train.steps may stretch a schedule
            self.resume_notes.append(
                f"resume: the learning rate goes on at {group['lr']:.1e}, where this schedule has it; it was {due:.1e}"
            )
        self.same_evaluation = self._evaluation == extra["evaluation"]
        if not self.same_evaluation:
            self.resume_notes.append("resume: the validation data are not those of the checkpoint")
        tp, before = self.config.plan.mesh.tp, extra["config"]["plan"].get("mesh", {}).get("tp", 1)
        if not resumed.generators or tp != before:  # ranks along tp draw alike, and others did
            torch.manual_seed(_seed(self.config.train.seed, self.step, self.parts.drawer))
            if goes_on:
                self.resume_notes.append(seeded_anew((resumed.world_size, before), (ranks.world_size, tp)))


def evaluation_limit(config: Config, readers: int) -> int:
    """Sequences over all ranks that an evaluation reads at most; `readers` do not share theirs with others."""
    return config.train.eval_batches * config.batch.micro_batch * readers


def open_session(config: Config, ranks: Ranks, notes: Sequence[str] = ()) -> Session:
    """Build a run, or take up the one that the newest checkpoint holds. Collective."""
    absent = absent_folders(config) if ranks.is_first else []
    try:
        on_first(lambda: make_log_folder(config), BadInput)
        keeper = Keeper(config, ranks)
        try:
            return _open(config, ranks, keeper, notes)
        except BaseException:
            keeper.abandon()
            raise
    except BaseException:
        remove_empty(absent)
        raise


def _open(config: Config, ranks: Ranks, keeper: Keeper, notes: Sequence[str]) -> Session:
    found = together(lambda: resume_from(config) or "", BadInput)
    newest = gather_json(found)[0]  # rank 0 decides: file systems may lag
    say = Console().say if ranks.is_first else None
    data = load_data(config, builds=ranks.builds_shared_files, together=partial(patiently, failed=BadInput), say=say)
    agree_on_data(data, config.data)
    mesh = tz.mesh(**mesh_shape(config.plan.mesh, ranks.world_size), device=ranks.device.type)
    parts = parts_of(config, ranks)
    _check_validation(config, data, parts.readers)
    asked = on_first(lambda: _asked(config, data), BadInput)
    saved = gather_json(_saved_with_reference(newest) if newest and ranks.is_first else {})[0]
    due = reference_due(config, data, evaluation_limit(config, parts.readers), saved)
    check_same_initial(due, config, saved)
    torch.manual_seed(config.train.seed)  # the same on every rank: initial weights do not depend on the plan
    answers = None if asked is None else Asked(*asked)
    model, flops_per_token = _model(config, data, _prompt(config, data, answers))
    parallelize_model(model, config, mesh)
    parts = parts_of(config, ranks, context_of(model))
    loader = Loader(data.train, config, parts.reader, parts.readers, parts.of)
    make_swap_folders(config)
    optimizer = build_optimizer(config.optimizer, model)
    base_bytes = (resident_bytes() or 0) if ranks.device.type == "cpu" else 0  # the model is still without memory
    model, sharded = tz.shard(
        model,
        optimizer,
        plan=build_plan(config),
        units=config.plan.units,
        precision=build_precision(config),
        mesh=mesh,
        prefetch=config.plan.prefetch,
        offload=build_offload(config),
    )
    try:
        if due or not newest:
            _load_pretrained(config, model)
        if due:
            if say is not None:
                say(f"computing the reference of {sum(len(part.pairs) for part in due):,} pairs ...")
            compute_reference(due, model, config, parts, ranks.device)
        torch.manual_seed(_seed(config.train.seed, 0, parts.drawer))  # dropout must differ between data
        schedule = build_schedule(config.schedule, config.train.steps, sharded)
        session = Session(
            config, ranks, parts, data, loader, model, sharded, schedule, flops_per_token, keeper, notes, base_bytes
        )
        session.asked = answers
        session.initial = initial_model(config, saved)
        if newest:
            session.resume()
        else:  # last, so that nothing is lost to a run that cannot start
            on_first(lambda: clear_checkpoints(config), BadInput)
    except BaseException:
        engine_of(model).close()  # its files would stay: ranks end without the interpreter's help
        raise
    return session


def _check_validation(config: Config, data: TokenData, readers: int) -> None:
    """Raise `BadInput` where an evaluation would have no token to measure."""
    dataset, limit = data.validation, evaluation_limit(config, readers)
    if dataset is not None and not dataset.valid_tokens(evaluated(dataset, limit)):
        raise BadInput(
            f"The validation data have no token to learn in the {min(limit, len(dataset))} of their {len(dataset)}"
            " sequences that an evaluation reads, so there is no validation loss. Raise train.eval_batches or"
            " batch.sequence_length, or set data.packing to 'whole' or 'single'."
        )


def _load_pretrained(config: Config, model: nn.Module) -> None:
    """The weights that a run begins with, where they are given. Collective."""
    if config.model.weights == "pretrained" and config.model.path is not None:
        weight_files(config.model.path)
        objective_of(config).load_pretrained(model, config.model.path)


def _asked(config: Config, data: TokenData) -> Asked | None:
    """The message that samples answer, as the chat template has it."""
    settings, question = config.data, config.train.sample_chat
    if question is None:
        return None
    return load_chat(data.tokenizer, settings.tokenizer, settings.chat_template, settings.loss_on).ask(question)


def _prompt(config: Config, data: TokenData, asked: Asked | None) -> list[int]:
    """What samples go on from. A score is no text, and a model in stages writes none."""
    if not config.train.sample_tokens or config.objective.kind.scored or config.plan.mesh.pp > 1:
        return []
    if asked is not None:
        return asked.tokens
    found: list[int] = data.tokenizer.encode([config.train.sample_prompt])[0].tolist()
    return found or [data.tokenizer.end_of_document]


def _saved_with_reference(path: str) -> dict[str, Any]:
    """A checkpoint's extra values; nothing where it has no reference, or cannot be read, which `resume` tells of."""
    try:
        found = checkpoint.open_source(path).extra
    except TerrazzoError:
        return {}
    return found if found.get("reference") and "config" in found else {}


def _seed(seed: int, step: int, drawer: int) -> int:
    """For what ranks draw each for itself from `step` on; those along tp draw alike, as `Parts.drawer` says."""
    return seed + 1 + drawer + step * 1_000_003


def _model(config: Config, data: TokenData, prompt: list[int]) -> tuple[nn.Module, int]:
    """The model before it is sharded, and what a token costs in floating-point operations."""
    model = prepare_model(config, data.tokenizer)
    vocab_size = cast(Any, model).config.vocab_size
    data.check_vocabulary(vocab_size)
    if max(prompt, default=0) >= vocab_size:
        key = "sample_prompt" if config.train.sample_chat is None else "sample_chat"
        raise BadInput(
            f"train.{key} has token id {max(prompt)}, but the model's vocabulary has ids 0 to {vocab_size - 1} only."
            f" Set model.vocab_size to at least {data.tokenizer.vocab_size}, use the model's own tokenizer, or set"
            " train.sample_tokens to 0."
        )
    return model, num_flops_per_token(model, config.batch.sequence_length)
