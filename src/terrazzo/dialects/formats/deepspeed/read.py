"""Reading DeepSpeed's JSON: each part in turn, over one source."""

from __future__ import annotations

from terrazzo.dialects.core.description import UNSET, Setting, SettingsByKey
from terrazzo.dialects.core.dialect import NO_CONTEXT, ConfigDocument, Reading, ReadingContext
from terrazzo.dialects.formats.deepspeed.keys import KEYS
from terrazzo.dialects.formats.deepspeed.read_precision import read_precision
from terrazzo.dialects.formats.deepspeed.read_schedule import read_schedule
from terrazzo.dialects.formats.deepspeed.read_training import read_batch, read_optimizer, read_training
from terrazzo.dialects.formats.deepspeed.read_zero import (
    one_group,
    read_gather,
    read_mesh,
    read_offload,
    read_prefetch,
    read_removed,
    read_saving,
    read_sharding,
    stage_of,
)
from terrazzo.dialects.formats.deepspeed.reader import DeepSpeedReader

__all__ = ["read"]


def read(document: ConfigDocument, context: ReadingContext = NO_CONTEXT) -> Reading:
    """The document's meaning. Settings come from the parts in turn; a later part may set an earlier one's right."""
    source = DeepSpeedReader(document, context)
    stage = stage_of(source)
    given: SettingsByKey = read_sharding(source, stage)
    given |= read_mesh(source, given.get("mesh.dp_shard", UNSET))
    given |= one_group(source, given)
    apart = given["mesh.tp"].value * given["mesh.sp"].value * given["mesh.pp"].value
    given |= read_offload(source, stage.value) | read_prefetch(source, stage.value)
    given |= read_saving(source, stage.value)
    given |= read_precision(source, given["mesh.sp"].value > 1)
    given |= read_gather(source, stage)
    given |= read_batch(source, apart) | read_optimizer(source) | read_schedule(source) | read_training(source)
    given["loading.broadcast"] = Setting(True, "default")
    read_removed(source)
    source.keep_rest()
    return source.finish("deepspeed", given, KEYS)
