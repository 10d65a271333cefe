"""Where facts that ranks have compared first differ, and who has what: for a message that all of them give alike."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping

import torch.distributed as dist
from torch import Tensor

from terrazzo.engine.consensus.number_rows import number_rows
from terrazzo.engine.mesh.axes import Axes
from terrazzo.messages import listed, of_ranks, shortened

__all__ = ["first_difference"]

_PATH_LENGTH, _VALUE_LENGTH = 200, 80


def first_difference(axes: Axes, facts: Mapping[str, object], along: Iterable[str]) -> str:
    """The path of the first value that differs, with what each rank has there; empty for none. Collective.

    Only hashes are exchanged before it is known, since facts may be of thousands of parameters.
    """
    along = tuple(along)
    leaves = dict(_leaves("", facts))
    own = [number for path, value in leaves.items() for number in (_hash(path), _hash(value))]
    ranks = [dict(zip(row[::2], row[1::2], strict=True)) for row in number_rows(axes, own, along)]
    paths = dict.fromkeys(path for values in ranks for path in values)
    first = next((path for path in paths if len({values.get(path) for values in ranks}) > 1), None)
    if first is None:
        return ""
    path = next((path for path in leaves if _hash(path) == first), "")
    return _told(axes, path, leaves.get(path, "nothing"), along)


def _told(axes: Axes, path: str, value: str, along: Iterable[str]) -> str:
    """`"train.steps (5 on rank 0; 6 on ranks 1, 2)"`, where `path` is empty on ranks that have no such value."""
    own = json.dumps([dist.get_rank(), shortened(path, _PATH_LENGTH), shortened(value, _VALUE_LENGTH)]).encode()
    told = sorted(json.loads(bytes(row)) for row in number_rows(axes, own, along))
    holders: dict[str, list[int]] = {}
    for rank, _, each in told:
        holders.setdefault(each, []).append(rank)
    shown = [f"{each} on {of_ranks(ranks)}" for each, ranks in holders.items()]
    return f"{max(path for _, path, _ in told)} ({listed(shown, 4, ';')})"


def _leaves(path: str, fact: object) -> Iterator[tuple[str, str]]:
    """Values that hold no others, as text, by path."""
    if isinstance(fact, Mapping) and fact:
        for key, value in fact.items():
            name = str(key)
            plain = not path or name.replace(" ", "_").isidentifier()
            yield from _leaves(f"{path}.{name}".lstrip(".") if plain else f"{path}[{name!r}]", value)
    elif isinstance(fact, list | tuple) and fact:
        for index, value in enumerate(fact):
            yield from _leaves(f"{path}[{index}]", value)
    elif isinstance(fact, Tensor):
        yield path, f"{fact.tolist()}"
    else:
        yield path, repr(fact) if isinstance(fact, str) else str(fact)


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])
