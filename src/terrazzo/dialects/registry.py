"""The dialects by name, each imported when it is first asked for; and which of them a document is written in."""

from __future__ import annotations

from functools import cache
from importlib import import_module

from terrazzo.dialects.core.dialect import ConfigDocument, Dialect
from terrazzo.errors import BadInput
from terrazzo.messages import did_you_mean, listed

__all__ = ["NAMES", "dialect", "recognise"]

# In the order in which they are listed and suggested. All of them are asked whether a document is theirs.
_MODULES = {
    "accelerate": "terrazzo.dialects.formats.accelerate.dialect",
    "deepspeed": "terrazzo.dialects.formats.deepspeed.dialect",
    "torchtitan": "terrazzo.dialects.formats.torchtitan.dialect",
    "megatron": "terrazzo.dialects.formats.megatron.dialect",
    "terrazzo": "terrazzo.dialects.formats.terrazzo.dialect",
    "lightning": "terrazzo.dialects.formats.lightning.dialect",
    "trainer": "terrazzo.dialects.formats.trainer.dialect",
    "fsdp2": "terrazzo.dialects.formats.fsdp2.dialect",
    "fsdp1": "terrazzo.dialects.formats.fsdp1.dialect",
}
NAMES = tuple(_MODULES)
_MOST_KEYS = 300
"""More than a configuration has beside each other: the Trainer has some 130 fields."""


@cache
def dialect(name: str) -> Dialect:
    """The dialect of that name. Raises: `BadInput` with the nearest name."""
    if name not in _MODULES:
        raise BadInput(f"There is no dialect {name!r}.{did_you_mean(name, NAMES)} Dialects are {', '.join(NAMES)}.")
    record: Dialect = import_module(_MODULES[name]).DIALECT  # a module of the table above, never one that a file names
    return record


def recognise(document: ConfigDocument, where: str) -> Dialect:
    """The dialect that a document is written in, also where one key of several is misspelt.

    Raises: `BadInput` where it is none's, or several could be meant.
    """
    candidates = [each for each in map(dialect, NAMES) if each.recognises(document)]
    candidates = candidates or _recognised_but_for_a_key(document)
    if len(candidates) == 1:
        return candidates[0]
    if not candidates:
        shown = listed([repr(str(key)[:40]) for key in document], 6)
        raise BadInput(
            f"'{where}' is of no dialect known here; its keys are {shown}. If it is one of "
            f"{', '.join(NAMES)}, say so: --from NAME."
        )
    titles = " or ".join(each.title for each in candidates)
    raise BadInput(f"'{where}' may be {titles}: say which, --from {candidates[0].name}.")


def _recognised_but_for_a_key(document: ConfigDocument) -> list[Dialect]:
    """Those that would take it for theirs without one of its keys, which they then name as unknown.

    Each key is tried, which of thousands, as somebody's data may have, would take minutes.
    """
    if len(document) > _MOST_KEYS:
        return []
    others = [{other: document[other] for other in document if other != key} for key in document]
    return [each for each in map(dialect, NAMES) if any(each.recognises(rest) for rest in others if rest)]
