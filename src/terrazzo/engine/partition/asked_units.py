"""Units that a user asks for: by class, by the name of one, by name of a module or a glob over these."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from torch import nn

from terrazzo.engine.partition.layer_lists import blocks_of, children_of, has_parameters, runs
from terrazzo.errors import BadInput
from terrazzo.messages import did_you_mean
from terrazzo.name_globs import level_hint, of_one_level

__all__ = ["Units", "asked_units"]

Units = type[nn.Module] | str | Sequence[type[nn.Module] | str]
"""Module classes, class names or globs over module names such as `"layers.*"`; one, or several.

A `*` stays within one level of names and does not mean containers such as a `ModuleList`, which have no forward: a
bare `"*"` asks for the model's own children, and for nothing inside of them.
"""
_SPECIAL = re.compile(r"[*?[]")
_UNESCAPED = re.compile(r"\[([*?[])\]")
"""Pattern of what `glob.escape` makes of a character that means something in a glob."""


def asked_units(model: nn.Module, units: Units, named: str) -> list[str]:
    """Names of the modules asked for, in the order of registration; `named` is what the user knows `units` by.

    Raises:
        BadInput: a class or glob matches nothing, or containers alone.
    """
    children = children_of(model)
    running = {name: module for name, module in children if runs(module)}
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
            blocks = [] if name in running else blocks_of(model.get_submodule(name))
            chosen.update([name, *(names[id(block)] for block in blocks)])
    return [name for name, module in running.items() if name in chosen and has_parameters(module)]


def _nothing_found(
    model: nn.Module, found: str, label: str, containers: Sequence[str], classes: Sequence[str]
) -> BadInput:
    known = f"Classes here: {', '.join(classes)}."
    if containers:
        name, container = containers[0], model.get_submodule(containers[0])
        inside = next((inner for inner, module in container.named_modules() if inner and runs(module)), None)
        edit = "Name the module around it" if inside is None else f"Name what is inside: '{name}{_level_of(inside)}'"
        return BadInput(
            f"{found} means {name!r}, a {type(container).__name__}, which has no forward: nothing would tell "
            f"when its weights are needed. {edit}. Units are module classes, their names, names of modules or globs "
            f"over these. {known}"
        )
    hint = level_hint((name for name, _ in children_of(model)), label)
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
