"""The dialects by name."""

from __future__ import annotations

from functools import cache
from importlib import import_module

from terrazzo.dialects.core.dialect import ConfigDocument, Dialect
from terrazzo.errors import BadInput, did_you_mean, listed

__all__ = ["NAMES", "dialect", "recognise"]

# In the order of recognition: those whose keys are least like another's first.
_CLASSES = {
    "accelerate": "terrazzo.dialects.formats.accelerate.Accelerate",
    "deepspeed": "terrazzo.dialects.formats.deepspeed.DeepSpeed",
    "torchtitan": "terrazzo.dialects.formats.torchtitan.Torchtitan",
    "megatron": "terrazzo.dialects.formats.megatron.Megatron",
    "terrazzo": "terrazzo.dialects.formats.terrazzo.Terrazzo",
    "lightning": "terrazzo.dialects.formats.lightning.Lightning",
    "trainer": "terrazzo.dialects.formats.trainer.TrainingArguments",
    "fsdp2": "terrazzo.dialects.formats.fsdp2.FSDP2",
    "fsdp1": "terrazzo.dialects.formats.fsdp1.FSDP1",
}
NAMES = tuple(_CLASSES)


@cache
def dialect(name: str) -> Dialect:
    """The dialect of that name. Raises: `BadInput` with the nearest name."""
    if name not in _CLASSES:
        raise BadInput(f"There is no dialect {name!r}.{did_you_mean(name, NAMES)} Dialects are {', '.join(NAMES)}.")
    module, _, attribute = _CLASSES[name].rpartition(".")
    found: Dialect = getattr(import_module(module), attribute)()  # from the table, never a file
    return found


def recognise(document: ConfigDocument, where: str) -> Dialect:
    """The dialect that a document is written in.

    Raises: `BadInput` where it is none's, or several could be meant.
    """
    found = [each for each in map(dialect, NAMES) if each.recognises(document)]
    if len(found) == 1:
        return found[0]
    if not found:
        shown = listed([repr(str(key)[:40]) for key in document], 6)
        raise BadInput(
            f"'{where}' is of no dialect known here; its keys are {shown}. If it is one of "
            f"{', '.join(NAMES)}, say so: --from NAME."
        )
    raise BadInput(f"'{where}' may be {' or '.join(each.title for each in found)}: say which, --from {found[0].name}.")
