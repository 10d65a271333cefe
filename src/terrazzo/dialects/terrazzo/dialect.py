"""Terrazzo's own YAML: the hub that every dialect is converted to and from."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from terrazzo.dialects.description import LOADED, Description, Setting
from terrazzo.dialects.dialect import NO_CONTEXT, Context, Dialect, Document, Finding, Reading, Writing
from terrazzo.dialects.reader import Reader, derived
from terrazzo.dialects.terrazzo.keys import DTYPE_KEYS, KEYS
from terrazzo.dialects.terrazzo.write import SCHEDULES, STATES, write
from terrazzo.engine import OFFLOADS, PLANS, PRECISIONS, TIERS, Place, Plan
from terrazzo.errors import BadInput, did_you_mean

__all__ = ["Terrazzo"]

DTYPES = {"fp32": "fp32", "bf16": "bf16", "fp16": "fp16", "fp64": "fp64"}
_OPAQUE = ("optimizer.options", "offload.weight", "offload.grad", "offload.optim")
_HARMLESS = (
    "log", "train.eval_every", "train.eval_batches", "train.sample_every", "train.check_replicas_every",
    "train.sample_tokens", "launch",
)  # fmt: skip
_ELSEWHERE = {
    "model": "the model comes from your code there",
    "data": "the data come from your code there",
    "lora": "adapters come from your code there, by peft",
    "optimizer.no_decay": "which parameters decay is decided in your code there",
}


class Terrazzo(Dialect):
    """The configuration of `terrazzo train`."""

    name = "terrazzo"
    title = "Terrazzo YAML"
    suffix = ".yaml"
    known_keys = ("plan", "precision", *KEYS, "optimizer.options.*")

    def recognises(self, document: Document) -> bool:
        """By its sections: each that is there has Terrazzo's keys, and at least one key of its own has."""
        sections = {key.partition(".")[0] for key in KEYS}
        if not document or not set(document) <= sections:
            return False
        names = [
            f"{section}.{key}" for section, inner in document.items() if isinstance(inner, Mapping) for key in inner
        ]
        known = [name for name in names if name in KEYS or name == "plan.mesh"]
        return isinstance(document.get("plan"), str) or 2 * len(known) > len(names) or (bool(known) and len(names) < 4)

    def read(self, document: Document, context: Context = NO_CONTEXT) -> Reading:
        reader = Reader(document, "Terrazzo", _OPAQUE)
        given = {
            **_plan(reader),
            **_offload(reader),
            **_precision(reader),
            **_batch(reader, context),
            **_optimizer(reader),
            **_training(reader),
            **_saving(reader),
        }
        _tiers_of_name(reader, given)
        _keep_others(reader)
        return reader.finish(self.name, given, self.known_keys, unknown="refuses it")

    def write(self, description: Description, context: Context = NO_CONTEXT) -> Writing:
        return write(description, context, self.name)

    def findings(self, document: Document, reading: Reading, context: Context) -> Iterable[Finding]:
        """What the trainer refuses of a plan with its tiers. That of single keys is said by their verdicts."""
        plan = reading.description.plan
        if plan is None:
            return
        replicas = reading.description.value("mesh.dp_replicate") or 1
        rows = {state: Place(place.axes) for state, place in plan.places().items()}
        try:
            Plan(**rows, name=plan.name).resolve(["dp_replicate", "dp_shard"] if replicas > 1 else ["dp_shard"])
        except BadInput as error:
            yield Finding("plan", "error", str(error))
        offloaded = {state: place.tier for state, place in plan.places().items() if "nvme" in place.tier}
        if offloaded and not reading.description.value("offload.path"):
            states = ", ".join(offloaded)
            yield Finding("offload.path", "error", f"{states} on nvme needs offload.path: a folder of a local drive.")

    def meaning(self, key: str) -> str:
        return KEYS[key][1] if key in KEYS else ""


def _default(key: str) -> Any:
    return KEYS[key][0]


# -- the plan ------------------------------------------------------------------------------------------------------


def _plan(reader: Reader) -> dict[str, Setting[Any]]:
    mesh = {
        "mesh.dp_replicate": reader.integer("plan.mesh.dp_replicate", 1, low=1),
        "mesh.dp_shard": reader.integer("plan.mesh.dp_shard", None, low=1, null=True),
        "mesh.world": reader.integer("launch.ranks", None, low=1, null=True),
    }
    ahead = reader.integer("plan.prefetch", _default("plan.prefetch"))
    shared = {"prefetch.forward": ahead, "prefetch.backward": ahead, **mesh, **_units(reader)}
    return {**shared, **(_places(reader) or _row(reader))}


def _units(reader: Reader) -> dict[str, Setting[Any]]:
    units = reader.names("plan.units", ())
    if isinstance(raw := reader.get("plan.units"), str):
        reader.refuse("plan.units", f"it is {raw!r}, expected a list: [{raw}]")
    if units.origin != "file" or reader.get("plan.units") is None:
        return {"units.policy": Setting("auto", "default", units.key)}
    policy = "classes" if units.value else "none"
    return {"units.policy": Setting(policy, "file", units.key), "units.classes": units}


def _places(reader: Reader) -> dict[str, Setting[Any]]:
    """Custom places, if the plan is given by them."""
    keys = {state: f"plan.{state}" for state in STATES}
    given = {state: reader.text(key, null=True) for state, key in keys.items() if key in reader.flat}
    if not any(setting.value for setting in given.values()):
        return {}
    name = reader.text("plan.name", null=True)
    missing = [state for state in STATES if state not in given or given[state].value is None]
    if name.value is not None or missing:
        fault = f"also names '{name.value}'" if name.value is not None else f"lacks {', '.join(missing)}"
        for key in [*keys.values(), "plan.name"]:
            reader.refuse(key, f"the plan is given by places and {fault}: give a name, or all four places")
        return _placed(Plan.named("zero3").places(), dict.fromkeys(STATES, ""), "default")
    return _placed({state: Place.parse(setting.value) for state, setting in given.items()}, keys)


def _row(reader: Reader) -> dict[str, Setting[Any]]:
    key = "plan" if "plan" in reader.flat else "plan.name"
    named = reader.text(key, _default("plan.name"), null=key == "plan.name")
    base, _, offload = str(named.value).strip().lower().partition("@")
    try:
        plan = Plan.named(base)
        if offload and offload.replace("_", "-") not in OFFLOADS:
            raise BadInput(f"there is no offload '{offload}'.{did_you_mean(offload, OFFLOADS)}")
    except BadInput as error:
        reader.refuse(key, f"{error}{did_you_mean(base, PLANS) if 'Did you mean' not in str(error) else ''}")
        plan, named, offload = Plan.named("zero3"), Setting("zero3", "default", key), ""
    tiers = OFFLOADS.get(offload.replace("_", "-"), {})
    places = {state: Place(place.axes, tiers.get(state, "device")) for state, place in plan.places().items()}
    return _placed(places, dict.fromkeys(STATES, named.key), named.origin)


def _placed(places: Mapping[str, Place], keys: Mapping[str, str], origin: Any = "file") -> dict[str, Setting[Any]]:
    settings: dict[str, Setting[Any]] = {}
    for state, place in places.items():
        settings[f"sharding.{state}"] = Setting(",".join(place.axes) or "-", origin, keys[state])
        if place.tier != "device":
            settings[f"offload.{state}"] = Setting(place.tier, origin, keys[state])
    return settings


# -- offload -------------------------------------------------------------------------------------------------------


def _offload(reader: Reader) -> dict[str, Setting[Any]]:
    path = reader.names("offload.path", ())
    if isinstance(reader.get("offload.path"), str):  # one folder, commas and all
        path = Setting((reader.get("offload.path"),), "file", "offload.path")
    block = reader.number("offload.block_mib", _default("offload.block_mib"))
    steps = {name: name for name in ("auto", "overlapped", "synchronous", "backward")}
    return {
        "offload.path": path,
        "offload.step": reader.choice("offload.step", steps, "auto"),
        "offload.threads": reader.integer("offload.threads", None, low=1, null=True),
        "offload.pin": reader.boolean("offload.pin", True),
        "offload.direct": reader.boolean("offload.direct", True),
        "offload.block_bytes": derived(int(block.value * 2**20), block, origin=block.origin),
        "offload.depth": reader.integer("offload.depth", _default("offload.depth"), low=1),
        "offload.digest": reader.boolean("offload.digest", False),
    }


def _tiers_of_name(reader: Reader, given: dict[str, Setting[Any]]) -> None:
    """The section's tiers in place of the plan's; all three are known then."""
    for state in ("weight", "grad", "optim"):
        key = path = f"offload.{state}"
        tier = _tier(reader, key)
        if tier is not None:
            given[path] = tier
        given.setdefault(path, Setting("device", "default"))


def _tier(reader: Reader, key: str) -> Setting[Any] | None:
    raw = reader.any(key).value
    if raw is None:
        return None
    shares = raw if isinstance(raw, Mapping) else dict(part.partition(":")[::2] for part in str(raw).split(","))
    parsed = {str(tier).strip(): _share(share) for tier, share in shares.items()}
    if not set(parsed) <= set(TIERS) or None in parsed.values() or not parsed:
        wrong = next((tier for tier in parsed if tier not in TIERS), "")
        reader.refuse(
            key, f"it is {raw!r}, expected device, cpu, nvme or shares such as cpu:0.7.{did_you_mean(wrong, TIERS)}"
        )
        return Setting("device", "default", key)
    if sum(share for share in parsed.values() if share is not None) > 1 + 1e-9:
        reader.refuse(key, f"it is {raw!r}, which gives away more than all units")
        return Setting("device", "default", key)
    text = ",".join(
        tier if share == 1 else f"{tier}:{share:g}" for tier, share in parsed.items() if tier != "device" and share
    )
    return Setting(text or "device", "file", key)


def _share(value: Any) -> float | None:
    try:
        share = 1.0 if value == "" else float(value)
    except (TypeError, ValueError):
        return None
    return share if 0 <= share <= 1 else None


# -- precision, batch ----------------------------------------------------------------------------------------------


def _precision(reader: Reader) -> dict[str, Setting[Any]]:
    key = "precision" if "precision" in reader.flat else "precision.name"
    name = reader.choice(key, {preset: preset for preset in PRECISIONS}, "fp32", fold=False)
    preset = PRECISIONS[name.value]
    found: dict[str, Setting[Any]] = {}
    for field in DTYPE_KEYS:
        default = _short(getattr(preset, field))
        own = reader.choice(f"precision.{field}", DTYPES, None, fold=False, null=True)
        found[f"precision.{field}"] = own if own.value else Setting(default, name.origin, name.key)
    scaling = preset.loss_scaling
    output = "fp32" if scaling else found["precision.compute"].value
    found["precision.loss_scaling"] = Setting(scaling, name.origin, name.key)
    found["precision.buffers"] = Setting(LOADED, "default")
    found["precision.output"] = Setting(output, "derived", found["precision.compute"].key)
    found["precision.saved"] = Setting(found["precision.master"].value, "derived", found["precision.master"].key)
    found["precision.autocast"] = Setting(False, "default")
    return found


def _short(dtype: Any) -> str:
    names = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}
    return names[str(dtype).removeprefix("torch.")]


def _batch(reader: Reader, context: Context) -> dict[str, Setting[Any]]:
    whole = reader.integer("batch.global_batch", _default("batch.global_batch"), low=1)
    micro = reader.integer("batch.micro_batch", _default("batch.micro_batch"), low=1)
    found = {
        "batch.global_batch": whole,
        "batch.micro_batch": micro,
        "batch.sequence_length": reader.integer("batch.sequence_length", _default("batch.sequence_length"), low=2),
    }
    ranks = reader.get("launch.ranks") or context.world
    at_once = micro.value * ranks if isinstance(ranks, int) else 0
    if at_once and whole.value % at_once == 0:
        found["batch.accumulation"] = derived(whole.value // at_once, whole, micro)
    return found


# -- optimizer, loop, checkpoints ----------------------------------------------------------------------------------


def _optimizer(reader: Reader) -> dict[str, Setting[Any]]:
    options = reader.any("optimizer.options", {})
    raw = dict(options.value) if isinstance(options.value, Mapping) else {}
    if not isinstance(options.value, Mapping):
        reader.refuse("optimizer.options", f"it is {options.value!r}, expected a section of keys")
    found = {
        "optimizer.name": reader.text("optimizer.name", _default("optimizer.name")),
        "optimizer.lr": reader.number("optimizer.lr", _default("optimizer.lr")),
        "optimizer.weight_decay": reader.number("optimizer.weight_decay", _default("optimizer.weight_decay")),
    }
    betas = raw.get("betas")
    if isinstance(betas, list | tuple) and len(betas) == 2:
        found["optimizer.betas"] = Setting(tuple(raw.pop("betas")), "file", options.key)
    if "eps" in raw:
        found["optimizer.eps"] = Setting(raw.pop("eps"), "file", options.key)
    found["optimizer.options"] = Setting(raw, options.origin, options.key)
    return {**found, **_schedule(reader)}


def _schedule(reader: Reader) -> dict[str, Setting[Any]]:
    name = reader.choice("schedule.name", {name: name for name in SCHEDULES}, "cosine", fold=False)
    total = reader.integer("train.steps", _default("train.steps"), low=1)
    decay = reader.integer("schedule.decay_steps", None, low=1, null=True)
    if name.value == "wsd" and not decay.key:
        decay = Setting(max(1, total.value // 5), "default")
    return {
        "schedule.name": name,
        "schedule.warmup_steps": reader.integer("schedule.warmup_steps", 0),
        "schedule.final_fraction": reader.number(
            "schedule.final_fraction", _default("schedule.final_fraction"), high=1
        ),
        "schedule.decay_steps": decay,
        "schedule.total_steps": total,
    }


def _training(reader: Reader) -> dict[str, Setting[Any]]:
    clip = reader.number("train.clip", _default("train.clip"))
    if "train.clip" in reader.flat and reader.get("train.clip") is None:
        reader.say("train.clip", "applied")
        clip = Setting(None, "file", "train.clip")
    offloaded = reader.choice("offload.activations", {"device": False, "cpu": True}, False)
    devices = {"auto": None, "cpu": "cpu", "cuda": "cuda"}
    return {
        "training.clip": clip,
        "training.compile": reader.boolean("train.compile", False),
        "training.seed": reader.integer("train.seed", 0),
        "training.device": reader.choice("launch.device", devices, None, fold=False),
        "activation_checkpointing.offload": offloaded,
        "activation_checkpointing.ops": reader.names("train.activation_checkpointing_ops", ()),
        **_checkpointing(reader),
    }


def _checkpointing(reader: Reader) -> dict[str, Setting[Any]]:
    mode = reader.text("train.activation_checkpointing", "none")
    match = re.fullmatch(r"none|full|selective|every_([1-9][0-9]{0,8})", mode.value)
    if match is None:
        reader.refuse(mode.key, f"it is {mode.value!r}, expected none, full, selective or every_N, such as every_2")
        return {"activation_checkpointing.mode": Setting("none", "default", mode.key)}
    if match[1] is None:
        return {"activation_checkpointing.mode": mode}
    every = Setting(int(match[1]), mode.origin, mode.key)
    return {
        "activation_checkpointing.mode": Setting("every", mode.origin, mode.key),
        "activation_checkpointing.every": every,
    }


def _saving(reader: Reader) -> dict[str, Setting[Any]]:
    keep = reader.integer("checkpoint.keep_last", _default("checkpoint.keep_last"), low=1)
    if "checkpoint.keep_last" in reader.flat and reader.get("checkpoint.keep_last") is None:
        reader.say("checkpoint.keep_last", "applied")
        keep = Setting(None, "file", "checkpoint.keep_last")
    return {
        "saving.state": Setting("sharded", "default"),
        "saving.export": reader.choice("checkpoint.save_format", {"terrazzo": "none", "hf": "hf"}, "none", fold=False),
        "saving.every": reader.integer("checkpoint.every", None, low=1, null=True),
        "saving.keep_last": keep,
        "saving.folder": reader.text("checkpoint.folder", None, null=True),
        "saving.background": reader.boolean("checkpoint.background", False),
        "loading.low_memory": Setting(True, "default"),
        "loading.broadcast": Setting(True, "default"),
    }


def _keep_others(reader: Reader) -> None:
    """Known keys with no neutral meaning."""
    for key in reader.unread():
        if key in KEYS:
            section = key.partition(".")[0]
            why = _ELSEWHERE.get(key) or _ELSEWHERE.get(section) or "only `terrazzo train` has it"
            idle = section in _HARMLESS or key in _HARMLESS or reader.get(key) == _default(key)
            reader.keep(key, why, harmless=idle)
