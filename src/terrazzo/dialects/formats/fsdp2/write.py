"""Writing FSDP2's arguments."""

from __future__ import annotations

from terrazzo.dialects.core.description import TIER_PATHS, Description
from terrazzo.dialects.core.dialect import NO_CONTEXT, ReadingContext, Writing
from terrazzo.dialects.core.draft import Draft
from terrazzo.dialects.formats.fsdp2.keys import KEYS
from terrazzo.dialects.formats.fsdp2.write_mesh import write_sharding
from terrazzo.dialects.formats.shared.fsdp_arguments import leave_to_loop, write_offload
from terrazzo.dialects.formats.shared.fsdp_policy import FSDP2_POLICY, write_policy

__all__ = ["write"]


def write(description: Description, context: ReadingContext = NO_CONTEXT) -> Writing:
    """All that `fully_shard` can be told."""
    draft = Draft(description, "FSDP2", KEYS)
    write_sharding(draft, context)
    _units(draft)
    write_policy(draft, FSDP2_POLICY, context)
    _offload(draft)
    for way in ("forward", "backward"):
        draft.option(f"prefetch.{way}", f"set_modules_to_{way}_prefetch")
    if draft.value("loading.broadcast"):
        draft.lossy("loading.broadcast", "load with set_model_state_dict(..., broadcast_from_rank0=True)")
    leave_to_loop(draft)
    return draft.finish()


def _units(draft: Draft) -> None:
    policy = draft.value("units.policy")
    if policy == "classes":
        draft.put("units.classes", "module", list(draft.value("units.classes", ())))
        draft.implied("units.policy", key="module")
    elif policy in ("auto", "min_numel"):
        paths = ("units.policy", "units.min_numel")
        draft.lossy(paths, "fully_shard has no rule for units: name the classes of the blocks in module")
    else:
        draft.holds("units.policy", "called on the root alone: the whole model is one unit")
    draft.option("units.ignored", "ignored_params")


def _offload(draft: Draft) -> None:
    pin = draft.value("offload.pin", True)
    key = "offload_policy"
    if not pin and any(draft.value(path, "device") != "device" for path in TIER_PATHS):
        write_offload(draft, f"{key}.pin_memory", pin)
        draft.implied("offload.pin", key=f"{key}.pin_memory")
        return
    if write_offload(draft, key, "CPUOffloadPolicy"):
        draft.implied("offload.pin")
