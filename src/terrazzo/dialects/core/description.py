"""The neutral description: what a configuration asks for, in no dialect's words.

A `Description` is sections of settings, all frozen. Each `Setting` knows its value, who gave it, and under which key of
the source. A setting's path, such as `precision.reduce`, is its name everywhere: in verdicts, tables and differences.
Settings that a dialect has no word for are *unset*: the choice is left to code that a configuration does not show.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Generic, Literal, TypeVar, get_type_hints

from terrazzo.dialects.core.verdict import Loss
from terrazzo.engine import PLANS, LossScaling, Place, Plan

__all__ = [
    "DATA_AXES",
    "DTYPES",
    "EVERY_DTYPE",
    "LOADED",
    "MEANING",
    "MODEL_AXES",
    "PARAMETER_DTYPES",
    "PATHS",
    "SHARDING",
    "STATES",
    "TIERS",
    "UNSET",
    "Description",
    "Extra",
    "Origin",
    "Setting",
    "Settings",
    "build",
    "inactive",
    "keys_in",
    "row_name",
    "settings",
    "shown",
]

T = TypeVar("T")
Origin = Literal["file", "default", "auto", "derived", "unset"]
"""Who gave a value: the file, the default, a rule that replaced "auto", arithmetic on other values, or nobody."""

STATES = ("weight", "between", "grad", "optim")
SHARDING = tuple(f"sharding.{state}" for state in STATES)
TIERS = ("offload.weight", "offload.grad", "offload.optim")
DATA_AXES = ("mesh.dp_replicate", "mesh.dp_shard")
MODEL_AXES = ("tp", "cp", "sp", "ep", "pp")
"""Axes of the mesh that are no data axes."""
LOADED = "loaded"
"""The dtype in which the model was loaded, where a stack keeps it and the configuration does not say it."""
DTYPES = ("fp32", "bf16", "fp16", "fp64", "fp8", LOADED)
EVERY_DTYPE = ("weight", "compute", "reduce", "accumulate", "master", "moments", "buffers", "output", "saved")
"""What has a dtype of its own, as `precision` names it."""
PARAMETER_DTYPES = tuple(name for name in EVERY_DTYPE if name not in ("buffers", "output"))
"""The same of a parameter, its gradient and its optimizer state."""


@dataclass(frozen=True)
class Setting(Generic[T]):
    """One value.

    Attributes:
        value: plain, in neutral words: `"bf16"`, `8`, `("LlamaDecoderLayer",)`.
        origin: who gave it.
        key: the source's dotted key that it came from; several as `keys_in` splits them; empty where no key gave it.
    """

    value: T
    origin: Origin = "file"
    key: str = ""

    @property
    def keys(self) -> tuple[str, ...]:
        return keys_in(self.key)

    @property
    def is_set(self) -> bool:
        return self.origin != "unset"


Settings = dict[str, Setting[Any]]
"""Settings by path."""
UNSET: Setting[Any] = Setting(None, "unset")
"""Left to the user's code: the dialect has no such setting, or gives it no default."""


@dataclass(frozen=True)
class Sharding:
    """The row of the table: over which data axes each state is split, as `Place` writes it (`-`, `S`, `S,R`, `D`)."""

    weight: Annotated[Setting[str], "axes that the compute weights are split over, at rest"] = UNSET
    between: Annotated[Setting[str], "the same, from the end of forward to backward"] = UNSET
    grad: Annotated[Setting[str], "axes that the reduced gradient is split over"] = UNSET
    optim: Annotated[Setting[str], "axes that master weights and optimizer state are split over"] = UNSET


@dataclass(frozen=True)
class Mesh:
    """Degrees of parallelism. None: what is left of the world."""

    world: Annotated[Setting[int | None], "number of ranks"] = UNSET
    dp_replicate: Annotated[Setting[int | None], "replicas (outer data axis, R)"] = UNSET
    dp_shard: Annotated[Setting[int | None], "ranks per replica (inner data axis, S); none: what is left"] = UNSET
    tp: Annotated[Setting[int | None], "tensor parallel degree"] = UNSET
    cp: Annotated[Setting[int | None], "context parallel degree (ring attention)"] = UNSET
    sp: Annotated[Setting[int | None], "sequence parallel degree (Ulysses)"] = UNSET
    ep: Annotated[Setting[int | None], "expert parallel degree"] = UNSET
    pp: Annotated[Setting[int | None], "pipeline parallel degree"] = UNSET


@dataclass(frozen=True)
class Units:
    """What is gathered and released as one."""

    policy: Annotated[
        Setting[str], "auto (found by themselves), classes, min_numel, or none (the whole model is one)"
    ] = UNSET
    classes: Annotated[Setting[tuple[str, ...]], "classes: class names of the modules"] = UNSET
    min_numel: Annotated[Setting[int | None], "min_numel: smallest number of elements"] = UNSET
    ignored: Annotated[Setting[Any], "modules or parameters that are not sharded"] = UNSET


@dataclass(frozen=True)
class Precision:
    """Every dtype, pinned: one of `DTYPES`; None: "auto", and what fills it is not known."""

    weight: Annotated[Setting[str], "storage of the compute weights at rest"] = UNSET
    compute: Annotated[Setting[str], "weights inside modules, and activations"] = UNSET
    reduce: Annotated[Setting[str], "gradients on the wire"] = UNSET
    accumulate: Annotated[Setting[str], "gradients kept across micro-batches"] = UNSET
    master: Annotated[Setting[str], "weights that the optimizer updates"] = UNSET
    moments: Annotated[Setting[str], "the rest of the optimizer's state"] = UNSET
    buffers: Annotated[Setting[str], "module buffers"] = UNSET
    output: Annotated[Setting[str], "what the model returns"] = UNSET
    saved: Annotated[Setting[str], "weights in an exported checkpoint"] = UNSET
    autocast: Annotated[
        Setting[bool], "torch.autocast to compute, operator by operator; weights that are not gathered keep their dtype"
    ] = UNSET
    loss_scaling: Annotated[Setting[LossScaling | None], "dynamic loss scaling"] = UNSET
    static_loss_scale: Annotated[Setting[float | None], "fixed loss scale"] = UNSET


@dataclass(frozen=True)
class Batch:
    """Sizes in sequences and tokens."""

    global_batch: Annotated[Setting[int | None], "sequences per optimizer step, over all ranks"] = UNSET
    micro_batch: Annotated[Setting[int | None], "sequences per forward pass on one rank"] = UNSET
    accumulation: Annotated[Setting[int | None], "micro-batches per optimizer step"] = UNSET
    sequence_length: Annotated[Setting[int | None], "tokens per sequence"] = UNSET


@dataclass(frozen=True)
class Optimizer:
    """The optimizer: the class name as in torch.optim where it is one of those."""

    name: Annotated[Setting[str | None], "class, as in torch.optim"] = UNSET
    lr: Annotated[Setting[float | None], "learning rate (peak)"] = UNSET
    betas: Annotated[Setting[tuple[float, float] | None], "Adam: decay of the two moments"] = UNSET
    eps: Annotated[Setting[float | None], "Adam: term added to the denominator"] = UNSET
    weight_decay: Annotated[Setting[float | None], "weight decay"] = UNSET
    options: Annotated[Setting[Mapping[str, Any]], "further arguments of the class"] = UNSET


@dataclass(frozen=True)
class Schedule:
    """The learning rate over the run."""

    name: Annotated[Setting[str | None], "constant, cosine, linear, wsd, or the source's own name"] = UNSET
    warmup_steps: Annotated[Setting[int | None], "steps of linear warm-up"] = UNSET
    warmup_fraction: Annotated[Setting[float | None], "the same as a share of the run"] = UNSET
    total_steps: Annotated[Setting[int | None], "optimizer steps of the run"] = UNSET
    decay_steps: Annotated[Setting[int | None], "wsd: length of the final decay"] = UNSET
    final_fraction: Annotated[Setting[float | None], "share of the peak that is left at the last step"] = UNSET
    options: Annotated[Setting[Mapping[str, Any]], "further arguments of the schedule"] = UNSET


@dataclass(frozen=True)
class Training:
    """The loop."""

    clip: Annotated[Setting[float | None], "largest global gradient norm; none: no clipping"] = UNSET
    compile: Annotated[Setting[bool], "torch.compile"] = UNSET
    seed: Annotated[Setting[int | None], "seed of the run"] = UNSET
    device: Annotated[Setting[str | None], "cpu or cuda"] = UNSET


@dataclass(frozen=True)
class Prefetch:
    """Units gathered ahead of the one that runs."""

    forward: Annotated[Setting[int | None], "in forward"] = UNSET
    backward: Annotated[Setting[int | None], "in backward"] = UNSET


@dataclass(frozen=True)
class ActivationCheckpointing:
    """What of the activations is kept."""

    mode: Annotated[Setting[str], "none, full, selective (by operator), every (N-th block)"] = UNSET
    every: Annotated[Setting[int | None], "every: N"] = UNSET
    ops: Annotated[Setting[tuple[str, ...] | None], "selective: operators whose results are kept"] = UNSET
    offload: Annotated[Setting[bool], "what is kept lies in host memory"] = UNSET


@dataclass(frozen=True)
class Offload:
    """Tiers: `device`, `cpu`, `nvme`, or shares of the units such as `cpu:0.7` (the rest is on the device)."""

    weight: Annotated[Setting[str], "tier of the compute weights"] = UNSET
    grad: Annotated[Setting[str], "tier of the reduced gradient"] = UNSET
    optim: Annotated[Setting[str], "tier of master weights and optimizer state"] = UNSET
    path: Annotated[Setting[tuple[str, ...]], "nvme: folders of the swap files"] = UNSET
    pin: Annotated[Setting[bool], "host memory is page-locked"] = UNSET
    buffers: Annotated[Setting[int | None], "staging buffers"] = UNSET
    step: Annotated[Setting[str | None], "step on the CPU: auto, overlapped, synchronous, backward"] = UNSET
    threads: Annotated[Setting[int | None], "threads of the step on the CPU, per rank"] = UNSET
    direct: Annotated[Setting[bool], "nvme: past the page cache (O_DIRECT)"] = UNSET
    block_bytes: Annotated[Setting[int | None], "nvme: size of one read or write"] = UNSET
    depth: Annotated[Setting[int | None], "nvme: reads and writes in flight per rank"] = UNSET
    digest: Annotated[Setting[bool], "nvme: what is read is checked"] = UNSET


@dataclass(frozen=True)
class Loading:
    """How weights come in."""

    low_memory: Annotated[Setting[bool], "no rank but the first holds the whole model in host memory"] = UNSET
    broadcast: Annotated[Setting[bool], "rank 0's weights are sent to all"] = UNSET


@dataclass(frozen=True)
class Saving:
    """What is written."""

    state: Annotated[
        Setting[str], "training state: sharded (any number of ranks can resume), local, or full (on one rank)"
    ] = UNSET
    export: Annotated[Setting[str], "weights beside it: none, full (one state dict), hf (a Hugging Face folder)"] = (
        UNSET
    )
    every: Annotated[Setting[int | None], "optimizer steps between checkpoints"] = UNSET
    keep_last: Annotated[Setting[int | None], "checkpoints kept; none: all"] = UNSET
    folder: Annotated[Setting[str | None], "where to"] = UNSET
    background: Annotated[Setting[bool], "training goes on meanwhile"] = UNSET


@dataclass(frozen=True)
class Extra:
    """A setting of the source with no neutral meaning, kept as it is so that the same dialect can be written again.

    Attributes:
        key: dotted, as in the source.
        value: as in the source.
        why: what another dialect loses with it, as the end of a sentence.
        loss: `harmless`: without it another dialect does the same thing, as for log intervals and bucket sizes;
            `refused`: without it it would not, and the key must not be dropped in silence; `lossy`: all others.
    """

    key: str
    value: Any
    why: str = ""
    loss: Loss = "lossy"


@dataclass(frozen=True)
class Description:
    """What one configuration asks for. Make one with `build`.

    Attributes:
        dialect: the dialect it was read from.
        extras: what the source says beyond the sections.
    """

    dialect: str = ""
    sharding: Sharding = Sharding()
    mesh: Mesh = Mesh()
    units: Units = Units()
    precision: Precision = Precision()
    batch: Batch = Batch()
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    training: Training = Training()
    prefetch: Prefetch = Prefetch()
    activation_checkpointing: ActivationCheckpointing = ActivationCheckpointing()
    offload: Offload = Offload()
    loading: Loading = Loading()
    saving: Saving = Saving()
    extras: tuple[Extra, ...] = ()

    def __getitem__(self, path: str) -> Setting[Any]:
        """The setting at `section.name`."""
        section, _, name = path.partition(".")
        found: Setting[Any] = getattr(getattr(self, section), name)
        return found

    def value(self, path: str) -> Any:
        return self[path].value

    @property
    def row(self) -> str | None:
        """The name of the row of the table that `sharding` is; None: it has none, or is not said."""
        return row_name(*(self[path].value for path in SHARDING))

    @property
    def plan(self) -> Plan | None:
        """The row with its tiers, as the engine takes it; None where the source does not say it."""
        if not all(self[path].is_set for path in SHARDING):
            return None
        places = {state: Place.parse(self.value(f"sharding.{state}")) for state in STATES}
        tiers = {path.partition(".")[2]: self.value(path) or "device" for path in TIERS}
        placed = {state: Place(place.axes, tiers.get(state, "device")) for state, place in places.items()}
        return Plan(**placed, name=self.row or "custom")

    def replace(self, changed: Mapping[str, Setting[Any]], extras: tuple[Extra, ...] | None = None) -> Description:
        """The same with other settings at some paths. Raises: `KeyError` for a path that there is not."""
        by_section: dict[str, dict[str, Setting[Any]]] = {}
        for path, setting in changed.items():
            if path not in MEANING:
                raise KeyError(f"the neutral description has no {path!r}")
            section, _, name = path.partition(".")
            by_section.setdefault(section, {})[name] = setting
        sections: dict[str, Any] = {name: replace(getattr(self, name), **given) for name, given in by_section.items()}
        return replace(self, **sections, extras=self.extras if extras is None else extras)


def build(dialect: str, given: Mapping[str, Setting[Any]], extras: tuple[Extra, ...] = ()) -> Description:
    """The description with these settings by path, and all others unset."""
    return Description(dialect).replace(given, extras)


def settings(description: Description) -> Iterator[tuple[str, Setting[Any]]]:
    """Every setting with its path, in the order of the sections."""
    return ((path, description[path]) for path in PATHS)


def keys_in(text: str) -> tuple[str, ...]:
    """The keys that `", "` joins; one with a comma of its own has quotes around the name, see `reader.join`."""
    parts = re.findall(r'(?:^|, )((?:"[^"]*"|(?!, ).)*)', text, re.DOTALL) if '"' in text else text.split(", ")
    return tuple(part for part in parts if part)


def inactive(path: str, value: Any) -> bool:
    """Whether this value asks for nothing to happen, so that a dialect without the setting agrees with it."""
    return value is None or bool(path in _OFF and value == _OFF[path])


def shown(value: Any) -> str:
    """A value as a configuration writes it, shortened."""
    if isinstance(value, str):
        text = value
    elif value is None or isinstance(value, bool):
        text = {None: "none", True: "true", False: "false"}[value]
    elif isinstance(value, Mapping):
        text = ", ".join(f"{name} {shown(inner)}" for name, inner in value.items()) or "none"
    elif isinstance(value, tuple | list):
        text = ", ".join(shown(each) for each in value) or "none"
    else:
        text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


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
_SECTIONS = tuple(each.name for each in fields(Description) if each.name not in ("dialect", "extras"))
_TYPES = {name: get_type_hints(type(getattr(Description(), name)), include_extras=True) for name in _SECTIONS}
MEANING: dict[str, str] = {
    f"{section}.{name}": hint.__metadata__[0] for section, hints in _TYPES.items() for name, hint in hints.items()
}
"""A setting's meaning in a few words, by path."""
PATHS = tuple(MEANING)
"""Every setting that there is, as `section.name`."""
_OFF: dict[str, Any] = {
    **dict.fromkeys(("mesh.dp_replicate", "mesh.tp", "mesh.cp", "mesh.sp", "mesh.ep", "mesh.pp"), 1),
    **dict.fromkeys(("precision.autocast", "training.compile", "activation_checkpointing.offload"), False),
    **dict.fromkeys(("offload.digest", "loading.low_memory", "loading.broadcast", "saving.background"), False),
    **dict.fromkeys(("activation_checkpointing.mode", "saving.export"), "none"),
    **dict.fromkeys(("schedule.warmup_steps", "schedule.warmup_fraction"), 0),
    "optimizer.options": {},
    "schedule.options": {},
    **dict.fromkeys(("units.classes", "activation_checkpointing.ops", "offload.path"), ()),
    **dict.fromkeys(TIERS, "device"),
}
