"""What a configuration asks for and the integration does not do: it is refused, or named in a warning.

A key is refused, or lost, by what its dialect says of it (`honour`). A setting that the dialect understands and that
nobody has asked for is left out (`RequestedSettings`).
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

from terrazzo.dialects.core.agreement import extras_by_key
from terrazzo.dialects.core.description import PATHS, Description, asks_for_nothing
from terrazzo.dialects.core.dialect import ConfigDocument, Reading, ReadingContext
from terrazzo.dialects.core.wording import as_text
from terrazzo.dialects.registry import dialect
from terrazzo.dialects.verbs.understand import read_document
from terrazzo.errors import BadInput
from terrazzo.integrations.shared.first_rank import warn_once

__all__ = ["RequestedSettings", "check_compiler", "honour", "lost", "refuse", "unknown_here"]

_OF_PLAN_AND_MESH = ("sharding.", "offload.weight", "offload.grad", "offload.optim", "mesh.", "parallel.")
_OF_THE_LIBRARY = ("optimizer.", "schedule.", "batch.", "loading.", "saving.", "training.", "precision.saved")
"""Settings that the library whose configuration it is carries out."""


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
    verdicts = {each.key: each for each in reading.verdicts if each.kind == "refused"}
    reasons = [f"{each.key} is {each.value!r}: {each.why}" for each in verdicts.values()]
    refuse(who, [*reasons, *unknown_here(reading.description, verdicts)])
    for text in lost(reading):
        warn_once(f"{who}: {text}")
    return reading.description


def unknown_here(description: Description, said: Container[str] = ()) -> list[str]:
    """Why each key, but for those that are `said`, is refused that its own library takes and Terrazzo does not."""
    extras = [each for each in description.extras if each.loss == "refused" and each.key not in said]
    return [
        f"{each.key} is {each.value!r}: {each.lost_in('terrazzo') or 'Terrazzo has no such setting: remove it'}"
        for each in extras
    ]


def refuse(who: str, reasons: Sequence[str]) -> None:
    """Raise a `BadInput` of all reasons, if there are any."""
    if reasons:
        text = "; ".join(reason.rstrip(".") for reason in reasons)
        raise BadInput(f"{who} cannot be honoured: {text}{'' if text.endswith('?') else '.'}")


def check_compiler(key: str, backend: str, options: Mapping[str, object]) -> None:
    """Raises: `BadInput` where `key`, a compiler, is not inductor, by which units are compiled, with its defaults."""
    asked = [name for name, value in options.items() if value and value != "default"]
    if backend != "inductor" or asked:
        raise BadInput(
            f"{key} is {backend}{' with ' if asked else ''}{', '.join(asked)}: Terrazzo compiles each unit with "
            "inductor and its defaults. Leave the others out."
        )


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


class RequestedSettings:
    """The settings of a description, which remember the ones that have been asked for.

    Raises: `BadInput` listing the keys of which the numbers would be others here, as `honour` does beforehand.
    """

    def __init__(self, description: Description) -> None:
        refuse("The configuration", unknown_here(description))
        self.description, self._asked = description, set[str]()

    def value(self, path: str) -> Any:
        self._asked.add(path)
        return self.description.value(path)

    def name(self, path: str) -> str:
        """A setting as the user wrote it, else by its path."""
        return self.description[path].key or path

    def warn_of_the_rest(self, own: Sequence[str]) -> None:
        """Name each setting that a file gives and that nobody has asked for, on rank 0, the first time.

        Args:
            own: beginnings of settings' paths that the integration carries out by itself.
        """
        done = (*_OF_PLAN_AND_MESH, *_OF_THE_LIBRARY, *own)
        for path in PATHS:
            setting = self.description[path]
            is_open = setting.origin == "file" and path not in self._asked and not path.startswith(done)
            if is_open and not asks_for_nothing(path, setting.value):
                warn_once(f"{self.name(path)} is {as_text(setting.value)}: this integration leaves it out.")
