"""Tensors that a checkpoint has under several names each, as formats do that do not know of ties."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor, uint8

from terrazzo.checkpoint.source import BUFFER, PIECE_BYTES, WEIGHT, Source

__all__ = ["names_apart", "same_bits"]


def names_apart(
    source: Source, groups: Iterable[Sequence[str]], part: int = 0, parts: int = 1
) -> Iterator[tuple[str, str]]:
    """Two names of each tensor of a model under which `source` has different values: which are meant is not known.

    Args:
        groups: all names of each tensor.
        part: of `parts` equal parts of a tensor's elements, the one that is compared.
    """
    for names in groups:
        first, *others = dict.fromkeys(there for name in names if (there := source.resolve([name]))) or [""]
        if other := next((each for each in others if not _alike(source, first, each, part, parts)), None):
            yield first, other


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one shape and dtype have the same bits, those of NaN too."""
    return bool((one.view(uint8) == other.view(uint8)).all())


def _alike(source: Source, one: str, other: str, part: int, parts: int) -> bool:
    info, its = source.tensors[one], source.tensors[other]
    kind, its_kind = (BUFFER if BUFFER in each.states else WEIGHT for each in (info, its))
    if info.shape != its.shape or info.states.get(kind) != its.states.get(its_kind):
        return False
    if kind not in info.states:
        return True
    start, end = info.numel * part // parts, info.numel * (part + 1) // parts
    step = PIECE_BYTES // info.states[kind].dtype.itemsize
    pieces = ((first, min(first + step, end)) for first in range(start, end, step))
    return all(same_bits(source.read(one, kind, *piece), source.read(other, its_kind, *piece)) for piece in pieces)
