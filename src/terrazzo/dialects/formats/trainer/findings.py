"""What TrainingArguments and the Trainer refuse, or take otherwise than it looks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from terrazzo.dialects.core.dialect import ConfigDocument, Finding, Reading, ReadingContext
from terrazzo.dialects.core.dotted_keys import flatten
from terrazzo.dialects.formats.nested import DEEPSPEED, keyed, read_nested
from terrazzo.dialects.formats.trainer.keys import FIELDS
from terrazzo.dialects.formats.trainer.trainer_reader import canonical_key

__all__ = ["MATCHED", "findings"]

MATCHED = {
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.eps": "adam_epsilon",
    "optimizer.params.weight_decay": "weight_decay",
    "scheduler.params.warmup_max_lr": "learning_rate",
    "fp16.enabled": "fp16",
    "bf16.enabled": "bf16",
}
"""Keys of a DeepSpeed document whose value must be that of a field, or "auto"."""


def findings(document: ConfigDocument, reading: Reading, context: ReadingContext) -> Iterable[Finding]:
    """What the Trainer refuses of a document, or takes otherwise than it looks."""
    flat = {canonical_key(key): value for key, value in flatten(document).items()}
    yield from _together(document, flat)
    if flat.get("fsdp"):
        yield from _fsdp(flat)
    if isinstance(document.get("deepspeed"), Mapping):
        yield from _mismatches(document["deepspeed"], document)
        within = replace(context, trainer={"output_dir": None, **document})
        nested = read_nested(DEEPSPEED, document["deepspeed"], within, "deepspeed")
        inner = DEEPSPEED.findings(nested.document, nested.inner, within)
        filled = {key for key, value in flatten(nested.document).items() if value == "auto"}
        yield from keyed([finding for finding in inner if finding.key not in filled], "deepspeed")
    saves = flat.get("save_strategy", "steps") != "no" and not flat.get("save_only_model")
    if document.get("distributed_config") and saves:
        text = "the Trainer raises for a model sharded by distributed_config: say save_only_model: true."
        yield Finding.error("distributed_config", text)


def _together(document: ConfigDocument, flat: Mapping[str, Any]) -> Iterable[Finding]:
    if document.get("fsdp") and document.get("deepspeed"):
        yield Finding.error("fsdp", "the Trainer raises when both fsdp and deepspeed are on: keep one.")
    best, every = flat.get("load_best_model_at_end"), flat.get("save_strategy", "steps")
    if best and every != "best" and flat.get("eval_strategy", "no") != every:
        text = f"save_strategy is {every} and eval_strategy {flat.get('eval_strategy', 'no')}: they must be the same."
        yield Finding.error("load_best_model_at_end", text)
    named = flat.get("torch_compile_backend") or flat.get("torch_compile_mode")
    if named and flat.get("torch_compile") is False:
        yield Finding.warning("torch_compile", "a backend or mode is named, which turns torch_compile on.")


def _fsdp(flat: Mapping[str, Any]) -> Iterable[Finding]:
    if flat.get("activation_checkpointing"):
        text = "under FSDP it gathers all weights once more in backward: say fsdp_config.activation_checkpointing."
        yield Finding.warning("activation_checkpointing", text)
    if str(flat.get("fsdp_config.version", 2)) == "1":
        text = "FSDP1 is on its way out of transformers: say version: 2 with reshard_after_forward: true or false."
        yield Finding.warning("fsdp_config.version", text)
    if str(flat.get("fsdp_config.state_dict_type")).upper() == "SHARDED_STATE_DICT":
        text = "save_model() writes no Hugging Face weights then, only shards: merge them, or say FULL_STATE_DICT."
        yield Finding.warning("fsdp_config.state_dict_type", text)


def _mismatches(inner: Mapping[str, Any], document: ConfigDocument) -> Iterable[Finding]:
    """Values of the DeepSpeed document that transformers holds against the fields, and raises if they differ."""
    flat = flatten(inner)
    for key, field in MATCHED.items():
        inner_value, wanted = flat.get(key), document.get(field, FIELDS[field].default)
        if (
            inner_value is not None
            and inner_value != "auto"
            and inner_value != wanted
            and isinstance(inner_value, int | float)
        ):
            text = f"it is {inner_value}, but {field} is {wanted}: transformers raises. Say auto, or the same in both."
            yield Finding.error(f"deepspeed.{key}, {field}", text)
