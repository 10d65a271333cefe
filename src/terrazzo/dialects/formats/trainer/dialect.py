"""The record of Hugging Face's TrainingArguments, and how such a document is recognised.

The fields stand at the top. `parallelism_config` is Accelerate's ParallelismConfig as a mapping, and
`distributed_config` transformers' own DistributedConfig, which is an argument of `from_pretrained` beside them.
"""

from __future__ import annotations

from terrazzo.dialects.core.dialect import ConfigDocument, Dialect
from terrazzo.dialects.core.keys import meaning_of
from terrazzo.dialects.formats.trainer.findings import findings
from terrazzo.dialects.formats.trainer.keys import FIELDS, KEYS
from terrazzo.dialects.formats.trainer.keys_earlier import ALIASES, GONE, RENAMED, canonical_key
from terrazzo.dialects.formats.trainer.read import read
from terrazzo.dialects.formats.trainer.write import write

__all__ = ["DIALECT"]

_TELLING = (
    *("per_device_train_batch_size", "output_dir", "fsdp", "fsdp_config", "deepspeed", "learning_rate"),
    *("num_train_epochs", "gradient_checkpointing", "distributed_config", "lr_scheduler_type", "optim"),
)


def recognises(document: ConfigDocument) -> bool:
    """Whether it has fields that no other dialect has at the top, and not Accelerate's word for its backend."""
    known = {*FIELDS, *ALIASES, *RENAMED, *GONE, "distributed_config"}
    fields = [key for key in document if key in known]
    telling = any(key in document for key in _TELLING) and "distributed_type" not in document
    return telling and 2 * len(fields) > len(document)


DIALECT = Dialect(
    name="trainer",
    title="Hugging Face TrainingArguments",
    suffix=".json",
    keys=KEYS,
    recognises=recognises,
    read=read,
    write=write,
    findings=findings,
    meaning_by=lambda key: meaning_of(KEYS, canonical_key(key)),
)
