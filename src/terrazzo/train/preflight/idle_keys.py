"""Settings that have no effect because of others: each gets a note with the edit; nothing is refused.

Settings at their defaults get none, so that a configuration with all defaults written out is quiet. Nor does
checkpoint.overwrite where checkpoint.resume has been set explicitly, as the commands do that a run prints.
"""

from __future__ import annotations

import functools
import inspect
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from terrazzo.config import Config, MuonConfig
from terrazzo.engine import Offload
from terrazzo.train.data.sources import PYTHON_STDLIB, without_records
from terrazzo.train.data.tokenizer import BYTES
from terrazzo.train.settings.optimizer import optimizer_class, steps_matrices
from terrazzo.train.settings.plan import build_plan, unused_formats

__all__ = ["idle_keys", "idle_notes"]


class _Rule(NamedTuple):
    """Keys that have no effect if `applies`; why, and the edit that would give them one."""

    keys: str
    applies: Callable[[Config], bool]
    why: str
    edit: str


class IdleKeys(NamedTuple):
    """Settings without effect, why, and the edit that would give them one."""

    keys: Sequence[str]
    why: str
    edit: str

    @property
    def consequence(self) -> str:
        """What a line says behind the keys."""
        verb, it = ("do", "them") if len(self.keys) > 1 else ("does", "it")
        return f"{verb} nothing: {self.why}. Remove {it}, or {self.edit}"


def idle_notes(config: Config, world_size: int) -> list[str]:
    """Lines that name the settings without effect in this run, why, and the edit."""
    return [f"config: {', '.join(idle.keys)} {idle.consequence}" for idle in idle_keys(config, world_size)]


def idle_keys(config: Config, world_size: int | None) -> Iterator[IdleKeys]:
    """The settings without effect; with None, those that are so with any number of ranks."""
    for rule in (*_RULES, *(_OF_ONE_RANK if world_size == 1 else ())):
        changed = _changed(config, rule.keys.split())
        if changed and rule.applies(config):
            yield IdleKeys(changed, rule.why, rule.edit)
    unused = Offload.unused_under(build_plan(config), activations=config.offload.activations == "cpu")
    for (why, tier), names in unused.items():
        if changed := _changed(config, [f"offload.{name}" for name in names]):
            yield IdleKeys(changed, why, f"set offload.optim={tier}")
    if world_size is None:
        return
    for why, names in unused_formats(config, world_size).items():
        if changed := _changed(config, [f"precision.{name}" for name in names]):
            yield IdleKeys(changed, why, "start more ranks, under a plan that splits, such as plan.name=zero3")
    if (ranks := config.rank_numbers) and world_size not in ranks:
        why = f"{world_size} ranks have been started by torchrun or Slurm"
        yield IdleKeys(["launch.ranks"], why, "start as many")


def _changed(config: Config, keys: Iterable[str]) -> list[str]:
    """Those of `keys` that are not at their defaults."""
    return [key for key in keys if (value := operator.attrgetter(key))(config) != value(_usual())]


_usual = functools.cache(Config)


def _without_validation(config: Config) -> bool:
    return config.data.validation_source is None and not config.data.validation_fraction


def _without_ranks(config: Config) -> bool:
    """Whether only the last checkpoint has a validation loss, so that none can be ranked by it."""
    every, evaluations = config.checkpoint.every, config.train.eval_every
    if _without_validation(config) or config.checkpoint.keep_last is None:
        return False
    if every is None or evaluations is None:
        return True
    return isinstance(every, int) and math.lcm(every, evaluations) >= config.train.steps


def _without_decay(config: Config) -> bool:
    return "weight_decay" not in inspect.signature(optimizer_class(config.optimizer)).parameters


def _without_copies(config: Config) -> bool:
    """Whether each state is on one rank only: weights and optimizer states are split over all ranks."""
    mesh, plan = config.plan.mesh, build_plan(config)
    data = {axis for axis in ("dp_replicate", "dp_shard", "cp") if getattr(mesh, axis) != 1}
    split = all(data <= {*place.among(tuple(data))} for place in (plan.weight, plan.optim))
    return split and mesh.tp == mesh.pp == mesh.ep == 1


def _axis_alone(axis: str, keys: str, does: str) -> _Rule:
    """The rule for settings of an axis that has one rank."""
    return _Rule(
        keys,
        lambda config: getattr(config.plan.mesh, axis) == 1,
        f"plan.mesh.{axis} is 1: no ranks {does}",
        f"set plan.mesh.{axis}",
    )


_RULES = (
    _axis_alone("pp", "parallel.pipeline.schedule parallel.pipeline.chunks", "share layers"),
    _axis_alone("cp", "parallel.context.mode parallel.context.balance", "share sequences"),
    _axis_alone("tp", "parallel.tensor.sequence parallel.tensor.plan", "share matrices"),
    _Rule(
        "plan.prefetch",
        lambda config: not any(it.axes or set(it.shares) - {"device"} for it in build_plan(config).places().values()),
        "under this plan every rank has all states, and none are gathered",
        "take a plan that splits weights, such as plan.name=zero3",
    ),
    _Rule(
        "plan.outer.lr plan.outer.momentum plan.outer.traffic plan.outer.fragments plan.outer.delay plan.outer.mixing"
        " plan.outer.meet_every",
        lambda config: config.plan.sync_every is None,
        "plan.sync_every is null: gradients are summed over all ranks, and there are no outer steps",
        "set plan.sync_every, such as 100",
    ),
    _Rule(
        "plan.outer.mixing",
        lambda config: not config.plan.outer.delay,
        "plan.outer.delay is 0: nothing is trained while an outer step is under way",
        "set plan.outer.delay, such as 1",
    ),
    _Rule(
        "model.vocab_size model.dim model.layers model.heads model.kv_heads model.ffn_dim model.tie_embeddings"
        " model.rope_theta model.dropout",
        lambda config: config.model.kind == "huggingface",
        "they size the built-in decoder, and model.kind is 'huggingface', whose config.json has its own",
        "change that file",
    ),
    _Rule(
        "data.text_field data.loss_on",
        lambda config: without_records(config.data),
        f"data.source is '{PYTHON_STDLIB}', which has no records",
        "give records as data.source",
    ),
    _Rule(
        "data.text_field",
        lambda config: config.objective.kind.of_pairs,
        "preference pairs have the fields 'prompt', 'chosen' and 'rejected'",
        "rename them in the data",
    ),
    _Rule(
        "model.ffn_dim",
        lambda config: config.model.experts.ffn_dim is not None,
        "model.experts.ffn_dim has the width of all experts, and there is no other feed-forward",
        "remove model.experts.ffn_dim",
    ),
    _Rule(
        "objective.loss",
        lambda config: config.objective.kind.of_pairs,
        "preference pairs are compared by all of their logits, or have none",
        "set objective=next_token",
    ),
    _Rule(
        "model.dropout lora.dropout",
        lambda config: config.objective.kind.against_initial,
        "objective 'dpo' compares the model with its reference, and drops nothing in either",
        "set another objective",
    ),
    _Rule(
        "train.sample_tokens train.sample_every train.sample_prompt train.sample_chat",
        lambda config: config.objective.kind.scored,
        "objective 'reward' trains a model that writes no text",
        "set objective=dpo",
    ),
    _Rule(
        "train.sample_tokens train.sample_prompt",
        lambda config: config.plan.mesh.pp > 1,
        "a model in stages writes no text",
        "set plan.mesh.pp=1",
    ),
    _Rule(
        "data.end_of_document",
        lambda config: config.data.tokenizer == BYTES,
        f"data.tokenizer is '{BYTES}', which ends a document with a token of its own",
        "set data.tokenizer to the folder of another",
    ),
    _Rule(
        "data.validation_fraction",
        lambda config: config.data.validation_source is not None,
        "data.validation_source has the data to validate on",
        "remove data.validation_source",
    ),
    _Rule(
        "optimizer.weight_decay optimizer.decay optimizer.no_decay",
        _without_decay,
        "the optimizer has no weight decay",
        "choose another, such as optimizer.name=AdamW",
    ),
    _Rule(
        " ".join(f"optimizer.muon.{key}" for key in MuonConfig.model_fields),
        lambda config: not steps_matrices(config.optimizer),
        "the optimizer updates no matrices whole",
        "set optimizer.name=Muon",
    ),
    _Rule(
        "optimizer.decay optimizer.no_decay",
        lambda config: not (config.optimizer.weight_decay or config.optimizer.muon.weight_decay),
        "optimizer.weight_decay is 0",
        "set optimizer.weight_decay",
    ),
    _Rule(
        "schedule.final_fraction",
        lambda config: config.schedule.name == "constant",
        "schedule.name is 'constant'",
        "choose a schedule that ends lower, such as schedule.name=cosine",
    ),
    _Rule(
        "train.eval_every train.eval_batches checkpoint.keep_best",
        _without_validation,
        "there are no data to validate on",
        "set data.validation_fraction or data.validation_source",
    ),
    _Rule(
        "train.sample_every train.sample_prompt train.sample_chat",
        lambda config: not config.train.sample_tokens,
        "train.sample_tokens is 0",
        "set train.sample_tokens",
    ),
    _Rule(
        "train.check_replicas_every",
        _without_copies,
        "under this plan no two ranks hold the same states, so there is nothing to compare",
        "set guard.memory_every, which looks at what each rank has",
    ),
    _Rule(
        "guard.limit",
        lambda config: config.guard.action == "stop",
        "guard.action is 'stop', which ends the run at the first",
        "set guard.action=skip",
    ),
    _Rule(
        "checkpoint.local.every checkpoint.local.partner",
        lambda config: config.checkpoint.local.folder is None,
        "checkpoint.local.folder is null, so none are taken",
        "set checkpoint.local.folder=/dev/shm",
    ),
    _Rule(
        "checkpoint.mtbf_hours checkpoint.overhead",
        lambda config: config.checkpoint.every != "auto",
        "checkpoint.every is not 'auto'",
        "set checkpoint.every=auto",
    ),
    _Rule(
        "checkpoint.keep_every checkpoint.keep_best",
        lambda config: config.checkpoint.keep_last is None,
        "checkpoint.keep_last is null, so all are kept",
        "set checkpoint.keep_last",
    ),
    _Rule(
        "checkpoint.keep_best",
        _without_ranks,
        "no step before the last is both validated (train.eval_every) and saved (checkpoint.every)",
        "set train.eval_every, and checkpoint.every to a multiple of it",
    ),
    _Rule(
        "checkpoint.staging_gib",
        lambda config: not config.checkpoint.background,
        "checkpoint.background is false",
        "set checkpoint.background=true",
    ),
    _Rule(
        "checkpoint.overwrite",
        lambda config: config.checkpoint.resume != "never" and "resume" not in config.checkpoint.model_fields_set,
        "checkpoint.resume is not 'never', so nothing is removed",
        "set checkpoint.resume=never",
    ),
    _Rule(
        "checkpoint.cast checkpoint.allow_changed_data",
        lambda config: config.checkpoint.resume == "never",
        "checkpoint.resume is 'never', so nothing is resumed",
        "set checkpoint.resume=if_exists",
    ),
)

_OF_ONE_RANK = (
    _Rule(
        "launch.stall_s",
        lambda config: True,
        "one rank alone waits for no other",
        "start more",
    ),
)
