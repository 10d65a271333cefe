"""Writing plain replicas: nothing is split, and little is left to say."""

from __future__ import annotations

from typing import Any

from terrazzo.dialects.core.description import SHARDING_PATHS, TIER_PATHS, Setting
from terrazzo.dialects.core.dialect import ReadingContext
from terrazzo.dialects.core.draft import Draft
from terrazzo.dialects.formats.shared.accelerate_dtypes import under_fp8, write_stack_precision
from terrazzo.dialects.formats.shared.accelerate_stack import write_replica_axes

__all__ = ["write_replicas"]


def write_replicas(draft: Draft, half: Setting[Any], context: ReadingContext) -> None:
    """Plain data parallelism says little: nothing is split, and compute is autocast's."""
    draft.implied(SHARDING_PATHS, key="distributed_type")
    write_replica_axes(draft, "parallelism_config.parallelism_config_tp_size", context.world)
    for path in TIER_PATHS:
        if draft.value(path, "device") != "device":
            draft.refuse(path, "plain replicas have no offload: take a plan that splits, such as zero3")
    write_stack_precision(draft, "ddp", under_fp8(half), context, says_accumulation=False)
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
