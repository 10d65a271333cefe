"""Table of strategies: where each state of a model lives. Frozen descriptions, no tensors.

A `Place` is an ordered tuple of mesh axes that a state is split over (outermost cut first) and a memory tier. A `Plan`
is four places. Every ZeRO stage and FSDP strategy is one row:

    >>> print(Plan.named("zero3"))
    zero3: weight D | between D | grad D | optim D

`S` is the inner shard axis (`dp_shard`), `R` the outer replica axis (`dp_replicate`), `D` all data axes that the mesh
has, `-` none. One rule makes every move a contiguous collective: each state's axes are a prefix of `optim`'s, and
`between`'s are a prefix of `weight`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from terrazzo.engine.mesh.family import DATA_AXES
from terrazzo.errors import BadInput
from terrazzo.messages import did_you_mean
from terrazzo.words import tier_shares

__all__ = ["OFFLOADS", "ON_DEVICE", "PLANS", "ROWS", "Place", "Plan", "Tiers"]

_SYMBOLS = {"S": ("dp_shard",), "R": ("dp_replicate",), "D": DATA_AXES}


class Tiers(NamedTuple):
    """Tiers on which the states of one unit rest: `device`, `cpu` or `nvme` each."""

    weight: str = "device"
    grad: str = "device"
    optim: str = "device"


ON_DEVICE = Tiers()


@dataclass(frozen=True)
class Place:
    """Axes over which one state is split, and the tier that it rests on.

    Attributes:
        axes: mesh axes or the symbols S, R, D, in cutting order; empty means a full copy on every rank.
        tier: `device`, `cpu` or `nvme`, or tiers with their shares of the units, `cpu:0.7` or `nvme:0.5,cpu:0.3`; what
            they leave is on the device.
    """

    axes: tuple[str, ...] = ()
    tier: str = "device"

    def __post_init__(self) -> None:
        axes: object = self.axes
        if isinstance(axes, str):
            raise BadInput(f"tz.Place({axes!r}): axes are a tuple of names. Write tz.Place.parse({axes!r}).")
        if not (isinstance(axes, tuple) and all(isinstance(axis, str) for axis in axes)):
            raise BadInput(f"tz.Place: axes are {axes!r}; give a tuple of names, such as ('dp_shard',) or ('S', 'R').")
        if not _may_be_axes(axes):
            raise BadInput(f"tz.Place: axes are {axes!r}; give names, each once, or () for a whole copy on every rank.")
        tier: object = self.tier
        if not isinstance(tier, str):
            raise BadInput(f"tz.Place: tier is {tier!r}; give 'device', 'cpu' or 'nvme', or shares such as 'cpu:0.7'.")

    @classmethod
    def parse(cls, text: str) -> Place:
        """The place that a text says: `"-"`, `"D"`, `"S,R"`, `"dp_shard"`, `"D@cpu"`, `"D@cpu:0.7"`.

        Raises:
            BadInput: an axis or a tier that is empty, an axis that is there twice, or `-` beside an axis.
        """
        axes, at, tier = text.partition("@")
        names = tuple(part.strip() for part in axes.split(","))
        names = () if names == ("-",) else names
        if not _may_be_axes(names) or (at and not tier.strip()):
            raise BadInput(
                f"{text!r} is no place of a state. Write the axes that it is split over, such as 'D' or 'S,R', or '-' "
                "alone for a whole copy on every rank; off the device '@' and a tier follow, such as 'D@cpu'."
            )
        return cls(names, tier.strip() or "device")

    def __str__(self) -> str:
        axes = ",".join(self.axes) or "-"
        return axes if self.tier == "device" else f"{axes}@{self.tier}"

    @property
    def offloaded(self) -> bool:
        """Whether any unit's part lies elsewhere than on the device."""
        return set(self.shares) != {"device"}

    @property
    def shares(self) -> dict[str, float]:
        """Share of the units that is on each tier; device first, nvme last.

        Raises:
            BadInput: what is no tier or share.
        """
        return dict(tier_shares(self.tier))

    def tier_of(self, index: int, units: int) -> str:
        """The tier of one unit.

        The first units stay on the device, and the last ones go furthest: their gradients come first in backward, and
        the first units' weights are needed first in forward, so that what takes longest has most time.

        Args:
            index: in the order of registration, root first.
            units: how many there are.
        """
        reached = 0.0
        for tier, share in tier_shares(self.tier).items():
            reached += share
            if index + 0.5 <= reached * units + 1e-9:
                return tier
        return tier

    def among(self, names: Container[str]) -> tuple[str, ...]:
        """Axes of this place that `names` has, symbols resolved."""
        axes = (name for axis in self.axes for name in _SYMBOLS.get(axis, (axis,)) if name in names)
        return tuple(dict.fromkeys(axes))

    def resolve(self, mesh_axes: Sequence[str], state: str, plan: str) -> Place:
        """Return the same place in axes that `mesh_axes` has.

        Raises:
            BadInput: an absent axis or an unusable tier.
        """
        try:
            _ = self.shares
        except BadInput as error:
            raise BadInput(f"plan {plan}: {state}: {error}") from None
        for axis in self.axes:
            if not Place((axis,)).among(mesh_axes):
                wanted = _SYMBOLS.get(axis, (axis,))[0]
                raise BadInput(
                    f"plan {plan}: {state} is split over {axis} ({wanted}), but the mesh has the axes "
                    f"{', '.join(mesh_axes)}. Pass a mesh with that axis, or choose a plan that does not need it."
                )
        return Place(self.among(mesh_axes), self.tier)


def _may_be_axes(names: Sequence[str]) -> bool:
    return not {"", "-"} & {*names} and len({*names}) == len(names)


_TABLE = {
    #                      weight  between grad   optim
    "zero0":              ("-",    "-",    "-",   "-"),
    "zero1":              ("-",    "-",    "-",   "D"),
    "zero2":              ("-",    "-",    "D",   "D"),
    "zero3":              ("D",    "D",    "D",   "D"),
    "shard_grad_op":      ("D",    "-",    "D",   "D"),
    "hybrid_shard":       ("S",    "S",    "S",   "S"),
    "hybrid_shard_zero2": ("S",    "-",    "S",   "S"),
    "hfsdp":              ("S",    "S",    "S",   "S,R"),
    "hpz":                ("S,R",  "S",    "S,R", "S,R"),
}  # fmt: skip
_ALIASES = {"ddp": "zero0", "no_shard": "zero0", "full_shard": "zero3"}
_ELSEWHERE = {
    "fsdp": "zero3", "fsdp1": "zero3", "fsdp2": "zero3", "deepspeed": "zero3", "dp": "ddp",
    "hsdp": "hybrid_shard", "mics": "hybrid_shard", "zero++": "hpz",
}  # fmt: skip
"""Names of strategies in other libraries: too loosely to be taken, and close in letters to something else."""


def _with_aliases(row: str) -> str:
    """`zero3 (or full_shard)`."""
    others = [alias for alias, same in _ALIASES.items() if same == row]
    return f"{row} (or {', '.join(others)})" if others else row


ROWS = tuple(_TABLE)
"""Names of the rows of the table."""

_ROW_OF = {tuple(Place.parse(text).among(DATA_AXES) for text in row): name for name, row in _TABLE.items()}

PLANS = (*_TABLE, *_ALIASES)
"""Names that `Plan.named` knows, each of which may be followed by `@`, one of `OFFLOADS`, and a share of the units."""

OFFLOADS: dict[str, dict[str, str]] = {
    "cpu": {"grad": "cpu", "optim": "cpu"},
    "cpu-all": {"weight": "cpu", "grad": "cpu", "optim": "cpu"},
    "nvme": {"grad": "cpu", "optim": "nvme"},
    "nvme-all": {"weight": "nvme", "grad": "cpu", "optim": "nvme"},
}
"""Tiers by state: ZeRO-Offload (arXiv 2101.06840), FSDP's CPU offload, and ZeRO-Infinity (arXiv 2104.07857) with the
optimizer alone or the weights too on disk."""


@dataclass(frozen=True, init=False)
class Plan:
    """A row of the table: four places. Each argument is a `Place` or its text, such as `"S,R"` or `"-"`.

    Attributes:
        weight: the compute weights, at rest.
        between: the compute weights, from the end of forward to the start of backward.
        grad: the gradient, once it has been reduced in a micro-batch.
        optim: master weights and whatever the optimizer keeps.
        name: for messages and tables.
    """

    weight: Place
    between: Place
    grad: Place
    optim: Place
    name: str = "custom"

    def __init__(
        self, weight: Place | str, between: Place | str, grad: Place | str, optim: Place | str, name: str = "custom"
    ) -> None:
        rows = {"weight": weight, "between": between, "grad": grad, "optim": optim}
        for state, value in rows.items():
            try:
                place = Place.parse(value) if isinstance(value, str) else value
            except BadInput as error:
                raise BadInput(f"plan {name}: {state}: {error}") from None
            if not isinstance(place, Place):
                raise BadInput(f"plan {name}: {state} is {value!r}; give a tz.Place or its text, such as 'D@cpu'.")
            object.__setattr__(self, state, place)
        object.__setattr__(self, "name", name)

    @classmethod
    def named(cls, name: str) -> Plan:
        """The preset of that name: `zero3`, `zero3@cpu`, or `zero3@cpu:0.7` with that share of the units offloaded.

        Raises:
            BadInput: an unknown name; the nearest is named. A share that is none is found by `resolve`.
        """
        given: object = name
        if not isinstance(given, str):
            raise BadInput(f"There is no plan {given!r}: give a name, such as 'zero3'. Plans are {', '.join(ROWS)}.")
        base, at, offload = name.strip().lower().partition("@")
        offload, colon, share = offload.replace("_", "-").partition(":")
        key = base.replace("-", "_")
        row = _TABLE.get(_ALIASES.get(key, key))
        if row is None:
            near = f" Did you mean '{_ELSEWHERE[key]}'?" if key in _ELSEWHERE else did_you_mean(key, PLANS)
            raise BadInput(f"There is no plan {name!r}.{near} Plans are {', '.join(map(_with_aliases, ROWS))}.")
        if at and offload not in OFFLOADS:
            raise BadInput(
                f"There is no offload {offload!r} in plan {name!r}.{did_you_mean(offload, OFFLOADS)} "
                f"Offloads are {', '.join(OFFLOADS)}, such as {key}@cpu."
            )
        plan = cls(*row, name=key)
        if not at:
            return plan
        tiers = {state: f"{tier}{colon}{share}" for state, tier in OFFLOADS[offload].items()}
        return plan.on(**tiers, name=f"{key}@{offload}{colon}{share}")

    def on(
        self, weight: str | None = None, grad: str | None = None, optim: str | None = None, *, name: str | None = None
    ) -> Plan:
        """This plan with other tiers, each as in `Place`; None leaves a state where it is.

        Args:
            name: of the new plan; by default what `named` knows it by, or `custom` where a preset has no such tiers.
        """
        tiers = {"weight": weight, "grad": grad, "optim": optim}
        rows = {
            state: place if (tier := tiers.get(state)) is None else Place(place.axes, tier)
            for state, place in self.places().items()
        }
        return Plan(**rows, name=_name_on(self.name, rows) if name is None else name)

    def places(self) -> dict[str, Place]:
        return {"weight": self.weight, "between": self.between, "grad": self.grad, "optim": self.optim}

    @property
    def resting_places(self) -> tuple[Place, Place, Place]:
        """Places of what is kept from step to step: weights, gradients' sums, and the optimizer's states."""
        return self.weight, self.grad, self.optim

    @property
    def offloaded(self) -> bool:
        """Whether any state, of any unit, is away from the device."""
        return any(place.offloaded for place in self.places().values())

    @property
    def on_disk(self) -> bool:
        """Whether any state, of any unit, is on `nvme`."""
        return any("nvme" in place.shares for place in self.places().values())

    def over(self, axes: Container[str]) -> Plan:
        """This plan split over only these axes, symbols resolved: the others split nothing."""
        return self.along(lambda own: Place(tuple(own)).among(axes))

    def along(self, renamed: Callable[[Sequence[str]], Sequence[str]]) -> Plan:
        """This plan with other axes in the place of each state's."""
        rows = {state: Place(tuple(renamed(place.axes)), place.tier) for state, place in self.places().items()}
        return Plan(**rows, name=self.name)

    def regathered_as(self, other: Plan) -> Plan:
        """This plan, for parameters in the same units as those of `other`.

        A unit gathers all that it has again in backward, or nothing: `other` says which, where both split weights.
        """
        if not (self.weight.axes and other.weight.axes) or bool(self.between.axes) == bool(other.between.axes):
            return self
        return replace(self, between=Place(self.weight.axes if other.between.axes else ()))

    def tiers_of(self, index: int, units: int) -> Tiers:
        """Tiers on which the states of one unit rest; arguments as of `Place.tier_of`."""
        return Tiers(*(place.tier_of(index, units) for place in (self.weight, self.grad, self.optim)))

    @property
    def base(self) -> str:
        """The name without its offload."""
        return self.name.partition("@")[0]

    @property
    def row(self) -> str | None:
        """The row of the table that splits the states as this plan does, whatever its name and tiers; None: no row."""
        return _ROW_OF.get(tuple(place.among(DATA_AXES) for place in self.places().values()))

    @property
    def groups(self) -> bool:
        """Whether it tells the ranks of a shard group from replicas, so that the mesh must have `dp_replicate` too."""
        return self._names("S", "R", "dp_replicate")

    def _names(self, *axes: str) -> bool:
        return any(axis in axes for place in self.places().values() for axis in place.axes)

    def resolve(self, mesh_axes: Sequence[str]) -> Plan:
        """This plan in the data axes of a mesh, checked against the prefix rule.

        Args:
            mesh_axes: names of the mesh's data axes.
        """
        known = [axis for axis in DATA_AXES if axis in mesh_axes]
        if self._names("S", "R") and not {"dp_shard", "dp_replicate"} <= set(known):
            raise BadInput(
                f"plan {self.name} needs the axes dp_replicate and dp_shard; this mesh has {', '.join(known) or 'none'}"
                '. Pass mesh=init_device_mesh(device, (nodes, ranks), mesh_dim_names=("dp_replicate", "dp_shard")), or '
                "take a plan that splits over D, all data axes, such as zero3."
            )
        rows = {state: place.resolve(known, state, self.name) for state, place in self.places().items()}
        resolved = Plan(**rows, name=self.name)
        resolved._check_prefixes()
        if self.between.offloaded:
            raise BadInput(
                f"plan {self.name}: between is placed on {self.between.tier!r}, but what is kept from forward to "
                "backward stays on the device, or is the resting weight itself. Remove the tier from between."
            )
        return resolved

    def _check_prefixes(self) -> None:
        pairs = [("weight", "optim"), ("grad", "optim"), ("between", "weight")]
        for inner, outer in pairs:
            short, long = getattr(self, inner), getattr(self, outer)
            if long.axes[: len(short.axes)] != short.axes:
                raise BadInput(
                    f"plan {self.name}: {inner} is split over {short} and {outer} over {long}, but {inner}'s axes must "
                    f"be a prefix of {outer}'s, so that ranges nest. Give {outer} the axes {short} first, or split "
                    f"{inner} over fewer axes."
                )

    def __str__(self) -> str:
        return f"{self.name}: " + " | ".join(f"{state} {place}" for state, place in self.places().items())


def _name_on(name: str, rows: Mapping[str, Place]) -> str:
    """The name of a plan that was called `name`, with the tiers of these places."""
    base = name.partition("@")[0]
    if base not in PLANS:  # the user's own
        return name
    tiers = {state: place.tier for state, place in rows.items()}
    if {*tiers.values()} == {"device"}:
        return base
    _, colon, share = tiers["optim"].partition(":")
    for offload, named in OFFLOADS.items():
        if tiers == {state: f"{named[state]}{colon}{share}" if state in named else "device" for state in tiers}:
            return f"{base}@{offload}{colon}{share}"
    return "custom"
