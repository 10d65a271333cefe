"""Hugging Face's TrainingArguments as a dialect.

The fields stand at the top. `parallelism_config` is Accelerate's ParallelismConfig as a mapping, and
`distributed_config` transformers' own DistributedConfig, which is an argument of `from_pretrained` beside them.
"""

from __future__ import annotations

from collections.abc import Iterable

from terrazzo.dialects.core.description import Description
from terrazzo.dialects.core.dialect import (
    NO_CONTEXT,
    ConfigDocument,
    Dialect,
    Finding,
    Reading,
    ReadingContext,
    Writing,
)
from terrazzo.dialects.formats.trainer.findings import findings
from terrazzo.dialects.formats.trainer.keys import ALIASES, FIELDS, KEYS, REMOVED
from terrazzo.dialects.formats.trainer.read import read
from terrazzo.dialects.formats.trainer.reader import canonical_key
from terrazzo.dialects.formats.trainer.write import write

__all__ = ["TrainingArguments"]

_TELLING = (
    *("per_device_train_batch_size", "output_dir", "fsdp", "fsdp_config", "deepspeed", "learning_rate"),
    *("num_train_epochs", "gradient_checkpointing", "distributed_config", "lr_scheduler_type", "optim"),
)


class TrainingArguments(Dialect):
    """The arguments of `transformers.Trainer`."""

    name = "trainer"
    title = "Hugging Face TrainingArguments"
    suffix = ".json"
    keys = KEYS

    def recognises(self, document: ConfigDocument) -> bool:
        """Whether it has fields that no other dialect has at the top."""
        known = {*FIELDS, *ALIASES, *REMOVED, "distributed_config"}
        fields = [key for key in document if key in known]
        return any(key in document for key in _TELLING) and 2 * len(fields) > len(document)

    def meaning(self, key: str) -> str:
        return super().meaning(canonical_key(key))

    def read(self, document: ConfigDocument, context: ReadingContext = NO_CONTEXT) -> Reading:
        return read(document, context)

    def write(self, description: Description, context: ReadingContext = NO_CONTEXT) -> Writing:
        return write(description, context)

    def findings(self, document: ConfigDocument, reading: Reading, context: ReadingContext) -> Iterable[Finding]:
        return findings(document, reading, context)
