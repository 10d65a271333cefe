"""Whether rectangles are a tensor, each element once; those of a damaged description may overlap. Integers only."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import product

from terrazzo.engine.partition.rectangles import Rectangle, whole

__all__ = ["tiling_problem"]

_MAX_CORNERS, _MAX_COMPARED = 16, 4096


def tiling_problem(shape: tuple[int, ...], rectangles: Sequence[Rectangle]) -> str | None:
    """Why `rectangles` are not the tensor, each element once; None where they are. Empty ones count for nothing."""
    full, rectangles = whole(shape), [rectangle for rectangle in rectangles if rectangle.numel]
    for rectangle in rectangles:
        if len(rectangle.offsets) != len(shape) or full.intersect(rectangle) != rectangle:
            return f"the part {rectangle} is not inside the shape {list(shape)}"
    cut = [dim for dim, size in enumerate(shape) if any(rectangle.sizes[dim] != size for rectangle in rectangles)]
    if 1 << len(cut) <= _MAX_CORNERS and _corners(rectangles, cut) == _corners([full] if full.numel else [], cut):
        return None
    if len(rectangles) > _MAX_COMPARED:
        return f"its {len(rectangles)} parts are not each of its elements once"
    if (pair := _overlapping(rectangles)) is not None:
        return f"the parts {pair[0]} and {pair[1]} overlap"
    if (numel := sum(rectangle.numel for rectangle in rectangles)) != full.numel:
        return f"its parts hold {numel} of {full.numel} elements"
    return None


def _corners(rectangles: Sequence[Rectangle], dims: Sequence[int]) -> dict[tuple[int, ...], int]:
    """The corners that `rectangles` have together along `dims`, each signed by how many of its places are ends.

    They are the mixed difference of how often each element is covered, and so equal where, and only where, that is.
    """
    counts: Counter[tuple[int, ...]] = Counter()
    for rectangle in rectangles:
        edges = [((rectangle.offsets[dim], 1), (rectangle.offsets[dim] + rectangle.sizes[dim], -1)) for dim in dims]
        for corner in product(*edges):
            counts[tuple(place for place, _ in corner)] += math.prod(sign for _, sign in corner)
    return {corner: count for corner, count in counts.items() if count}


def _overlapping(rectangles: Sequence[Rectangle]) -> tuple[Rectangle, Rectangle] | None:
    """A sweep along the dim with the most different offsets: only rectangles that reach that far are compared."""
    dims = range(len(rectangles[0].offsets) if rectangles else 0)
    dim = max(dims, key=lambda dim: len({rectangle.offsets[dim] for rectangle in rectangles}), default=None)
    if dim is None:
        return (rectangles[0], rectangles[1]) if len(rectangles) > 1 else None
    reaching: list[Rectangle] = []
    for rectangle in sorted(rectangles, key=lambda rectangle: rectangle.offsets[dim]):
        reaching = [other for other in reaching if other.ends[dim] > rectangle.offsets[dim]]
        if (other := next((other for other in reaching if other.intersect(rectangle)), None)) is not None:
            return other, rectangle
        reaching.append(rectangle)
    return None
