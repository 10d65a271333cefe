"""The dtypes that follow from `training.dtype`, in which torchtitan builds the model: for reader and writer alike."""

from __future__ import annotations

from typing import Any

from terrazzo.dialects.core.description import LOADED, Setting, SettingsByPath
from terrazzo.dialects.core.reader import derived

__all__ = ["NARROW_MOMENTS", "stored_dtypes"]

NARROW_MOMENTS = "fused_opt_states_bf16"
"""The `optimizer.implementation` of Adam that keeps its moments in bf16."""


def stored_dtypes(stored: Setting[Any], way: Setting[Any]) -> SettingsByPath:
    """The dtype of every state that is kept. `way`: the `optimizer.implementation`."""
    moments = "bf16" if way.value == NARROW_MOMENTS else stored.value
    same = derived(stored.value, stored, origin=stored.origin)
    return {
        **{f"precision.{state}": same for state in ("weight", "master", "accumulate")},
        "precision.moments": derived(moments, stored, way, origin=way.origin),
        "precision.buffers": Setting(LOADED, "default"),
    }
