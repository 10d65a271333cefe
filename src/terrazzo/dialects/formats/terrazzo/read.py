"""Reading Terrazzo's own YAML."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from terrazzo.config import CONFIG_KEYS, SHORTHANDS, MuonConfig, check_keys, tier_text
from terrazzo.dialects.core.description import LOADED, STATES, TIER_PATHS, Setting, SettingsByPath
from terrazzo.dialects.core.dialect import NO_CONTEXT, ConfigDocument, Reading, ReadingContext
from terrazzo.dialects.core.keys import TEXT
from terrazzo.dialects.core.reader import Reader, derived
from terrazzo.dialects.core.wording import found
from terrazzo.dialects.formats.terrazzo.keys import KEYS
from terrazzo.dialects.formats.terrazzo.optimizer_arguments import argument_defaults
from terrazzo.dialects.formats.terrazzo.paths import PATH_OF, WORDS
from terrazzo.engine import DTYPE_NAMES, PRECISIONS, Place, Plan
from terrazzo.errors import BadInput
from terrazzo.words import DTYPE_FIELDS

__all__ = ["read"]

_MUON = "optimizer.muon"
_OPAQUE = ("optimizer.options", "parallel.tensor.plan", *TIER_PATHS)
_HARMLESS = (
    "log", "train.eval_every", "train.eval_batches", "train.sample_every", "train.check_replicas_every",
    "train.sample_tokens", "launch",
)  # fmt: skip
_ELSEWHERE = {
    "model": "the model comes from your code there",
    "data": "the data come from your code there",
    "objective": "the loss is computed by your code there",
    "lora": "adapters come from your code there, by peft",
    "precision.frozen": "a base in 4 bits comes from your code there, by BitsAndBytesConfig",
    "optimizer.no_decay": "which parameters decay is decided in your code there",
}


def read(document: ConfigDocument, context: ReadingContext = NO_CONTEXT) -> Reading:
    """The document's meaning."""
    reader = _SchemaReader(document)
    settings = {path: reader.take(key) for key, path in PATH_OF.items()}
    _settled_while_running(reader, settings)
    settings |= {**_plan(reader), **_offload(reader), **_precision(reader), **_checkpointing(reader)}
    settings |= _sequences(reader, settings["mesh.cp"])
    settings |= _lags(settings) | _final_decay(settings) | _options(reader, settings["optimizer.name"].value) | _ALWAYS
    _tiers_of_name(reader, settings)
    _keep_others(reader)
    return reader.finish("terrazzo", settings, KEYS, unknown="refuses it")


class _SchemaReader(Reader):
    """A reader whose values are checked by the schema itself, the one that `terrazzo train` reads by.

    Attributes:
        checked: what it says of each key.
    """

    def __init__(self, document: ConfigDocument) -> None:
        super().__init__(document, "Terrazzo", _OPAQUE)
        self.checked = check_keys(document)

    def take(self, key: str) -> Setting[Any]:
        """A key of the schema, also where its section is one word, as what it means in neutral words."""
        section = key.removesuffix(".name")
        where = section if self.flat.get(section, {}) != {} or section in self.checked.problems else key
        known = CONFIG_KEYS[key]
        default = _neutral(key, known.default)
        if where not in self.flat:
            return Setting(default, "default", "")
        if self.refused(where) or self.refused(key, where):
            return Setting(default, "default", where)
        self.mark(where, "applied")
        value = self.checked.values[key]
        in_file = value is not None or known.default is not None  # a null that is the default says nothing
        return Setting(_neutral(key, value), "file" if in_file else "default", where)

    def refused(self, key: str, where: str = "") -> bool:
        """Whether a key has a problem, which is then its verdict, at `where` if it stands elsewhere."""
        problem = self.checked.problems.get(key)
        if problem is not None:
            self.refuse(where or key, problem)
        return problem is not None


def _neutral(key: str, value: Any) -> Any:
    if CONFIG_KEYS[key].kind is list:
        return None if value is None else tuple(value)
    return WORDS[key][value] if key in WORDS else value


# -- the plan ------------------------------------------------------------------------------------------------------


def _plan(reader: _SchemaReader) -> SettingsByPath:
    ahead = reader.take("plan.prefetch")
    shared = {"prefetch.forward": ahead, "prefetch.backward": ahead, **_units(reader)}
    return {**shared, **(_places(reader) or _row(reader))}


def _units(reader: _SchemaReader) -> SettingsByPath:
    units = reader.take("plan.units")
    if units.origin != "file":
        return {"units.policy": Setting("auto", "default", units.key)}
    policy = "classes" if units.value else "none"
    return {"units.policy": Setting(policy, "file", units.key), "units.classes": units}


def _places(reader: _SchemaReader) -> SettingsByPath:
    """Custom places, if the plan is given by them."""
    keys = {state: f"plan.{state}" for state in STATES}
    places = {state: reader.take_as(key, TEXT, null=True) for state, key in keys.items() if key in reader.flat}
    if not any(setting.value for setting in places.values()):
        return {}
    name = reader.take_as("plan.name", TEXT, null=True)
    missing = [state for state in STATES if state not in places or places[state].value is None]
    if name.value is not None or missing:
        fault = f"also names '{name.value}'" if name.value is not None else f"lacks {', '.join(missing)}"
        for key in [*keys.values(), "plan.name"]:
            reader.refuse(key, f"the plan is given by places and {fault}: give a name, or all four places")
        return _placed(Plan.named("zero3").places(), dict.fromkeys(STATES, ""), "default")
    given = {}
    for state, setting in places.items():
        try:
            given[state] = Place.parse(setting.value)
        except BadInput as error:
            reader.refuse(keys[state], str(error))
            given[state] = Place()
    return _placed(given, keys)


def _row(reader: _SchemaReader) -> SettingsByPath:
    named = reader.take("plan.name")
    try:
        places = Plan.named(named.value).places()
        places = {state: Place(place.axes, _shortest(place.tier)) for state, place in places.items()}
    except BadInput as error:
        reader.refuse(named.key, str(error))
        places, named = Plan.named("zero3").places(), Setting("zero3", "default", named.key)
    return _placed(places, dict.fromkeys(STATES, named.key), named.origin)


def _placed(places: Mapping[str, Place], keys: Mapping[str, str], origin: Any = "file") -> SettingsByPath:
    settings: SettingsByPath = {}
    for state, place in places.items():
        settings[f"sharding.{state}"] = Setting(",".join(place.axes) or "-", origin, keys[state])
        if place.tier != "device":
            settings[f"offload.{state}"] = Setting(place.tier, origin, keys[state])
    return settings


# -- offload -------------------------------------------------------------------------------------------------------


def _offload(reader: _SchemaReader) -> SettingsByPath:
    path = reader.take("offload.path")
    folders = (path.value,) if isinstance(path.value, str) else tuple(path.value or ())
    block = reader.take("offload.block_mib")
    return {
        "offload.path": Setting(folders, path.origin, path.key),
        "offload.block_bytes": derived(int(block.value * 2**20), block, origin=block.origin),
    }


def _tiers_of_name(reader: _SchemaReader, settings: SettingsByPath) -> None:
    """The section's tiers in place of the plan's; all three are known then."""
    for state in ("weight", "grad", "optim"):
        key = path = f"offload.{state}"
        tier = _tier(reader, key)
        if tier is not None:
            settings[path] = tier
        settings.setdefault(path, Setting("device", "default"))


def _tier(reader: _SchemaReader, key: str) -> Setting[Any] | None:
    raw = reader.take_raw(key).value
    if raw is None:
        return None
    if not isinstance(raw, str | Mapping):
        reader.refuse(key, f"it is {found(raw)}, expected device, cpu, nvme or shares such as cpu:0.7.")
        return Setting("device", "default", key)
    try:
        return Setting(_shortest(tier_text(raw)), "file", key)
    except ValueError as error:
        reader.refuse(key, str(error))
        return Setting("device", "default", key)


def _shortest(tier: str) -> str:
    """The text that means the same, its tiers in the same order. Raises: `BadInput`."""
    shares = {name: share for name, share in Place(tier=tier).shares.items() if name != "device"}
    named = sorted(shares, key=tier.index)
    return ",".join(name if shares[name] == 1 else f"{name}:{shares[name]:g}" for name in named) or "device"


def _settled_while_running(reader: _SchemaReader, settings: SettingsByPath) -> None:
    """Numbers that no file has: the most of `2:4` stands for it, since fewer there are after failures alone."""
    every = settings["saving.every"]
    when = "end" if every.value is None else "steps"
    settings["saving.when"] = Setting(when, "default" if every.value is None else "file", every.key)
    if every.value == "auto":
        settings["saving.every"] = Setting(None, "derived")
        reader.keep("checkpoint.every", "how often it pays to save is found out by `terrazzo train` alone")
    world = settings["mesh.world"]
    if isinstance(world.value, str):
        settings["mesh.world"] = Setting(int(world.value.partition(":")[2]), "derived")
        reader.keep(world.key, "how few there may be after a failure is Terrazzo's own launcher's", loss="harmless")


# -- precision, and what follows --------------------------------------------------------------------------------------


def _precision(reader: _SchemaReader) -> SettingsByPath:
    name = reader.take("precision.name")
    preset = PRECISIONS[name.value]
    settings: SettingsByPath = {}
    for field in DTYPE_FIELDS:
        own = reader.take(f"precision.{field}")
        named = Setting(DTYPE_NAMES[getattr(preset, field)], name.origin, name.key)
        settings[f"precision.{field}"] = own if own.value else named
    rounding, master = reader.take("precision.rounding"), settings["precision.master"]
    if rounding.value == "remainder":  # bf16 and the 16 bits that it leaves out
        settings["precision.master"] = derived("fp32", master, rounding, origin="file")
    scaling = preset.loss_scaling
    output = "fp32" if scaling else settings["precision.compute"].value
    settings["precision.loss_scaling"] = Setting(scaling, name.origin, name.key)
    settings["precision.output"] = Setting(output, "derived", settings["precision.compute"].key)
    settings["precision.saved"] = Setting(
        settings["precision.master"].value, "derived", settings["precision.master"].key
    )
    return settings


_ALWAYS: SettingsByPath = {
    "precision.buffers": Setting(LOADED, "default"),
    "precision.autocast": Setting(False, "default"),
    "training.loss_mean": Setting("tokens", "default"),
    "saving.state": Setting("sharded", "default"),
    "loading.low_memory": Setting(True, "default"),
    "loading.broadcast": Setting(True, "default"),
}


def _sequences(reader: _SchemaReader, ranks: Setting[Any]) -> SettingsByPath:
    """The axis along which ranks share sequences: by Ulysses it is another one in neutral words."""
    if ranks.value == 1 or reader.checked.values.get("parallel.context.mode") != "ulysses":
        return {"mesh.sp": Setting(1, "default")}
    mode = reader.take("parallel.context.mode")
    return {"mesh.cp": Setting(1, "derived"), "mesh.sp": derived(ranks.value, ranks, mode, origin="file")}


def _lags(settings: Mapping[str, Setting[Any]]) -> SettingsByPath:
    """The first step has a part of the peak, and the last one of the run the least."""
    return {
        "schedule.warmup_start": Setting(0.0, "default"),
        "schedule.warmup_lag": derived(0, settings["schedule.warmup_steps"]),
        "schedule.decay_lag": derived(0, settings["schedule.name"]),
    }


def _final_decay(settings: Mapping[str, Setting[Any]]) -> SettingsByPath:
    """A line, over a fifth of the run where nobody says how long it is."""
    decay, name = settings["schedule.decay_steps"], settings["schedule.name"]
    if name.value != "wsd":
        return {}
    shape: SettingsByPath = {"schedule.decay_shape": derived("linear", name)}
    if decay.value is not None:
        return shape
    return shape | {
        "schedule.decay_steps": Setting(max(1, settings["schedule.total_steps"].value // 5), "default", decay.key)
    }


def _options(reader: _SchemaReader, name: str) -> SettingsByPath:
    """Further arguments of the optimizer; betas and eps have settings of their own, also where its class has them."""
    options = reader.take_raw("optimizer.options", {})
    raw = dict(options.value) if isinstance(options.value, Mapping) else {}
    if not isinstance(options.value, Mapping):
        reader.refuse("optimizer.options", f"it is {found(options.value)}, expected a section of keys")
    defaults = argument_defaults(name).items()
    settings: SettingsByPath = {
        f"optimizer.{key}": Setting(value, "default") for key, value in defaults if key not in raw
    }
    betas = raw.get("betas")
    if isinstance(betas, list | tuple) and len(betas) == 2:
        settings["optimizer.betas"] = Setting(tuple(raw.pop("betas")), "file", options.key)
    if "eps" in raw:
        settings["optimizer.eps"] = Setting(raw.pop("eps"), "file", options.key)
    return {**settings, "optimizer.options": _with_matrices(reader, raw, options)}


def _with_matrices(reader: _SchemaReader, raw: dict[str, Any], options: Setting[Any]) -> Setting[Any]:
    """Further arguments, and beside them those of matrices that are updated whole, as `muon.` and their keys."""
    matrices = {
        key: reader.take(f"{_MUON}.{key}") for key in MuonConfig.model_fields if f"{_MUON}.{key}" in reader.flat
    }
    if not matrices:
        return Setting(raw, options.origin, options.key)
    raw |= {f"muon.{key}": each.value for key, each in matrices.items() if each.origin == "file"}
    settings = [*([options] if options.origin == "file" else []), *matrices.values()]
    return derived(raw, *settings, origin="file")


def _checkpointing(reader: _SchemaReader) -> SettingsByPath:
    mode = reader.take("train.activation_checkpointing")
    count = mode.value.removeprefix("every_")
    if count == mode.value:
        return {"activation_checkpointing.mode": mode}
    every = Setting(int(count), mode.origin, mode.key)
    return {
        "activation_checkpointing.mode": Setting("every", mode.origin, mode.key),
        "activation_checkpointing.every": every,
    }


def _keep_others(reader: _SchemaReader) -> None:
    """Known keys with no neutral meaning."""
    for key in reader.unread():
        name = f"{key}.name" if key in SHORTHANDS and reader.raw(key) != {} else key
        if not reader.refused(key) and not reader.refused(name, key) and name in CONFIG_KEYS:
            section = key.partition(".")[0]
            why = _ELSEWHERE.get(key) or _ELSEWHERE.get(section) or "only `terrazzo train` has it"
            usual = reader.raw(key) == CONFIG_KEYS[name].default
            idle = usual or section in _HARMLESS or key in _HARMLESS
            reader.keep(key, why, loss="harmless" if idle else "lossy", usual=usual)
