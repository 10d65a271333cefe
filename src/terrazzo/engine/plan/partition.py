"""Choice of the modules that become units, and of the unit that owns each parameter."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from terrazzo.engine.mesh.family import Family
from terrazzo.engine.pipeline.absent_parameters import absent_in_place
from terrazzo.engine.plan.box import Box, Record, record_of
from terrazzo.errors import BadInput, did_you_mean

__all__ = ["Member", "UnitSpec", "Units", "find_units", "parameters_by_names", "partition"]

Units = type[nn.Module] | str | Sequence[type[nn.Module] | str]
"""Module classes, class names or globs over module names such as `"layers.*"`; one, or several.

A `*` stays within one level of names and does not mean containers such as a `ModuleList`, which have no forward: a
bare `"*"` asks for the model's own children, and for nothing inside of them.
"""

MIN_UNIT_NUMEL = 1_000_000
"""Elements. Where no block repeats, a module becomes a unit once it holds this many parameters of its own."""


@dataclass
class Member:
    """One parameter: every name it has, where it is registered, and what steps it.

    Attributes:
        position: among the parameters of the model, in the order of registration.
        is_table: of an embedding, which is looked up before all that is registered behind it.
        is_matrix: the weight of one linear layer, which no other module has.
        record: this rank's part of it, where ranks share it; None for an ordinary parameter.
        group: number of its param group among those of all optimizers of the model; -1 for none.
        stages: the ranks along the axis of stages that have it, where several do; () for one that no stages share.
        holders: modules and attributes, until its values are there; they may hold the model itself.
        registered: the dictionaries of parameters in which it stands from then on, by attribute.
    """

    names: tuple[str, ...]
    parameter: nn.Parameter
    holders: tuple[tuple[nn.Module, str], ...]
    position: int
    is_table: bool
    is_matrix: bool = False
    record: Record | None = None
    group: int = -1
    stages: tuple[int, ...] = ()
    registered: tuple[tuple[dict[str, Any], str], ...] = ()

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def trainable(self) -> bool:
        return self.parameter.requires_grad

    @property
    def family(self) -> Family:
        return Family.DENSE if self.record is None else self.record.family

    @property
    def replicated(self) -> bool:
        """Whether each rank of the family's axes computes the same whole gradient, of which the first one's counts."""
        return self.record is not None and self.record.replicated

    @property
    def box(self) -> Box:
        """This rank's part of the parameter."""
        return Box.all_of(self.parameter.shape) if self.record is None else self.record.box

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole parameter, of which this rank may have a part."""
        return self.box.shape

    def assign_group(self, group: int) -> None:
        """Note that the param group of that number steps it; -1: none."""
        self.group = group

    def assign_stages(self, stages: tuple[int, ...]) -> None:
        """Note which stages have it; () where no stages share it."""
        self.stages = stages

    def register(self) -> None:
        """Keep the places where modules register it, and let go of the modules: the model may be one of them."""
        self.registered = tuple((module._parameters, attribute) for module, attribute in self.holders)
        self.holders = ()

    def replace(self, parameter: nn.Parameter) -> None:
        """Have another parameter in its place, under all its names."""
        self.parameter = parameter
        for parameters, attribute in self.registered:
            parameters[attribute] = parameter

    @property
    def boxes(self) -> tuple[Box, ...]:
        """The parts of its matrices that all ranks along `tp` have; none where each has whole ones."""
        cut = self.record is not None and self.shape[-2:] != self.parameter.shape[-2:]
        return self.record.boxes if cut and self.record is not None else ()


@dataclass
class UnitSpec:
    """A unit before anything is allocated: its module's name, the module, and the parameters that it owns.

    Attributes:
        drawn: parameters of other ranks that have no values yet: they are drawn here too, in their turn.
        forward_only: whether no gradient is expected to go back through it: in the order of registration nothing is
            trained in it, nor in front of it, on any rank.
    """

    name: str
    module: nn.Module
    members: list[Member]
    drawn: list[Member] = field(default_factory=list)
    forward_only: bool = False

    def set_aside(self, elsewhere: Mapping[nn.Parameter, bool]) -> None:
        """Keep what this rank has; `elsewhere` are the others, and whether each has no values yet."""
        self.drawn = [member for member in self.members if elsewhere.get(member.parameter)]
        self.members = [member for member in self.members if member.parameter not in elsewhere]


def find_units(model: nn.Module, units: Units | None) -> tuple[list[str], str]:
    """Names of the modules that become units, in registration order, and why these.

    Args:
        units: what the user asked for. None: a Hugging Face model's own list of blocks; else the class of the most
            repeated block in a `ModuleList` or `Sequential`, where a container stands for the blocks inside; else each
            module with a million parameters of its own. Containers have no forward and are never units.

    Raises:
        BadInput: a class or glob matches nothing, or containers alone.
    """
    with absent_in_place(model):
        return _find_units(model, units)


def _find_units(model: nn.Module, units: Units | None) -> tuple[list[str], str]:
    if units is not None:
        return _asked_for(model, units), "as asked"
    no_split = set(getattr(model, "_no_split_modules", None) or ())
    if no_split:
        names = [name for name, module in _children(model) if type(module).__name__ in no_split and _runs(module)]
        if names:
            return names, f"the model's own list of blocks: {', '.join(sorted(no_split))}"
    return _repeated_blocks(model)


def _children(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(name, module) for name, module in model.named_modules() if name]


def _asked_for(model: nn.Module, units: Units) -> list[str]:
    children = _children(model)
    finds, running = _finder(children), {name: module for name, module in children if _runs(module)}
    names = {id(module): name for name, module in children}
    chosen: set[str] = set()
    for unit in units if isinstance(units, Iterable) and not isinstance(units, type | str) else [units]:
        if not isinstance(unit, type | str):
            raise BadInput(f"units has a {type(unit).__name__}: give module classes or names, as Block or 'layers.*'.")
        matches = finds(unit)
        if not any(name in running for name in matches):
            label = unit if isinstance(unit, str) else unit.__name__
            containers = [name for name, _ in children if name in matches]
            raise _nothing_found(model, label, containers, sorted({type(each).__name__ for each in running.values()}))
        for name in matches:  # a container that comes with others stands for the blocks inside
            blocks = [] if name in running else _blocks_of(model.get_submodule(name))
            chosen.update([name, *(names[id(block)] for block in blocks)])
    return [name for name, module in running.items() if name in chosen and _has_parameters(module)]


def _nothing_found(model: nn.Module, label: str, containers: Sequence[str], classes: Sequence[str]) -> BadInput:
    known = f"Classes here: {', '.join(classes)}."
    if containers:
        name, container = containers[0], model.get_submodule(containers[0])
        inside = next((inner for inner, module in container.named_modules() if inner and _runs(module)), None)
        edit = "Name the module around it" if inside is None else f"Name what is inside: '{name}{_level_of(inside)}'"
        return BadInput(
            f"units: {label!r} means {name!r}, a {type(container).__name__}, which has no forward: nothing would tell "
            f"when its weights are needed. {edit}. Units are module classes, their names, names of modules or globs "
            f"over these. {known}"
        )
    return BadInput(
        f"units: {label!r} matches no module of {type(model).__name__}.{did_you_mean(label, classes)} Give a module "
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
        dots = unit.count(".")
        return [*of_class, *(n for n in names if n.count(".") == dots and fnmatch.fnmatchcase(n, unit))]

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


def partition(model: nn.Module, unit_names: Sequence[str]) -> list[UnitSpec]:
    """Assign each parameter to the innermost unit that encloses every module holding it; the root takes the rest.

    A parameter tied across units thus goes to their lowest common ancestor that is a unit. Units left without
    parameters are dropped, but not those whose parameters other ranks have.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    specs = {name: UnitSpec(name, modules[name], []) for name in ["", *unit_names]}
    with absent_in_place(model) as elsewhere:
        for member in _members(model, modules):
            specs[_owner([name.rpartition(".")[0] for name in member.names], specs)].members.append(member)
    partitioned = [spec for spec in specs.values() if spec.members]
    _tell_forward_only(partitioned)
    for spec in partitioned:
        spec.set_aside(elsewhere)
    return partitioned


def _tell_forward_only(specs: Sequence[UnitSpec]) -> None:
    members = [member for spec in specs for member in spec.members]
    first = min((member.position for member in members if member.trainable), default=len(members))
    trained = [spec.name.split(".") for spec in specs if any(member.trainable for member in spec.members)]
    around = {".".join(parts[:depth]) for parts in trained for depth in range(len(parts) + 1)}
    for spec in specs:
        spec.forward_only = spec.name not in around and all(member.position < first for member in spec.members)


def _members(model: nn.Module, modules: dict[str, nn.Module]) -> list[Member]:
    members = []
    for position, (names, parameter) in enumerate(_by_names(model).items()):
        paths = [name.rpartition(".") for name in names]
        holders = tuple((modules[path], attribute) for path, _, attribute in paths)
        record = next(filter(None, (record_of(*holder) for holder in holders)), None)
        is_table = isinstance(holders[0][0], nn.Embedding)
        (module, attribute), *others = holders
        is_matrix = isinstance(module, nn.Linear) and attribute == "weight" and not others
        members.append(Member(names, parameter, holders, position, is_table, is_matrix, record))
    return members


def parameters_by_names(model: nn.Module) -> dict[tuple[str, ...], nn.Parameter]:
    """Each parameter of the model, by all of its names, its own first, in the order of `model.parameters()`.

    Those that ranks with other stages have are among them, on the meta device.
    """
    with absent_in_place(model):
        return _by_names(model)


def _by_names(model: nn.Module) -> dict[tuple[str, ...], nn.Parameter]:
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return {tuple(each): parameter for parameter, each in names.items()}


def _owner(holders: list[str], units: Container[str]) -> str:
    common = holders[0].split(".") if holders[0] else []
    for holder in holders[1:]:
        parts = holder.split(".") if holder else []
        length = 0
        while length < min(len(common), len(parts)) and common[length] == parts[length]:
            length += 1
        common = common[:length]
    while common and ".".join(common) not in units:
        common.pop()
    return ".".join(common)
