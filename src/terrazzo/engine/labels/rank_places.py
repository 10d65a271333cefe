"""Where each rank is in what all of them run, as errors say it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from terrazzo.errors import RanksApart
from terrazzo.messages import of_ranks

__all__ = ["NOT_THE_SAME", "PlacesDiffer", "RankPlace", "apart_text", "places_text"]

NOT_THE_SAME = "The ranks have not run the same"
"""How errors of ranks that have come apart begin."""


class RankPlace(NamedTuple):
    """An exchange that a rank is at.

    Attributes:
        name: what is exchanged.
        edit: what errors ask for where others are elsewhere.
        detail: how much, for ranks that differ in that alone.
        code: of its label, by which a rank that knows more names finds its own words for it; -1 where it is not known.
        model: of which it is, from 1 on, for ranks that are at different ones; 0 where it is of none.
    """

    name: str
    edit: str
    detail: str = ""
    code: int = -1
    model: int = 0


class PlacesDiffer(RanksApart):
    """Ranks have met in an exchange, and are at different places.

    Args:
        places: by rank, as far as this one has seen.
    """

    def __init__(self, places: Mapping[int, RankPlace]) -> None:
        super().__init__(places)
        self.places = places

    def __str__(self) -> str:
        return apart_text(self.places)


def apart_text(places: Mapping[int, RankPlace], more: str = "", unknown: Collection[int] = ()) -> str:
    """The message of ranks that are at different places, and what errors ask for there.

    Args:
        more: what there is to say of them all.
        unknown: ranks of whose places nothing is known.
    """
    edits = " ".join(dict.fromkeys(place.edit for _, place in sorted(places.items())))
    return f"{NOT_THE_SAME}{more}: {places_text(places, unknown)}. {edits}"


def places_text(places: Mapping[int, RankPlace], unknown: Collection[int] = ()) -> str:
    """Where ranks are: `"ranks 0, 2 at the end of forward 3; rank 1 at the end of forward 4"`."""
    only_details_differ = len({(place.name, place.model) for place in places.values()}) == 1 < len({*places.values()})
    models_differ = len({place.model for place in places.values()} - {0}) > 1
    at: dict[str, list[int]] = {}
    for rank, place in sorted(places.items()):
        text = f"{place.name} ({place.detail})" if only_details_differ and place.detail else place.name
        text += f", of {_model_text(place.model)}" if models_differ and place.model else ""
        at.setdefault(text, []).append(rank)
    known = [f"{of_ranks(ranks)} at {text}" for text, ranks in at.items()]
    return "; ".join([*known, *([f"of {of_ranks(unknown)} nothing is known"] if unknown else [])])


_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth")


def _model_text(number: int) -> str:
    return f"the {_ORDINALS[number - 1]} model" if number <= len(_ORDINALS) else f"model {number}"
