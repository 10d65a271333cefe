"""Writing Lightning's configuration from a description, as LightningCLI reads it."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch

from terrazzo.dialects.core.description import DATA_AXES, LOADED, PATHS, SHARDING, TIERS, Description, Setting
from terrazzo.dialects.core.dialect import NO_CONTEXT, ReadingContext, Writing
from terrazzo.dialects.core.draft import Pen
from terrazzo.dialects.core.key_verdict import KeyVerdict
from terrazzo.dialects.formats.lightning.precision import WORDS, precision_row
from terrazzo.dialects.formats.nested import DEEPSPEED, FSDP_STRATEGY, placed
from terrazzo.dialects.formats.shared.fsdp import ROW_NAMES, TORCH_NAMES, wants_deepspeed
from terrazzo.dialects.formats.shared.rows import nearest_row

__all__ = ["write"]

_STAGES = ("terrazzo", "deepspeed")
"""Dialects whose zero3 may as well be DeepSpeed's stage 3, which clips by norm where FSDPStrategy raises."""
_CLASSES = "lightning.pytorch.strategies"
_STRATEGY, _ARGUMENTS = "trainer.strategy", "trainer.strategy.init_args"
_ADOPTED = ("sharding.", "mesh.", "units.", "offload.", "prefetch.", "loading.broadcast")
_PLAIN_WORDS = tuple(word for word in WORDS if isinstance(word, str) and "-" in word and "engine" not in word)


def write(description: Description, context: ReadingContext = NO_CONTEXT) -> Writing:
    """The document."""
    if description.dialect == "lightning":
        return _own(description)
    pen = Pen(description, "Lightning", "lightning")
    pen.implied("mesh.world")
    _loop(pen)
    row, why = nearest_row(description, ROW_NAMES)
    clipped = pen.value("training.clip") is not None and description.dialect in _STAGES
    if wants_deepspeed(description) or (row == "zero3" and clipped):
        return _deepspeed(pen, context)
    if row == "zero0":
        _ddp(pen)
    elif row is not None:
        _fsdp(pen, context)
    elif why:
        pen.refuse(SHARDING, f"{why}: choose one of {', '.join(ROW_NAMES)}")
    return pen.finish()


def _own(description: Description) -> Writing:
    """What was read from this very dialect: the loop from its settings, the rest as it stood."""
    copied = tuple(replace(extra, value=deepcopy(extra.value)) for extra in description.extras)
    pen = Pen(replace(description, extras=copied), "Lightning", "lightning")
    for path in PATHS:
        setting = pen.setting(path)
        last = setting.keys[-1].rpartition(".")[2] if setting.keys else ""
        if path in _OWN and last == _OWN[path] and setting.origin != "default":
            pen.put(path, setting.keys[-1], setting.value)
    return pen.finish()


_OWN = {
    "batch.accumulation": "accumulate_grad_batches",
    "schedule.total_steps": "max_steps",
    "training.seed": "seed_everything",
    "saving.folder": "default_root_dir",
    "training.clip": "gradient_clip_val",
}


# -- the loop ------------------------------------------------------------------------------------------------------


def _loop(pen: Pen) -> None:
    pen.option("batch.accumulation", "trainer.accumulate_grad_batches", 1)
    pen.option("schedule.total_steps", "trainer.max_steps", None)
    pen.option("training.seed", "seed_everything", None)
    pen.option("saving.folder", "trainer.default_root_dir", None)
    for path in ("batch.micro_batch", "batch.global_batch", "batch.sequence_length"):
        pen.lossy(path, "the data loader decides it there")
    for path in PATHS:
        if path.startswith("schedule.") and path != "schedule.total_steps":
            pen.lossy(path, "the LightningModule returns its schedule from configure_optimizers")
    if pen.value("training.compile"):
        pen.lossy("training.compile", "compile the model in configure_model")
    for path in ("saving.every", "saving.keep_last"):
        if pen.value(path) is not None:
            pen.lossy(path, "say it to the ModelCheckpoint callback")
    if pen.value("loading.low_memory"):
        pen.lossy("loading.low_memory", "build the model in configure_model")
    if pen.value("training.device") is not None:
        pen.put("training.device", "trainer.accelerator", "cpu" if pen.value("training.device") == "cpu" else "gpu")
    _optimizer(pen)


def _optimizer(pen: Pen) -> None:
    paths = tuple(f"optimizer.{name}" for name in ("lr", "betas", "eps", "weight_decay"))
    name = pen.value("optimizer.name")
    if name is None:
        pen.lossy((*paths, "optimizer.options"), "the optimizer comes from the LightningModule there")
        return
    if not hasattr(torch.optim, name):
        pen.refuse("optimizer.name", f"torch.optim has no {name}: return your own from configure_optimizers")
        return
    pen.put("optimizer.name", "optimizer.class_path", f"torch.optim.{name}")
    for path in paths:
        if pen.value(path) is not None:
            value = pen.value(path)
            key = f"optimizer.init_args.{path.partition('.')[2]}"
            pen.put(path, key, list(value) if isinstance(value, tuple) else value)
    for argument, value in pen.value("optimizer.options", {}).items():
        pen.put("optimizer.options", f"optimizer.init_args.{argument}", value)


def _clip(pen: Pen, sharded: bool) -> None:
    clip = pen.value("training.clip")
    if clip is None:
        pen.implied("training.clip")
    elif sharded:
        why = (
            "FSDPStrategy raises on clipping by norm: override configure_gradient_clipping and call clip_grad_norm_ of"
        )
        pen.refuse("training.clip", f"{why} the FSDP module there")
    else:
        pen.put("training.clip", "trainer.gradient_clip_val", clip)


# -- strategies ----------------------------------------------------------------------------------------------------


def _ddp(pen: Pen) -> None:
    pen.put(SHARDING, _STRATEGY, "ddp")
    pen.implied(DATA_AXES, "every rank is a replica", _STRATEGY)
    pen.implied([path for path in PATHS if path.startswith(("units.", "prefetch."))], "nothing is gathered")
    if any(pen.value(path, "device") != "device" for path in TIERS):
        pen.refuse(TIERS, "DDP moves nothing to the CPU: shard with zero3")
    else:
        pen.implied([path for path in PATHS if path.startswith("offload.")])
    pen.implied("loading.broadcast", "DDP does so")
    _recomputed(pen, sharded=False)
    _state(pen, sharded=False)
    _clip(pen, sharded=False)
    _precision(pen, "DDPStrategy")


def _fsdp(pen: Pen, context: ReadingContext) -> None:
    """FSDPStrategy passes its arguments on to FullyShardedDataParallel."""
    writing = FSDP_STRATEGY.write(replace(pen.description, dialect=""), context)
    arguments = {key: value for key, value in writing.document.items() if key != "mixed_precision"}
    if isinstance(arguments.get("cpu_offload"), dict):
        arguments["cpu_offload"] = True
    pen.write(f"{_STRATEGY}.class_path", f"{_CLASSES}.FSDPStrategy")
    for key, value in arguments.items():
        pen.write(f"{_ARGUMENTS}.{key}", value)
    _adopt(pen, [verdict for verdict in writing.verdicts if verdict.key.startswith(_ADOPTED)], _ARGUMENTS)
    _recomputed(pen, sharded=True)
    _state(pen, sharded=True)
    _clip(pen, sharded=True)
    _precision(pen, "FSDPStrategy")
    if pen.document["trainer"]["strategy"] == {"class_path": f"{_CLASSES}.FSDPStrategy"}:
        pen.write(_STRATEGY, "fsdp")


def _adopt(pen: Pen, verdicts: list[KeyVerdict], section: str) -> None:
    """Another writer's words, with its keys below a section."""
    for verdict in verdicts:
        key = placed(verdict, section).target
        if verdict.kind == "refused":
            pen.refuse(verdict.key, verdict.why)
        elif verdict.kind == "lossy":
            pen.lossy(verdict.key, verdict.why, key)
        else:
            pen.implied(verdict.key, verdict.why, key)


def _recomputed(pen: Pen, *, sharded: bool) -> None:
    mode, classes = pen.value("activation_checkpointing.mode", "none"), pen.value("units.classes", ())
    paths = tuple(path for path in PATHS if path.startswith("activation_checkpointing."))
    if mode == "none":
        pen.implied(paths)
    elif mode == "full" and sharded and classes:
        key = f"{_ARGUMENTS}.activation_checkpointing_policy"
        pen.put("activation_checkpointing.mode", key, list(classes))
    else:
        pen.lossy(paths, "recompute blocks in the LightningModule")


def _state(pen: Pen, *, sharded: bool) -> None:
    state = pen.value("saving.state", "full")
    if sharded and state != "full" and pen.value("saving.export", "none") == "none":
        pen.put("saving.state", f"{_ARGUMENTS}.state_dict_type", "sharded")
        pen.implied("saving.export")
        return
    pen.implied(("saving.state", "saving.export"), "one file with all weights")


# -- precision -----------------------------------------------------------------------------------------------------


def _precision(pen: Pen, kind: str) -> None:
    """The word that misses the fewest dtypes; under FSDP, `mixed_precision` puts gather and reduction right."""
    asked = {path: pen.setting(path) for path in PATHS if path.startswith("precision.") and pen.is_set(path)}
    if "precision.compute" not in asked:
        return
    word = min(_PLAIN_WORDS, key=lambda each: _misses(asked, kind, each))
    row = precision_row(kind, Setting(word, "file"))
    pen.write("trainer.precision", word)
    explicit = _mixed_precision(pen, kind, row)
    for path, setting in asked.items():
        does = row.get(path)
        if path in explicit:
            pen.implied(path, key=f"{_ARGUMENTS}.mixed_precision.{explicit[path]}")
        elif does is None or does.value == setting.value or (not setting.value and not does.value):
            pen.implied(path, key="trainer.precision")
        elif path == "precision.autocast":
            how = "runs under autocast: norms, softmax and losses compute in fp32" if does.value else "has no autocast"
            pen.lossy(path, f"under {word} the forward {how}", "trainer.precision")
        elif setting.value == LOADED:
            pen.lossy(
                path, f"it depends on the dtype in which the model is loaded; {word} is written: say --load-dtype"
            )
        else:
            pen.lossy(path, f"under {word} it is {does.value}", "trainer.precision")


def _misses(asked: Mapping[str, Setting[Any]], kind: str, word: str) -> tuple[int, int]:
    """How many dtypes a word gets wrong; what is stored and computed counts before the rest."""
    row = precision_row(kind, Setting(word, "file"))
    wrong = [path for path, setting in asked.items() if path in row and row[path].value != setting.value]
    known = [path for path in wrong if asked[path].value != LOADED]
    grave = ("precision.compute", "precision.master", "precision.loss_scaling")
    return sum(path in grave for path in known), len(known)


def _mixed_precision(pen: Pen, kind: str, row: Mapping[str, Setting[Any]]) -> dict[str, str]:
    """The argument `mixed_precision`, where the word alone reduces in another dtype; the keys by path."""
    reduce = pen.value("precision.reduce")
    if kind != "FSDPStrategy" or reduce not in TORCH_NAMES or reduce == row["precision.reduce"].value:
        return {}
    keys = {"precision.compute": "param_dtype", "precision.reduce": "reduce_dtype", "precision.buffers": "buffer_dtype"}
    for path, key in keys.items():
        value = pen.value(path)
        value = value if value in TORCH_NAMES else row[path].value
        pen.write(f"{_ARGUMENTS}.mixed_precision.{key}", TORCH_NAMES[value])
    return {path: key for path, key in keys.items() if pen.value(path) in TORCH_NAMES}


# -- DeepSpeed -----------------------------------------------------------------------------------------------------


def _deepspeed(pen: Pen, context: ReadingContext) -> Writing:
    """DeepSpeedStrategy with a whole configuration; accumulation and clipping are the Trainer's."""
    inner = DEEPSPEED.write(pen.description, context)
    config = deepcopy(inner.document)
    for key in ("gradient_accumulation_steps", "train_batch_size"):
        config.pop(key, None)
    _clip(pen, sharded=False)
    config.pop("gradient_clipping", None)
    for name, word in (("bf16", "bf16-true"), ("fp16", "16-true")):
        section = config.get(name)
        if isinstance(section, dict) and section.get("enabled") is True:
            pen.write("trainer.precision", word)
    pen.write(f"{_STRATEGY}.class_path", f"{_CLASSES}.DeepSpeedStrategy")
    pen.write(f"{_ARGUMENTS}.config", config)
    outer = pen.finish()
    spoken = {
        verdict.key: verdict
        for verdict in outer.verdicts
        if verdict.target or verdict.kind == "refused" or verdict.key.startswith(("batch.", "training.clip"))
    }
    for verdict in inner.verdicts:
        spoken.setdefault(verdict.key, placed(verdict, f"{_ARGUMENTS}.config"))
    for verdict in outer.verdicts:
        spoken.setdefault(verdict.key, verdict)
    return Writing(pen.document, tuple(spoken.values()))
