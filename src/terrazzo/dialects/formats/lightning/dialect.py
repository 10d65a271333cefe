"""The record of Lightning's Trainer, and how such a document is recognised.

Its arguments stand at the top, or below `trainer` as LightningCLI writes them. A strategy is a name, or `class_path`
with `init_args`; a class path is compared with the known ones, never imported.
"""

from __future__ import annotations

from terrazzo.dialects.core.dialect import ConfigDocument, Dialect
from terrazzo.dialects.core.keys import meaning_of
from terrazzo.dialects.formats.lightning.findings import findings
from terrazzo.dialects.formats.lightning.keys import ARGUMENTS, KEYS, TRAINER, canonical_key
from terrazzo.dialects.formats.lightning.read import read
from terrazzo.dialects.formats.lightning.trainer_arguments import place_of_arguments
from terrazzo.dialects.formats.lightning.write import write

__all__ = ["DIALECT"]

_TELLING = ("accumulate_grad_batches", "gradient_clip_val", "strategy", "num_nodes", "max_epochs", "accelerator")


def recognises(document: ConfigDocument) -> bool:
    """Whether it has Trainer arguments, at the top or below `trainer`."""
    prefix, arguments = place_of_arguments(document)
    known = [key for key in arguments if key in TRAINER or key in ("seed_everything", "model", "data")]
    telling = any(key in arguments for key in (*_TELLING, *(("precision",) if prefix else ())))
    return bool(known) and telling and 2 * len(known) > len(arguments) and "fsdp" not in document


def meaning(key: str) -> str:
    """What an argument of the Trainer or of a strategy does."""
    name = canonical_key(key).removeprefix("trainer.")
    if not name.startswith("strategy.init_args."):
        return meaning_of(KEYS, name)
    argument = name.split(".")[2]
    rows = [
        row for arguments in ARGUMENTS.values() for key, row in arguments.items() if key == argument and row.meaning
    ]
    return rows[0].meaning if rows else "argument of the strategy"


DIALECT = Dialect(
    name="lightning",
    title="Lightning Trainer",
    suffix=".yaml",
    keys=KEYS,
    recognises=recognises,
    read=read,
    write=write,
    findings=findings,
    meaning_by=meaning,
)
