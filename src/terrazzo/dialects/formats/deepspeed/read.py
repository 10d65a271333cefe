"""Reading DeepSpeed's JSON: each part in turn, over one reader."""

from __future__ import annotations

from terrazzo.dialects.core.description import UNSET, Setting, SettingsByPath
from terrazzo.dialects.core.dialect import NO_CONTEXT, ConfigDocument, Reading, ReadingContext
from terrazzo.dialects.formats.deepspeed.deepspeed_reader import DeepSpeedReader
from terrazzo.dialects.formats.deepspeed.keys import KEYS
from terrazzo.dialects.formats.deepspeed.read_precision import read_precision
from terrazzo.dialects.formats.deepspeed.read_schedule import read_schedule
from terrazzo.dialects.formats.deepspeed.read_training import read_batch, read_optimizer, read_training
from terrazzo.dialects.formats.deepspeed.read_zero import (
    read_mesh,
    read_offload,
    read_prefetch,
    read_quantized,
    read_removed,
    read_saving,
    read_sharding,
    stage_of,
)
from terrazzo.dialects.formats.shared.plan_rows import in_one_group

__all__ = ["read"]


def read(document: ConfigDocument, context: ReadingContext = NO_CONTEXT) -> Reading:
    """The document's meaning. Settings come from the parts in turn; a later part may set an earlier one's right."""
    reader = DeepSpeedReader(document, context)
    stage = stage_of(reader)
    settings: SettingsByPath = read_sharding(reader, stage)
    settings |= read_mesh(reader, settings.get("mesh.dp_shard", UNSET))
    settings |= in_one_group(settings)
    apart = settings["mesh.tp"].value * settings["mesh.sp"].value * settings["mesh.pp"].value
    settings |= read_offload(reader, stage.value) | read_prefetch(reader, stage.value)
    settings |= read_saving(reader, stage.value)
    settings |= read_precision(reader, stage.value, settings["mesh.sp"].value > 1)
    settings |= read_quantized(reader, stage)
    settings |= read_batch(reader, apart) | read_optimizer(reader) | read_schedule(reader) | read_training(reader)
    settings["loading.broadcast"] = Setting(True, "default")
    read_removed(reader)
    reader.keep_rest()
    return reader.finish("deepspeed", settings, KEYS)
