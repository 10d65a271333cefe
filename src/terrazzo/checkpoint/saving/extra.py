"""What `extra` of a save may hold: plain JSON values, which come back as they were given."""

from __future__ import annotations

import hashlib
import json
import math
from typing import Any, NamedTuple

from terrazzo.checkpoint.format.manifest import MAX_MANIFEST_BYTES, is_crowded
from terrazzo.errors import BadInput, RanksApart
from terrazzo.exchange import gather_json
from terrazzo.given_numbers import is_count
from terrazzo.messages import listed

__all__ = ["check_extra", "require_same_extra", "text_problem"]

_DEPTH = 100
"""Levels of lists and dicts. What writes manifests stops at some 250, when every rank has written its file."""

MOST_BYTES = MAX_MANIFEST_BYTES // 4
"""The most bytes of `extra` as JSON; the rest of the manifest is for tensors and ranks."""

_INSTEAD = {"tuple": "a list", "set": "a list", "Tensor": "its item() or tolist()"}


def check_extra(extra: object) -> None:
    """Raises `BadInput` for what a load would refuse or give back as something else, naming it and the edit."""
    if not isinstance(extra, dict):
        raise BadInput(f"extra is a {type(extra).__name__}: give a dict, such as {{'step': 100}}.")
    if (problem := _problem(extra, 0)) is not None:
        raise BadInput(f"extra holds a value that would not come back as it is: extra{problem.at} {problem.what}.")
    try:
        data = json.dumps(extra, separators=(",", ":"), ensure_ascii=False).encode()
    except ValueError as error:  # a whole number of thousands of digits
        raise BadInput(f"extra holds a value that JSON cannot: {error}. Give it as text.") from None
    is_large = len(data) > MOST_BYTES
    if is_large or is_crowded(data):
        what = (
            f"is {len(data):,} bytes of JSON, and may be {MOST_BYTES:,}" if is_large else "holds too many small values"
        )
        raise BadInput(
            f"extra {what}: it is a part of the checkpoint's manifest. Save it in a file of its own, and that file's"
            " name in extra."
        )
    step = extra.get("step", 0)
    if not is_count(step, least=0):
        raise BadInput(f"extra['step'] is {step!r}: give a whole number of finished steps.")


def require_same_extra(extra: dict[str, Any]) -> None:
    """Refuse values that differ between ranks, since a checkpoint has one of each. Collective.

    Ranks that give none take the first one's.

    Args:
        extra: as `check_extra` has found it good, on every rank.

    Raises:
        RanksApart: on every rank, with the keys.
    """
    digests = gather_json({key: _digest(value) for key, value in extra.items()})
    of_ranks = [digests[0], *filter(None, digests[1:])]
    if apart := [
        key for key in {key: None for each in of_ranks for key in each} if len({e.get(key) for e in of_ranks}) > 1
    ]:
        raise RanksApart(
            f"extra has other values on other ranks, of {listed([*map(repr, apart)])}, and a checkpoint has one of "
            "each, which 'load' gives back on every rank. Give the same on all, such as a list with every rank's from "
            "torch.distributed.all_gather_object; or give extra on the first rank alone."
        )


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def text_problem(value: object) -> str | None:
    """Why `value` is no text that a manifest can hold, as a predicate."""
    if not isinstance(value, str):
        return f"is {value!r}; give text"
    try:
        value.encode()
    except UnicodeEncodeError:
        return f"is {value!a}, and half a character is no text; take it out"
    return None


class _Problem(NamedTuple):
    at: str
    what: str


def _problem(value: Any, depth: int) -> _Problem | None:
    """The first thing in `value` that JSON does not give back equal, and where in it that is."""
    if value is None or isinstance(value, bool | int):
        return None
    if isinstance(value, float):
        return None if math.isfinite(value) else _Problem("", f"is {value}; leave it out, or give None or text")
    if isinstance(value, str):
        return None if (what := text_problem(value)) is None else _Problem("", what)
    if isinstance(value, dict | list):
        return _inner_problem(value, depth)
    kind = type(value).__name__
    return _Problem("", f"is a {kind}; give {_INSTEAD.get(kind, 'numbers, text, lists and dicts')}")


def _inner_problem(value: dict[Any, Any] | list[Any], depth: int) -> _Problem | None:
    if depth == _DEPTH:
        return _Problem("", f"is nested deeper than {_DEPTH} levels, or holds itself; make it flat")
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(value, dict) and (what := _key_problem(key)) is not None:
            return _Problem("", what)
        if (problem := _problem(inner, depth + 1)) is not None:
            return _Problem(f"[{key!r}]{problem.at}", problem.what)
    return None


def _key_problem(key: object) -> str | None:
    if not isinstance(key, str):
        return f"has the key {key!r}; JSON has text as keys alone: give {str(key)!r}"
    return None if (what := text_problem(key)) is None else f"has a key that {what}"
