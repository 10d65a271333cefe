"""What is wrong with a configuration before a process is started: keys, combinations, batch arithmetic, the mesh."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

from terrazzo.dialects.core.description import DTYPES, PATHS, Description
from terrazzo.dialects.core.dialect import Dialect, Finding, Reading, ReadingContext
from terrazzo.dialects.core.key_verdict import TODAY, KeyVerdict
from terrazzo.dialects.core.mesh import TWO_AXES, data_ranks, degrees, row_fault
from terrazzo.dialects.verbs.understand import Understood
from terrazzo.documents.dotted_keys import keys_in
from terrazzo.messages import listed
from terrazzo.parallel.sharing_rules import shares_experts, shares_heads

__all__ = ["check", "findings_of", "other_world"]

_FEW = 4
"""Keys in older spellings that are spoken of one by one."""

_LEAST_STEP = {"bf16": "2^-8", "fp16": "2^-11"}
"""Half the distance from 1 to the next number: of less, rounding to the nearest leaves nothing."""


def check(understood: Understood) -> list[Finding]:
    """All findings, errors first."""
    found = findings_of(understood.dialect, understood.reading, understood.context)
    once = _said_once([*_keys(understood), *found])
    return sorted(once, key=lambda finding: finding.level != "error")


def _said_once(findings: Iterable[Finding]) -> list[Finding]:
    """Findings whose words are the same as one, of all their keys."""
    alike: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        alike.setdefault((finding.level, finding.text), []).append(finding)
    return [replace(each[0], key=", ".join(dict.fromkeys(one.key for one in each))) for each in alike.values()]


def findings_of(dialect: Dialect, reading: Reading, context: ReadingContext) -> list[Finding]:
    """What is wrong with a document beyond single keys: by the rules that hold everywhere, and its library's own."""
    own = list(dialect.findings(reading, context))
    said = {finding.key for finding in own if finding.level == "error"}
    found = _everywhere(dialect, reading.description, context)
    return [*(finding for finding in found if not _is_said(finding.key, said)), *own]


def other_world(description: Description, context: ReadingContext) -> Iterator[Finding]:
    """Two numbers of ranks, one of the document and one of the command line."""
    launched, world = context.world, description.value("mesh.world")
    if launched is not None and world is not None and world != launched:
        yield Finding.error(
            description["mesh.world"].key or "mesh.world", f"it says {world} ranks, and --world {launched}"
        )


def _is_said(key: str, said: set[str]) -> bool:
    """Whether the library's own words are of this key, or of its section or of one in it."""
    return any(key == own or key.startswith(f"{own}.") or own.startswith(f"{key}.") for own in said if own)


def _keys(understood: Understood) -> Iterator[Finding]:
    if understood.loaded.relaxed:
        text = "comments or commas before a closing bracket: DeepSpeed reads them, Hugging Face's loaders do not"
        yield Finding.warning("", text)
    open_before: dict[str, str] = {}
    verdicts = understood.reading.verdicts
    older = [each for each in verdicts if each.kind == "renamed" and each.why.startswith(TODAY)]
    if len(older) > _FEW:
        words = [f"{each.key} is {each.why.removeprefix(TODAY)}" for each in older]
        yield Finding.warning("", f"{len(older)} keys are words of earlier versions: {listed(words, 2 * _FEW)}")
    for verdict in verdicts if len(older) <= _FEW else (each for each in verdicts if each not in older):
        if verdict.kind == "refused":
            yield Finding.error(verdict.key, verdict.why)
        elif verdict.kind in ("lossy", "renamed") and verdict.why:
            yield Finding.warning(verdict.key, verdict.why)
        elif verdict.kind == "defaulted" and _unresolved(understood.description, verdict):
            same = open_before.setdefault(verdict.target, verdict.key)
            text = verdict.why or "its value is not known here"
            yield Finding.warning(verdict.key, text if same == verdict.key else f"as {same}: they are one setting")


def _unresolved(description: Description, verdict: KeyVerdict) -> bool:
    """Whether "auto" stayed what it was: what comes from the key has no value."""
    paths = [path for path in keys_in(verdict.target) if path in PATHS]
    return bool(paths) and all(description.value(path) is None for path in paths)


def _everywhere(dialect: Dialect, description: Description, context: ReadingContext) -> Iterator[Finding]:
    yield from other_world(description, context)
    yield from _world(description)
    yield from _model(dialect, description, context)
    yield from _batch(description, fills=dialect.fills_batches)
    yield from _plan(description)
    yield from _precision(description)
    yield from _loop(description)


def _world(description: Description) -> Iterator[Finding]:
    world = description.value("mesh.world")
    axes = degrees(description)
    known_axes = {axis: degree for axis, degree in axes.items() if description.value(f"mesh.{axis}") is not None}
    wanted = math.prod(degree or 1 for degree in known_axes.values())
    product = " × ".join(f"{axis} {degree}" for axis, degree in known_axes.items() if degree != 1) or "1"
    keys = ", ".join(dict.fromkeys(key for axis in axes for key in description[f"mesh.{axis}"].keys)) or "mesh.world"
    if world is None:
        return
    experts, stages = description["mesh.ep"], description.value("mesh.pp") or 1
    if (experts.value or 1) > 1 and world % stages == 0 and world // stages % experts.value:
        text = f"ep {experts.value} does not divide the {world // stages} ranks that hold a layer"
        yield Finding.error(experts.key or "mesh.ep", text)
    if None in axes.values() and world % wanted:
        yield Finding.error(keys, f"{product} = {wanted} does not divide the {world} ranks of the world")
    elif None not in axes.values() and math.prod(degree or 1 for degree in axes.values()) != world:
        yield Finding.error(keys, f"{product} = {wanted} ranks, but the world has {world}: they must be equal")


def _model(dialect: Dialect, description: Description, model: ReadingContext) -> Iterator[Finding]:
    """What the model's sizes rule out."""
    for axis, what, name in (
        ("tp", "heads", "attention heads"),
        ("tp", "kv_heads", "key and value heads"),
        ("sp", "heads", "attention heads"),
        ("pp", "layers", "blocks"),
        ("ep", "experts", "experts"),
    ):
        setting, size = description[f"mesh.{axis}"], getattr(model, what)
        degree, can_share = setting.value or 1, {**_CAN_SHARE, **dialect.can_share}[what]
        if size is not None and degree > 1 and not (size and can_share(size, degree)):
            text = f"{axis} {degree} cannot cut the model's {size} {name}" + (" evenly" if axis != "pp" else "")
            yield Finding.error(setting.key or axis, text)
    yield from _units(description, model)
    length = description["batch.sequence_length"]
    if model.positions is not None and (length.value or 0) > model.positions:
        text = f"sequences of {length.value:,} tokens, and the model takes {model.positions:,}"
        yield Finding.warning(length.key or "batch.sequence_length", text)


_CAN_SHARE = {
    **dict.fromkeys(("heads", "kv_heads"), shares_heads),
    "layers": lambda layers, stages: stages <= layers,
    "experts": shares_experts,
}
"""Whether so many ranks can share so many of something, as most libraries have it."""


def _units(description: Description, model: ReadingContext) -> Iterator[Finding]:
    """Units that the model cannot be cut into."""
    classes = description["units.classes"]
    alone = [name for name in classes.value or () if name.rpartition(".")[2] in ("Embedding", "Linear")]
    if model.tied and alone:
        text = (
            f"the model's head is its embedding, and a unit of {alone[0]} parts them: FSDP raises where units share a"
            f" parameter. Leave {alone[0]} to the root"
        )
        yield Finding.error(classes.key or "units.classes", text)
    smallest, block = description["units.min_numel"], model.block_numel
    if description.value("units.policy") == "min_numel" and block is not None and (smallest.value or 0) > block:
        text = f"no block has {smallest.value:,} elements, the largest has {block:,}: the whole model is one unit"
        yield Finding.warning(smallest.key or "units.min_numel", text)


def _batch(description: Description, *, fills: bool) -> Iterator[Finding]:
    whole, micro, count = (
        description.value(f"batch.{name}") for name in ("global_batch", "micro_batch", "accumulation")
    )
    ranks = data_ranks(description)
    settings = [description[f"batch.{name}"] for name in ("global_batch", "micro_batch", "accumulation")]
    keys = ", ".join(dict.fromkeys(key for setting in settings for key in setting.keys)) or "batch"
    if not (whole and micro and ranks):
        return
    at_once = micro * ranks
    if count and whole != at_once * count:
        text = (
            f"{micro} × {count} micro-batches × {ranks} data ranks = {at_once * count}, but the global batch is {whole}"
        )
        yield Finding.error(keys, text)
    elif not count and whole % at_once and not fills:
        near = max(at_once, whole // at_once * at_once)
        text = (
            f"the global batch {whole} is no multiple of {micro} × {ranks} data ranks = {at_once}; {near} is, for one"
        )
        yield Finding.error(keys, text)


def _plan(description: Description) -> Iterator[Finding]:
    plan = description.plan
    if plan is None:
        return
    sizes, key = degrees(description), description["sharding.weight"].key or "plan"
    if description.row in TWO_AXES and sizes["dp_replicate"] == 1:
        text = f"{plan.name} needs two data axes; without replicas nothing is replicated: give both degrees"
        yield Finding(key, "warning" if sizes["dp_shard"] is None else "error", text)
    if fault := row_fault(plan):
        yield Finding.error(key, fault)


def _precision(description: Description) -> Iterator[Finding]:
    dtype = {name: description.value(f"precision.{name}") for name in ("compute", "reduce", "master", "moments")}
    key = description["precision.compute"].key or "precision"
    assert all(value in (None, *DTYPES) for value in dtype.values())
    scaled = description.value("precision.loss_scaling") or description.value("precision.static_loss_scale")
    if dtype["compute"] == "fp16" and description["precision.loss_scaling"].is_set and not scaled:
        yield Finding.warning(key, "fp16 gradients without loss scaling underflow: turn it on, or use bf16")
    if dtype["master"] in _LEAST_STEP and description.value("precision.rounding") in (None, "nearest"):
        least = _LEAST_STEP[dtype["master"]]
        text = f"the weights that the optimizer updates are {dtype['master']}: steps below {least} of a weight are lost"
        yield Finding.warning(description["precision.master"].key or key, text)


def _loop(description: Description) -> Iterator[Finding]:
    warmup, total = description["schedule.warmup_steps"], description["schedule.total_steps"]
    if warmup.value and total.value and warmup.value > total.value:
        text = f"{warmup.value} steps of warm-up are more than the {total.value} of the run"
        yield Finding.warning(warmup.key or "schedule", text)
    offload = description["activation_checkpointing.offload"]
    if offload.value and description.value("activation_checkpointing.mode") == "none":
        text = "it moves what activation checkpointing keeps, and there is none: turn that on"
        yield Finding.error(offload.key or "activation_checkpointing", text)
