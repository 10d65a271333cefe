"""Reading `zero_optimization`: which row of the table, on which mesh, and what is off the device."""

from __future__ import annotations

from typing import Any

from terrazzo.dialects.core.description import Setting, SettingsByKey
from terrazzo.dialects.core.reader import derived
from terrazzo.dialects.formats.deepspeed.reader import DeepSpeedReader
from terrazzo.dialects.formats.deepspeed.versions import REMOVED, SWITCHED, in_words
from terrazzo.dialects.formats.shared.rows import ALONE_WORDS, alone, row_settings

__all__ = [
    "OLD_OFFLOAD",
    "one_group",
    "read_gather",
    "read_mesh",
    "read_offload",
    "read_prefetch",
    "read_removed",
    "read_saving",
    "read_sharding",
    "stage_of",
]

ZERO = "zero_optimization"
QUANTIZED = f"{ZERO}.zero_quantized_weights"
HPZ, MICS = f"{ZERO}.zero_hpz_partition_size", f"{ZERO}.mics_shard_size"
GATHER, PREFETCH = f"{ZERO}.stage3_gather_16bit_weights_on_model_save", f"{ZERO}.stage3_prefetch_bucket_size"
_ROWS = ("zero0", "zero1", "zero2", "zero3")
OLD_OFFLOAD = {"offload_optimizer": "cpu_offload", "offload_param": "cpu_offload_param"}
"""A section's older word, for states on the CPU."""


def stage_of(source: DeepSpeedReader) -> Setting[int]:
    """The stage; `zero_optimization: true` is an old way to say 1."""
    if isinstance(source.get(ZERO), bool):
        source.say(ZERO, "renamed", "an old word for zero_optimization.stage")
        return Setting(int(source.get(ZERO)), "file", ZERO)
    return source.take(f"{ZERO}.stage")


def read_removed(source: DeepSpeedReader) -> None:
    """Explain keys of features that DeepSpeed no longer has. Those that are switched off cost nothing."""
    for key, removed in REMOVED.items():
        gone, asked = source.version >= removed.since, _asks(source, key)
        for name in [name for name in source.unread() if name == key or name.startswith(f"{key}.")]:
            text = removed.in_words(source.version)
            if not gone:
                source.keep(name, text, loss="refused" if asked else "harmless")
            if asked:
                source.refuse(name, text)
            elif gone:
                source.say(name, "defaulted", f"It is switched off, as without the key. {text}")


def _asks(source: DeepSpeedReader, key: str) -> bool:
    """Whether a removed feature is switched on."""
    off: tuple[Any, ...] = (False, None, -1, 0, {})
    if key in SWITCHED:
        return source.get(f"{key}.enabled") not in off
    return any(name.startswith(f"{key}.") for name in source.flat) or source.get(key) not in off


def read_sharding(source: DeepSpeedReader, stage: Setting[int]) -> SettingsByKey:
    """The row: that of the stage, or one of two axes for hpZ, and for MiCS, which is gone."""
    hpz, mics = source.take(HPZ), source.get(MICS)
    if stage.value == 3 and isinstance(mics, int) and mics > 0:
        return _mics(source, stage)
    if stage.value == 3 and hpz.value > 1:
        source.say(HPZ, "applied", "gradients end up split over all ranks; here they are summed within the group first")
        return row_settings("hpz", stage, hpz) | {"mesh.dp_shard": hpz}
    if hpz.origin == "file":
        source.keep_as(HPZ, hpz.value, "it has no effect here")
    return row_settings(_ROWS[stage.value], stage)


def read_gather(source: DeepSpeedReader, stage: Setting[int]) -> SettingsByKey:
    """What weights are gathered in, which is a choice at stage 3 alone."""
    switch = source.take(QUANTIZED)
    if stage.value != 3:
        if switch.origin == "file":
            source.keep_as(QUANTIZED, switch.value, "it has an effect at stage 3 only")
        return {}
    if switch.value:
        source.say(QUANTIZED, "applied", "in blocks of 256 elements of matrices; norms and biases stay in `compute`")
    return {"precision.gather": Setting("int8" if switch.value else "compute", switch.origin, switch.key)}


def _mics(source: DeepSpeedReader, stage: Setting[int]) -> SettingsByKey:
    """MiCS, which later versions refuse and Terrazzo has."""
    group = source.integer(MICS, 1)
    since = in_words(REMOVED[MICS].since)
    source.say(MICS, "renamed", f"MiCS is the row hybrid_shard; DeepSpeed {since} removed it and refuses the key")
    return row_settings("hybrid_shard", stage, group) | {"mesh.dp_shard": group}


def read_mesh(source: DeepSpeedReader, group: Setting[Any]) -> SettingsByKey:
    """Degrees; the launcher gives the number of ranks.

    Args:
        source: the document.
        group: ranks of one group of hpZ or MiCS, None if there are none.
    """
    given: SettingsByKey = {
        "mesh.tp": _degree(source, source.take("tensor_parallel.autotp_size")),
        "mesh.sp": _degree(source, source.integer("sequence_parallel_size", 1, low=1, null=True)),
        "mesh.ep": _experts(source),
        "mesh.pp": Setting(1, "default"),
    }
    if source.raw("pipeline.stages") not in (None, "auto"):
        given["mesh.pp"] = _degree(source, source.integer("pipeline.stages", 1, low=1))
        given |= {"parallel.schedule": Setting("1f1b", "default"), "parallel.chunks": Setting(1, "default")}
    return given | _data(source, given, group)


def _data(source: DeepSpeedReader, given: SettingsByKey, group: Setting[Any]) -> SettingsByKey:
    """Groups of hpZ and MiCS make replicas of what is left; else all data ranks are one group."""
    apart = given["mesh.tp"].value * given["mesh.sp"].value * given["mesh.pp"].value
    if group.value is not None:
        world = source.context.world
        count = None if world is None or world % (apart * group.value) else world // apart // group.value
        return {"mesh.dp_replicate": Setting(count, "derived")}
    data = source.integer("data_parallel_size", None, low=1, null=True)
    return {"mesh.dp_replicate": Setting(1, "default"), "mesh.dp_shard": data}


def one_group(source: DeepSpeedReader, given: SettingsByKey) -> SettingsByKey:
    """Where one group of hpZ or MiCS holds all ranks, that of the stage; the key comes back as it was."""
    whole = alone(given)
    if whole:
        source.keep_as(given["mesh.dp_shard"].key, given["mesh.dp_shard"].value, ALONE_WORDS)
    return whole


def _degree(source: DeepSpeedReader, found: Setting[int]) -> Setting[int]:
    """A degree; where it asks for nothing, the key is kept as it is."""
    if found.origin == "file" and found.value <= 1:
        source.keep_as(found.key, found.value, "it asks for nothing")
    return Setting(max(1, found.value), found.origin, found.key)


def _experts(source: DeepSpeedReader) -> Setting[int]:
    enabled = source.take("expert_parallel.enabled")
    size = source.take("expert_parallel.autoep_size")
    degree = size.value if enabled.value else 1
    if degree == 1:
        for found in (enabled, size):
            if found.origin == "file":
                source.keep_as(found.key, found.value, "it asks for nothing")
    given = [each for each in (enabled, size) if each.origin == "file"]
    return derived(degree, *given, origin="file" if given else "default")


def read_prefetch(source: DeepSpeedReader, stage: int) -> SettingsByKey:
    """Stage 3 gathers ahead by elements; how many units that is, the model says. None is none."""
    if stage != 3:
        return {}
    bucket = source.take(PREFETCH)
    if bucket.origin != "default":
        source.keep_as(PREFETCH, source.raw(PREFETCH), "how much is gathered ahead, in elements")
    ahead = Setting(0 if bucket.value == 0 else 1, bucket.origin, bucket.key)
    return {"prefetch.forward": ahead, "prefetch.backward": ahead}


def read_offload(source: DeepSpeedReader, stage: int) -> SettingsByKey:
    """Tiers, with what DeepSpeed makes of them at each stage."""
    optim, weight = _device(source, "offload_optimizer"), _device(source, "offload_param")
    source.say(f"{ZERO}.cpu_offload_use_pin_memory", "lossy", "DeepSpeed does nothing with it: set pin_memory instead")
    given: SettingsByKey = {
        **_optimizer_tiers(source, optim, stage),
        "offload.weight": _weight_tier(source, weight, stage),
    }
    nvme = "nvme" in (given["offload.optim"].value, given["offload.weight"].value)
    given |= _pin(source) if {optim.value, weight.value} != {"none"} else {}
    given |= _nvme(source, optim.value, weight.value) if nvme else {}
    return given | _aio(source, nvme)


def _device(source: DeepSpeedReader, section: str) -> Setting[str]:
    """Where a section puts things; `cpu_offload: true` is an old way to say "cpu"."""
    key = f"{ZERO}.{section}.device"
    old = f"{ZERO}.{OLD_OFFLOAD[section]}"
    if source.raw(old) is not None:
        asked = source.boolean(old, False)
        if asked.origin == "file" and source.verdicts[old].kind == "applied":
            source.say(old, "renamed", f"today's word is {key}")
        if asked.value and not source.has(key):
            return Setting("cpu", "file", old)
    return source.take(key)


def _optimizer_tiers(source: DeepSpeedReader, device: Setting[str], stage: int) -> SettingsByKey:
    ratio = source.take(f"{ZERO}.offload_optimizer.ratio")
    tier, where = "device" if device.value == "none" else device.value, device.key
    if stage == 0 and tier != "device":
        _ineffective(source, where, device.value, "at stage 0 DeepSpeed has no offload: from stage 1 on")
        tier = "device"
    if stage in (1, 2) and tier == "nvme":
        _ineffective(source, where, "nvme", f"at stage {stage} DeepSpeed takes 'nvme' for 'cpu': NVMe needs stage 3")
        tier = "cpu"
    share = tier
    if ratio.value < 1 and tier == "cpu" and stage == 3:
        share = f"cpu:{ratio.value:g}" if ratio.value > 0 else "device"
        optim = derived(share, device, ratio, origin="file")
    else:
        optim = Setting(share, device.origin, device.key)
        if ratio.origin == "file":
            source.keep_as(f"{ZERO}.offload_optimizer.ratio", ratio.value, "it has no effect here")
    grad = "cpu" if tier == "nvme" else share
    step: SettingsByKey = {"offload.step": Setting("synchronous", "default")} if share != "device" else {}
    return {"offload.optim": optim, "offload.grad": derived(grad, optim, origin=optim.origin)} | step


def _ineffective(source: DeepSpeedReader, key: str, device: str, why: str, section: str = "offload_optimizer") -> None:
    """A device that DeepSpeed takes and does not use; kept for its own sake."""
    source.say(key, "lossy", why)
    source.keep_as(f"{ZERO}.{section}.device", device, why)


def _weight_tier(source: DeepSpeedReader, device: Setting[str], stage: int) -> Setting[str]:
    if device.value != "none" and stage < 3:
        why = f"at stage {stage} DeepSpeed keeps weights on the device: offload_param needs stage 3"
        _ineffective(source, device.key, device.value, why, "offload_param")
        return Setting("device", device.origin, device.key)
    return Setting("device" if device.value == "none" else device.value, device.origin, device.key)


def _pin(source: DeepSpeedReader) -> SettingsByKey:
    """One setting for both sections; they differ only if the file says so."""
    keys = [f"{ZERO}.{section}.pin_memory" for section in ("offload_optimizer", "offload_param")]
    found = [source.take(key) for key in keys]
    given = [each for each in found if each.origin == "file"]
    if len(given) == 2 and given[0].value != given[1].value:
        source.keep_as(keys[1], given[1].value, "one setting says it for weights and optimizer state")
        given = given[:1]
    return {"offload.pin": derived(given[0].value, *given, origin="file") if given else found[0]}


def _nvme(source: DeepSpeedReader, optim: str, weight: str) -> SettingsByKey:
    sections = [name for name, device in (("offload_optimizer", optim), ("offload_param", weight)) if device == "nvme"]
    paths = [source.take(f"{ZERO}.{name}.nvme_path") for name in sections]
    named = [path for path in paths if path.value is not None]
    given: SettingsByKey = {"offload.direct": Setting(True, "default")}
    if named:
        folders = tuple(dict.fromkeys(path.value for path in named))
        given["offload.path"] = derived(folders, *named, origin="file")
    return given | {"offload.buffers": source.take(f"{ZERO}.{sections[0]}.buffer_count")}


def _aio(source: DeepSpeedReader, nvme: bool) -> SettingsByKey:
    keys = {"offload.block_bytes": "aio.block_size", "offload.depth": "aio.queue_depth"}
    return {path: source.take(key) for path, key in keys.items() if nvme or source.has(key)}


def read_saving(source: DeepSpeedReader, stage: int) -> SettingsByKey:
    """DeepSpeed's own checkpoint resumes on as many ranks as wrote it; at stage 0 every rank has all of it."""
    gather = source.take(GATHER)
    given: SettingsByKey = {"saving.state": Setting("local" if stage else "full", "default")}
    background = source.take("checkpoint.writer.decoupled")
    given["saving.background"] = background
    if stage == 3:
        given["saving.export"] = Setting("full" if gather.value else "none", gather.origin, gather.key)
    elif gather.origin == "file":
        source.keep_as(GATHER, gather.value, "it has no effect here")
    return given
