"""The neutral description: what a configuration asks for, in no dialect's words.

A `Description` is sections of settings, all frozen. Each `Setting` knows its value, who gave it, and under which key of
the source. A setting's path, such as `precision.reduce`, is its name everywhere: in verdicts, tables and differences.
Settings that a dialect has no word for are *unset*: the choice is left to code that a configuration does not show.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar, get_type_hints

from terrazzo.dialects.core.key_verdict import Loss
from terrazzo.dialects.core.sections import (
    OFF,
    TIER_PATHS,
    UNSET,
    ActivationCheckpointingSection,
    BatchSection,
    LoadingSection,
    MeshSection,
    OffloadSection,
    OptimizerSection,
    ParallelSection,
    PrecisionSection,
    PrefetchSection,
    SavingSection,
    ScheduleSection,
    Setting,
    SettingOrigin,
    SettingsByPath,
    ShardingSection,
    TrainingSection,
    UnitsSection,
)
from terrazzo.engine import PLANS, Place, Plan

__all__ = [
    "DATA_AXIS_PATHS",
    "DTYPES",
    "EVERY_DTYPE",
    "LOADED",
    "MEANING",
    "MODEL_AXES",
    "PARAMETER_DTYPES",
    "PATHS",
    "SHARDING_PATHS",
    "STATES",
    "TIER_PATHS",
    "UNSET",
    "Description",
    "Extra",
    "Setting",
    "SettingOrigin",
    "SettingsByPath",
    "asks_for_nothing",
    "build",
    "row_name",
]

T = TypeVar("T")
STATES = ("weight", "between", "grad", "optim")
SHARDING_PATHS = tuple(f"sharding.{state}" for state in STATES)
DATA_AXIS_PATHS = ("mesh.dp_replicate", "mesh.dp_shard")
MODEL_AXES = ("tp", "cp", "sp", "ep", "pp")
"""Axes of the mesh that are no data axes."""
LOADED = "loaded"
"""The dtype in which the model was loaded, where a stack keeps it and the configuration does not say it."""
DTYPES = ("fp32", "bf16", "fp16", "fp64", "fp8", "int8", LOADED)
EVERY_DTYPE = ("weight", "compute", "reduce", "accumulate", "master", "moments", "buffers", "output", "saved")
"""Names of the settings of `precision` that are dtypes."""
PARAMETER_DTYPES = tuple(name for name in EVERY_DTYPE if name not in ("buffers", "output"))
"""Those of them that are about a parameter, its gradient or its optimizer state."""


@dataclass(frozen=True)
class Extra:
    """A setting of the source with no neutral meaning, kept as it stands.

    Attributes:
        key: dotted, as in the source.
        value: as in the source.
        why: what another dialect loses with it, as the end of a sentence.
        loss: `harmless`: without it another dialect does the same thing, as for log intervals and bucket sizes;
            `refused`: without it it would not, and the key must not be dropped in silence; `lossy`: all others.
        usual: it is what the library does where nothing is said.
        here: what says it in Terrazzo's own configuration.
    """

    key: str
    value: Any
    why: str = ""
    loss: Loss = "lossy"
    usual: bool = False
    here: str = ""

    def lost_in(self, dialect: str) -> str:
        """What the dialect loses with it; of Terrazzo's, what says it there."""
        return f"in Terrazzo: {self.here}" if self.here and dialect == "terrazzo" else self.why


@dataclass(frozen=True)
class Description:
    """What one configuration asks for. Make one with `build`.

    Attributes:
        dialect: the dialect it was read from.
        extras: what the source says beyond the sections.
        document: the source itself, as its own library takes it: without keys that are refused.
    """

    dialect: str = ""
    sharding: ShardingSection = field(default_factory=ShardingSection)
    mesh: MeshSection = field(default_factory=MeshSection)
    parallel: ParallelSection = field(default_factory=ParallelSection)
    units: UnitsSection = field(default_factory=UnitsSection)
    precision: PrecisionSection = field(default_factory=PrecisionSection)
    batch: BatchSection = field(default_factory=BatchSection)
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    schedule: ScheduleSection = field(default_factory=ScheduleSection)
    training: TrainingSection = field(default_factory=TrainingSection)
    prefetch: PrefetchSection = field(default_factory=PrefetchSection)
    activation_checkpointing: ActivationCheckpointingSection = field(default_factory=ActivationCheckpointingSection)
    offload: OffloadSection = field(default_factory=OffloadSection)
    loading: LoadingSection = field(default_factory=LoadingSection)
    saving: SavingSection = field(default_factory=SavingSection)
    extras: tuple[Extra, ...] = ()
    document: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, path: str) -> Setting[Any]:
        """The setting at `section.name`."""
        section, _, name = path.partition(".")
        setting: Setting[Any] = getattr(getattr(self, section), name)
        return setting

    def value(self, path: str) -> Any:
        """The value of the setting at `section.name`; None where it is unset."""
        return self[path].value

    def items(self) -> Iterator[tuple[str, Setting[Any]]]:
        """Every setting with its path, in the order of the sections; unset ones, too."""
        return ((path, self[path]) for path in PATHS)

    @property
    def row(self) -> str | None:
        """The name of the row of the table that `sharding` is; None: it has none, or is not said."""
        return row_name(*(self[path].value for path in SHARDING_PATHS))

    @property
    def plan(self) -> Plan | None:
        """The row with its tiers, as the engine takes it; None where the source does not say it."""
        if not all(self[path].is_set for path in SHARDING_PATHS):
            return None
        places = {state: Place.parse(self.value(f"sharding.{state}")) for state in STATES}
        tiers = {path.partition(".")[2]: self.value(path) or "device" for path in TIER_PATHS}
        placed = {state: Place(place.axes, tiers.get(state, "device")) for state, place in places.items()}
        return Plan(**placed, name=self.row or "custom")

    def replace(self, changed: Mapping[str, Setting[Any]], extras: tuple[Extra, ...] | None = None) -> Description:
        """A copy with other settings at some paths. Raises: `KeyError` for an unknown path."""
        by_section: dict[str, dict[str, Setting[Any]]] = {}
        for path, setting in changed.items():
            if path not in MEANING:
                raise KeyError(f"the neutral description has no {path!r}")
            section, _, name = path.partition(".")
            by_section.setdefault(section, {})[name] = setting
        sections: dict[str, Any] = {name: _with(getattr(self, name), changes) for name, changes in by_section.items()}
        return _with(self, sections if extras is None else {**sections, "extras": extras})


def _with(record: T, changes: Mapping[str, Any]) -> T:
    """`dataclasses.replace` in a third of its time, for records whose fields are all arguments."""
    return type(record)(**{**vars(record), **changes})


def build(
    dialect: str,
    settings: Mapping[str, Setting[Any]],
    extras: tuple[Extra, ...] = (),
    document: Mapping[str, Any] | None = None,
) -> Description:
    """The description with these settings by path, and all others unset."""
    return Description(dialect, document=document or {}).replace(settings, extras)


def asks_for_nothing(path: str, value: Any) -> bool:
    """Whether this value asks for nothing to happen, so that a dialect without the setting agrees with it."""
    return value is None or bool(path in OFF and value == OFF[path])


def row_name(weight: str | None, between: str | None, grad: str | None, optim: str | None) -> str | None:
    """The name of a row by its axes, such as `zero3`; None for one of its own."""
    return _ROWS.get((weight, between, grad, optim))


def _rows() -> dict[tuple[str | None, ...], str]:
    rows: dict[tuple[str | None, ...], str] = {}
    for name in PLANS:  # real names stand before the aliases
        places = Plan.named(name).places().values()
        rows.setdefault(tuple(str(place) for place in places), name)
    return rows


_ROWS = _rows()
_SECTIONS = tuple(each.name for each in fields(Description) if each.name not in ("dialect", "extras", "document"))
_TYPES = {name: get_type_hints(type(getattr(Description(), name)), include_extras=True) for name in _SECTIONS}
MEANING: dict[str, str] = {
    f"{section}.{name}": hint.__metadata__[0] for section, hints in _TYPES.items() for name, hint in hints.items()
}
"""A setting's meaning in a few words, by path."""
PATHS = tuple(MEANING)
"""Every setting that there is, as `section.name`."""
