"""Reading FSDP2's arguments."""

from __future__ import annotations

import torch

from terrazzo.dialects.core.description import Setting, SettingsByPath
from terrazzo.dialects.core.dialect import NO_CONTEXT, ConfigDocument, Reading, ReadingContext
from terrazzo.dialects.core.reader import Reader, derived
from terrazzo.dialects.formats.fsdp2.keys import KEYS
from terrazzo.dialects.formats.fsdp2.read_mesh import read_mesh
from terrazzo.dialects.formats.shared.fsdp_arguments import offload
from terrazzo.dialects.formats.shared.fsdp_policy import dtype, dtype_or, keep_casts, load_dtype, policy_row
from terrazzo.dialects.formats.shared.fsdp_words import canonical

__all__ = ["read"]


_REDUCE_CHANGED = (2, 15)
"""The version of torch from which on no `reduce_dtype` means the parameter's own dtype."""


def read(document: ConfigDocument, context: ReadingContext = NO_CONTEXT) -> Reading:
    """What the arguments mean."""
    reader = Reader(document, "fully_shard", ("mesh",), KEYS)
    reader.keep_nulls()
    settings = {
        **read_mesh(reader, context),
        **_units(reader),
        **_precision(reader, context),
        **_offload(reader),
        **_prefetch(reader),
    }
    return reader.finish("fsdp2", settings, unknown="raises a TypeError")


def _units(reader: Reader) -> SettingsByPath:
    settings: SettingsByPath = {}
    classes = reader.take("module")
    if classes.value:
        settings = {"units.policy": derived("classes", classes, origin="file"), "units.classes": classes}
    if reader.raw("ignored_params") is not None:
        settings["units.ignored"] = reader.take_raw("ignored_params")
    return settings


def reduces_in_parameter_dtype(context: ReadingContext) -> bool:
    """Whether this version of torch reduces in the parameter's own dtype where none is said; default: the one here."""
    return context.version("torch", torch.__version__) >= _REDUCE_CHANGED


def _precision(reader: Reader, context: ReadingContext) -> SettingsByPath:
    words = {name: dtype(reader, f"mp_policy.{name}_dtype") for name in ("param", "reduce", "output")}
    base = load_dtype(context, any(words[name].value for name in ("param", "reduce")))
    compute = dtype_or(words["param"], base)
    followed = base if reduces_in_parameter_dtype(context) else compute
    reduce = dtype_or(words["reduce"], followed)
    if words["reduce"].value is None:
        why = (
            f"none: {reduce.value} with this torch; the dtype of the computation up to 2.14, the parameter's from 2.15"
        )
        reader.mark("mp_policy.reduce_dtype", "defaulted", why)
    keep_casts(reader, "mp_policy.cast_forward_inputs")
    deferred = reader.raw("set_requires_gradient_sync") is False
    row = {**policy_row(base, compute, reduce, deferred=deferred), "precision.autocast": Setting(False, "default")}
    return {**row, "precision.output": words["output"]} if words["output"].value else row


def _offload(reader: Reader) -> SettingsByPath:
    key = "offload_policy"
    if f"{key}.pin_memory" in reader.flat:
        pin = reader.take(f"{key}.pin_memory")
        return offload(Setting(True, "file", pin.key), pin)
    enabled = reader.take(key)
    return offload(canonical(reader, key, enabled, "CPUOffloadPolicy" if enabled.value else "OffloadPolicy"))


def _prefetch(reader: Reader) -> SettingsByPath:
    settings: SettingsByPath = {}
    for way in ("forward", "backward"):
        key = f"set_modules_to_{way}_prefetch"
        raw = reader.raw(key)
        if isinstance(raw, list | tuple):
            reader.keep(key, f"so many units are gathered ahead in {way}; which ones, the order of the run decides")
            settings[f"prefetch.{way}"] = Setting(len(raw), "file", key)
        else:
            settings[f"prefetch.{way}"] = reader.take(key)
    return settings
