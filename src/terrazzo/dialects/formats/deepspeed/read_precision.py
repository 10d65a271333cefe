"""Reading the dtype of every tensor: what `fp16`, `bf16`, `torch_autocast` and `data_types` come to together."""

from __future__ import annotations

import math

from terrazzo.dialects.core.description import EVERY_DTYPE, LOADED, Setting, SettingsByKey
from terrazzo.dialects.core.reader import derived
from terrazzo.dialects.formats.deepspeed.reader import DeepSpeedReader
from terrazzo.engine import LossScaling

__all__ = ["DTYPE_WORDS", "read_precision"]

DTYPE_WORDS = {
    **dict.fromkeys(("fp32", "float32", "float", "torch.float32"), "fp32"),
    **dict.fromkeys(("fp16", "float16", "half", "torch.float16"), "fp16"),
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), "bf16"),
}
"""Neutral dtype by DeepSpeed's words for it."""

_WIRE = {"fp32": "fp32", "fp16": "fp16", "bf16": "bf16"}


def read_precision(source: DeepSpeedReader, sequence_parallel: bool) -> SettingsByKey:
    """Every dtype, pinned: DeepSpeed leaves most to the model's."""
    bf16, fp16 = source.take("bf16.enabled"), source.take("fp16.enabled")
    autocast = source.take("torch_autocast.enabled")
    if bf16.value or fp16.value:
        low, switch = ("bf16", bf16) if bf16.value else ("fp16", fp16)
        given = _low(source, low, switch)
    elif autocast.value:
        given = _autocast(source, autocast)
    elif None in (bf16.value, fp16.value):
        given = _open(bf16, fp16)
    else:
        asked = [each for each in (bf16, fp16, autocast) if each.origin != "default"]
        kind = derived("fp32", *asked, origin=asked[0].origin if asked else "default")
        given = dict.fromkeys((f"precision.{name}" for name in EVERY_DTYPE), Setting("fp32", "default"))
        given["precision.compute"] = kind
    for switch, mode in ((bf16, "bf16"), (fp16, "fp16"), (autocast, "torch_autocast")):
        if switch.origin != "default" and switch.key not in given["precision.compute"].keys:
            source.keep_as(f"{mode}.enabled", source.flat[switch.key], "another section says the dtype")
    return given | _wire(source, given, sequence_parallel)


def _open(*switches: Setting[bool]) -> SettingsByKey:
    """A switch is "auto", and what fills it is not known: masters and moments are fp32 in any case."""
    sources = [switch for switch in switches if switch.origin != "default"]
    given: SettingsByKey = {"precision.compute": derived(None, *sources, origin="auto")}
    return given | {f"precision.{name}": Setting("fp32", "default") for name in ("master", "moments")}


def _low(source: DeepSpeedReader, low: str, switch: Setting[bool]) -> SettingsByKey:
    """bf16 or fp16: all but buffers in 16 bits where nothing else is said, masters and moments in fp32."""
    given: SettingsByKey = dict.fromkeys((f"precision.{name}" for name in EVERY_DTYPE), Setting(low, "default"))
    given["precision.weight"] = given["precision.compute"] = Setting(low, switch.origin, switch.key)
    given |= {"precision.master": Setting("fp32", "default"), "precision.moments": Setting("fp32", "default")}
    given["precision.buffers"] = Setting(LOADED, "default")
    masters = source.take(f"{low}.{low}_master_weights_and_grads")
    if masters.origin == "file":
        given["precision.master"] = Setting(low if masters.value else "fp32", "file", masters.key)
    if low == "bf16":
        moments = source.take("bf16.bf16_optimizer_states")
        if moments.origin == "file":
            given["precision.moments"] = Setting("bf16" if moments.value else "fp32", "file", moments.key)
        return given
    return given | _moments(source, bool(masters.value)) | _scaling(source)


def _moments(source: DeepSpeedReader, masters: bool) -> SettingsByKey:
    """Beside fp16 masters, the CPU's Adam can keep its moments in fp16."""
    key = "optimizer.params.fp32_optimizer_states"
    if not masters or not source.has(key):
        return {}
    fp32 = source.take(key)
    return {"precision.moments": Setting("fp32" if fp32.value else "fp16", fp32.origin, fp32.key)}


def _scaling(source: DeepSpeedReader) -> SettingsByKey:
    """fp16's loss scale: fixed if one is given, else dynamic."""
    fixed = source.take("fp16.loss_scale")
    bounds = {"initial_scale_power": (0, 120), "loss_scale_window": (1, None), "hysteresis": (1, None)}
    power, window, hysteresis, minimum = (
        source.integer(key := f"fp16.{name}", source.default(key), low=low, high=high)
        for name, (low, high) in {**bounds, "min_loss_scale": (1, None)}.items()
    )
    if fixed.value:
        for found in (power, window, hysteresis, minimum):
            if found.origin == "file":
                source.keep_as(found.key, found.value, "a fixed loss scale has no use for it")
        return {"precision.static_loss_scale": fixed, "precision.loss_scaling": Setting(None, "default")}
    lowest = 2.0 ** math.ceil(math.log2(minimum.value))
    if lowest != minimum.value:
        source.keep_as(minimum.key, minimum.value, f"the scale is a power of two: {lowest:g} is the next")
    scaling = LossScaling(2.0**power.value, 2.0, 0.5, window.value, hysteresis.value, lowest)
    given = [each for each in (fixed, power, window, hysteresis, minimum) if each.origin == "file"]
    return {"precision.loss_scaling": derived(scaling, *given, origin="file" if given else "default")}


def _autocast(source: DeepSpeedReader, switch: Setting[bool]) -> SettingsByKey:
    """fp32 throughout, but for what autocast computes, and the gradients of linear layers on the wire."""
    dtype = source.choice("torch_autocast.dtype", DTYPE_WORDS, "fp16", null=True)
    safe = source.take("torch_autocast.lower_precision_safe_modules")
    given: SettingsByKey = dict.fromkeys((f"precision.{name}" for name in EVERY_DTYPE), Setting("fp32", "default"))
    compute = derived(dtype.value, switch, dtype, origin="file")
    wire = Setting(dtype.value, "derived")
    if safe.origin == "file":
        wire = Setting(dtype.value if safe.value else "fp32", "file", safe.key)
        if safe.value:
            source.keep_as(safe.key, list(safe.value), "gradients of other modules are reduced in fp32")
    return given | {
        "precision.autocast": Setting(True, "file", switch.key),
        "precision.compute": compute,
        "precision.output": Setting(dtype.value, "derived"),
        "precision.reduce": wire,
    }


def _wire(source: DeepSpeedReader, given: SettingsByKey, sequence_parallel: bool) -> SettingsByKey:
    """What the top of the file and `data_types` say over it."""
    changed: SettingsByKey = {}
    name = "seq_parallel_communication_data_type" if sequence_parallel else "communication_data_type"
    wire = source.choice(name, _WIRE, "fp32" if sequence_parallel else None, null=True)
    if wire.value is not None and "precision.autocast" not in given:
        changed["precision.reduce"] = wire
    elif wire.origin == "file":
        source.keep_as(name, source.raw(name), "autocast says the dtype of each gradient")
    for path, key in {"accumulate": "grad_accum_dtype", "buffers": "buffer_dtype"}.items():
        found = source.choice(f"data_types.{key}", DTYPE_WORDS, None, null=True)
        if found.value is not None:
            changed[f"precision.{path}"] = Setting(found.value, found.origin, found.key)
    return changed
