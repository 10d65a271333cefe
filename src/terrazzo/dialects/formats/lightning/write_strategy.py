"""Writing DDP, or FSDPStrategy with its arguments as LightningCLI takes them.

LightningCLI imports dtypes and classes by their paths, wants two axes in `device_mesh`, and takes what FSDPStrategy
passes on to FullyShardedDataParallel without a name of its own in `dict_kwargs`, where it makes nothing of a value.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from terrazzo.dialects.core.description import DATA_AXIS_PATHS, PATHS, SHARDING_PATHS, TIER_PATHS, asks_for_nothing
from terrazzo.dialects.core.dialect import ReadingContext
from terrazzo.dialects.core.draft import Draft
from terrazzo.dialects.core.key_verdict import KeyVerdict
from terrazzo.dialects.formats.lightning.keys import FSDP_BY_NAME
from terrazzo.dialects.formats.lightning.write_loop import write_clip
from terrazzo.dialects.formats.lightning.write_precision import write_precision
from terrazzo.dialects.formats.nested import FSDP_STRATEGY
from terrazzo.documents.dotted_keys import keys_in

__all__ = ["write_ddp", "write_fsdp"]

_STRATEGY, _ARGUMENTS = "trainer.strategy", "trainer.strategy.init_args"
_CLASS = "lightning.pytorch.strategies.FSDPStrategy"
_ADOPTED = ("sharding.", "mesh.", "units.", "offload.", "prefetch.", "loading.broadcast")


def write_ddp(draft: Draft, context: ReadingContext) -> None:
    """Nothing is split."""
    draft.put(SHARDING_PATHS, _STRATEGY, "ddp")
    draft.implied(DATA_AXIS_PATHS, "every rank is a replica", _STRATEGY)
    draft.holds([path for path in PATHS if path.startswith(("units.", "prefetch."))], "nothing is gathered")
    if any(draft.value(path, "device") != "device" for path in TIER_PATHS):
        draft.refuse(TIER_PATHS, "DDP moves nothing to the CPU: shard with zero3")
    else:
        draft.implied([path for path in PATHS if path.startswith("offload.")])
    draft.holds("loading.broadcast", "DDP does so")
    _recomputed(draft, sharded=False)
    _saved(draft, sharded=False)
    write_clip(draft, sharded=False)
    write_precision(draft, "DDPStrategy", context)


def write_fsdp(draft: Draft, context: ReadingContext) -> None:
    """FSDPStrategy passes its arguments on to FullyShardedDataParallel."""
    writing = FSDP_STRATEGY.write(replace(draft.description, dialect=""), context)
    arguments = dict(_taken(writing.document))
    draft.write(f"{_STRATEGY}.class_path", _CLASS)
    for argument, value in arguments.items():
        draft.write(_place(argument), value)
    _adopt(draft, (each for each in writing.verdicts if each.key.startswith(_ADOPTED)), arguments)
    _units(draft)
    _recomputed(draft, sharded=True)
    _saved(draft, sharded=True)
    write_clip(draft, sharded=True)
    write_precision(draft, "FSDPStrategy", context)
    if draft.document["trainer"]["strategy"] == {"class_path": _CLASS}:
        draft.write(_STRATEGY, "fsdp")


def _taken(arguments: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    """FSDP1's arguments, as far as LightningCLI takes them, and they say more than a default."""
    for argument, value in arguments.items():
        alone = argument == "device_mesh" and len(value) == 1  # all ranks, without a word
        by_size = argument == "auto_wrap_policy" and isinstance(value, Mapping)
        usual = (argument, value) == ("backward_prefetch", "BACKWARD_PRE")
        if not (alone or by_size or usual or argument in _OTHERWISE):
            yield argument, True if argument == "cpu_offload" else value


_OTHERWISE = ("mixed_precision", "ignored_states")
"""What is written beside the word for precision, and what no YAML can say."""


def _place(argument: str) -> str:
    """Where an argument of FullyShardedDataParallel stands."""
    return f"{_ARGUMENTS if argument in FSDP_BY_NAME else f'{_STRATEGY}.dict_kwargs'}.{argument}"


def _adopt(draft: Draft, verdicts: Iterable[KeyVerdict], arguments: Mapping[str, Any]) -> None:
    """FSDP1's words, under the keys of the arguments that are written."""
    for verdict in verdicts:
        told = dict.fromkeys(key.partition(".")[0] for key in keys_in(verdict.target))
        key = ", ".join(_place(argument) for argument in told if argument in arguments)
        if verdict.kind == "refused":
            draft.refuse(verdict.key, verdict.why)
        elif verdict.kind == "lossy":
            draft.lossy(verdict.key, verdict.why, key)
        else:
            (draft.holds if verdict.holds else draft.implied)(verdict.key, verdict.why, key)


def _units(draft: Draft) -> None:
    """Say of units what LightningCLI cannot be told."""
    if draft.value("units.policy") == "min_numel":
        code = "FSDPStrategy(auto_wrap_policy=functools.partial(size_based_auto_wrap_policy, min_num_params=...))"
        draft.lossy(("units.policy", "units.min_numel"), f"LightningCLI takes no size of units: in code, {code}")
    else:
        _imported(draft, "units.classes", "auto_wrap_policy")
    if draft.value("units.ignored"):
        draft.lossy("units.ignored", "LightningCLI hands on names, and FSDP takes modules: pass ignored_states in code")


def _imported(draft: Draft, path: str, argument: str) -> None:
    """Say of classes without their modules that LightningCLI stops there."""
    bare = [name for name in draft.value("units.classes", ()) if "." not in name]
    if bare and draft.has(key := f"{_ARGUMENTS}.{argument}"):
        why = f"LightningCLI imports classes by their paths: write the module of {', '.join(bare)} in front"
        draft.lossy(path, why, key)


def _recomputed(draft: Draft, *, sharded: bool) -> None:
    mode, classes = draft.value("activation_checkpointing.mode", "none"), draft.value("units.classes", ())
    paths = tuple(path for path in PATHS if path.startswith("activation_checkpointing."))
    if mode == "none":
        draft.implied(paths)
    elif mode == "full" and sharded and classes:
        key = f"{_ARGUMENTS}.activation_checkpointing_policy"
        draft.put("activation_checkpointing.mode", key, list(classes))
        _imported(draft, "activation_checkpointing.mode", "activation_checkpointing_policy")
    else:
        asked = [path for path in paths if not asks_for_nothing(path, draft.value(path))]
        draft.lossy(asked, "recompute blocks in the LightningModule")


def _saved(draft: Draft, *, sharded: bool) -> None:
    """Write what a checkpoint is: shards, or one file of all weights, which is no Hugging Face folder."""
    state, export = draft.value("saving.state", "full"), draft.value("saving.export", "none")
    if sharded and state != "full" and export == "none":
        why = "shards resume on any number of ranks" if state == "local" else ""
        draft.write(key := f"{_ARGUMENTS}.state_dict_type", "sharded")
        draft.holds("saving.state", why, key)
        draft.implied("saving.export")
        return
    draft.holds(("saving.state", "saving.export"), "one file with all weights")
    if export == "hf":
        why = "a .ckpt has all weights, without the model's other files: call save_pretrained() of the model"
        draft.lossy("saving.export", why)
