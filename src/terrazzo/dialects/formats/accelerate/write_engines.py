"""Writing `deepspeed_config`, and what plain replicas leave to say."""

from __future__ import annotations

from terrazzo.dialects.core.description import DATA_AXES, LOADED, SHARDING, TIERS
from terrazzo.dialects.core.draft import Pen
from terrazzo.dialects.core.meaning import NVME_ONLY, ON_CPU, TWO_AXES, tier_and_share
from terrazzo.dialects.formats.shared.accelerate import AUTOCAST, kept_as_loaded
from terrazzo.dialects.formats.shared.deepspeed import BY_PARAMETER, KEPT_WHOLE, STAGES, write_grad

__all__ = ["write_autocast", "write_deepspeed", "write_precision", "write_replicas"]

_D, _P = "deepspeed_config", "parallelism_config.parallelism_config_"
_IN_FILE = "only a deepspeed_config_file says it"
_LOST = {
    "shard_grad_op": KEPT_WHOLE,
    "hpz": f"hpZ is in no key of Accelerate's: {_IN_FILE}",
    "hybrid_shard": "DeepSpeed splits over all ranks: less memory, more traffic",
}


def write_precision(pen: Pen, brought: dict[str, str], why: str) -> None:
    """A verdict for every dtype that the stack brings along, and `why` another one is lost."""
    for state, kind in brought.items():
        path = f"precision.{state}"
        wanted = pen.value(path)
        if wanted is None or wanted == kind:
            pen.implied(path, key="mixed_precision" if pen.has("mixed_precision") else "")
        elif kind == LOADED:
            pen.lossy(path, kept_as_loaded(wanted))
        else:
            pen.lossy(path, f"it is {kind} there: {why}")


def write_autocast(pen: Pen, half: str | None) -> None:
    """Accelerate runs the forward under autocast, sharded or not, but for DeepSpeed."""
    if half and pen.value("precision.autocast") is not True:
        pen.lossy("precision.autocast", AUTOCAST, "mixed_precision")
    elif half:
        pen.implied("precision.autocast", key="mixed_precision")
    elif pen.value("precision.autocast"):
        pen.lossy("precision.autocast", "without mixed_precision there is none")


# -- DeepSpeed -----------------------------------------------------------------------------------------------------


def write_deepspeed(pen: Pen, half: str | None) -> None:
    """Write what Accelerate's plugin takes of DeepSpeed's configuration."""
    row = pen.description.row or ""
    stage = STAGES.get(row, 3)
    why = _LOST.get(row, "" if row in STAGES else f"DeepSpeed has no such row: stage {stage} is nearest")
    pen.put(SHARDING, f"{_D}.zero_stage", stage, why, "lossy" if why else "applied")
    low = ("bf16" if half == "fp8" else half) or "fp32"
    states = ("weight", "reduce", "accumulate", "buffers", "output", "saved")
    write_precision(pen, {**dict.fromkeys(states, low), "master": "fp32", "moments": "fp32"}, _IN_FILE)
    if half is None:
        write_precision(pen, {"compute": "fp32"}, _IN_FILE)
    for name in ("precision.loss_scaling", "precision.static_loss_scale"):
        if pen.value(name) is not None:
            pen.lossy(name, f"DeepSpeed scales by its own defaults: {_IN_FILE}")
    if pen.value("precision.autocast"):
        pen.lossy("precision.autocast", f"the whole model is cast: {_IN_FILE}")
    _offload(pen, stage)
    _loop(pen)
    _at_ends(pen, stage)
    _axes(pen, stage)


def _offload(pen: Pen, stage: int) -> None:
    """Write devices; shares, folders and buffers have no key."""
    devices = {
        "offload_optimizer": _device(pen, "offload.optim", f"{_D}.offload_optimizer_device", stage),
        "offload_param": _device(pen, "offload.weight", f"{_D}.offload_param_device", stage),
    }
    write_grad(pen, devices["offload_optimizer"])
    folders = pen.value("offload.path", ())
    for name in [name for name, device in devices.items() if device == "nvme" and folders]:
        why = f"accelerate launch does not hand it on, and DeepSpeed swaps to a folder named 'none': {_IN_FILE}"
        pen.put("offload.path", f"{_D}.{name}_nvme_path", str(folders[0]), why, "lossy")
    usual = {"offload.pin": True, "offload.step": "synchronous", "offload.direct": True}
    for path in ("offload.step", "offload.pin", *NVME_ONLY):
        value = usual.get(path)
        unused = path in NVME_ONLY and "nvme" not in devices.values()
        if unused or pen.value(path, value) in (value, "auto") or set(devices.values()) == {"device"}:
            pen.implied(path, ON_CPU if path == "offload.step" and pen.value(path) == "auto" else "")
        else:
            pen.lossy(path, _IN_FILE)


def _device(pen: Pen, path: str, key: str, stage: int) -> str:
    """Write where one state lives; the device that it gets."""
    tier, share, mixed = tier_and_share(str(pen.value(path, "device")))
    least = 3 if path == "offload.weight" else 1
    if tier == "device":
        pen.implied(path)
        return tier
    if stage < least:
        pen.refuse(path, f"DeepSpeed does so from stage {least} on, this is {stage}")
        return "device"
    given = "cpu" if tier == "nvme" and stage < 3 else tier
    why = f"a share is in no key of Accelerate's, all of it is offloaded: {_IN_FILE}" if share else ""
    why = f"DeepSpeed has one tier for it: all of it on {tier}" if mixed else why
    why = why if given == tier else "DeepSpeed has NVMe at stage 3 only"
    pen.put(path, key, given, why, "lossy" if why else "applied")
    return given


def _loop(pen: Pen) -> None:
    """Accumulation and clipping, which DeepSpeed's engine does."""
    steps, clip = pen.value("batch.accumulation"), pen.value("training.clip")
    if steps is not None:
        pen.put("batch.accumulation", f"{_D}.gradient_accumulation_steps", steps)
    if clip is not None:
        pen.put("training.clip", f"{_D}.gradient_clipping", clip)
    else:
        pen.lossy("training.clip", f"a 0 does not reach DeepSpeed, which clips at its own default: {_IN_FILE}")


def _at_ends(pen: Pen, stage: int) -> None:
    """How weights come in, and what is written."""
    if stage == 3 and pen.value("loading.low_memory") is False:
        pen.put("loading.low_memory", f"{_D}.zero3_init_flag", False)
    elif stage < 3 and pen.value("loading.low_memory"):
        pen.lossy("loading.low_memory", "DeepSpeed builds the model split at stage 3 only")
    else:
        pen.implied("loading.low_memory")
    if pen.value("loading.broadcast") is False:
        pen.lossy("loading.broadcast", "DeepSpeed broadcasts rank 0's weights")
    else:
        pen.implied("loading.broadcast")
    export = pen.value("saving.export", "none")
    if export != "none" and stage == 3:
        why = "a plain state dict, without the model's other files" if export == "hf" else ""
        pen.put("saving.export", f"{_D}.zero3_save_16bit_model", True, why, "lossy" if why else "applied")
    else:
        pen.implied("saving.export")
    made = "local" if stage else "full"
    if pen.value("saving.state", made) == made:
        pen.implied("saving.state")
    else:
        pen.lossy("saving.state", "DeepSpeed's checkpoint resumes on as many ranks as wrote it")


def _axes(pen: Pen, stage: int) -> None:
    if pen.value("mesh.sp", 1) > 1:
        pen.put("mesh.sp", f"{_P}sp_size", pen.value("mesh.sp"))
    for axis, instead in (("tp", "tensor_parallel"), ("ep", "expert_parallel"), ("pp", "a PipelineModule")):
        if pen.value(f"mesh.{axis}", 1) > 1:
            pen.refuse(f"mesh.{axis}", f"Accelerate's keys for DeepSpeed have none: {instead}, which {_IN_FILE[5:]}")
    if pen.value("mesh.cp", 1) > 1:
        pen.refuse("mesh.cp", "DeepSpeed has no ring attention: take sequence parallelism (mesh.sp)")
    pen.implied(DATA_AXES, "all ranks that are started")
    if pen.description.row in TWO_AXES:
        pen.lossy(DATA_AXES, f"groups of ranks are in no key of Accelerate's: {_IN_FILE}")
    pen.implied(["units.policy", "units.classes", "units.min_numel"], BY_PARAMETER)
    for path in ("prefetch.forward", "prefetch.backward"):
        if stage == 3 and pen.value(path, 1) != 1:
            pen.lossy(path, f"DeepSpeed gathers ahead by elements: {_IN_FILE}")
        else:
            pen.implied(path)


# -- replicas ------------------------------------------------------------------------------------------------------


def write_replicas(pen: Pen, half: str | None) -> None:
    """Plain data parallelism says little: nothing is split, and compute is autocast's."""
    pen.implied(SHARDING, key="distributed_type")
    pen.implied(DATA_AXES, "all ranks that are started")
    for path in TIERS:
        if pen.value(path, "device") != "device":
            pen.refuse(path, "plain replicas have no offload: take a plan that splits, such as zero3")
    kept = dict.fromkeys(("weight", "reduce", "accumulate", "master", "moments", "saved", "buffers"), LOADED)
    write_precision(pen, {**kept, "output": "fp32"} if half else {**kept, "compute": LOADED, "output": LOADED}, "")
    write_autocast(pen, half)
    for path in ("precision.loss_scaling", "precision.static_loss_scale"):
        if pen.value(path) is not None:
            pen.lossy(path, "Accelerate scales the loss by torch's GradScaler: pass GradScalerKwargs")
    pen.implied(["units.policy", "units.classes", "units.min_numel"], "whole weights are not gathered")
    pen.implied(["prefetch.forward", "prefetch.backward"], "whole weights are not gathered")
    pen.implied("loading.broadcast")
    if pen.value("saving.export") == "hf":
        pen.lossy("saving.export", "your code writes it: accelerator.unwrap_model(model).save_pretrained(...)")
    else:
        pen.implied("saving.export")
    if pen.value("saving.state", "full") != "full":
        pen.implied("saving.state", "every rank has the whole state: its checkpoint fits any number of ranks")
    else:
        pen.implied("saving.state")
