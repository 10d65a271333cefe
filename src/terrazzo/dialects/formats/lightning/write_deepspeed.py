"""Writing DeepSpeedStrategy with a whole configuration, and its optimizer."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from terrazzo.dialects.core.dialect import ReadingContext, Writing
from terrazzo.dialects.core.draft import Draft
from terrazzo.dialects.formats.lightning.write_loop import write_clip
from terrazzo.dialects.formats.nested import DEEPSPEED, filled, joined, resolve_auto
from terrazzo.documents.dotted_keys import put

__all__ = ["write_deepspeed"]

_STRATEGY, _CONFIG = "trainer.strategy", "trainer.strategy.init_args.config"


def write_deepspeed(draft: Draft, context: ReadingContext) -> Writing:
    """DeepSpeedStrategy with a whole configuration, and its optimizer; accumulation and clipping are the Trainer's."""
    inner = DEEPSPEED.written(draft.description, context)
    config = deepcopy(inner.document)
    for key in ("gradient_accumulation_steps", "train_batch_size"):
        config.pop(key, None)
    _fill(config, context)
    if (key := "train_micro_batch_size_per_gpu") in config:
        why = "the data loader decides it there, and DeepSpeed counts samples by this"
        draft.lossy("batch.micro_batch", why, f"{_CONFIG}.{key}")
    if (key := "sequence_parallel_size") in config:
        draft.lossy(
            "mesh.sp", "Lightning neither registers Ulysses nor splits sequences: do so in code", f"{_CONFIG}.{key}"
        )
    write_clip(draft, sharded=False)
    config.pop("gradient_clipping", None)
    for name, word in (("bf16", "bf16-true"), ("fp16", "16-true")):
        section = config.get(name)
        if isinstance(section, dict) and section.get("enabled") is True:
            draft.write("trainer.precision", word)
            if draft.value("precision.buffers", name) != name:
                draft.lossy("precision.buffers", f"Lightning casts them to {name} with the module", "trainer.precision")
    draft.write(f"{_STRATEGY}.class_path", "lightning.pytorch.strategies.DeepSpeedStrategy")
    draft.write(_CONFIG, config)
    return joined(draft, inner, _CONFIG, own=("batch.", "training.clip"))


def _fill(config: dict[str, Any], context: ReadingContext) -> None:
    """Put values for "auto", as far as they are known; of a micro-batch Lightning asks the data loader."""
    if config.get("train_micro_batch_size_per_gpu") == "auto":
        del config["train_micro_batch_size_per_gpu"]
    for key in filled(config):
        if (value := resolve_auto(key, context).value) is not None:
            put(config, key, value)
