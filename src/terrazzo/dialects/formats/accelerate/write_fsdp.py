"""Writing `fsdp_config` and `parallelism_config`: FSDP2, or FSDP1 where only that can say it."""

from __future__ import annotations

from typing import Any

from terrazzo.dialects.core.description import DATA_AXIS_PATHS, SHARDING_PATHS, Setting
from terrazzo.dialects.core.dialect import ReadingContext
from terrazzo.dialects.core.draft import Draft
from terrazzo.dialects.formats.accelerate.keys import STRATEGIES
from terrazzo.dialects.formats.shared.accelerate_dtypes import under_fp8, write_stack_precision
from terrazzo.dialects.formats.shared.fsdp_arguments import bare_classes, write_offload
from terrazzo.dialects.formats.shared.plan_rows import HYBRID_ROWS, choose_row, one_axis, shard_ranks

__all__ = ["write_fsdp"]

_F, _P = "fsdp_config.fsdp_", "parallelism_config.parallelism_config_"
_NAMES = {row: name.upper() for name, row in STRATEGIES.items()}


def write_fsdp(draft: Draft, half: Setting[Any], context: ReadingContext) -> None:
    """Write all that Accelerate's FSDP keys can say."""
    near, why = choose_row(draft, _NAMES, "a row that FSDP has, such as zero3")
    row = near or "zero3"
    shards = shard_ranks(draft, context.world)
    version = 1 if row in HYBRID_ROWS and None in (draft.value("mesh.dp_replicate"), shards) else 2
    draft.write(f"{_F}version", version)
    if near is not None:
        _row(draft, near, why, version)
    _sizes(draft, row, version, shards if row in HYBRID_ROWS else one_axis(draft, context.world))
    _units(draft)
    if write_offload(draft, f"{_F}offload_params") and draft.value("offload.pin") is False:
        draft.lossy("offload.pin", "FSDP always pins what it offloads")
    else:
        draft.implied("offload.pin")
    _prefetch(draft, version)
    _activations(draft, version)
    _saving(draft)
    _loading(draft, version)
    write_stack_precision(draft, f"fsdp{version}", under_fp8(half), context, says_accumulation=False)


def _row(draft: Draft, row: str, why: str, version: int) -> None:
    """Write the row under the key of the version; both keys say it."""
    key: str = f"{_F}reshard_after_forward"
    value: bool | str = row in ("zero3", "hybrid_shard")
    if version == 1:
        key, value = f"{_F}sharding_strategy", _NAMES[row]
    one = row in HYBRID_ROWS and version == 2 and draft.value("mesh.dp_replicate") == 1
    note = "one replica: it is split over all ranks" if one else ""
    draft.write(key, value)
    both = f"{_F}version, {key}"
    if why:
        draft.lossy(SHARDING_PATHS, why, both)
    else:
        draft.implied(SHARDING_PATHS, note, both)


def _sizes(draft: Draft, row: str, version: int, shards: int | None) -> None:
    """Write the mesh where it has more than one axis."""
    sizes = {axis: draft.value(f"mesh.{axis}", 1) for axis in ("tp", "cp")}
    if version == 1:
        draft.implied(DATA_AXIS_PATHS)
        known = [path for path in DATA_AXIS_PATHS if draft.value(path) is not None]
        draft.lossy(
            known, "both sizes must be known (--world); else nodes are replicas, and the ranks of a node shards"
        )
        for axis in [axis for axis, size in sizes.items() if size > 1]:
            draft.refuse(f"mesh.{axis}", "it needs all sizes of the mesh: say the number of ranks (--world)")
    elif row in HYBRID_ROWS or max(sizes.values()) > 1:
        _parallel(draft, row in HYBRID_ROWS, shards, sizes)
    else:
        draft.holds(DATA_AXIS_PATHS, "all data ranks are one axis")


def _parallel(draft: Draft, hybrid: bool, shards: int | None, sizes: dict[str, int]) -> None:
    replicas, key = draft.value("mesh.dp_replicate", 1), f"{_P}dp_shard_size"
    if hybrid:
        draft.put("mesh.dp_replicate", f"{_P}dp_replicate_size", replicas)
    else:
        draft.holds("mesh.dp_replicate", "all data ranks are one axis")
    why = f"the number of ranks is not known: set {key}" if shards is None else ""
    if shards is not None:
        draft.write(key, shards)
        draft.implied("mesh.dp_shard", key=key)
    else:
        draft.lossy("mesh.dp_shard", why, key)
    for axis, size in sizes.items():
        if size > 1:
            draft.put(f"mesh.{axis}", f"{_P}{axis}_size", size, why, "lossy" if why else "applied")


def _units(draft: Draft) -> None:
    """Write the policy; where none is said, blocks are found by themselves."""
    policy, key = draft.value("units.policy", "auto"), f"{_F}auto_wrap_policy"
    words = {"none": "NO_WRAP", "min_numel": "SIZE_BASED_WRAP"}
    draft.put("units.policy", key, words.get(policy, "TRANSFORMER_BASED_WRAP"))
    draft.implied(["units.classes", "units.min_numel"])
    if policy == "classes":
        names, why = bare_classes(draft)
        draft.write(where := f"{_F}transformer_layer_cls_to_wrap", ",".join(names))
        draft.holds("units.classes", why, where)
    elif policy == "min_numel" and draft.value("units.min_numel") is not None:
        draft.put("units.min_numel", f"{_F}min_num_params", draft.value("units.min_numel"))
    ignored = draft.value("units.ignored")
    if isinstance(ignored, str):
        draft.put("units.ignored", f"{_F}ignored_modules", ignored)
    elif ignored:
        draft.lossy("units.ignored", "Accelerate takes one regular expression of module names")


def _prefetch(draft: Draft, version: int) -> None:
    if version == 2:
        for path, there in (("prefetch.forward", 0), ("prefetch.backward", 1)):
            if draft.value(path, there) == there:
                draft.implied(path)
            else:
                draft.lossy(path, f"version 2 gathers {there} units ahead there, and has no key for it")
        return
    for path, name, words in (
        ("prefetch.backward", "backward_prefetch", ("NO_PREFETCH", "BACKWARD_PRE")),
        ("prefetch.forward", "forward_prefetch", (False, True)),
    ):
        ahead = draft.value(path, 1 if path == "prefetch.backward" else 0)
        why = "FSDP1 gathers one unit ahead" if ahead > 1 else ""
        draft.put(path, f"{_F}{name}", words[min(1, ahead)], why, "lossy" if why else "applied")


def _activations(draft: Draft, version: int) -> None:
    mode, away = draft.value("activation_checkpointing.mode", "none"), "activation_checkpointing.offload"
    paths = [f"activation_checkpointing.{name}" for name in ("mode", "every", "ops")]
    if mode == "none":
        draft.implied(paths)
    else:
        why = "" if mode == "full" else "Accelerate recomputes all of every unit"
        draft.put(paths, f"{_F}activation_checkpointing", True, why, "lossy" if why else "applied")
    if not draft.value(away):
        draft.implied(away)
    elif version == 2 and mode != "none":
        draft.put(away, f"{_F}activation_checkpointing_offload", True)
    else:
        draft.lossy(away, "Accelerate offloads what version 2 checkpoints, and nothing else")


def _saving(draft: Draft) -> None:
    """One key says both kinds: whole checkpoints are also what others load."""
    state, export, key = draft.value("saving.state"), draft.value("saving.export", "none"), f"{_F}state_dict_type"
    paths = ("saving.state", "saving.export")
    if state is None and not draft.is_set("saving.export"):
        return
    if export == "none" and state != "full":
        why = "shards resume on any number of ranks" if state == "local" else ""
        draft.write(key, "SHARDED_STATE_DICT")
        draft.holds(paths, why, key)
        return
    draft.put(paths, key, "FULL_STATE_DICT")
    if state not in ("full", None):
        draft.holds("saving.state", "whole checkpoints resume on any number of ranks", key)
    if export == "hf":
        draft.lossy("saving.export", "one state dict, without the model's other files", key)


def _loading(draft: Draft, version: int) -> None:
    """Both are on by default, and the second goes with the first."""
    low, sent = draft.value("loading.low_memory"), draft.value("loading.broadcast")
    if low is False:
        draft.put("loading.low_memory", f"{_F}cpu_ram_efficient_loading", False)
    else:
        draft.implied("loading.low_memory")
    if version == 1 and sent is False and low is False:
        draft.put("loading.broadcast", f"{_F}sync_module_states", False)
    elif sent == (low is not False) or sent is None:
        draft.implied("loading.broadcast")
    elif version == 1:
        draft.lossy("loading.broadcast", "weights that rank 0 alone loads are sent to all")
    else:
        draft.lossy("loading.broadcast", "under version 2 it goes with fsdp_cpu_ram_efficient_loading")
