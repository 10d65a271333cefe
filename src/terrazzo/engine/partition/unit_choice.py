"""Choice of the modules that become units."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from torch import nn

from terrazzo.engine.partition.absent_parameters import absent_in_place
from terrazzo.errors import BadInput
from terrazzo.messages import did_you_mean
from terrazzo.name_globs import level_hint, of_one_level

__all__ = ["Units", "find_units"]

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
        units: what the user asked for. None: the model's own list of blocks, `_no_split_modules`; else the class of
            the most repeated block in a `ModuleList` or `Sequential`, where a container stands for the blocks inside;
            else each module with a million parameters of its own. Containers have no forward and are never units.
        named: what the user knows `units` by, for errors.

    Raises:
        BadInput: a class or glob matches nothing, or containers alone.
    """
    with absent_in_place(model):
        return _find_units(model, units, named)


def _find_units(model: nn.Module, units: Units | None, named: str) -> tuple[list[str], str]:
    if units is not None:
        return _asked_for(model, units, named), "as asked"
    no_split = set(getattr(model, "_no_split_modules", None) or ())
    if no_split:
        names = [name for name, module in _children(model) if type(module).__name__ in no_split and _runs(module)]
        if names:
            return names, f"the model's own list of blocks: {', '.join(sorted(no_split))}"
    return _repeated_blocks(model)


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
    by_kinds = _blocks_in_lists(model)
    kinds = max(by_kinds, key=lambda kinds: sum(by_kinds[kinds].values()), default=frozenset[type]())
    blocks = by_kinds.get(kinds, {})
    if sum(blocks.values()):
        names = [
            name
            for name, module in _children(model)
            if _has_parameters(module) and (id(module) in blocks or ({type(module)} == kinds and _is_block(module)))
        ]
        return names, f"the repeated block {' and '.join(sorted(kind.__name__ for kind in kinds))}"
    names = [name for name, module in _children(model) if _is_large(module) and _runs(module)]
    return names, f"modules with at least {MIN_UNIT_NUMEL:,} parameters of their own"


def _blocks_in_lists(model: nn.Module) -> dict[frozenset[type], dict[int, int]]:
    """The classes that stand for an item of a list; for these the `id` of each such module, and its elements."""
    by_kinds: dict[frozenset[type], dict[int, int]] = {}
    for container in model.modules():
        if isinstance(container, nn.ModuleList | nn.Sequential) and len(container) > 1:
            for item in container.children():
                blocks = _blocks_of(item)
                elements = {id(block): sum(p.numel() for p in block.parameters()) for block in blocks}
                by_kinds.setdefault(frozenset(map(type, blocks)), {}).update(elements)
    return by_kinds


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
