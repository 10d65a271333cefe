"""Lists of layers in a model, and the blocks that stand in them.

A list is a `ModuleList`, a `Sequential`, or a `ModuleDict` whose keys are numbered and of whose values a class repeats:
one of names, such as the heads of several tasks, does not run from its first value to its last. An item is a block of
its list, unless others stand for it: it has no forward, or it is a stage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from typing import TypeGuard

from torch import nn

__all__ = [
    "MIN_UNIT_NUMEL",
    "LayerLists",
    "blocks_of",
    "children_of",
    "elements",
    "has_parameters",
    "is_block",
    "is_large",
    "runs",
]

MIN_UNIT_NUMEL = 1_000_000
"""Elements. Where no block repeats, a module becomes a unit once it holds this many parameters of its own."""

_LARGE_STAGE = 8
"""A stage with more than this part of the model is too much to gather at once, and its blocks are gathered instead."""

_List = nn.ModuleList | nn.Sequential | nn.ModuleDict


class LayerLists:
    """The lists of a model.

    Attributes:
        lists: each list, and its blocks.
        stages: items which run blocks of their own, in a list where one of these is a large part of the model, and the
            lists in them: their blocks stand for them.
        counts: how many blocks of lists are of each class; one that stands in a list several times counts as often.
        together: the classes of blocks of which several may stand for one item.
    """

    def __init__(self, model: nn.Module) -> None:
        lists, numel = [each for each in model.modules() if _is_list(each)], elements(model)
        self.stages = {stage for each in lists for stage in _large_stages(each, numel)}
        self.lists = [(each, [block for item in _items(each) for block in self._of(item)]) for each in lists]
        self.counts = Counter(type(block) for _, blocks in self.lists for block in blocks)
        self.together = set[type]()
        for item in (item for each in lists for item in _items(each)):
            kinds = {type(block) for block in self._of(item)}
            if not runs(item) or (item in self.stages and len(kinds) > 1):
                self.together |= kinds

    def _of(self, item: nn.Module) -> list[nn.Module]:
        return blocks_of(item, self.stages)


def _is_list(module: nn.Module) -> TypeGuard[_List]:
    if isinstance(module, nn.ModuleDict):
        kinds = Counter(type(each) for each in module.values() if is_block(each))
        return all(key[-1:].isdigit() for key in module) and max(kinds.values(), default=0) > 1
    return isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > 1


def _items(layers: _List) -> list[nn.Module]:
    return [*(layers.values() if isinstance(layers, nn.ModuleDict) else layers)]


def _large_stages(layers: _List, numel: int) -> list[nn.Module]:
    """The stages of a list, where one is a large part of a model of `numel` elements, and the lists in them."""
    stages = [part for item in _items(layers) for part in _running(item) if _is_stage(part)]
    large = _LARGE_STAGE * max(map(elements, stages), default=0) > numel
    return [each for stage in stages for each in (stage, *_lists_in(stage))] if large else []


def _is_stage(module: nn.Module) -> bool:
    """Whether most of it are blocks alike, which its lists run one after the other."""
    lists = _lists_in(module)
    blocks = [block for each in lists for block in _alike(each)]
    return 2 * sum(map(elements, blocks)) > elements(module) and not any(_is_routed(module, each) for each in lists)


def _lists_in(module: nn.Module) -> list[_List]:
    """Itself, where it is a list, or the lists that it has for attributes."""
    return [each for each in ([module] if isinstance(module, nn.Sequential) else module.children()) if _is_list(each)]


def _alike(layers: _List) -> list[nn.Module]:
    """The blocks of classes of which two in the list have several matrices of the same shapes.

    The sublayers of one block may be of one class, such as residual connections around attention and MLP, but these
    differ; a convolution with its norm is too little to be gathered alone.
    """
    blocks = [block for item in _items(layers) for block in blocks_of(item)]
    shapes = Counter((type(block), tuple(p.shape for p in block.parameters())) for block in blocks)
    alike = {kind for (kind, of), count in shapes.items() if count > 1 and sum(len(each) > 1 for each in of) > 1}
    return [block for block in blocks if type(block) in alike]


def _is_routed(module: nn.Module, layers: _List) -> bool:
    """Whether a matrix beside the list has a row for each of its items: these are experts, and do not all run."""
    if isinstance(layers, nn.Sequential):
        return False
    beside = {*module.parameters()} - {*layers.parameters()}
    return any(p.dim() == 2 and len(layers) in p.shape for p in beside)


def blocks_of(item: nn.Module, stages: Collection[nn.Module] = ()) -> list[nn.Module]:
    """Blocks that stand for one item of a list: itself, or those inside, where it is a stage or has no forward."""
    parts = [*_running(item, stages)]
    return [part for part in parts if is_block(part)] if any(map(_has_children, parts)) else []


def _running(module: nn.Module, stages: Collection[nn.Module] = ()) -> Iterator[nn.Module]:
    if runs(module) and module not in stages:
        yield module
    else:
        for child in module.children():
            yield from _running(child, stages)


def children_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """All modules below, under their first names."""
    return [(name, module) for name, module in model.named_modules() if name]


def elements(module: nn.Module) -> int:
    """Of its parameters, and of those of modules below."""
    return sum(p.numel() for p in module.parameters())


def runs(module: nn.Module) -> bool:
    """Whether it has a forward; nothing would tell when another one runs, such as a `ModuleList`."""
    return getattr(module.forward, "__func__", None) is not nn.Module.forward


def has_parameters(module: nn.Module) -> bool:
    """Whether it, or a module below, has any."""
    return next(module.parameters(), None) is not None


def is_block(module: nn.Module) -> bool:
    """Whether it has modules inside, or is large: another is a layer of a block, or too little to be gathered alone."""
    return _has_children(module) or is_large(module)


def is_large(module: nn.Module) -> bool:
    """Whether it has `MIN_UNIT_NUMEL` parameters of its own."""
    return sum(p.numel() for p in module.parameters(recurse=False)) >= MIN_UNIT_NUMEL


def _has_children(module: nn.Module) -> bool:
    return next(module.children(), None) is not None
