"""Reading the dtype of every tensor: what `fp16`, `bf16`, `torch_autocast` and `data_types` come to together."""

from __future__ import annotations

import math

from terrazzo.dialects.core.description import EVERY_DTYPE, LOADED, Setting, SettingsByPath
from terrazzo.dialects.core.keys import choice, integer
from terrazzo.dialects.core.reader import derived
from terrazzo.dialects.formats.deepspeed.deepspeed_reader import DeepSpeedReader
from terrazzo.dialects.formats.deepspeed.keys import DTYPE_WORDS
from terrazzo.dialects.formats.deepspeed.versions import sums_in_fp32
from terrazzo.engine import LossScaling

__all__ = ["read_precision"]


_WIRE = {"fp32": "fp32", "fp16": "fp16", "bf16": "bf16"}


def read_precision(reader: DeepSpeedReader, stage: int | None, sequence_parallel: bool) -> SettingsByPath:
    """Every dtype, pinned: DeepSpeed leaves most to the model's."""
    bf16, fp16 = reader.take("bf16.enabled"), reader.take("fp16.enabled")
    autocast = reader.take("torch_autocast.enabled")
    if bf16.value or fp16.value:
        low, switch = ("bf16", bf16) if bf16.value else ("fp16", fp16)
        settings = _low(reader, low, switch)
        if sums_in_fp32(low, stage, reader.version):
            settings["precision.accumulate"] = Setting("fp32", "default")
    elif autocast.value:
        settings = _autocast(reader, autocast)
    elif None in (bf16.value, fp16.value):
        settings = _open(bf16, fp16)
    else:
        from_file = [each for each in (bf16, fp16, autocast) if each.origin != "default"]
        kind = derived("fp32", *from_file, origin=from_file[0].origin if from_file else "default")
        settings = dict.fromkeys((f"precision.{name}" for name in EVERY_DTYPE), Setting("fp32", "default"))
        settings["precision.compute"] = kind
    for switch in (bf16, fp16, autocast):
        if switch.origin != "default" and switch.key not in settings["precision.compute"].keys:
            reader.keep(switch.key, "another section says the dtype", loss="harmless")
    return settings | _wire(reader, settings, sequence_parallel)


def _open(*switches: Setting[bool]) -> SettingsByPath:
    """A switch is "auto", and what fills it is not known: masters and moments are fp32 in any case."""
    sources = [switch for switch in switches if switch.origin != "default"]
    settings: SettingsByPath = {"precision.compute": derived(None, *sources, origin="auto")}
    return settings | {f"precision.{name}": Setting("fp32", "default") for name in ("master", "moments")}


def _low(reader: DeepSpeedReader, low: str, switch: Setting[bool]) -> SettingsByPath:
    """bf16 or fp16: all but buffers in 16 bits where nothing else is said, masters and moments in fp32."""
    settings: SettingsByPath = dict.fromkeys((f"precision.{name}" for name in EVERY_DTYPE), Setting(low, "default"))
    settings["precision.weight"] = settings["precision.compute"] = Setting(low, switch.origin, switch.key)
    settings |= {"precision.master": Setting("fp32", "default"), "precision.moments": Setting("fp32", "default")}
    settings["precision.buffers"] = Setting(LOADED, "default")
    masters = reader.take(f"{low}.{low}_master_weights_and_grads")
    if masters.origin == "file":
        settings["precision.master"] = Setting(low if masters.value else "fp32", "file", masters.key)
    if low == "bf16":
        moments = reader.take("bf16.bf16_optimizer_states")
        if moments.origin == "file":
            settings["precision.moments"] = Setting("bf16" if moments.value else "fp32", "file", moments.key)
        return settings
    return settings | _moments(reader, bool(masters.value)) | _scaling(reader)


def _moments(reader: DeepSpeedReader, masters: bool) -> SettingsByPath:
    """Beside fp16 masters, the CPU's Adam can keep its moments in fp16."""
    key = "optimizer.params.fp32_optimizer_states"
    if not masters or reader.spelled(key) not in reader.flat:
        return {}
    fp32 = reader.take(key)
    return {"precision.moments": Setting("fp32" if fp32.value else "fp16", fp32.origin, fp32.key)}


def _scaling(reader: DeepSpeedReader) -> SettingsByPath:
    """fp16's loss scale: fixed if one is given, else dynamic."""
    fixed = reader.take("fp16.loss_scale")
    bounds = {"initial_scale_power": (0, 120), "loss_scale_window": (1, None), "hysteresis": (1, None)}
    power, window, hysteresis, minimum = (
        reader.take_as(key := f"fp16.{name}", integer(low, high), reader.default(key))
        for name, (low, high) in {**bounds, "min_loss_scale": (1, None)}.items()
    )
    if fixed.value:
        for setting in (power, window, hysteresis, minimum):
            if setting.origin == "file":
                reader.keep(setting.key, "a fixed loss scale has no use for it", loss="harmless")
        return {"precision.static_loss_scale": fixed, "precision.loss_scaling": Setting(None, "default")}
    lowest = 2.0 ** math.ceil(math.log2(minimum.value))  # the scale is a power of two
    scaling = LossScaling(2.0**power.value, 2.0, 0.5, window.value, hysteresis.value, lowest)
    from_file = [each for each in (fixed, power, window, hysteresis, minimum) if each.origin == "file"]
    return {"precision.loss_scaling": derived(scaling, *from_file, origin="file" if from_file else "default")}


def _autocast(reader: DeepSpeedReader, switch: Setting[bool]) -> SettingsByPath:
    """fp32 throughout, but for what autocast computes, and the gradients of linear layers on the wire."""
    dtype = reader.take_as("torch_autocast.dtype", choice(DTYPE_WORDS), "fp16", null=True)
    safe = reader.take("torch_autocast.lower_precision_safe_modules")
    settings: SettingsByPath = dict.fromkeys((f"precision.{name}" for name in EVERY_DTYPE), Setting("fp32", "default"))
    compute = derived(dtype.value, switch, dtype, origin="file")
    wire = Setting(dtype.value, "derived")
    if safe.origin == "file":
        wire = Setting(dtype.value if safe.value else "fp32", "file", safe.key)
    return settings | {
        "precision.autocast": Setting(True, "file", switch.key),
        "precision.compute": compute,
        "precision.output": Setting(dtype.value, "derived"),
        "precision.reduce": wire,
    }


def _wire(reader: DeepSpeedReader, settings: SettingsByPath, sequence_parallel: bool) -> SettingsByPath:
    """What the top of the file and `data_types` say over it."""
    changed: SettingsByPath = {}
    name = "seq_parallel_communication_data_type" if sequence_parallel else "communication_data_type"
    wire = reader.take_as(name, choice(_WIRE), "fp32" if sequence_parallel else None, null=True)
    if wire.value is not None and "precision.autocast" not in settings:
        changed["precision.reduce"] = wire
    elif wire.origin == "file":
        reader.keep(name, "autocast says the dtype of each gradient", loss="harmless")
    for path, key in {"accumulate": "grad_accum_dtype", "buffers": "buffer_dtype"}.items():
        dtype = reader.take_as(f"data_types.{key}", choice(DTYPE_WORDS), null=True)
        if dtype.value is not None:
            changed[f"precision.{path}"] = Setting(dtype.value, dtype.origin, dtype.key)
    return changed
