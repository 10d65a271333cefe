"""Writing Lightning's configuration from a description, as LightningCLI reads it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch

from terrazzo.dialects.core.description import (
    DATA_AXIS_PATHS,
    LOADED,
    PATHS,
    SHARDING_PATHS,
    TIER_PATHS,
    Description,
    Setting,
    SettingsByPath,
    as_text,
    asks_for_nothing,
)
from terrazzo.dialects.core.dialect import NO_CONTEXT, ReadingContext, Writing
from terrazzo.dialects.core.draft import Draft
from terrazzo.dialects.core.key_verdict import KeyVerdict
from terrazzo.dialects.formats.lightning.keys import KEYS
from terrazzo.dialects.formats.lightning.model_checkpoint import write_saving
from terrazzo.dialects.formats.lightning.precision import LAST, POLICY, WORDS, dtype_of_sums, gathered_in, precision_row
from terrazzo.dialects.formats.nested import DEEPSPEED, FSDP_STRATEGY, filled, joined, placed, resolve_auto
from terrazzo.dialects.formats.shared.fsdp_policy import load_dtype
from terrazzo.dialects.formats.shared.fsdp_words import TORCH_NAMES, wants_deepspeed
from terrazzo.dialects.formats.shared.launcher import write_ranks
from terrazzo.dialects.formats.shared.plan_rows import is_split
from terrazzo.documents.dotted_keys import put

__all__ = ["write"]

_STAGES = ("terrazzo", "deepspeed")
"""Dialects whose zero3 may as well be DeepSpeed's stage 3, which clips by norm where FSDPStrategy raises."""
_CLASSES = "lightning.pytorch.strategies"
_STRATEGY, _ARGUMENTS = "trainer.strategy", "trainer.strategy.init_args"
_POLICY = f"{_ARGUMENTS}.mixed_precision"
_OPTIONS = "optimizer.init_args"
_ADOPTED = ("sharding.", "mesh.", "units.", "offload.", "prefetch.", "loading.broadcast")
_PLAIN = tuple(word for word in WORDS if isinstance(word, str) and "-" in word and "engine" not in word)
_WORDS = tuple(sorted(_PLAIN, key="32-true".__ne__))
"""Lightning's full words; of several that fit alike the first is taken, which casts no weights to 16 bits."""


def write(description: Description, context: ReadingContext = NO_CONTEXT) -> Writing:
    """The document."""
    draft = Draft(description, "Lightning", KEYS)
    write_ranks(draft, "trainer.devices", "trainer.num_nodes")
    _loop(draft)
    clipped = draft.value("training.clip") is not None and description.dialect in _STAGES
    if wants_deepspeed(description) or (description.row == "zero3" and clipped):
        return _deepspeed(draft, context)
    _optimizer(draft)
    _schedule(draft)
    if is_split(description):
        _fsdp(draft, context)
    else:
        _ddp(draft, context)
    if draft.value("mesh.tp", 1) != 1:
        draft.lossy("mesh.tp", "ModelParallelStrategy alone has it, and configure_model() says what is split")
    return draft.finish()


# -- the loop ------------------------------------------------------------------------------------------------------


def _loop(draft: Draft) -> None:
    draft.option("batch.accumulation", "trainer.accumulate_grad_batches")
    draft.option("schedule.total_steps", "trainer.max_steps")
    draft.option("training.seed", "seed_everything")
    for path in ("batch.micro_batch", "batch.global_batch", "batch.sequence_length"):
        draft.lossy(path, "the data loader decides it there")
    if draft.value("training.compile"):
        draft.lossy("training.compile", "compile the model in configure_model")
    write_saving(draft)
    if draft.value("loading.low_memory"):
        draft.lossy("loading.low_memory", "build the model in configure_model")
    if draft.value("training.device") is not None:
        draft.put("training.device", "trainer.accelerator", "cpu" if draft.value("training.device") == "cpu" else "gpu")


def _optimizer(draft: Draft) -> None:
    paths = tuple(f"optimizer.{name}" for name in ("lr", "betas", "eps", "weight_decay"))
    name = draft.value("optimizer.name")
    if name is None:
        draft.lossy((*paths, "optimizer.options"), "the optimizer comes from the LightningModule there")
        return
    kind = getattr(torch.optim, name, None)
    if name == "Muon" or not isinstance(kind, type):
        fault = "Muon is for matrices alone, and gets every parameter" if kind else f"torch.optim has no {name}"
        draft.refuse("optimizer.name", f"{fault}: return your own from configure_optimizers")
        return
    draft.put("optimizer.name", "optimizer.class_path", f"torch.optim.{name}")
    draft.does("optimizer.decay", "all")
    known = inspect.signature(kind).parameters
    for path in paths:
        field = path.partition(".")[2]
        if draft.value(path) is not None and field not in known:
            draft.lossy(path, f"torch.optim.{name} has no {field}")
        elif draft.value(path) is not None:
            draft.copy(path, f"{_OPTIONS}.{field}")
    options = draft.value("optimizer.options", {})
    for field in (field for field in options if field in known):
        draft.write(f"{_OPTIONS}.{field}", options[field])
    if unknown := [field for field in options if field not in known]:
        draft.lossy("optimizer.options", f"torch.optim.{name} has no {', '.join(unknown)}", _OPTIONS)
    elif options:
        draft.implied("optimizer.options", key=_OPTIONS)


def _schedule(draft: Draft) -> None:
    """LightningCLI makes none, or one that it steps once an epoch; beside `optimizer` the module's own is not asked."""
    paths = [path for path in PATHS if path.startswith("schedule.") and path != "schedule.total_steps"]
    warm = [path for path in ("schedule.warmup_steps", "schedule.warmup_fraction") if draft.value(path)]
    if not draft.has("optimizer"):
        draft.lossy(paths, "the LightningModule returns its schedule from configure_optimizers")
    elif draft.value("schedule.name", "constant") == "constant" and not warm:
        draft.holds(paths, "no lr_scheduler: the rate stays as it is")
    else:
        edit = "return it with the optimizer from configure_optimizers instead"
        draft.lossy(paths, f"LightningCLI steps a schedule once an epoch: {edit}")


def _clip(draft: Draft, sharded: bool) -> None:
    clip = draft.value("training.clip")
    if clip is None:
        draft.implied("training.clip")
    elif sharded:
        why = (
            "FSDPStrategy raises on clipping by norm: override configure_gradient_clipping and call clip_grad_norm_ of"
        )
        draft.refuse("training.clip", f"{why} the FSDP module there")
    else:
        draft.put("training.clip", "trainer.gradient_clip_val", clip)


# -- strategies ----------------------------------------------------------------------------------------------------


def _ddp(draft: Draft, context: ReadingContext) -> None:
    draft.put(SHARDING_PATHS, _STRATEGY, "ddp")
    draft.implied(DATA_AXIS_PATHS, "every rank is a replica", _STRATEGY)
    draft.holds([path for path in PATHS if path.startswith(("units.", "prefetch."))], "nothing is gathered")
    if any(draft.value(path, "device") != "device" for path in TIER_PATHS):
        draft.refuse(TIER_PATHS, "DDP moves nothing to the CPU: shard with zero3")
    else:
        draft.implied([path for path in PATHS if path.startswith("offload.")])
    draft.holds("loading.broadcast", "DDP does so")
    _recomputed(draft, sharded=False)
    _state(draft, sharded=False)
    _clip(draft, sharded=False)
    _precision(draft, "DDPStrategy", context)


def _fsdp(draft: Draft, context: ReadingContext) -> None:
    """FSDPStrategy passes its arguments on to FullyShardedDataParallel."""
    writing = FSDP_STRATEGY.write(replace(draft.description, dialect=""), context)
    arguments = {key: value for key, value in writing.document.items() if key != "mixed_precision"}
    if isinstance(arguments.get("cpu_offload"), dict):
        arguments["cpu_offload"] = True
    draft.write(f"{_STRATEGY}.class_path", f"{_CLASSES}.FSDPStrategy")
    for key, value in arguments.items():
        draft.write(f"{_ARGUMENTS}.{key}", value)
    _adopt(draft, [verdict for verdict in writing.verdicts if verdict.key.startswith(_ADOPTED)], _ARGUMENTS)
    _recomputed(draft, sharded=True)
    _state(draft, sharded=True)
    _clip(draft, sharded=True)
    _precision(draft, "FSDPStrategy", context)
    if draft.document["trainer"]["strategy"] == {"class_path": f"{_CLASSES}.FSDPStrategy"}:
        draft.write(_STRATEGY, "fsdp")


def _adopt(draft: Draft, verdicts: list[KeyVerdict], section: str) -> None:
    """Another writer's words, with its keys below a section."""
    for verdict in verdicts:
        key = placed(verdict, section).target
        if verdict.kind == "refused":
            draft.refuse(verdict.key, verdict.why)
        elif verdict.kind == "lossy":
            draft.lossy(verdict.key, verdict.why, key)
        else:
            (draft.holds if verdict.holds else draft.implied)(verdict.key, verdict.why, key)


def _recomputed(draft: Draft, *, sharded: bool) -> None:
    mode, classes = draft.value("activation_checkpointing.mode", "none"), draft.value("units.classes", ())
    paths = tuple(path for path in PATHS if path.startswith("activation_checkpointing."))
    if mode == "none":
        draft.implied(paths)
    elif mode == "full" and sharded and classes:
        key = f"{_ARGUMENTS}.activation_checkpointing_policy"
        draft.put("activation_checkpointing.mode", key, list(classes))
    else:
        asked = [path for path in paths if not asks_for_nothing(path, draft.value(path))]
        draft.lossy(asked, "recompute blocks in the LightningModule")


def _state(draft: Draft, *, sharded: bool) -> None:
    state = draft.value("saving.state", "full")
    if sharded and state != "full" and draft.value("saving.export", "none") == "none":
        why = "shards resume on any number of ranks" if state == "local" else ""
        draft.write(key := f"{_ARGUMENTS}.state_dict_type", "sharded")
        draft.holds("saving.state", why, key)
        draft.implied("saving.export")
        return
    draft.holds(("saving.state", "saving.export"), "one file with all weights")


# -- precision -----------------------------------------------------------------------------------------------------


def _precision(draft: Draft, kind: str, context: ReadingContext) -> None:
    """The word that misses the fewest dtypes, alone or, under FSDP, with a `mixed_precision` of its own beside it."""
    wanted = {path: draft.setting(path) for path in PATHS if path.startswith("precision.") and draft.is_set(path)}
    if "precision.compute" not in wanted:
        return
    policies = (None, _policy(draft)) if kind == "FSDPStrategy" else (None,)
    rows = [(word, policy, _row(draft, kind, word, policy, context)) for policy in policies for word in _WORDS]
    word, policy, row = min(rows, key=lambda each: _misses(wanted, each[2]))
    draft.write("trainer.precision", word)
    for state, setting in (policy or {}).items():
        draft.write(f"{_POLICY}.{POLICY[state]}", TORCH_NAMES[setting.value])
    for path, setting in wanted.items():
        does, state = row.get(path), path.partition(".")[2]
        if does is None:  # no word decides it: `finish` says so of what asks for something
            continue
        if _is_met(path, wanted, row):
            cast = "" if does.value == setting.value or not setting.value else _cast(word, does.value)
            key = f"{_POLICY}.{POLICY[state]}" if policy and state in policy else "trainer.precision"
            draft.holds(path, cast, key)
        elif path == "precision.autocast":
            how = "runs under autocast: norms, softmax and losses compute in fp32" if does.value else "has no autocast"
            draft.lossy(path, f"under {word} the forward {how}", "trainer.precision")
        elif setting.value == LOADED and path == "precision.buffers":
            draft.lossy(path, f"Lightning casts them to {does.value}, and here they stay as loaded")
        elif setting.value == LOADED:
            draft.lossy(
                path, f"it depends on the dtype in which the model is loaded; {word} is written: say --load-dtype"
            )
        else:
            draft.lossy(path, f"under {word} it is {as_text(does.value)}", "trainer.precision")


def _row(
    draft: Draft, kind: str, word: str, policy: Mapping[str, Setting[Any]] | None, context: ReadingContext
) -> SettingsByPath:
    """What a word does, with sums over the micro-batches that a step has."""
    told: Setting[Any] = Setting(word, "file")
    loaded = load_dtype(context, True)
    row = precision_row(kind, told, loaded, policy)
    if kind != "FSDPStrategy":
        return row
    gathered = gathered_in(kind, word, loaded, policy, context.version("lightning", LAST))
    return row | dtype_of_sums(gathered, told, draft.setting("batch.accumulation"))


def _policy(draft: Draft) -> dict[str, Setting[Any]]:
    """The dtypes that `mixed_precision` can say, as far as they are known. Without one, buffers are left alone."""
    wanted = {state: draft.setting(f"precision.{state}") for state in POLICY}
    return {state: setting for state, setting in wanted.items() if setting.value in TORCH_NAMES}


def _cast(word: str, dtype: str) -> str:
    return f"{word} casts them to {dtype}, in which the model is loaded"


def _is_met(path: str, wanted: Mapping[str, Setting[Any]], row: SettingsByPath) -> bool:
    """Whether a word does what is wanted. Buffers that stay as loaded may be cast to what the model is loaded in."""
    does, value = row[path].value, wanted[path].value
    if path == "precision.buffers" and value == LOADED and path in row:
        masters = wanted.get("precision.master")
        return does == LOADED or (masters is not None and does == masters.value)
    return bool(does == value) or (not does and not value)


def _misses(wanted: Mapping[str, Setting[Any]], row: SettingsByPath) -> tuple[int, int]:
    """How many dtypes a word gets wrong; what is stored and computed counts before the rest."""
    wrong = [path for path in wanted if path in row and not _is_met(path, wanted, row)]
    known = [path for path in wrong if wanted[path].value != LOADED or path == "precision.buffers"]
    grave = ("precision.compute", "precision.master", "precision.loss_scaling")
    return sum(path in grave for path in known), len(known)


# -- DeepSpeed -----------------------------------------------------------------------------------------------------


def _deepspeed(draft: Draft, context: ReadingContext) -> Writing:
    """DeepSpeedStrategy with a whole configuration, and its optimizer; accumulation and clipping are the Trainer's."""
    inner = DEEPSPEED.written(draft.description, context)
    config = deepcopy(inner.document)
    for key in ("gradient_accumulation_steps", "train_batch_size"):
        config.pop(key, None)
    _fill(config, context)
    if (key := "train_micro_batch_size_per_gpu") in config:
        why = "the data loader decides it there, and DeepSpeed counts samples by this"
        draft.lossy("batch.micro_batch", why, f"{_ARGUMENTS}.config.{key}")
    _clip(draft, sharded=False)
    config.pop("gradient_clipping", None)
    for name, word in (("bf16", "bf16-true"), ("fp16", "16-true")):
        section = config.get(name)
        if isinstance(section, dict) and section.get("enabled") is True:
            draft.write("trainer.precision", word)
    draft.write(f"{_STRATEGY}.class_path", f"{_CLASSES}.DeepSpeedStrategy")
    draft.write(f"{_ARGUMENTS}.config", config)
    return joined(draft, inner, f"{_ARGUMENTS}.config", own=("batch.", "training.clip"))


def _fill(config: dict[str, Any], context: ReadingContext) -> None:
    """Put values for "auto", as far as they are known; of a micro-batch Lightning asks the data loader."""
    if config.get("train_micro_batch_size_per_gpu") == "auto":
        del config["train_micro_batch_size_per_gpu"]
    for key in filled(config):
        if (value := resolve_auto(key, context).value) is not None:
            put(config, key, value)
