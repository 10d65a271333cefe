"""A configuration in its library's words, read by its dialect: what cannot be done of it is refused or named."""

from __future__ import annotations

from collections.abc import Container, Sequence

from terrazzo.dialects.core.agreement import extras_by_key
from terrazzo.dialects.core.description import Description
from terrazzo.dialects.core.dialect import ConfigDocument, Reading, ReadingContext
from terrazzo.dialects.registry import dialect
from terrazzo.dialects.verbs.understand import read_document
from terrazzo.errors import BadInput
from terrazzo.integrations.shared.first_rank import warn_once

__all__ = ["honour", "lost", "refuse"]


def honour(name: str, document: ConfigDocument, context: ReadingContext, who: str) -> Description:
    """What a configuration means, once what is refused and what is lost of it has been said.

    What is lost is a warning on rank 0, the first time.

    Args:
        name: of its dialect.
        who: the configuration's name in messages.

    Raises:
        BadInput: listing every key that is refused, each with its value and why.
    """
    reading = read_document(dialect(name), document, context)
    refuse(who, [f"{each.key} is {each.value!r}: {each.why}" for each in reading.verdicts if each.kind == "refused"])
    for text in lost(reading):
        warn_once(f"{who}: {text}")
    return reading.description


def refuse(who: str, reasons: Sequence[str]) -> None:
    """Raise a `BadInput` of all reasons, if there are any."""
    if reasons:
        text = "; ".join(reason.rstrip(".") for reason in reasons)
        raise BadInput(f"{who} cannot be honoured: {text}{'' if text.endswith('?') else '.'}")


def lost(reading: Reading, own: Container[str] = ()) -> list[str]:
    """What is not carried out, or only in part, a line for each key.

    A key that the document does not have, or has at its library's default, loses nothing.

    Args:
        own: keys without a neutral meaning that the integration carries out by itself.
    """
    reasons = {each.key: each.why for each in reading.verdicts if each.kind == "lossy"}
    for key, extra in extras_by_key(reading.description).items():
        if extra.loss == "lossy" and key not in own and extra.value not in (None, {}):
            reasons.setdefault(key, f"Terrazzo has no such setting: {extra.why}")
    return [f"{key}: {why}" for key, why in reasons.items()]
