"""Reading `zero_optimization`: which row of the table, on which mesh, and what is off the device."""

from __future__ import annotations

from typing import Any

from terrazzo.dialects.core.description import Setting, SettingsByPath
from terrazzo.dialects.core.keys import BOOLEAN, integer
from terrazzo.dialects.core.reader import derived
from terrazzo.dialects.formats.deepspeed.deepspeed_reader import DeepSpeedReader
from terrazzo.dialects.formats.deepspeed.keys import OLD_OFFLOAD
from terrazzo.dialects.formats.deepspeed.versions import REMOVED, SWITCHED, in_words
from terrazzo.dialects.formats.shared.plan_rows import row_settings

__all__ = [
    "read_mesh",
    "read_offload",
    "read_prefetch",
    "read_quantized",
    "read_removed",
    "read_saving",
    "read_sharding",
    "stage_of",
]

ZERO = "zero_optimization"
HPZ, MICS = f"{ZERO}.zero_hpz_partition_size", f"{ZERO}.mics_shard_size"
GATHER, PREFETCH = f"{ZERO}.stage3_gather_16bit_weights_on_model_save", f"{ZERO}.stage3_prefetch_bucket_size"
_ROWS = ("zero0", "zero1", "zero2", "zero3")


def stage_of(reader: DeepSpeedReader) -> Setting[int]:
    """The stage; `zero_optimization: true` is an old way to say 1."""
    if isinstance(reader.raw(ZERO), bool):
        reader.mark(ZERO, "renamed", "an old word for zero_optimization.stage")
        return Setting(int(reader.raw(ZERO)), "file", ZERO)
    return reader.take(f"{ZERO}.stage")


def read_removed(reader: DeepSpeedReader) -> None:
    """Explain keys of features that DeepSpeed no longer has. Those that are switched off cost nothing."""
    for key, removed in REMOVED.items():
        gone, switched_on = reader.version >= removed.since, _asks(reader, key)
        for name in [name for name in reader.unread() if name == key or name.startswith(f"{key}.")]:
            text = removed.in_words(reader.version)
            if not gone:
                reader.keep(name, text, loss="refused" if switched_on else "harmless")
            if switched_on:
                reader.refuse(name, text)
            elif gone:
                reader.mark(name, "defaulted", f"It is switched off, as without the key. {text}")


def _asks(reader: DeepSpeedReader, key: str) -> bool:
    """Whether a removed feature is switched on."""
    off: tuple[Any, ...] = (False, None, -1, 0, {})
    if key in SWITCHED:
        return reader.raw(f"{key}.enabled") not in off
    return any(name.startswith(f"{key}.") for name in reader.flat) or reader.raw(key) not in off


def read_sharding(reader: DeepSpeedReader, stage: Setting[int]) -> SettingsByPath:
    """The row: that of the stage, or one of two axes for hpZ, and for MiCS, which is gone."""
    hpz, mics = reader.take(HPZ), reader.raw(MICS)
    if stage.value == 3 and isinstance(mics, int) and mics > 0:
        return _mics(reader, stage)
    if stage.value == 3 and hpz.value > 1:
        reader.mark(
            HPZ, "applied", "gradients end up split over all ranks; here they are summed within the group first"
        )
        return row_settings("hpz", stage, hpz) | {"mesh.dp_shard": hpz}
    if hpz.origin == "file":
        reader.keep(HPZ, "it has no effect here", loss="harmless")
    return row_settings(_ROWS[stage.value], stage)


def read_quantized(reader: DeepSpeedReader, stage: Setting[int]) -> SettingsByPath:
    """What weights are gathered in and gradients sent in, which is a choice at stage 3 alone."""
    found: SettingsByPath = {}
    for path, (key, on, off, note) in _QUANTIZED.items():
        switch = reader.take(key)
        if stage.value == 3:
            if switch.value:
                reader.mark(key, "applied", note)
            found[path] = Setting(on if switch.value else off, switch.origin, switch.key)
        elif switch.origin == "file":
            reader.keep(key, "it has an effect at stage 3 only", loss="harmless")
    return found


_QUANTIZED = {
    "precision.gather": (
        f"{ZERO}.zero_quantized_weights",
        "int8",
        "compute",
        "in blocks of 256 elements of matrices; norms and biases stay in `compute`",
    ),
    "precision.quantized_reduce": (
        f"{ZERO}.zero_quantized_gradients",
        "int4",
        "none",
        "in blocks of 256 elements of matrices, each rank's gradient once; under hpz across groups alone",
    ),
}


def _mics(reader: DeepSpeedReader, stage: Setting[int]) -> SettingsByPath:
    """MiCS, which later versions refuse and Terrazzo has."""
    group = reader.take_as(MICS, integer(), 1)
    since = in_words(REMOVED[MICS].since)
    reader.mark(MICS, "renamed", f"MiCS is the row hybrid_shard; DeepSpeed {since} removed it and refuses the key")
    return row_settings("hybrid_shard", stage, group) | {"mesh.dp_shard": group}


def read_mesh(reader: DeepSpeedReader, group: Setting[Any]) -> SettingsByPath:
    """Degrees; the launcher gives the number of ranks.

    Args:
        reader: of the document.
        group: ranks of one group of hpZ or MiCS, None if there are none.
    """
    settings: SettingsByPath = {
        "mesh.tp": _degree(reader.take("tensor_parallel.autotp_size")),
        "mesh.sp": _degree(reader.take_as("sequence_parallel_size", integer(1), 1, null=True)),
        "mesh.ep": _experts(reader),
        "mesh.pp": Setting(1, "default"),
    }
    if reader.raw("pipeline.stages") not in (None, "auto"):
        settings["mesh.pp"] = _degree(reader.take_as("pipeline.stages", integer(1), 1))
        settings |= {"parallel.schedule": Setting("1f1b", "default"), "parallel.chunks": Setting(1, "default")}
    return settings | _data(reader, settings, group)


def _data(reader: DeepSpeedReader, settings: SettingsByPath, group: Setting[Any]) -> SettingsByPath:
    """Groups of hpZ and MiCS make replicas of what is left; else all data ranks are one group."""
    apart = settings["mesh.tp"].value * settings["mesh.sp"].value * settings["mesh.pp"].value
    if group.value is not None:
        world = reader.context.world
        count = None if world is None or world % (apart * group.value) else world // apart // group.value
        return {"mesh.dp_replicate": Setting(count, "derived")}
    data = reader.take_as("data_parallel_size", integer(1), null=True)
    return {"mesh.dp_replicate": Setting(1, "default"), "mesh.dp_shard": data}


def _degree(degree: Setting[int]) -> Setting[int]:
    return Setting(max(1, degree.value), degree.origin, degree.key)


def _experts(reader: DeepSpeedReader) -> Setting[int]:
    enabled = reader.take("expert_parallel.enabled")
    size = reader.take("expert_parallel.autoep_size")
    degree = size.value if enabled.value else 1
    from_file = [each for each in (enabled, size) if each.origin == "file"]
    return derived(degree, *from_file, origin="file" if from_file else "default")


def read_prefetch(reader: DeepSpeedReader, stage: int) -> SettingsByPath:
    """Stage 3 gathers ahead by elements; how many units that is, the model says. None is none."""
    if stage != 3:
        return {}
    bucket = reader.take(PREFETCH)
    ahead = Setting(0 if bucket.value == 0 else 1, bucket.origin, bucket.key)
    return {"prefetch.forward": ahead, "prefetch.backward": ahead}


def read_offload(reader: DeepSpeedReader, stage: int) -> SettingsByPath:
    """Tiers, with what DeepSpeed makes of them at each stage."""
    optim, weight = _device(reader, "offload_optimizer"), _device(reader, "offload_param")
    reader.mark(f"{ZERO}.cpu_offload_use_pin_memory", "lossy", "DeepSpeed does nothing with it: set pin_memory instead")
    settings: SettingsByPath = {
        **_optimizer_tiers(reader, optim, stage),
        "offload.weight": _weight_tier(reader, weight, stage),
    }
    nvme = "nvme" in (settings["offload.optim"].value, settings["offload.weight"].value)
    settings |= _pin(reader) if {optim.value, weight.value} != {"none"} else {}
    settings |= _nvme(reader, optim.value, weight.value) if nvme else {}
    return settings | _aio(reader, nvme)


def _device(reader: DeepSpeedReader, section: str) -> Setting[str]:
    """Where a section puts things; `cpu_offload: true` is an old way to say "cpu"."""
    key = f"{ZERO}.{section}.device"
    old = f"{ZERO}.{OLD_OFFLOAD[section]}"
    if reader.raw(old) is not None:
        on_cpu = reader.take_as(old, BOOLEAN, False)
        if on_cpu.origin == "file" and reader.verdicts[old].kind == "applied":
            reader.mark(old, "renamed", f"today's word is {key}")
        if reader.spelled(key) not in reader.flat:
            return Setting("cpu" if on_cpu.value else "none", on_cpu.origin, old)
    return reader.take(key)


def _optimizer_tiers(reader: DeepSpeedReader, device: Setting[str], stage: int) -> SettingsByPath:
    ratio = reader.take(f"{ZERO}.offload_optimizer.ratio")
    tier, where = "device" if device.value == "none" else device.value, device.key
    if stage == 0 and tier != "device":
        reader.mark(where, "lossy", "at stage 0 DeepSpeed has no offload: from stage 1 on")
        tier = "device"
    if stage in (1, 2) and tier == "nvme":
        reader.mark(where, "lossy", f"at stage {stage} DeepSpeed takes 'nvme' for 'cpu': NVMe needs stage 3")
        tier = "cpu"
    share = tier
    if ratio.value < 1 and tier == "cpu" and stage == 3:
        share = f"cpu:{ratio.value:g}" if ratio.value > 0 else "device"
        if ratio.value == 0:
            reader.mark(ratio.key, "applied", "a share of 0: nothing leaves the device")
        optim = derived(share, device, ratio, origin="file")
    else:
        optim = Setting(share, device.origin, device.key)
        if ratio.origin == "file":
            reader.keep(ratio.key, "it has no effect here", loss="harmless")
    grad = "cpu" if tier == "nvme" else share
    step: SettingsByPath = {"offload.step": Setting("synchronous", "default")} if share != "device" else {}
    return {"offload.optim": optim, "offload.grad": derived(grad, optim, origin=optim.origin)} | step


def _weight_tier(reader: DeepSpeedReader, device: Setting[str], stage: int) -> Setting[str]:
    if device.value != "none" and stage < 3:
        why = f"at stage {stage} DeepSpeed keeps weights on the device: offload_param needs stage 3"
        reader.mark(device.key, "lossy", why)
        return Setting("device", device.origin, device.key)
    return Setting("device" if device.value == "none" else device.value, device.origin, device.key)


def _pin(reader: DeepSpeedReader) -> SettingsByPath:
    """One setting for both sections; they differ only if the file says so."""
    keys = [f"{ZERO}.{section}.pin_memory" for section in ("offload_optimizer", "offload_param")]
    pins = [reader.take(key) for key in keys]
    from_file = [each for each in pins if each.origin == "file"]
    if len(from_file) == 2 and from_file[0].value != from_file[1].value:
        reader.keep(keys[1], "one setting says it for weights and optimizer state", loss="harmless")
        from_file = from_file[:1]
    return {"offload.pin": derived(from_file[0].value, *from_file, origin="file") if from_file else pins[0]}


def _nvme(reader: DeepSpeedReader, optim: str, weight: str) -> SettingsByPath:
    sections = [name for name, device in (("offload_optimizer", optim), ("offload_param", weight)) if device == "nvme"]
    paths = [reader.take(f"{ZERO}.{name}.nvme_path") for name in sections]
    named = [path for path in paths if path.value is not None]
    settings: SettingsByPath = {"offload.direct": Setting(True, "default")}
    if named:
        folders = tuple(dict.fromkeys(path.value for path in named))
        settings["offload.path"] = derived(folders, *named, origin="file")
    return settings | {"offload.buffers": reader.take(f"{ZERO}.{sections[0]}.buffer_count")}


def _aio(reader: DeepSpeedReader, nvme: bool) -> SettingsByPath:
    keys = {"offload.block_bytes": "aio.block_size", "offload.depth": "aio.queue_depth"}
    return {path: reader.take(key) for path, key in keys.items() if nvme or reader.spelled(key) in reader.flat}


def read_saving(reader: DeepSpeedReader, stage: int) -> SettingsByPath:
    """DeepSpeed's own checkpoint resumes on as many ranks as wrote it; at stage 0 every rank has all of it."""
    gather = reader.take(GATHER)
    settings: SettingsByPath = {"saving.state": Setting("local" if stage else "full", "default")}
    background = reader.take("checkpoint.writer.decoupled")
    settings["saving.background"] = background
    if stage == 3:
        settings["saving.export"] = Setting("full" if gather.value else "none", gather.origin, gather.key)
    elif gather.origin == "file":
        reader.keep(gather.key, "it has no effect here", loss="harmless")
    return settings
