"""What a configuration means: the row of the table, and every option's effective value with who set it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from terrazzo.dialects.core.agreement import extras_by_key
from terrazzo.dialects.core.description import LOADED, MEANING, Description, Extra, Setting, asks_for_nothing
from terrazzo.dialects.core.key_verdict import KeyVerdict
from terrazzo.dialects.core.mesh import data_ranks, degrees
from terrazzo.dialects.core.wording import as_text, meant
from terrazzo.dialects.verbs.understand import Understood

__all__ = ["OptionRow", "Page", "explain", "origin_words", "plan_words"]

_STATES = {
    "weight": "weights",
    "between": "weights from forward to backward",
    "grad": "gradients",
    "optim": "optimizer",
}


@dataclass(frozen=True)
class OptionRow:
    """One option's effective value.

    Attributes:
        path: of the neutral setting.
        origin: who set it: see `origin_words`.
    """

    path: str
    value: Any
    origin: str
    key: str
    meaning: str


@dataclass(frozen=True)
class Page:
    """What `explain` says.

    Attributes:
        plan: the meaning in the table's words, a line each.
        options: every option that the file or its library decides.
        left: settings that the file and its library leave to code, by path.
        own: what has a meaning to this library alone.
        unsettled: verdicts of keys that are not taken as they stand.
    """

    dialect: str
    title: str
    plan: tuple[str, ...]
    options: tuple[OptionRow, ...]
    left: tuple[str, ...]
    own: tuple[Extra, ...]
    unsettled: tuple[KeyVerdict, ...]


def explain(understood: Understood) -> Page:
    """The page of a file."""
    description = understood.description
    options = [
        OptionRow(path, setting.value, setting.origin, setting.key, MEANING[path])
        for path, setting in description.items()
        if setting.is_set
    ]
    unsettled = [verdict for verdict in understood.reading.verdicts if verdict.kind != "applied"]
    return Page(
        understood.dialect.name,
        understood.dialect.title,
        tuple(plan_words(description)),
        tuple(options),
        tuple(path for path, setting in description.items() if not setting.is_set),
        tuple(extras_by_key(description).values()),
        tuple(unsettled),
    )


def origin_words(setting: Setting[Any] | OptionRow) -> str:
    """Who set a value: `file: zero_optimization.stage`, `default`, `auto: train_batch_size`."""
    if setting.origin == "file" and not setting.key:
        return "file"
    return f"{setting.origin}: {setting.key}" if setting.key else setting.origin


def plan_words(description: Description) -> Iterator[str]:
    """Where each state lives, over which ranks, in which dtypes, and the batch's arithmetic."""
    plan = description.plan
    if plan is None:
        yield "where states live is left to code: there is no plan in this file"
    else:
        yield str(plan)
        yield from (f"  {line}" for line in _in_full(description))
    if mesh := _mesh(description):
        yield f"ranks: {mesh}"
    if dtypes := _dtypes(description):
        yield f"dtypes: {dtypes}"
    if batch := _batch(description):
        yield f"batch: {batch}"


def _in_full(description: Description) -> Iterator[str]:
    for state, name in _STATES.items():
        axes = description.value(f"sharding.{state}")
        tier = description.value(f"offload.{state}") if state != "between" else None
        where = {"cpu": ", in host memory", "nvme": ", on NVMe", "device": "", None: ""}.get(tier, f", {tier}")
        yield f"{name}: {meant(f'sharding.{state}', axes)}{where}"


def _mesh(description: Description) -> str:
    sizes = degrees(description)
    known = {axis: degree for axis, degree in sizes.items() if degree not in (1, None)}
    ep, world = description.value("mesh.ep"), description.value("mesh.world")
    product = " × ".join(f"{axis} {degree}" for axis, degree in known.items())
    among = f", of which {ep} share experts" if ep not in (None, 1) else ""  # they are ranks of the data axes
    if world is None:
        return product + (" × dp_shard as many as are left" if product and sizes["dp_shard"] is None else "") + among
    return (f"{world} = {product}" if product else str(world)) + among


def _dtypes(description: Description) -> str:
    names = ("weight", "compute", "reduce", "accumulate", "master", "moments")
    dtypes = [(name, description.value(f"precision.{name}")) for name in names]
    known = [f"{name} {'as loaded' if dtype == LOADED else dtype}" for name, dtype in dtypes if dtype]
    sent = {name: description.value(f"precision.{name}") for name in ("gather", "quantized_reduce")}
    known += [f"{name} {form}" for name, form in sent.items() if not asks_for_nothing(f"precision.{name}", form)]
    if description.value("precision.error_feedback"):
        known.append("error_feedback")
    if scaling := description.value("precision.loss_scaling"):
        known.append(as_text(scaling))
    if fixed := description.value("precision.static_loss_scale"):
        known.append(f"loss scale {fixed:g}")
    return ", ".join(known)


def _batch(description: Description) -> str:
    sizes = {name: description.value(f"batch.{name}") for name in ("global_batch", "micro_batch", "accumulation")}
    ranks = data_ranks(description)
    if all(sizes.values()) and ranks:
        micro, count = sizes["micro_batch"], sizes["accumulation"]
        whole, product = sizes["global_batch"], micro * count * ranks
        apart = "" if product == whole else f", which are {product}: the file contradicts itself"
        return f"{whole} sequences {'≠' if apart else '='} {micro} × {count} micro-batches × {ranks} data ranks{apart}"
    return ", ".join(f"{name} {as_text(size)}" for name, size in sizes.items() if size)
