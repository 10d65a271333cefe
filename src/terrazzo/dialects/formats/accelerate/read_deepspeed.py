"""Reading `deepspeed_config`: the DeepSpeed document that Accelerate's plugin makes of it, read as such."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from terrazzo.dialects.core.description import Setting, SettingsByPath
from terrazzo.dialects.core.dialect import Reading, ReadingContext
from terrazzo.dialects.formats.accelerate.accelerate_reader import AccelerateReader
from terrazzo.dialects.formats.nested import DEEPSPEED, load_named, read_nested
from terrazzo.messages import listed

__all__ = ["FILE", "plugin_precision", "read_deepspeed"]

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


def read_deepspeed(reader: AccelerateReader, half: Setting[Any], world: int | None) -> SettingsByPath:
    """What DeepSpeed does, under the YAML's keys.

    Args:
        reader: of the YAML.
        half: `bf16`, `fp16` or None, with its key.
        world: number of ranks.
    """
    context = replace(reader.context, world=world)
    file = reader.take(FILE)
    if file.value is not None and file.value != "none":
        return _from_file(reader, file.value, context)
    document = _made(reader, half)
    reading = DEEPSPEED.read(document, context)
    keys = {inner: f"{_D}.{name}" for inner, name in _PLUGIN.items() if f"{_D}.{name}" in reader.flat}
    keys |= dict.fromkeys(("bf16.enabled", "fp16.enabled"), half.key)
    _carry(reader, reading, keys)
    rekeyed = {path: _rekeyed(setting, keys) for path, setting in reading.description.items() if setting.is_set}
    known = {
        path: setting for path, setting in rekeyed.items() if setting.origin != "auto" or setting.value is not None
    }
    return known | _at_start(reader, document["zero_optimization"]["stage"])


def _from_file(reader: AccelerateReader, name: str, context: ReadingContext) -> SettingsByPath:
    """The file says all; what stands beside it is refused by Accelerate."""
    document, fault = load_named(name, reader.context)
    if fault:
        reader.refuse(FILE, fault)
        return {}
    nested = read_nested(DEEPSPEED, document, context, FILE, file=name)
    for key in [f"{_D}.{each}" for each in _PLUGIN.values()]:
        reader.refuse(key, "Accelerate refuses it beside deepspeed_config_file: say it in that file")
    verdict = nested.verdicts[0] if nested.verdicts else None
    if verdict is not None:
        reader.mark(FILE, verdict.kind, verdict.why)
    alone = [extra.key.removeprefix(f"{FILE}.") for extra in nested.extras if extra.loss != "harmless"]
    if alone and (verdict is None or verdict.kind != "refused"):
        reader.mark(FILE, "lossy", f"DeepSpeed alone has {listed(alone, 8)}, which that file says")
    stage = document.get("zero_optimization")
    return {**nested.settings, **_at_start(reader, stage.get("stage", 0) if isinstance(stage, dict) else 0)}


def _made(reader: AccelerateReader, half: Setting[Any]) -> dict[str, Any]:
    """What the plugin hands to DeepSpeed, "auto" where it waits for the loop."""
    document: dict[str, Any] = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "zero_optimization": _zero(reader),
    }
    steps = reader.take(f"{_D}.gradient_accumulation_steps")
    if steps.value is not None:
        document["gradient_accumulation_steps"] = steps.value
    clip = reader.take(f"{_D}.gradient_clipping")
    if clip.value == 0:
        why = "the plugin leaves a 0 out, and DeepSpeed then clips at its own default: say it in a"
        reader.mark(clip.key, "lossy", f"{why} deepspeed_config_file")
    else:
        document["gradient_clipping"] = 1.0 if clip.value is None else clip.value
    return document | _sixteen_bits(half.value)


def _sixteen_bits(half: str | None) -> dict[str, Any]:
    return {} if half is None else {half: {"enabled": True, **({"auto_cast": True} if half == "fp16" else {})}}


def plugin_precision(half: str | None, stage: int, context: ReadingContext) -> SettingsByPath:
    """What DeepSpeed trains in by the document that Accelerate's plugin makes, for the reader and the writer alike."""
    document = {"zero_optimization": {"stage": stage}, **_sixteen_bits(half)}
    told = DEEPSPEED.read(document, context).description.items()
    return {path: setting for path, setting in told if path.startswith("precision.") and setting.is_set}


def _zero(reader: AccelerateReader) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": reader.take(f"{_D}.zero_stage").value}
    for name in ("offload_optimizer", "offload_param"):
        device = reader.take(f"{_D}.{name}_device").value
        path = reader.take(f"{_D}.{name}_nvme_path")
        zero[name] = {"device": device}
        if device == "nvme" and path.value not in (None, "none"):
            zero[name]["nvme_path"] = path.value
            why = "accelerate launch does not hand it on, and DeepSpeed swaps to a folder named 'none': say it in a"
            reader.mark(path.key, "lossy", f"{why} deepspeed_config_file")
        elif path.origin == "file":
            reader.keep(path.key, "nothing is on NVMe", loss="harmless")
    whole = reader.take(f"{_D}.zero3_save_16bit_model")
    zero["stage3_gather_16bit_weights_on_model_save"] = bool(whole.value)
    return zero


def _rekeyed(setting: Setting[Any], keys: dict[str, str]) -> Setting[Any]:
    """A setting under the YAML's keys; one that no key of the file gave is a default."""
    outer_keys = list(dict.fromkeys(keys[key] for key in setting.keys if keys.get(key)))
    if not outer_keys and setting.origin == "file":
        return Setting(setting.value, "default")
    return Setting(setting.value, setting.origin, ", ".join(outer_keys))


def _carry(reader: AccelerateReader, reading: Reading, keys: dict[str, str]) -> None:
    """DeepSpeed's own words about a key, on the key that gave it; and values that have no effect, as they stand."""
    for verdict in reading.verdicts:
        name = keys.get(verdict.key, "")
        if verdict.why and verdict.kind in ("lossy", "refused") and name in reader.verdicts:
            reader.mark(name, verdict.kind, verdict.why)
    for extra in reading.description.extras:
        name = keys.get(extra.key, "")
        if name in reader.flat:
            reader.keep(name, extra.why, loss="harmless")


def _at_start(reader: AccelerateReader, stage: Any) -> SettingsByPath:
    """The model is built split at stage 3, unless the configuration says otherwise."""
    init = reader.take(f"{_D}.zero3_init_flag")
    init = init if init.value is not None else replace(init, value=stage == 3)
    if init.value and stage != 3:
        reader.mark(init.key, "lossy", "it has an effect at stage 3 only")
        return {"loading.low_memory": Setting(False, "derived", init.key)}
    return {"loading.low_memory": init}
