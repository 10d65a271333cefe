"""Writing `deepspeed_config`: what Accelerate's plugin takes of DeepSpeed's configuration."""

from __future__ import annotations

from typing import Any

from terrazzo.dialects.core.agreement import NVME_ONLY
from terrazzo.dialects.core.description import DATA_AXIS_PATHS, SHARDING_PATHS, Setting
from terrazzo.dialects.core.dialect import ReadingContext
from terrazzo.dialects.core.draft import Draft
from terrazzo.dialects.core.mesh import TWO_AXES
from terrazzo.dialects.core.wording import as_text
from terrazzo.dialects.formats.accelerate.read_deepspeed import plugin_precision
from terrazzo.dialects.formats.shared.accelerate_dtypes import under_fp8
from terrazzo.dialects.formats.shared.deepspeed_words import BY_PARAMETER, STAGES, WHOLE_BETWEEN_STEPS, write_grad
from terrazzo.dialects.formats.shared.tiers import ON_CPU, tier_and_share

__all__ = ["write_deepspeed"]

_D, _P = "deepspeed_config", "parallelism_config.parallelism_config_"
_IN_FILE = "only a deepspeed_config_file says it"
_LOST = {
    "shard_grad_op": WHOLE_BETWEEN_STEPS,
    "hpz": f"hpZ is in no key of Accelerate's: {_IN_FILE}",
    "hybrid_shard": "DeepSpeed splits over all ranks: less memory, more traffic",
}


def write_deepspeed(draft: Draft, half: Setting[Any], context: ReadingContext) -> None:
    """Write what Accelerate's plugin takes of DeepSpeed's configuration."""
    row = draft.description.row or ""
    stage = STAGES.get(row, 3)
    why = _LOST.get(row, "" if row in STAGES else f"DeepSpeed has no such row: stage {stage} is nearest")
    draft.put(SHARDING_PATHS, f"{_D}.zero_stage", stage, why, "lossy" if why else "applied")
    _precision(draft, half, stage, context)
    _offload(draft, stage)
    _loop(draft)
    _at_ends(draft, stage)
    _axes(draft, stage)


def _precision(draft: Draft, half: Setting[Any], stage: int, context: ReadingContext) -> None:
    """A verdict on every dtype, by the row that the plugin's document is read as."""
    for path, does in plugin_precision(under_fp8(half).value, stage, context).items():
        wanted = draft.setting(path)
        if not wanted.is_set or draft.has_verdict(path):
            continue
        if wanted.value == does.value:
            draft.implied(path, key=half.key)
        elif path == "precision.loss_scaling":
            draft.lossy(path, f"DeepSpeed scales by its own defaults: {_IN_FILE}")
        else:
            draft.lossy(path, f"it is {as_text(does.value)} there: {_IN_FILE}")
    if draft.value("precision.static_loss_scale") is not None:
        draft.lossy("precision.static_loss_scale", f"DeepSpeed scales by its own defaults: {_IN_FILE}")
    if draft.value("precision.autocast"):
        draft.lossy("precision.autocast", f"the whole model is cast: {_IN_FILE}")


def _offload(draft: Draft, stage: int) -> None:
    """Write devices; shares, folders and buffers have no key."""
    devices = {
        "offload_optimizer": _device(draft, "offload.optim", f"{_D}.offload_optimizer_device", stage),
        "offload_param": _device(draft, "offload.weight", f"{_D}.offload_param_device", stage),
    }
    write_grad(draft, devices["offload_optimizer"])
    folders = draft.value("offload.path", ())
    for name in [name for name, device in devices.items() if device == "nvme" and folders]:
        why = f"accelerate launch does not hand it on, and DeepSpeed swaps to a folder named 'none': {_IN_FILE}"
        draft.put("offload.path", f"{_D}.{name}_nvme_path", str(folders[0]), why, "lossy")
    usual = {"offload.pin": True, "offload.step": "synchronous", "offload.direct": True}
    for path in ("offload.step", "offload.pin", *NVME_ONLY):
        value = usual.get(path)
        unused = path in NVME_ONLY and "nvme" not in devices.values()
        if unused or draft.value(path, value) in (value, "auto") or set(devices.values()) == {"device"}:
            draft.holds(path, ON_CPU if path == "offload.step" and draft.value(path) == "auto" else "")
        else:
            draft.lossy(path, _IN_FILE)


def _device(draft: Draft, path: str, key: str, stage: int) -> str:
    """Write where one state lives; the device that it gets."""
    tier, share, mixed = tier_and_share(str(draft.value(path, "device")))
    least = 3 if path == "offload.weight" else 1
    if tier == "device":
        draft.implied(path)
        return tier
    if stage < least:
        draft.refuse(path, f"DeepSpeed does so from stage {least} on, this is {stage}")
        return "device"
    device = "cpu" if tier == "nvme" and stage < 3 else tier
    why = f"a share is in no key of Accelerate's, all of it is offloaded: {_IN_FILE}" if share else ""
    why = f"DeepSpeed has one tier for it: all of it on {tier}" if mixed else why
    why = why if device == tier else "DeepSpeed has NVMe at stage 3 only"
    draft.put(path, key, device, why, "lossy" if why else "applied")
    return device


def _loop(draft: Draft) -> None:
    """Accumulation and clipping, which DeepSpeed's engine does."""
    steps, clip = draft.value("batch.accumulation"), draft.value("training.clip")
    if steps is not None:
        draft.put("batch.accumulation", f"{_D}.gradient_accumulation_steps", steps)
    if clip is not None:
        draft.put("training.clip", f"{_D}.gradient_clipping", clip)
    else:
        draft.lossy("training.clip", f"a 0 does not reach DeepSpeed, which clips at its own default: {_IN_FILE}")


def _at_ends(draft: Draft, stage: int) -> None:
    """How weights come in, and what is written."""
    if stage == 3 and draft.value("loading.low_memory") is False:
        draft.put("loading.low_memory", f"{_D}.zero3_init_flag", False)
    elif stage < 3 and draft.value("loading.low_memory"):
        draft.lossy("loading.low_memory", "DeepSpeed builds the model split at stage 3 only")
    else:
        draft.implied("loading.low_memory")
    if draft.value("loading.broadcast") is False:
        draft.lossy("loading.broadcast", "DeepSpeed broadcasts rank 0's weights")
    else:
        draft.implied("loading.broadcast")
    export = draft.value("saving.export", "none")
    if export != "none" and stage == 3:
        why = "a plain state dict, without the model's other files" if export == "hf" else ""
        draft.put("saving.export", f"{_D}.zero3_save_16bit_model", True, why, "lossy" if why else "applied")
    else:
        draft.implied("saving.export")
    made = "local" if stage else "full"
    if draft.value("saving.state", made) == made:
        draft.implied("saving.state")
    else:
        draft.lossy("saving.state", "DeepSpeed's checkpoint resumes on as many ranks as wrote it")


def _axes(draft: Draft, stage: int) -> None:
    if draft.value("mesh.sp", 1) > 1:
        draft.put("mesh.sp", f"{_P}sp_size", draft.value("mesh.sp"))
    for axis, instead in (("tp", "tensor_parallel"), ("ep", "expert_parallel"), ("pp", "a PipelineModule")):
        if draft.value(f"mesh.{axis}", 1) > 1:
            draft.refuse(f"mesh.{axis}", f"Accelerate's keys for DeepSpeed have none: {instead}, which {_IN_FILE[5:]}")
    if draft.value("mesh.cp", 1) > 1:
        draft.refuse("mesh.cp", "DeepSpeed has no ring attention: take sequence parallelism (mesh.sp)")
    draft.implied(DATA_AXIS_PATHS, "all ranks that are started")
    if draft.description.row in TWO_AXES:
        draft.lossy(DATA_AXIS_PATHS, f"groups of ranks are in no key of Accelerate's: {_IN_FILE}")
    draft.holds(["units.policy", "units.classes", "units.min_numel"], BY_PARAMETER)
    for path in ("prefetch.forward", "prefetch.backward"):
        if stage == 3 and draft.value(path, 1) != 1:
            draft.lossy(path, f"DeepSpeed gathers ahead by elements: {_IN_FILE}")
        else:
            draft.implied(path)
