"""Lightning's Trainer as a dialect: its arguments at the top, or below `trainer` as LightningCLI writes them.

A strategy is a name, or `class_path` with `init_args`; a class path is compared with the known ones, never imported.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

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
from terrazzo.dialects.formats.lightning.findings import findings
from terrazzo.dialects.formats.lightning.keys import DEEPSPEED_STRATEGY, FSDP, KEYS, MODEL_PARALLEL, SHARED, TRAINER
from terrazzo.dialects.formats.lightning.read import read
from terrazzo.dialects.formats.lightning.write import write

__all__ = ["Lightning"]

_TELLING = ("accumulate_grad_batches", "gradient_clip_val", "strategy", "num_nodes", "max_epochs", "accelerator")


class Lightning(Dialect):
    """The arguments of `lightning.Trainer` and its strategy."""

    name = "lightning"
    title = "Lightning Trainer"
    suffix = ".yaml"
    keys = KEYS

    def recognises(self, document: ConfigDocument) -> bool:
        """Whether it has Trainer arguments, at the top or below `trainer`."""
        below = document.get("trainer")
        arguments = below if isinstance(below, Mapping) else document
        known = [key for key in arguments if key in TRAINER or key in ("seed_everything", "model", "data")]
        telling = any(key in arguments for key in (*_TELLING, *(("precision",) if below is arguments else ())))
        return bool(known) and telling and 2 * len(known) > len(arguments) and "fsdp" not in document

    def meaning(self, key: str) -> str:
        name = key.removeprefix("trainer.")
        if not name.startswith("strategy.init_args."):
            return super().meaning(name)
        row = {**SHARED, **FSDP, **MODEL_PARALLEL, **DEEPSPEED_STRATEGY}.get(name.split(".")[2])
        return row.meaning if row else "argument of the strategy"

    def read(self, document: ConfigDocument, context: ReadingContext = NO_CONTEXT) -> Reading:
        return read(document, context)

    def write(self, description: Description, context: ReadingContext = NO_CONTEXT) -> Writing:
        return write(description, context)

    def findings(self, document: ConfigDocument, reading: Reading, context: ReadingContext) -> Iterable[Finding]:
        return findings(document)
