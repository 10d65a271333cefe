"""Reading `deepspeed_config`: the DeepSpeed document that Accelerate's plugin makes of it, read as such."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from terrazzo.dialects.core.description import Setting, SettingsByKey, settings
from terrazzo.dialects.core.dialect import Reading, ReadingContext
from terrazzo.dialects.formats.accelerate.reader import AccelerateReader
from terrazzo.dialects.formats.nested import DEEPSPEED, load_named, read_nested
from terrazzo.errors import listed

__all__ = ["FILE", "read_deepspeed"]

_D = "deepspeed_config"
FILE = f"{_D}.deepspeed_config_file"
_PLUGIN = {
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
    "zero_optimization.stage": "zero_stage",
    "zero_optimization.offload_optimizer.device": "offload_optimizer_device",
    "zero_optimization.offload_param.device": "offload_param_device",
    "zero_optimization.offload_optimizer.nvme_path": "offload_optimizer_nvme_path",
    "zero_optimization.offload_param.nvme_path": "offload_param_nvme_path",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": "zero3_save_16bit_model",
}
"""DeepSpeed's key by the one that Accelerate's plugin has for it."""


def read_deepspeed(source: AccelerateReader, half: Setting[Any], world: int | None) -> SettingsByKey:
    """What DeepSpeed does, under the YAML's keys.

    Args:
        source: the YAML.
        half: `bf16`, `fp16` or None, with its key.
        world: number of ranks.
    """
    context = replace(source.context, world=world)
    file = source.take(FILE)
    if file.value is not None and file.value != "none":
        return _from_file(source, file.value, context)
    document = _made(source, half)
    reading = DEEPSPEED.read(document, context)
    keys = {inner: f"{_D}.{name}" for inner, name in _PLUGIN.items() if f"{_D}.{name}" in source.flat}
    keys |= dict.fromkeys(("bf16.enabled", "fp16.enabled"), half.key)
    _carry(source, reading, keys)
    found = {path: _rekeyed(setting, keys) for path, setting in settings(reading.description) if setting.is_set}
    given = {path: setting for path, setting in found.items() if setting.origin != "auto" or setting.value is not None}
    return given | _at_start(source, document["zero_optimization"]["stage"])


def _from_file(source: AccelerateReader, name: str, context: ReadingContext) -> SettingsByKey:
    """The file says all; what stands beside it is refused by Accelerate."""
    document, fault = load_named(name, source.context)
    if fault:
        source.refuse(FILE, fault)
        return {}
    nested = read_nested(DEEPSPEED, document, context, FILE, file=name)
    for key in [f"{_D}.{each}" for each in _PLUGIN.values()]:
        source.refuse(key, "Accelerate refuses it beside deepspeed_config_file: say it in that file")
    verdict = nested.verdicts[0] if nested.verdicts else None
    if verdict is not None:
        source.say(FILE, verdict.kind, verdict.why)
    alone = [extra.key.removeprefix(f"{FILE}.") for extra in nested.extras if extra.loss != "harmless"]
    if alone and (verdict is None or verdict.kind != "refused"):
        source.say(FILE, "lossy", f"DeepSpeed alone has {listed(alone, 8)}, which that file says")
    source.keep_as(FILE, name, "the name of the file")
    stage = document.get("zero_optimization")
    return {**nested.given, **_at_start(source, stage.get("stage", 0) if isinstance(stage, dict) else 0)}


def _made(source: AccelerateReader, half: Setting[Any]) -> dict[str, Any]:
    """What the plugin hands to DeepSpeed, "auto" where it waits for the loop."""
    document: dict[str, Any] = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "zero_optimization": _zero(source),
    }
    steps = source.take(f"{_D}.gradient_accumulation_steps")
    if steps.value is not None:
        document["gradient_accumulation_steps"] = steps.value
    clip = source.take(f"{_D}.gradient_clipping")
    if clip.value == 0:
        why = "the plugin leaves a 0 out, and DeepSpeed then clips at its own default: say it in a"
        source.say(clip.key, "lossy", f"{why} deepspeed_config_file")
    else:
        document["gradient_clipping"] = 1.0 if clip.value is None else clip.value
    if half.value is not None:
        document[half.value] = {"enabled": True, **({"auto_cast": True} if half.value == "fp16" else {})}
    return document


def _zero(source: AccelerateReader) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": source.take(f"{_D}.zero_stage").value}
    for name in ("offload_optimizer", "offload_param"):
        device = source.take(f"{_D}.{name}_device").value
        path = source.take(f"{_D}.{name}_nvme_path")
        zero[name] = {"device": device}
        if device == "nvme" and path.value not in (None, "none"):
            zero[name]["nvme_path"] = path.value
            why = "accelerate launch does not hand it on, and DeepSpeed swaps to a folder named 'none': say it in a"
            source.say(path.key, "lossy", f"{why} deepspeed_config_file")
        elif path.origin == "file":
            source.keep_as(path.key, source.flat[path.key], "nothing is on NVMe")
    whole = source.take(f"{_D}.zero3_save_16bit_model")
    zero["stage3_gather_16bit_weights_on_model_save"] = bool(whole.value)
    return zero


def _rekeyed(setting: Setting[Any], keys: dict[str, str]) -> Setting[Any]:
    """A setting under the YAML's keys; one that no key of the file gave is a default."""
    found = list(dict.fromkeys(keys[key] for key in setting.keys if keys.get(key)))
    if not found and setting.origin == "file":
        return Setting(setting.value, "default")
    return Setting(setting.value, setting.origin, ", ".join(found))


def _carry(source: AccelerateReader, reading: Reading, keys: dict[str, str]) -> None:
    """DeepSpeed's own words about a key, on the key that gave it; and values that have no effect, as they stand."""
    for verdict in reading.verdicts:
        name = keys.get(verdict.key, "")
        if verdict.why and verdict.kind in ("lossy", "refused") and name in source.verdicts:
            source.say(name, verdict.kind, verdict.why)
    for extra in reading.description.extras:
        name = keys.get(extra.key, "")
        if name in source.flat:
            source.keep_as(name, source.flat[name], extra.why)


def _at_start(source: AccelerateReader, stage: Any) -> SettingsByKey:
    """The model is built split at stage 3, unless the configuration says otherwise."""
    init = source.take(f"{_D}.zero3_init_flag")
    init = init if init.value is not None else replace(init, value=stage == 3)
    if init.value and stage != 3:
        source.say(init.key, "lossy", "it has an effect at stage 3 only")
        source.keep_as(init.key, source.flat[init.key], "it has an effect at stage 3 only")
        return {"loading.low_memory": Setting(False, "derived", init.key)}
    return {"loading.low_memory": init}
