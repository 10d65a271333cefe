"""Whether one unit is most of a model, which a plan that splits weights then gathers almost whole."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["most_in_one"]

_SMALL_MODEL = 5_000_000
"""Elements. What a smaller model gathers at once is nothing to a device."""

_LARGE_TENSOR = 8
"""A tensor with more than this part of the model is large whatever the units are, as tables of a vocabulary are."""


def most_in_one(units: Sequence[Sequence[int]]) -> int | None:
    """The index of the unit with more than half of a model, in tensors that smaller units would gather apart.

    Args:
        units: the elements of each parameter, by units.

    Returns:
        None where there is none, or the model is small.
    """
    total = sum(map(sum, units))
    apart = [sum(numel for numel in unit if _LARGE_TENSOR * numel <= total) for unit in units]
    return next((index for index, numel in enumerate(apart) if total >= _SMALL_MODEL and 2 * numel > total), None)
