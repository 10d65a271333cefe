"""DeepSpeed's JSON configuration, as a dialect."""

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
from terrazzo.dialects.formats.deepspeed.findings import findings
from terrazzo.dialects.formats.deepspeed.keys import KEYS
from terrazzo.dialects.formats.deepspeed.read import read
from terrazzo.dialects.formats.deepspeed.write import write

__all__ = ["DeepSpeed"]

_TELLING = (
    *("zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size", "zero_allow_untested_optimizer"),
    *("gradient_clipping", "steps_per_print", "wall_clock_breakdown", "activation_checkpointing", "aio"),
)


class DeepSpeed(Dialect):
    """DeepSpeed's configuration. `ReadingContext.versions["deepspeed"]` says which release; default: 0.19.8."""

    name = "deepspeed"
    title = "DeepSpeed JSON"
    suffix = ".json"
    keys = KEYS

    def recognises(self, document: ConfigDocument) -> bool:
        """Whether it has keys that no other dialect has at the top, or a 16-bit section with its switch."""
        switches = (document.get(name) for name in ("fp16", "bf16", "bfloat16"))
        return any(key in document for key in _TELLING[:4]) or (
            any(isinstance(switch, dict) and "enabled" in switch for switch in switches)
        )

    def read(self, document: ConfigDocument, context: ReadingContext = NO_CONTEXT) -> Reading:
        """See `Dialect.read`."""
        return read(document, context)

    def write(self, description: Description, context: ReadingContext = NO_CONTEXT) -> Writing:
        """See `Dialect.write`."""
        return write(description, context)

    def findings(self, document: ConfigDocument, reading: Reading, context: ReadingContext) -> Iterable[Finding]:
        """Combinations that DeepSpeed refuses, or takes otherwise than they look."""
        return findings(document, reading, context)
