"""The parameters of a model by units: which unit owns each, and what is known of it before anything is allocated.

Modules are told apart by what they are, and not by their names, of which one module may have several: blocks of which
one object is called many times, or an attribute beside the list of blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from terrazzo.engine.mesh.family import Family
from terrazzo.engine.partition.absent_parameters import absent_in_place
from terrazzo.engine.partition.box import Box, Record, record_of

__all__ = ["Member", "UnitSpec", "left_without", "parameters_by_names", "partition"]

TiedRanks = Callable[[Sequence[str]], tuple[int, ...]]


@dataclass
class Member:
    """One parameter: every name it has, where it is registered, and what steps it.

    All is known when it is made, but two fields change:

        field      when                                           by
        parameter  values come in the place of a meta one,        `replace`, of `InitialValues.draw`
                   or this rank's part in the place of the whole
        group      an optimizer is put on it                      `assign_groups`
                   its optimizer is gone                          `Drivers.drop_gone`

    Attributes:
        kinds: classes of the modules that have it, each module once, in the order of its names.
        registered: the dictionaries of parameters in which it stands, by attribute; not the modules, which may hold the
            model itself.
        position: among the parameters of the model, in the order of registration.
        is_table: of an embedding, which is looked up before all that is registered after it.
        is_matrix: the weight of one linear layer, which no other module has.
        record: this rank's part of it, where ranks share it; None for an ordinary parameter.
        group: number of its param group among those of all optimizers of the model; -1 for none.
        tied_ranks: the ranks along the axis of stages that have it, where several do; () for one that no stages share.
    """

    names: tuple[str, ...]
    parameter: nn.Parameter
    kinds: tuple[type[nn.Module], ...]
    registered: tuple[tuple[dict[str, Any], str], ...]
    position: int
    is_table: bool
    is_matrix: bool
    record: Record | None
    tied_ranks: tuple[int, ...]
    group: int = -1

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
    def in_parts(self) -> bool:
        """Whether ranks that see the same data have a part each, of the parameter or of its gradient."""
        return self.record is not None and not (self.record.box.is_all and self.record.replicated)

    @property
    def box(self) -> Box:
        """This rank's part of the parameter."""
        return Box.all_of(self.parameter.shape) if self.record is None else self.record.box

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole parameter, of which this rank may have a part."""
        return self.box.shape

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


@dataclass(frozen=True, eq=False)
class UnitSpec:
    """A unit before anything is allocated: its module's name, the module, and the parameters that it owns.

    Attributes:
        members: those that this rank has.
        drawn: parameters of other ranks that have no values yet: they are drawn here too, in their turn.
        forward_only: whether no gradient is expected to go back through it: in the order of registration nothing is
            trained in it, nor in front of it, on any rank.
    """

    name: str
    module: nn.Module
    members: Sequence[Member]
    drawn: Sequence[Member]
    forward_only: bool


def partition(model: nn.Module, unit_names: Sequence[str], tied_ranks: TiedRanks | None = None) -> list[UnitSpec]:
    """Assign each parameter to the innermost unit that encloses every module holding it; the root takes the rest.

    A parameter tied across units thus goes to their lowest common ancestor that is a unit; so does that of a module
    which two units hold. Units left without parameters are dropped, but not those whose parameters other ranks have.

    Args:
        tied_ranks: of a parameter's names, `Member.tied_ranks`; None for a model without stages.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    owned: dict[str, list[Member]] = {name: [] for name in ["", *unit_names]}
    units = _Enclosing({name: modules[name] for name in owned})
    with absent_in_place(model) as elsewhere:  # the parameters of other ranks, and whether each has no values yet
        for member, holders in _members(model, modules, tied_ranks or _untied):
            owned[units.owner(holders)].append(member)
    forward_only = _forward_only(owned)
    return [
        UnitSpec(
            name,
            modules[name],
            members=[member for member in members if member.parameter not in elsewhere],
            drawn=[member for member in members if elsewhere.get(member.parameter)],
            forward_only=name in forward_only,
        )
        for name, members in owned.items()
        if members
    ]


def _forward_only(owned: Mapping[str, Sequence[Member]]) -> set[str]:
    """Names of the units of which `UnitSpec.forward_only` is so, from the members that each owns on any rank."""
    every = [member for members in owned.values() for member in members]
    first = min((member.position for member in every if member.trainable), default=len(every))
    trained = [name.split(".") for name, members in owned.items() if any(member.trainable for member in members)]
    around = {".".join(parts[:depth]) for parts in trained for depth in range(len(parts) + 1)}
    return {name for name, members in owned.items() if name not in around and all(m.position < first for m in members)}


def _untied(names: Sequence[str]) -> tuple[int, ...]:
    return ()


def _members(
    model: nn.Module, modules: dict[str, nn.Module], tied_ranks: TiedRanks
) -> Iterator[tuple[Member, list[nn.Module]]]:
    """Each parameter, and the modules that hold it."""
    for position, (names, parameter) in enumerate(_by_names(model).items()):
        paths = [name.rpartition(".") for name in names]
        each = {(id(modules[path]), attribute): modules[path] for path, _, attribute in paths}
        holders = [(module, attribute) for (_, attribute), module in each.items()]
        (module, attribute), *others = holders
        member = Member(
            names,
            parameter,
            kinds=tuple(type(each) for each, _ in holders),
            registered=tuple((each._parameters, attribute) for each, attribute in holders),
            position=position,
            is_table=isinstance(module, nn.Embedding),
            is_matrix=isinstance(module, nn.Linear) and attribute == "weight" and not others,
            record=next(filter(None, (record_of(*holder) for holder in holders)), None),
            tied_ranks=tied_ranks(names),
        )
        yield member, [module for module, _ in holders]


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


class _Enclosing:
    """Which units enclose a module, by whatever path.

    Args:
        units: by name, in the order of registration, with the root.
    """

    def __init__(self, units: Mapping[str, nn.Module]) -> None:
        self._around: dict[int, list[str]] = {}
        for name, unit in units.items():
            for module in unit.modules() if name else ():
                self._around.setdefault(id(module), []).append(name)
        self._depths = {name: frozenset(self._of(module)) for name, module in units.items()}

    def _of(self, module: nn.Module) -> list[str]:
        return self._around.get(id(module), [])

    def owner(self, holders: Sequence[nn.Module]) -> str:
        """The innermost unit around all of these modules; the root's name where there is none."""
        first, *others = ({*self._of(holder)} for holder in holders)
        common = first.intersection(*others)
        nested = [name for name in common if all(self._are_nested(name, other) for other in common)]
        return max(nested, key=lambda name: len(self._depths[name]), default="")

    def _are_nested(self, one: str, other: str) -> bool:
        """Whether one encloses the other: of two units beside each other neither has what both hold."""
        return one in self._depths[other] or other in self._depths[one]


def left_without(model: nn.Module, unit_names: Iterable[str], specs: Sequence[UnitSpec]) -> list[str]:
    """Names of the units that own nothing, since modules outside of them have their parameters too.

    Args:
        specs: all that `partition` has made of these names.
    """
    kept = {spec.name for spec in specs}
    owners = {member.parameter: spec.module for spec in specs for member in (*spec.members, *spec.drawn)}

    def lost(unit: nn.Module) -> bool:
        inside = {id(module) for module in unit.modules()}
        return any(id(owners[parameter]) not in inside for parameter in unit.parameters())

    return [name for name in unit_names if name not in kept and lost(model.get_submodule(name))]
