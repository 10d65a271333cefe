"""Choice of the modules that become units."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from torch import nn

from terrazzo.engine.partition.absent_parameters import absent_in_place
from terrazzo.errors import BadInput
from terrazzo.messages import did_you_mean
from terrazzo.name_globs import level_hint, of_one_level

__all__ = ["Units", "find_units", "layers_in_root"]

Units = type[nn.Module] | str | Sequence[type[nn.Module] | str]
"""Module classes, class names or globs over module names such as `"layers.*"`; one, or several.

A `*` stays within one level of names and does not mean containers such as a `ModuleList`, which have no forward: a
bare `"*"` asks for the model's own children, and for nothing inside of them.
"""

MIN_UNIT_NUMEL = 1_000_000
"""Elements. Where no block repeats, a module becomes a unit once it holds this many parameters of its own."""


def find_units(model: nn.Module, units: Units | None, named: str = "units") -> tuple[list[str], str]:
    """Names of the modules that become units, in registration order, and why these.

    Args:
        units: what the user asked for. None: the model's own list of blocks, `_no_split_modules`, or those of modules
            inside; else the classes that repeat in a `ModuleList` or `Sequential`, where a container stands for the
            blocks inside; else each module with a million parameters of its own. Containers have no forward and are
            never units.
        named: what the user knows `units` by, for errors.

    Raises:
        BadInput: a class or glob matches nothing, or containers alone.
    """
    with absent_in_place(model):
        return _find_units(model, units, named)


def _find_units(model: nn.Module, units: Units | None, named: str) -> tuple[list[str], str]:
    if units is not None:
        return _asked_for(model, units, named), "as asked"
    names, kinds = _declared(model)
    if names:
        return names, f"the model's own list of blocks: {', '.join(sorted(kinds))}"
    return _repeated_blocks(model)


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
        return [name for name, module in _children(model) if module in left] if units and heavy else []


def _declared(model: nn.Module) -> tuple[list[str], set[str]]:
    """Modules of the classes in `_no_split_modules`, and these; a module's own list is for all that is inside it."""
    kinds, blocks, spoken_for = set[str](), set[nn.Module](), set[nn.Module]()
    for module in model.modules():
        own = set(getattr(module, "_no_split_modules", None) or ())
        if own and module not in spoken_for:
            spoken_for.update(module.modules())
            kinds |= own
            blocks |= {part for part in module.modules() if type(part).__name__ in own and _runs(part)}
    return [name for name, module in _children(model) if module in blocks], kinds


def _children(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(name, module) for name, module in model.named_modules() if name]


def _asked_for(model: nn.Module, units: Units, named: str) -> list[str]:
    children = _children(model)
    running = {name: module for name, module in children if _runs(module)}
    names = {id(module): name for name, module in children}
    under_all_names = [(name, module) for name, module in model.named_modules(remove_duplicate=False) if name]
    finds, own = _finder(under_all_names), {name: names[id(module)] for name, module in under_all_names}
    chosen: set[str] = set()
    for unit in units if isinstance(units, Iterable) and not isinstance(units, type | str) else [units]:
        if not isinstance(unit, type | str):
            raise BadInput(
                f"{named} has a {type(unit).__name__}: give module classes or names, as Block or 'layers.*'."
            )
        matches = {own[name] for name in finds(unit)}
        if not any(name in running for name in matches):
            label = unit if isinstance(unit, str) else unit.__name__
            containers = [name for name, _ in children if name in matches]
            known = sorted({type(each).__name__ for each in running.values()})
            raise _nothing_found(model, f"{named}: {label!r}", label, containers, known)
        for name in matches:  # a container that comes with others stands for the blocks inside
            blocks = [] if name in running else _blocks_of(model.get_submodule(name))
            chosen.update([name, *(names[id(block)] for block in blocks)])
    return [name for name, module in running.items() if name in chosen and _has_parameters(module)]


def _nothing_found(
    model: nn.Module, found: str, label: str, containers: Sequence[str], classes: Sequence[str]
) -> BadInput:
    known = f"Classes here: {', '.join(classes)}."
    if containers:
        name, container = containers[0], model.get_submodule(containers[0])
        inside = next((inner for inner, module in container.named_modules() if inner and _runs(module)), None)
        edit = "Name the module around it" if inside is None else f"Name what is inside: '{name}{_level_of(inside)}'"
        return BadInput(
            f"{found} means {name!r}, a {type(container).__name__}, which has no forward: nothing would tell "
            f"when its weights are needed. {edit}. Units are module classes, their names, names of modules or globs "
            f"over these. {known}"
        )
    hint = level_hint((name for name, _ in _children(model)), label)
    return BadInput(
        f"{found} matches no module of {type(model).__name__}.{hint or did_you_mean(label, classes)} Give a module "
        f"class, or a glob over module names such as 'layers.*'. {known}"
    )


def _level_of(name: str) -> str:
    return ".*" * len(name.split("."))


def _finder(children: Sequence[tuple[str, nn.Module]]) -> Callable[[type[nn.Module] | str], list[str]]:
    """Names of the children that one unit asks for. A long list of names may be asked for one by one."""
    names = {name for name, _ in children}
    by_class: dict[str, list[str]] = {}
    for name, module in children:
        by_class.setdefault(type(module).__name__, []).append(name)

    def find(unit: type[nn.Module] | str) -> list[str]:
        if not isinstance(unit, str):
            return [name for name, module in children if isinstance(module, unit)]
        of_class = by_class.get(unit, [])
        plain = _UNESCAPED.sub(r"\1", unit)
        if not _SPECIAL.search(_UNESCAPED.sub("", unit)):
            return [*of_class, plain] if plain in names else of_class
        return [*of_class, *of_one_level(names, unit)]

    return find


_SPECIAL = re.compile(r"[*?[]")
_UNESCAPED = re.compile(r"\[([*?[])\]")
"""Pattern of what `glob.escape` makes of a character that means something in a glob."""


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _repeated_blocks(model: nn.Module) -> tuple[list[str], str]:
    children, blocks, kinds = _children(model), list[nn.Module](), list[type]()
    lists = [_blocks_in(each) for each in _lists(model)]
    for kind, of_kind in _by_weight(model, [module for _, module in children]):
        outside = _Outside(blocks)
        new = [block for block in of_kind if block not in outside.inside]
        beside = any({*kinds} & {*map(type, each)} for each in lists if kind in map(type, each))
        # Less than one unit, and no neighbour of one: its collectives would cost more than its memory in the root.
        if (weight := outside.weight(new)) and (beside or weight >= max(map(_elements, [*blocks, *new]))):
            kinds.append(kind)
            blocks += new
    if blocks:
        label = f"the repeated block{'s' * (len(kinds) > 1)} {' and '.join(sorted(kind.__name__ for kind in kinds))}"
        units = {*blocks}
        return [name for name, module in children if module in units], label
    names = [name for name, module in children if _is_large(module) and _runs(module)]
    return names, f"modules with at least {MIN_UNIT_NUMEL:,} parameters of their own"


def _by_weight(model: nn.Module, children: Sequence[nn.Module]) -> list[tuple[type, list[nn.Module]]]:
    """The classes of blocks that repeat in lists, the heaviest first, and their modules, those beside lists included.

    Of a class of which one may stand for an item together with others, those in lists alone: it is often `Sequential`.
    """
    lists, counts = _lists(model), _counts(model)
    listed = {block for each in lists for block in _blocks_in(each)}
    together = {type(block) for each in lists for item in each if not _runs(item) for block in _blocks_of(item)}

    def of(kind: type) -> list[nn.Module]:
        everywhere = [module for module in children if type(module) is kind and _has_parameters(module)]
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
    return [block for item in layers for block in _blocks_of(item)]


def _blocks_of(item: nn.Module) -> list[nn.Module]:
    """Blocks that stand for one item of a list: itself, or, where it has no forward, those inside that have one."""
    parts = _running(item)
    return [part for part in parts if _is_block(part)] if any(map(_has_children, parts)) else []


def _running(module: nn.Module) -> list[nn.Module]:
    return [module] if _runs(module) else [part for child in module.children() for part in _running(child)]


def _runs(module: nn.Module) -> bool:
    """Whether it has a forward; nothing would tell when another one runs, such as a `ModuleList`."""
    return getattr(module.forward, "__func__", None) is not nn.Module.forward


def _is_block(module: nn.Module) -> bool:
    return _has_children(module) or _is_large(module)


def _has_children(module: nn.Module) -> bool:
    return next(module.children(), None) is not None


def _is_large(module: nn.Module) -> bool:
    return sum(p.numel() for p in module.parameters(recurse=False)) >= MIN_UNIT_NUMEL
