"""The table: where each state of a model lives. Frozen descriptions, no tensors.

A `Place` is an ordered tuple of mesh axes that a state is split over (outermost cut first) and a memory tier. A `Plan`
is four places. Every ZeRO stage and FSDP strategy is one row:

    >>> print(Plan.named("zero3"))
    zero3: weight D | between D | grad D | optim D

`S` is the inner shard axis (`dp_shard`), `R` the outer replica axis (`dp_replicate`), `D` all data axes that the mesh
has, `-` none. One rule makes every move a contiguous collective: each state's axes are a prefix of `optim`'s, and
`between`'s are a prefix of `weight`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from terrazzo.errors import BadInput, did_you_mean

__all__ = ["DATA_AXES", "PLANS", "Place", "Plan"]

DATA_AXES = ("dp_shard", "cp", "dp_replicate")
"""Mesh axes along which ranks see different data, innermost first: the order in which `D` cuts a state."""

_SYMBOLS = {"S": ("dp_shard",), "R": ("dp_replicate",), "D": DATA_AXES, "-": ()}
_TIERS = ("device", "cpu", "nvme")


@dataclass(frozen=True)
class Place:
    """Where one state lives.

    Attributes:
        axes: mesh axes or the symbols S, R, D, in cutting order; empty means a full copy on every rank.
        tier: `device`; `cpu` and `nvme` are reserved for offload.
    """

    axes: tuple[str, ...] = ()
    tier: str = "device"

    @classmethod
    def parse(cls, text: str) -> Place:
        """`"-"`, `"D"`, `"S,R"`, `"dp_shard"`, `"D@cpu"`."""
        axes, _, tier = text.partition("@")
        names = tuple(part.strip() for part in axes.split(",") if part.strip() not in ("", "-"))
        return cls(names, tier.strip() or "device")

    def __str__(self) -> str:
        axes = ",".join(self.axes) or "-"
        return axes if self.tier == "device" else f"{axes}@{self.tier}"

    def resolve(self, mesh_axes: Sequence[str], state: str, plan: str) -> Place:
        """The same place in axes that `mesh_axes` has. Errors: `BadInput` for an absent axis or an unusable tier."""
        if self.tier not in _TIERS:
            raise BadInput(f"plan {plan}: {state} names the tier {self.tier!r}; tiers are {', '.join(_TIERS)}.")
        if self.tier != "device":
            raise BadInput(
                f"plan {plan}: {state} is placed on {self.tier!r}, but this version keeps every state on the device. "
                f"Remove '@{self.tier}'."
            )
        resolved: list[str] = []
        for axis in self.axes:
            present = [name for name in _SYMBOLS.get(axis, (axis,)) if name in mesh_axes]
            if not present:
                wanted = _SYMBOLS.get(axis, (axis,))[0]
                raise BadInput(
                    f"plan {plan}: {state} is split over {axis} ({wanted}), but the mesh has the axes "
                    f"{', '.join(mesh_axes)}. Pass a mesh with that axis, or choose a plan that does not need it."
                )
            resolved += [name for name in present if name not in resolved]
        return Place(tuple(resolved), self.tier)


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
    "hpz":                ("S,R",  "S",    "S",   "S,R"),
}  # fmt: skip
_ALIASES = {"ddp": "zero0", "no_shard": "zero0", "full_shard": "zero3"}
_NEED_TWO_AXES = ("hybrid_shard", "hybrid_shard_zero2", "hfsdp", "hpz")

PLANS = (*_TABLE, *_ALIASES)
"""Names that `Plan.named` knows."""


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
        for state, place in rows.items():
            object.__setattr__(self, state, Place.parse(place) if isinstance(place, str) else place)
        object.__setattr__(self, "name", name)

    @classmethod
    def named(cls, name: str) -> Plan:
        """The preset of that name. Errors: `BadInput` with the nearest name."""
        key = name.lower().replace("-", "_")
        row = _TABLE.get(_ALIASES.get(key, key))
        if row is None:
            raise BadInput(f"There is no plan {name!r}.{did_you_mean(key, PLANS)} Plans are {', '.join(PLANS)}.")
        return cls(*row, name=key)

    def places(self) -> dict[str, Place]:
        return {"weight": self.weight, "between": self.between, "grad": self.grad, "optim": self.optim}

    def resolve(self, mesh_axes: Sequence[str]) -> Plan:
        """This plan in the data axes of a mesh, checked against the prefix rule.

        Args:
            mesh_axes: names of the mesh's data axes.
        """
        known = [axis for axis in DATA_AXES if axis in mesh_axes]
        if self.name in _NEED_TWO_AXES and not {"dp_shard", "dp_replicate"} <= set(known):
            raise BadInput(
                f"plan {self.name} needs the axes dp_replicate and dp_shard; this mesh has {', '.join(known) or 'none'}"
                '. Pass mesh=init_device_mesh(device, (nodes, ranks), mesh_dim_names=("dp_replicate", "dp_shard")).'
            )
        rows = {state: place.resolve(known, state, self.name) for state, place in self.places().items()}
        resolved = Plan(**rows, name=self.name)
        resolved._check_prefixes()
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
