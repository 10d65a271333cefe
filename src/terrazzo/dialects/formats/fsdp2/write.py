"""Writing FSDP2's arguments."""

from __future__ import annotations

from terrazzo.dialects.core.description import TIERS, Description
from terrazzo.dialects.core.dialect import NO_CONTEXT, ReadingContext, Writing
from terrazzo.dialects.core.draft import Pen
from terrazzo.dialects.formats.fsdp2.write_mesh import write_sharding
from terrazzo.dialects.formats.shared.fsdp import leave_to_loop, write_offload
from terrazzo.dialects.formats.shared.fsdp_policy import FSDP2_POLICY, write_policy

__all__ = ["write"]


def write(description: Description, context: ReadingContext = NO_CONTEXT) -> Writing:
    """All that `fully_shard` can be told."""
    pen = Pen(description, "FSDP2", "fsdp2")
    leave_to_loop(pen)
    write_sharding(pen, context)
    _units(pen)
    write_policy(pen, FSDP2_POLICY)
    _offload(pen)
    for way, default in (("forward", 0), ("backward", 1)):
        pen.option(f"prefetch.{way}", f"set_modules_to_{way}_prefetch", default)
    if pen.value("loading.broadcast"):
        pen.lossy("loading.broadcast", "load with set_model_state_dict(..., broadcast_from_rank0=True)")
    return pen.finish()


def _units(pen: Pen) -> None:
    policy = pen.value("units.policy")
    if policy == "classes":
        pen.put("units.classes", "module", list(pen.value("units.classes", ())))
        pen.implied("units.policy", key="module")
    elif policy in ("auto", "min_numel"):
        paths = ("units.policy", "units.min_numel")
        pen.lossy(paths, "fully_shard has no rule for units: name the classes of the blocks in module")
    else:
        pen.implied("units.policy", "called on the root alone: the whole model is one unit")
    pen.option("units.ignored", "ignored_params", None)


def _offload(pen: Pen) -> None:
    pin = pen.value("offload.pin", True)
    key = "offload_policy"
    said = pen.own and f"{key}.pin_memory" in pen.setting("offload.pin").keys
    if (said or not pin) and any(pen.value(path, "device") != "device" for path in TIERS):
        write_offload(pen, f"{key}.pin_memory", pin)
        pen.implied("offload.pin", key=f"{key}.pin_memory")
        return
    if write_offload(pen, key, "CPUOffloadPolicy", "OffloadPolicy"):
        pen.implied("offload.pin")
