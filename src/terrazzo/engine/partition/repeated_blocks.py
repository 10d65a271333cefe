"""Blocks that repeat in the lists of a model, of which units are made where nobody says which."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from terrazzo.engine.partition.absent_parameters import absent_in_place
from terrazzo.engine.partition.layer_lists import LayerLists, children_of, elements, has_parameters, is_block

__all__ = ["layers_in_root", "repeated_blocks"]


def repeated_blocks(model: nn.Module) -> tuple[list[str], list[str]]:
    """Names of the blocks that become units, and their classes.

    The heaviest class does, and then each whose blocks, without what is in units already, weigh as much as one unit, or
    stand in a list beside one.
    """
    children, blocks, kinds, lists = children_of(model), list[nn.Module](), list[type](), LayerLists(model)
    for kind, of_kind in _by_weight(lists, [module for _, module in children]):
        outside = _Outside(blocks)
        new = [block for block in of_kind if block not in outside.inside]
        beside = any({*kinds} & {*map(type, each)} for _, each in lists.lists if kind in map(type, each))
        # Less than one unit, and no neighbour of one: its collectives would cost more than its memory in the root.
        if (weight := outside.weight(new)) and (beside or weight >= max(map(elements, [*blocks, *new]))):
            kinds.append(kind)
            blocks += new
    units = {*blocks}
    return [name for name, module in children if module in units], sorted(kind.__name__ for kind in kinds)


def layers_in_root(model: nn.Module, units: Sequence[str]) -> list[str]:
    """Names of the layers of lists that are in none of these units, where together they outweigh the largest one.

    Of a `Sequential` those of which several are alike: others may be a head, whose place is the root. None without
    units: all is in the root then.
    """
    with absent_in_place(model):
        modules, lists = {model.get_submodule(name) for name in units}, LayerLists(model)
        outside = _Outside(modules)
        left = {
            block
            for each, blocks in lists.lists
            for block in blocks
            if (not isinstance(each, nn.Sequential) or lists.counts[type(block)] > 1)
            and block not in outside.inside
            and modules.isdisjoint(block.modules())
        }
        heavy = outside.weight(left) > max(map(elements, modules), default=0)
        return [name for name, module in children_of(model) if module in left] if units and heavy else []


def _by_weight(lists: LayerLists, children: Sequence[nn.Module]) -> list[tuple[type, list[nn.Module]]]:
    """The classes of blocks that repeat in lists, the heaviest first, and their modules, those beside lists included.

    Of a class of which one may stand for an item together with others, those in lists alone: it is often `Sequential`.
    So is a stage, and what is around stages, whose blocks stand for them.
    """
    listed = {block for _, blocks in lists.lists for block in blocks}

    def is_of_kind(module: nn.Module, kind: type) -> bool:
        return kind not in lists.together and is_block(module) and lists.stages.isdisjoint(module.modules())

    def of(kind: type) -> list[nn.Module]:
        everywhere = [module for module in children if type(module) is kind and has_parameters(module)]
        return [each for each in everywhere if each in listed or is_of_kind(each, kind)]

    def weight(kind: type) -> int:
        return sum(elements(block) for block in listed if type(block) is kind)

    counts = lists.counts
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
