"""Sections of torchtitan before 0.3 for linear layers in float8, which Python code builds since."""

from __future__ import annotations

from typing import Any

from terrazzo.dialects.core.description import Setting, SettingsByPath
from terrazzo.dialects.core.reader import Reader

__all__ = ["read_float8"]

_SECTIONS = ("quantize.linear.float8", "float8")
_SINCE = "torchtitan 0.3 has no such key: there Float8LinearConverter is built in Python"
_RECIPES = {"tensorwise": "fp8-tensorwise", "rowwise": "fp8-rowwise", "rowwise_with_gw_hp": "fp8-rowwise"}
_SMALL = "auto_filter_small_kn"
_OTHERS = {
    "enable_fsdp_float8_all_gather": "weights are gathered in bf16 here: the same numbers, twice the traffic",
    "precompute_float8_dynamic_scale_for_fsdp": "a scale is found when a weight is gathered: the same numbers",
    "force_recompute_fp8_weight_in_bwd": "weights are cast again in backward here, always",
    "emulate": "a CPU emulates, and a GPU does not",
    "enable_float8_linear": "it is on where the section is there",
}


def read_float8(reader: Reader) -> SettingsByPath:
    """How linear layers multiply; nothing where no section says so."""
    return {path: setting for section in _SECTIONS for path, setting in _section(reader, section).items()}


def _section(reader: Reader, section: str) -> SettingsByPath:
    inside = [key for key in reader.flat if key.startswith(f"{section}.")]
    if not inside or reader.raw(f"{section}.enable_float8_linear") is False:
        return {}
    for name, why in _OTHERS.items():
        reader.keep(f"{section}.{name}", why, loss="harmless")
    return _recipe(reader, section, inside[0]) | _names(reader, f"{section}.filter_fqns")


def _recipe(reader: Reader, section: str, first: str) -> SettingsByPath:
    key = f"{section}.recipe_name"
    recipe = reader.raw(key) or "tensorwise"
    if not isinstance(recipe, str) or recipe not in _RECIPES:
        reader.refuse(key, f"there is no recipe {str(recipe)[:40]!r} here: use {', '.join(_RECIPES)}")
        return {}
    gradient = recipe == "rowwise_with_gw_hp"
    reader.mark(
        key, "lossy" if gradient else "renamed", "weights' gradients are in 8 bits, too" if gradient else _SINCE
    )
    return {"precision.linears": Setting(_RECIPES[recipe], "file", key if key in reader.flat else first)}


def _names(reader: Reader, key: str) -> SettingsByPath:
    """Parts of names, of layers that are left out."""
    parts: Any = reader.raw(key)
    if parts is None:
        return {}
    if not isinstance(parts, list) or not all(isinstance(name, str) for name in parts):
        reader.refuse(key, f"it is {parts!r}, expected a list of parts of names")
        return {}
    small = _SMALL in parts
    reader.mark(key, "lossy" if small else "renamed", "small layers are converted as well" if small else _SINCE)
    globs = tuple(f"*{name}*" for name in parts if name != _SMALL)
    return {"precision.skip": Setting(globs, "file", key)} if globs else {}
