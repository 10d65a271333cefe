"""What FSDP's arguments say of units, meshes and offload, for every dialect that has them; read, and written."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from terrazzo.dialects.core.agreement import NVME_ONLY
from terrazzo.dialects.core.description import PATHS, TIER_PATHS, Description, Setting, SettingsByPath, asks_for_nothing
from terrazzo.dialects.core.draft import Draft
from terrazzo.dialects.core.keys import NAME_LIST, integer
from terrazzo.dialects.core.reader import Reader, derived
from terrazzo.dialects.core.wording import found
from terrazzo.dialects.formats.shared.tiers import ON_CPU

__all__ = [
    "MIN_NUMEL",
    "WRAP_KEYS",
    "bare_classes",
    "leave_to_loop",
    "mesh_sizes",
    "offload",
    "wants_deepspeed",
    "wrap_policy",
    "write_offload",
    "write_wrap_policy",
]

_LOOP = ("batch", "optimizer", "schedule", "training", "activation_checkpointing", "saving", "loading")
MIN_NUMEL = 10**8
"""Elements of the smallest unit by torch's size rule, where none is said."""


# -- reading -------------------------------------------------------------------------------------------------------


def offload(enabled: Setting[Any], pin: Setting[Any] | None = None) -> SettingsByPath:
    """FSDP's all-or-nothing offload: weights, gradients and optimizer in host memory, or none of them."""
    tier = derived("cpu" if enabled.value else "device", enabled, origin=enabled.origin)
    settings = dict.fromkeys(TIER_PATHS, tier)
    return {**settings, "offload.pin": pin or Setting(True, "default")} if enabled.value else settings


_CLASS_KEYS = (
    "",
    ".transformer_layer_cls",
    ".module_classes",
    ".ModuleWrapPolicy",
    ".ModuleWrapPolicy.module_classes",
    ".transformer_auto_wrap_policy.transformer_layer_cls",
)
_SIZE_KEYS = (".min_num_params", ".size_based_auto_wrap_policy.min_num_params")
WRAP_KEYS = (*_CLASS_KEYS, *_SIZE_KEYS, ".size_based_auto_wrap_policy.<argument>")
"""What may stand at and below a wrap policy."""


def wrap_policy(reader: Reader, key: str) -> SettingsByPath:
    """Units by FSDP1's `auto_wrap_policy`: class names, or a smallest size. Names of functions are refused."""
    for name in (key + suffix for suffix in _SIZE_KEYS if key + suffix in reader.flat):
        size = reader.take_as(name, integer(1), MIN_NUMEL)
        for other in reader.unread():
            if other.startswith(f"{key}.size_based_auto_wrap_policy."):
                reader.keep(other, "only torch's size rule has it")
        return {"units.policy": derived("min_numel", size, origin="file"), "units.min_numel": size}
    for name in (key + suffix for suffix in _CLASS_KEYS if reader.raw(key + suffix) is not None):
        classes = reader.take_as(name, NAME_LIST, (), null=True)
        wrong = [word for word in classes.value if not re.fullmatch(r"(\w+\.)*[A-Z]\w*", word)]
        if wrong:
            reader.refuse(name, f"'{wrong[0]}' names a function, which is not run: name the classes of the units")
        elif classes.value:
            return {"units.policy": derived("classes", classes, origin="file"), "units.classes": classes}
    return {"units.policy": Setting("none", "default")}


def mesh_sizes(reader: Reader, key: str) -> tuple[int | None, ...] | None:
    """Sizes of a mesh given as a number, a list, or names with sizes; None where there is none or it is no mesh."""
    raw = reader.take_raw(key).value
    if raw is None:
        return None
    sizes = list(raw.values()) if isinstance(raw, Mapping) else raw if isinstance(raw, list | tuple) else [raw]
    if not sizes or not all(size is None or _is_size(size) for size in sizes):
        reader.refuse(key, f"it is {found(raw)}, expected the sizes of the axes, such as [2, 4]: replicas, then shards")
        return None
    return tuple(sizes)


def _is_size(value: Any) -> bool:
    """Whether it is a number of ranks."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


# -- writing -------------------------------------------------------------------------------------------------------


def write_offload(draft: Draft, key: str, value: Any = True) -> bool:
    """Write FSDP's offload if any state is off the device; whether it is."""
    tiers = {path: draft.value(path, "device") for path in TIER_PATHS}
    idle = [path for path in PATHS if path.startswith("offload.") and path not in TIER_PATHS]
    if set(tiers.values()) == {"device"}:
        draft.implied((*TIER_PATHS, *idle))
        return False
    if not any("nvme" in tier for tier in tiers.values()):
        draft.implied([path for path in idle if path in NVME_ONLY])
    if draft.value("offload.step") in ("auto", "synchronous"):
        draft.holds("offload.step", ON_CPU)
    if set(tiers.values()) == {"cpu"}:
        draft.put(TIER_PATHS, key, value)
        return True
    wanted = ", ".join(f"{path.partition('.')[2]} {tier}" for path, tier in tiers.items())
    why = f"{draft.library} moves all of weights, gradients and optimizer to the CPU or nothing; asked was {wanted}"
    draft.put(TIER_PATHS, key, value, why, "lossy")
    return True


def wants_deepspeed(description: Description) -> bool:
    """Whether DeepSpeed says this and FSDP cannot: stages 1 and 2, a second copy in the node, a part off the device."""
    tiers = {description.value(path) or "device" for path in TIER_PATHS}
    partly = tiers not in ({"device"}, {"cpu"})
    return description.dialect == "deepspeed" or description.row in ("zero1", "zero2", "hpz") or partly


def leave_to_loop(draft: Draft) -> None:
    """Say of what a training loop decides that these arguments do not, where nothing has been said of it."""
    for path in PATHS:
        idle = draft.has_verdict(path) or asks_for_nothing(path, draft.description.value(path))
        if path.partition(".")[0] in _LOOP and not idle:
            draft.lossy(path, f"{draft.library} takes no such argument: your own code says it")


def bare_classes(draft: Draft) -> tuple[list[str], str]:
    """The units' classes by their bare names, as a library matches them; and what to say of those that had others."""
    told = [str(name) for name in draft.value("units.classes", ())]
    bare = list(dict.fromkeys(name.rpartition(".")[2] for name in told))
    return bare, "" if bare == told else "classes are matched by their bare names there"


def write_wrap_policy(draft: Draft, key: str) -> None:
    """Write units as FSDP1's `auto_wrap_policy`."""
    policy = draft.value("units.policy")
    if policy == "classes":
        draft.put("units.classes", key, list(draft.value("units.classes", ())))
        draft.implied("units.policy", key=key)
    elif policy == "min_numel":
        where = f"{key}.min_num_params"
        draft.put("units.min_numel", where, draft.value("units.min_numel", MIN_NUMEL))
        draft.implied("units.policy", key=where)
    elif policy == "auto":
        draft.lossy(
            "units.policy", f"{draft.library} finds no units by itself: name the classes of the blocks in {key}"
        )
    else:
        draft.implied("units.policy")
