"""Names for the parameters of an optimizer whose state only numbers them.

Numbers run through the param groups in order. Which parameters a program put into which group is not written down, so
the groups of the run that goes on with it are tried first, then the usual ways; every state must have its parameter's
shape. Without the run's own, one that fits in two ways is refused, and so is one whose groups fit in another order too.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from terrazzo.errors import BadInput

__all__ = ["NOT_KNOWN", "ModelNames", "NameGroups", "Number", "in_groups", "in_order", "name_numbers"]

Number = int | str
"""What stands for a parameter in an optimizer's state dict."""

NameGroups = Sequence[Sequence[str]]
"""Param groups, of which each lists the names of its parameters in order."""


@dataclass(frozen=True)
class ModelNames:
    """What is known of the model that a checkpoint is for, where a format only numbers an optimizer's states.

    Attributes:
        order: its parameters in the order of `model.parameters()`; empty where they are not known.
        frozen: those of them that are not trained. An optimizer may have them nevertheless.
        groups: param groups of the run that goes on with it: where they fit they tell whose the numbers are.
    """

    order: Sequence[str] = ()
    frozen: Collection[str] = ()
    groups: NameGroups = ()


NOT_KNOWN = ModelNames()

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]  # of parameters
StateShapes = Mapping[Number, Sequence[Shape]]
ParameterNames = list[str]

# transformers' Trainer: no weight decay for these, nor for any parameter of a torch.nn.LayerNorm.
_UNDECAYED = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")

_REMEDY = (
    "Give the model that was trained, with the same parameters frozen, and load into a run with the same param groups;"
    " or take the weights alone, by opening the checkpoint without a model."
)


def in_groups(
    groups: Sequence[Sequence[Number]], names: NameGroups, states: StateShapes, shapes: Shapes
) -> dict[Number, str] | None:
    """The name of each number if groups of these `names` have as many parameters, of shapes that fit. As below."""
    if [*map(len, groups)] != [*map(len, names)]:
        return None
    named = {number: name for pair in zip(groups, names, strict=True) for number, name in zip(*pair, strict=True)}
    return named if all(_fits(states, number, shapes[name]) for number, name in named.items()) else None


def in_order(numbers: Sequence[Number], states: StateShapes, shapes: Shapes) -> dict[Number, str] | None:
    """The name of each number if they fit all parameters in the model's order. As below."""
    return in_groups([numbers], [list(shapes)], states, shapes)


def name_numbers(
    groups: Sequence[Sequence[Number]],
    states: StateShapes,
    shapes: Shapes,
    where: str,
) -> dict[Number, str]:
    """The name of each number.

    Args:
        groups: the numbers in each param group, in order; each is in one group.
        states: of each number the shapes of its states with a value per element; none where it has no state.
        shapes: of the parameters by name, in the order of `model.parameters()`.

    Raises:
        BadInput: they fit in no way, or in several; `where` names the optimizer state.
    """
    numbers = [number for group in groups for number in group]
    fits: list[dict[Number, str]] = []
    for lists in _divisions(shapes, len(groups)):
        parts = [numbers] if len(lists) == 1 else groups
        for names in _placements(parts, lists, states, shapes):
            if (named := dict(zip(numbers, names, strict=True))) not in fits:
                fits.append(named)
    if not fits:
        raise BadInput(f"{where} does not fit the model: {_difference(numbers, states, shapes)}. {_REMEDY}")
    if len(fits) == 1 and (other_order := _reordered(groups, states, shapes, fits[0])) is not None:
        fits.append(other_order)
    if len(fits) > 1:
        one, other = next((fits[0][each], fits[1][each]) for each in numbers if fits[0][each] != fits[1][each])
        raise BadInput(f"{where} only numbers its parameters, and one could be {one} or {other}. {_REMEDY}")
    return fits[0]


def _reordered(
    groups: Sequence[Sequence[Number]], states: StateShapes, shapes: Shapes, but: Mapping[Number, str]
) -> dict[Number, str] | None:
    """Names other than `but` that the groups in another order would have in the model's."""
    names = list(shapes)
    if sum(map(len, groups)) != len(names):
        return None
    dead: set[frozenset[int]] = set()  # groups that fit the last names in no order

    def orders(left: frozenset[int], start: int) -> Iterator[dict[Number, str]]:
        if not left:
            yield {}
        found = not left
        for index in sorted(left):
            here = dict(zip(groups[index], names[start:], strict=False))
            rest = left - {index}
            if rest not in dead and all(_fits(states, number, shapes[name]) for number, name in here.items()):
                for others in orders(rest, start + len(here)):
                    found = True
                    yield here | others
        if not found:
            dead.add(left)

    return next((named for named in orders(frozenset(range(len(groups))), 0) if named != but), None)


def _divisions(shapes: Shapes, group_count: int) -> Iterator[list[ParameterNames]]:
    """Ways to divide parameters among groups: lists to take the groups' parameters from, or one for all of them."""
    yield [list(shapes)]
    if group_count == 2:
        undecayed = {name for name in shapes if _UNDECAYED.search(name.lower())}
        yield _divided(shapes, undecayed)
        yield _divided(shapes, undecayed | {name for name in shapes if _is_layer_norm(name, shapes)})
        yield _divided(shapes, {name for name, shape in shapes.items() if len(shape) < 2})


def _divided(shapes: Shapes, second: set[str]) -> list[ParameterNames]:
    return [[name for name in shapes if name not in second], [name for name in shapes if name in second]]


def _is_layer_norm(name: str, shapes: Shapes) -> bool:
    module = name.removesuffix("weight")
    return module != name and len(shapes[name]) == 1 and shapes.get(f"{module}bias") == shapes[name]


def _placements(
    parts: Sequence[Sequence[Number]],
    lists: Sequence[ParameterNames],
    states: StateShapes,
    shapes: Shapes,
) -> Iterator[ParameterNames]:
    """How the numbers of each part fit the names of its list, in order; frozen parameters may be left out.

    Both the first and the last way, which are equal if there is one only.
    """
    for backwards in (False, True):
        placement: ParameterNames = []
        for part, names in zip(parts, lists, strict=True):
            placed = _first_fit(part[::-1] if backwards else part, names[::-1] if backwards else names, states, shapes)
            if placed is None:
                return
            placement += placed[::-1] if backwards else placed
        yield placement


def _first_fit(
    numbers: Sequence[Number], names: ParameterNames, states: StateShapes, shapes: Shapes
) -> ParameterNames | None:
    placed, left = [], iter(names)
    for number in numbers:
        fitting = (name for name in left if _fits(states, number, shapes[name]))
        if (name := next(fitting, None)) is None:
            return None
        placed.append(name)
    return placed


def _fits(states: StateShapes, number: Number, shape: Shape) -> bool:
    """Whether all states of a number have this shape."""
    return all(each == shape for each in states.get(number, ()))


def _difference(numbers: Sequence[Number], states: StateShapes, shapes: Shapes) -> str:
    if len(numbers) != len(shapes):
        return f"it has {len(numbers)} parameters, and the model {len(shapes)}"
    for number, (name, shape) in zip(numbers, shapes.items(), strict=True):
        for theirs in states.get(number, ()):
            if theirs != shape:
                return f"the state of parameter {number} has the shape {list(theirs)}, and {name} has {list(shape)}"
    return "its groups are not those that the Trainer, or weight decay for matrices alone, would make"
