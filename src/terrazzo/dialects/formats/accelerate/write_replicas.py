"""Writing plain replicas: nothing is split, and little is left to say."""

from __future__ import annotations

from terrazzo.dialects.core.description import LOADED, SHARDING_PATHS, TIER_PATHS
from terrazzo.dialects.core.dialect import ReadingContext
from terrazzo.dialects.core.draft import Draft
from terrazzo.dialects.formats.accelerate.write_precision import write_autocast, write_precision
from terrazzo.dialects.formats.shared.accelerate_stack import write_replica_axes

__all__ = ["write_replicas"]


def write_replicas(draft: Draft, half: str | None, context: ReadingContext) -> None:
    """Plain data parallelism says little: nothing is split, and compute is autocast's."""
    draft.implied(SHARDING_PATHS, key="distributed_type")
    write_replica_axes(draft, "parallelism_config.parallelism_config_tp_size", context.world)
    for path in TIER_PATHS:
        if draft.value(path, "device") != "device":
            draft.refuse(path, "plain replicas have no offload: take a plan that splits, such as zero3")
    as_loaded = dict.fromkeys(("weight", "reduce", "accumulate", "master", "moments", "saved", "buffers"), LOADED)
    write_precision(
        draft, {**as_loaded, "output": "fp32"} if half else {**as_loaded, "compute": LOADED, "output": LOADED}, ""
    )
    write_autocast(draft, half)
    for path in ("precision.loss_scaling", "precision.static_loss_scale"):
        if draft.value(path) is not None:
            draft.lossy(path, "Accelerate scales the loss by torch's GradScaler: pass GradScalerKwargs")
    draft.holds(["units.policy", "units.classes", "units.min_numel"], "whole weights are not gathered")
    draft.holds(["prefetch.forward", "prefetch.backward"], "whole weights are not gathered")
    draft.implied("loading.broadcast")
    if draft.value("saving.export") == "hf":
        draft.lossy("saving.export", "your code writes it: accelerator.unwrap_model(model).save_pretrained(...)")
    else:
        draft.implied("saving.export")
    if draft.value("saving.state", "full") != "full":
        draft.holds("saving.state", "every rank has the whole state: its checkpoint fits any number of ranks")
    else:
        draft.implied("saving.state")
