"""Blocks that repeat in the lists of a model, of which units are made where nobody says which."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from torch import nn

from terrazzo.engine.partition.absent_parameters import absent_in_place

__all__ = [
    "MIN_UNIT_NUMEL",
    "blocks_of",
    "children_of",
    "has_parameters",
    "large_modules",
    "layers_in_root",
    "repeated_blocks",
    "runs",
]

MIN_UNIT_NUMEL = 1_000_000
"""Elements. Where no block repeats, a module becomes a unit once it holds this many parameters of its own."""


def repeated_blocks(model: nn.Module) -> tuple[list[str], list[str]]:
    """Names of the blocks that become units, and their classes.

    The heaviest class does, and then each whose blocks, without what is in units already, weigh as much as one unit, or
    stand in a list beside one.
    """
    children, blocks, kinds = children_of(model), list[nn.Module](), list[type]()
    lists = [_blocks_in(each) for each in _lists(model)]
    for kind, of_kind in _by_weight(model, [module for _, module in children]):
        outside = _Outside(blocks)
        new = [block for block in of_kind if block not in outside.inside]
        beside = any({*kinds} & {*map(type, each)} for each in lists if kind in map(type, each))
        # Less than one unit, and no neighbour of one: its collectives would cost more than its memory in the root.
        if (weight := outside.weight(new)) and (beside or weight >= max(map(_elements, [*blocks, *new]))):
            kinds.append(kind)
            blocks += new
    units = {*blocks}
    return [name for name, module in children if module in units], sorted(kind.__name__ for kind in kinds)


def large_modules(model: nn.Module) -> list[str]:
    """Names of the modules with `MIN_UNIT_NUMEL` parameters of their own."""
    return [name for name, module in children_of(model) if _is_large(module) and runs(module)]


def layers_in_root(model: nn.Module, units: Sequence[str]) -> list[str]:
    """Names of the layers of lists that are in none of these units, where together they outweigh the largest one.

    Of a `Sequential` those of which several are alike: others may be a head, whose place is the root.
    """
    with absent_in_place(model):
        modules, counts = {model.get_submodule(name) for name in units}, _counts(model)
        outside = _Outside(modules)
        left = {
            block
            for each in _lists(model)
            for block in _blocks_in(each)
            if (isinstance(each, nn.ModuleList) or counts[type(block)] > 1)
            and block not in outside.inside
            and modules.isdisjoint(block.modules())
        }
        heavy = outside.weight(left) > max(map(_elements, modules), default=0)
        return [name for name, module in children_of(model) if module in left] if units and heavy else []


def _by_weight(model: nn.Module, children: Sequence[nn.Module]) -> list[tuple[type, list[nn.Module]]]:
    """The classes of blocks that repeat in lists, the heaviest first, and their modules, those beside lists included.

    Of a class of which one may stand for an item together with others, those in lists alone: it is often `Sequential`.
    """
    lists, counts = _lists(model), _counts(model)
    listed = {block for each in lists for block in _blocks_in(each)}
    together = {type(block) for each in lists for item in each if not runs(item) for block in blocks_of(item)}

    def of(kind: type) -> list[nn.Module]:
        everywhere = [module for module in children if type(module) is kind and has_parameters(module)]
        return [each for each in everywhere if each in listed or (kind not in together and _is_block(each))]

    def weight(kind: type) -> int:
        return sum(_elements(block) for block in listed if type(block) is kind)

    return [(kind, of(kind)) for kind in sorted(counts, key=weight, reverse=True) if counts[kind] > 1]


class _Outside:
    """What is outside of some units.

    Attributes:
        inside: the units, and all modules in them.
    """

    def __init__(self, units: Iterable[nn.Module]) -> None:
        self.inside = {part for unit in units for part in unit.modules()}
        self._theirs = {parameter for module in self.inside for parameter in module.parameters(recurse=False)}

    def weight(self, modules: Iterable[nn.Module]) -> int:
        """Elements of the parameters that modules have, and the units have not."""
        return sum(p.numel() for p in {p for module in modules for p in module.parameters()} - self._theirs)


def _elements(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _counts(model: nn.Module) -> Counter[type]:
    """How many blocks of lists are of each class; one that stands in a list several times counts as often."""
    return Counter(type(block) for each in _lists(model) for block in _blocks_in(each))


def _lists(model: nn.Module) -> list[nn.ModuleList | nn.Sequential]:
    return [each for each in model.modules() if isinstance(each, nn.ModuleList | nn.Sequential) and len(each) > 1]


def _blocks_in(layers: nn.ModuleList | nn.Sequential) -> list[nn.Module]:
    return [block for item in layers for block in blocks_of(item)]


def blocks_of(item: nn.Module) -> list[nn.Module]:
    """Blocks that stand for one item of a list: itself, or, where it has no forward, those inside that have one."""
    parts = _running(item)
    return [part for part in parts if _is_block(part)] if any(map(_has_children, parts)) else []


def _running(module: nn.Module) -> list[nn.Module]:
    return [module] if runs(module) else [part for child in module.children() for part in _running(child)]


def children_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """All modules below, under their first names."""
    return [(name, module) for name, module in model.named_modules() if name]


def runs(module: nn.Module) -> bool:
    """Whether it has a forward; nothing would tell when another one runs, such as a `ModuleList`."""
    return getattr(module.forward, "__func__", None) is not nn.Module.forward


def has_parameters(module: nn.Module) -> bool:
    """Whether it, or a module below, has any."""
    return next(module.parameters(), None) is not None


def _is_block(module: nn.Module) -> bool:
    return _has_children(module) or _is_large(module)


def _has_children(module: nn.Module) -> bool:
    return next(module.children(), None) is not None


def _is_large(module: nn.Module) -> bool:
    return sum(p.numel() for p in module.parameters(recurse=False)) >= MIN_UNIT_NUMEL
