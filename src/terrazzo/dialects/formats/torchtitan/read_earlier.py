"""What documents of torchtitan before 0.3 say by keys that there are no more: optimizer, recomputation, float8."""

from __future__ import annotations

from typing import Any

from terrazzo.dialects.core.description import Setting, SettingsByPath
from terrazzo.dialects.core.reader import derived
from terrazzo.dialects.core.wording import found
from terrazzo.dialects.formats.torchtitan.torchtitan_reader import TorchtitanReader

__all__ = ["BUDGET", "read_float8", "read_optimizer", "read_recomputed", "read_whole_weights"]

BUDGET = "the compiler keeps what fits a share of the memory: nearest is selective"
_SINCE = "torchtitan 0.3 has no such key: there Float8LinearConverter is built in Python"
_SMALL = "auto_filter_small_kn"
_CONVERTERS = {"float8", "quantize.linear.float8"}
"""Names in `model.converters` that convert linear layers to float8."""
_IN_BLOCKS = ("mx", "quantize.linear.mx", "quantize.grouped_mm.mx", "quantize.grouped_mm.float8")


def read_optimizer(reader: TorchtitanReader) -> SettingsByPath:
    """One optimizer for all parameters, AdamW where nothing is said."""
    name, lr, first, second, eps, decay = (
        reader.take(f"optimizer.{each}") for each in ("name", "lr", "beta1", "beta2", "eps", "weight_decay")
    )
    for each in (name, lr, first, second, eps, decay):
        reader.mark(each.key, "renamed", "torchtitan 0.3 says it in optimizer.param_groups")
    options = {"lr": lr.value, "betas": [first.value, second.value], "eps": eps.value, "weight_decay": decay.value}
    group = {"pattern": ".*", "optimizer_name": name.value, "optimizer_kwargs": options}
    reader.said_together["optimizer.param_groups"] = [group]
    betas: Any = "file" if "file" in (first.origin, second.origin) else "default"
    return {
        "optimizer.name": name,
        "optimizer.lr": lr,
        "optimizer.betas": derived((first.value, second.value), first, second, origin=betas),
        "optimizer.eps": eps,
        "optimizer.weight_decay": decay,
        "optimizer.decay": derived("all", decay),
        "optimizer.options": Setting({}, "default"),
    }


def read_recomputed(reader: TorchtitanReader) -> SettingsByPath:
    """Blocks, or operators of all blocks, or one block in so many: every second where nothing is said.

    Empty where the document says it as today's do.
    """
    section, path = "activation_checkpoint", "activation_checkpointing.mode"
    if not reader.earlier or reader.raw(section, {}) != {} or f"{section}.type" in reader.flat:
        return {}
    mode, option = reader.take(f"{section}.mode"), reader.take(f"{section}.selective_ac_option")
    word = str(option.value)
    for each in (mode, option):
        reader.mark(each.key, "renamed", f"torchtitan 0.3 says it in {section}.type")
    if mode.value != "selective":
        reader.keep(option.key, "mode is not selective", loss="harmless")
        if mode.value == "memory_budget":
            reader.keep(mode.key, BUDGET)
        kind = {"full": "FullAC", "memory_budget": "MemoryBudgetAC"}.get(mode.value)
        reader.said_together |= {f"{section}.type": kind} if kind else {section: None}
        return {path: Setting("selective" if mode.value == "memory_budget" else mode.value, mode.origin, mode.key)}
    reader.said_together[f"{section}.type"] = "SelectiveAC"
    origin: Any = "file" if "file" in (mode.origin, option.origin) else "default"
    if word == "op":
        return {path: derived("selective_half", mode, option, origin=origin)}
    if not word.isdecimal():
        reader.refuse(option.key, f"it is {found(word)}, expected op, or N for one block in N")
        return {path: Setting("selective_half", "default", mode.key)}
    every = int(word)
    reader.said_together[f"{section}.type"] = "FullAC"
    if every > 1:
        reader.mark(
            option.key, "renamed", "torchtitan 0.3 recomputes each block, or operators of each, never some blocks"
        )
        return {
            path: derived("every", mode, option, origin=origin),
            "activation_checkpointing.every": derived(every, option, origin=option.origin),
        }
    return {path: derived("full", mode, option, origin=origin)}


def read_whole_weights(reader: TorchtitanReader, settings: SettingsByPath) -> SettingsByPath:
    """What computes in 16 bits where nothing is split: autocast, and with stages or tensor parallel ranks nothing."""
    narrow = settings["precision.compute"]
    if not reader.earlier or settings["sharding.weight"].value != "-" or narrow.value == "fp32":
        return {}
    if settings["mesh.tp"].value == 1 and settings["mesh.pp"].value == 1:
        return {"precision.autocast": derived(True, narrow)}
    reader.mark(narrow.key, "lossy", "without sharded weights tensor and pipeline parallel ranks compute in fp32")
    return {"precision.compute": derived("fp32", narrow)}


# -- float8 --------------------------------------------------------------------------------------------------------


def read_float8(reader: TorchtitanReader) -> SettingsByPath:
    """How linear layers multiply, where `model.converters` says that they do so in float8."""
    converters = reader.take("model.converters")
    _keep_others(reader, converters)
    sections = [name for name in ("quantize.linear.float8", "float8") if name in reader]
    switches = [reader.take(f"{name}.enable_float8_linear") for name in sections]
    on = [each for each in switches if each.value] or ([converters] if _CONVERTERS & set(converters.value) else [])
    if not on:
        for name in sections:
            reader.keep(name, "model.converters does not name it: nothing is in 8 bits", loss="harmless")
        return {}
    return _recipe(reader, sections[0] if sections else "float8", on[0])


def _keep_others(reader: TorchtitanReader, converters: Setting[Any]) -> None:
    """Converters that are not read here."""
    if narrow := [name for name in converters.value if name in _IN_BLOCKS]:
        reader.refuse(
            converters.key, f"{narrow[0]} multiplies blocks or experts in 8 bits: remove it, or train in bf16"
        )
    elif others := [name for name in converters.value if name not in _CONVERTERS]:
        reader.keep(converters.key, f"what {found(others[0])} makes of the model, only its code knows")
    elif converters.origin == "file" and not converters.value:
        reader.keep(converters.key, "it names none", loss="harmless")


def _recipe(reader: TorchtitanReader, section: str, on: Setting[Any]) -> SettingsByPath:
    recipe, skipped = reader.take(f"{section}.recipe_name"), reader.take(f"{section}.filter_fqns")
    gradient = reader.raw(recipe.key) == "rowwise_with_gw_hp"
    for key in (on.key, recipe.key, skipped.key):
        reader.mark(key, "renamed", _SINCE)
    if gradient:
        reader.mark(recipe.key, "lossy", "weights' gradients are in 8 bits, too")
    if _SMALL in skipped.value:
        reader.mark(skipped.key, "lossy", "small layers are converted as well")
    globs = tuple(f"*{name}*" for name in skipped.value if name != _SMALL)
    return {
        "precision.linears": derived(recipe.value or "fp8-tensorwise", on, recipe, origin="file"),
        "precision.skip": Setting(globs, skipped.origin, skipped.key),
    }
