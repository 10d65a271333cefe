"""Reading FSDP1's arguments."""

from __future__ import annotations

from typing import Any

from terrazzo.dialects.core.description import Setting, SettingsByPath
from terrazzo.dialects.core.dialect import NO_CONTEXT, ConfigDocument, Reading, ReadingContext
from terrazzo.dialects.core.reader import Reader, derived
from terrazzo.dialects.formats.fsdp1.keys import KEYS
from terrazzo.dialects.formats.shared.fsdp_arguments import mesh_sizes, offload, wrap_policy
from terrazzo.dialects.formats.shared.fsdp_policy import dtype, dtype_or, keep_casts, load_dtype, policy_row
from terrazzo.dialects.formats.shared.fsdp_words import ROW_NAMES, canonical
from terrazzo.dialects.formats.shared.plan_rows import HYBRID_ROWS, ONE_GROUP, in_one_group, row_settings

__all__ = ["read"]


def read(document: ConfigDocument, context: ReadingContext = NO_CONTEXT) -> Reading:
    """What the arguments mean."""
    reader = Reader(document, "FullyShardedDataParallel", ("device_mesh",), KEYS)
    reader.keep_nulls()
    strategy = reader.take("sharding_strategy")
    strategy = canonical(reader, "sharding_strategy", strategy, ROW_NAMES.get(strategy.value))
    where = "cpu_offload.offload_params" if "cpu_offload.offload_params" in reader.flat else "cpu_offload"
    settings = {
        **row_settings(strategy.value, strategy),
        **_mesh(reader, strategy),
        **wrap_policy(reader, "auto_wrap_policy"),
        **_ignored(reader),
        **_precision(reader, context),
        **offload(reader.take(where)),
        **_prefetch(reader),
        "loading.broadcast": reader.take("sync_module_states"),
    }
    if whole := in_one_group(settings):
        settings |= whole
        reader.mark(strategy.key, "renamed", ONE_GROUP)
    _keep_needless(reader)
    return reader.finish("fsdp1", settings, unknown="raises a TypeError")


def _mesh(reader: Reader, strategy: Setting[Any]) -> SettingsByPath:
    if reader.raw("process_group") is not None:
        why = KEYS["process_group"].why
        reader.keep("process_group", why, loss="refused")
        reader.refuse("process_group", why)
    sizes = mesh_sizes(reader, "device_mesh")
    hybrid = strategy.value in HYBRID_ROWS
    if sizes is not None and len(sizes) != (2 if hybrid else 1):
        shape = "two axes, replicas and shards" if hybrid else "one axis"
        reader.refuse("device_mesh", f"it has {len(sizes)} axes; {ROW_NAMES[strategy.value]} takes {shape}")
        sizes = None
    if sizes is None:
        replicas = derived(None, strategy, origin="default") if hybrid else Setting(1, "default")
        return {"mesh.dp_replicate": replicas, "mesh.dp_shard": Setting(None, "default")}
    settings = {"mesh.dp_shard": Setting(sizes[-1], "file", "device_mesh")}
    return {**settings, "mesh.dp_replicate": Setting(sizes[0] if hybrid else 1, "file", "device_mesh")}


def _ignored(reader: Reader) -> SettingsByPath:
    for key in ("ignored_states", "ignored_modules"):
        if reader.raw(key) is not None:
            return {"units.ignored": reader.take_raw(key)}
    return {}


def _precision(reader: Reader, context: ReadingContext) -> SettingsByPath:
    section = "mixed_precision"
    words = {name: dtype(reader, f"{section}.{name}_dtype") for name in ("param", "reduce", "buffer")}
    base = load_dtype(context, any(word.value for word in words.values()))
    if words["param"].value and words["reduce"].value is None:
        reader.mark(f"{section}.reduce_dtype", "defaulted", f"none follows param_dtype: {words['param'].value}")
    low = reader.take(f"{section}.keep_low_precision_grads")
    if low.origin == "file":
        reader.keep(low.key, "gradients stay in the dtype of the reduction", loss="harmless")
    compute = dtype_or(words["param"], base)
    reduce = dtype_or(words["reduce"], words["param"], base)
    keep_casts(reader, f"{section}.cast_forward_inputs", f"{section}.cast_root_forward_inputs")
    ignored = f"{section}._module_classes_to_ignore"
    reader.keep(ignored, KEYS[ignored].why)
    row = policy_row(base, compute, reduce, deferred=bool(low.value))
    return {
        **row,
        "precision.accumulate": derived(row["precision.accumulate"].value, low, origin=low.origin),
        "precision.buffers": dtype_or(words["buffer"], load_dtype(context, False)),
    }


def _prefetch(reader: Reader) -> SettingsByPath:
    key = "backward_prefetch"
    if key in reader.flat and reader.raw(key) is None:
        backward = Setting(0, "file", key)
    else:
        backward = reader.take(key)
    if "post" in str(reader.raw(key)).lower() and backward.origin == "file":
        reader.keep(key, "the next unit is gathered after the gradients of this one, not before", loss="harmless")
    ahead = reader.take("forward_prefetch")
    return {
        "prefetch.backward": backward,
        "prefetch.forward": derived(int(bool(ahead.value)), ahead, origin=ahead.origin),
    }


def _keep_needless(reader: Reader) -> None:
    """Arguments that solve problems which only FSDP1 has, or name code."""
    for key in ("use_orig_params", "limit_all_gathers"):
        reader.take(key)
    for key in ("use_orig_params", "limit_all_gathers", "device_id", "param_init_fn"):
        verdict = reader.verdicts.get(key)
        if reader.raw(key) is not None and (verdict is None or verdict.kind == "applied"):
            reader.keep_row(key)
