"""Writing dtypes: `bf16`, `fp16` or `torch_autocast`, and what differs from what these bring."""

from __future__ import annotations

import math

from terrazzo.dialects.core.description import EVERY_DTYPE, LOADED
from terrazzo.dialects.formats.deepspeed.deepspeed_draft import DeepSpeedDraft
from terrazzo.dialects.formats.deepspeed.versions import sums_in_fp32

__all__ = ["write_precision"]

_WIRE = ("fp32", "fp16", "bf16")
_SCALING = "precision.loss_scaling"


def write_precision(draft: DeepSpeedDraft, stage: int, optimizer_on_cpu: bool) -> None:
    """Write the section that gives the compute dtype, then every dtype that it does not bring along."""
    if not any(draft.is_set(f"precision.{name}") for name in EVERY_DTYPE):
        return
    wanted = {name: _dtype(draft, name) for name in EVERY_DTYPE}
    low = wanted["compute"] = wanted["compute"] or wanted["weight"]
    if draft.value("precision.autocast"):
        brought = _autocast(draft, wanted)
    elif low in ("bf16", "fp16"):
        brought = _low(draft, wanted, stage, optimizer_on_cpu)
    else:
        brought = dict.fromkeys(EVERY_DTYPE, "fp32")
    _wire(draft, wanted, brought, stage)
    for path in _QUANTIZED:
        _quantized(draft, path, stage)
    if draft.value("precision.error_feedback"):
        draft.lossy("precision.error_feedback", "DeepSpeed forgets what codes of gradients lose")
    _rest(draft, wanted, brought)


def _dtype(draft: DeepSpeedDraft, name: str) -> str | None:
    """The dtype asked for, None where any will do; the load dtype if it is known."""
    value = draft.value(f"precision.{name}")
    return draft.context.load_dtype or LOADED if value == LOADED else value


def _autocast(draft: DeepSpeedDraft, wanted: dict[str, str | None]) -> dict[str, str]:
    """fp32 weights under autocast. No safe modules means that gradients travel as they are: in fp32."""
    low = wanted["compute"] or "bf16"
    draft.put("precision.autocast", "torch_autocast.enabled", True)
    draft.put("precision.compute", "torch_autocast.dtype", "bfloat16" if low == "bf16" else low)
    wire = wanted["reduce"] or low
    if wire == "fp32":
        why = "no module's gradients are reduced in 16 bits"
        draft.put("precision.reduce", "torch_autocast.lower_precision_safe_modules", [], why)
    return {
        **dict.fromkeys(EVERY_DTYPE, "fp32"),
        "compute": low,
        "output": low,
        "reduce": "fp32" if wire == "fp32" else low,
    }


def _low(draft: DeepSpeedDraft, wanted: dict[str, str | None], stage: int, on_cpu: bool) -> dict[str, str]:
    """16 bits: what the section brings along, after its own switches for masters and moments."""
    low = str(wanted["compute"])
    rests = wanted["weight"] in (None, low)
    draft.put_if_needed(["precision.compute", *(["precision.weight"] if rests else [])], f"{low}.enabled", True)
    if wanted["weight"] == "fp32":
        why = f"DeepSpeed rests the weights in {low} beside fp32 masters: the numbers are the same, the memory is not"
        draft.lossy("precision.weight", why, f"{low}.enabled")
    brought = {**dict.fromkeys(EVERY_DTYPE, low), "master": "fp32", "moments": "fp32", "buffers": LOADED}
    if sums_in_fp32(low, stage, draft.version):
        brought["accumulate"] = "fp32"
    _masters(draft, wanted, brought, stage)
    if low == "bf16":
        _moments(draft, wanted, brought, on_cpu)
    elif wanted["moments"] == "fp16" and brought["master"] == "fp16":
        draft.put("precision.moments", "optimizer.params.fp32_optimizer_states", False)
        brought["moments"] = "fp16"
    if low == "fp16":
        _scale(draft)
    return brought


def _masters(draft: DeepSpeedDraft, wanted: dict[str, str | None], brought: dict[str, str], stage: int) -> None:
    low = brought["compute"]
    key = f"{low}.{low}_master_weights_and_grads"
    if wanted["master"] == low and stage > 0:
        draft.put_if_needed("precision.master", key, True)
        brought["master"] = low


def _moments(draft: DeepSpeedDraft, wanted: dict[str, str | None], brought: dict[str, str], on_cpu: bool) -> None:
    key = "bf16.bf16_optimizer_states"
    if wanted["moments"] == "bf16" and brought["master"] == "bf16":
        draft.put_if_needed("precision.moments", key, True)
        brought["moments"] = "bf16"
    elif brought["master"] == "bf16" and not on_cpu:
        why = "bf16 masters have bf16 moments, or fp32 ones where the optimizer is offloaded to the CPU"
        draft.put("precision.moments", key, True, why, "lossy")


def _scale(draft: DeepSpeedDraft) -> None:
    """The loss scale: fixed, or DeepSpeed's dynamic one."""
    fixed, scaling = draft.value("precision.static_loss_scale"), draft.value(_SCALING)
    if fixed is not None:
        draft.put_if_needed("precision.static_loss_scale", "fp16.loss_scale", fixed)
        return
    if scaling is None:
        if draft.is_set(_SCALING):
            draft.write("fp16.loss_scale", 1.0)
            draft.holds(_SCALING, "a fixed scale of 1 is none", "fp16.loss_scale")
        return
    draft.implied(_SCALING)
    values = {
        "fp16.loss_scale": 0,
        "fp16.initial_scale_power": round(math.log2(scaling.init)),
        "fp16.loss_scale_window": scaling.interval,
        "fp16.hysteresis": scaling.hysteresis,
        "fp16.min_loss_scale": max(1, round(scaling.minimum)),
    }
    for key, value in values.items():
        draft.put_if_needed(_SCALING, key, value)
    if (scaling.growth, scaling.backoff) != (2.0, 0.5) or scaling.minimum != values["fp16.min_loss_scale"]:
        draft.lossy(_SCALING, "DeepSpeed doubles and halves its scale, down to a whole number")


def _wire(draft: DeepSpeedDraft, wanted: dict[str, str | None], brought: dict[str, str], stage: int) -> None:
    """Gradients on the wire and across micro-batches."""
    wire, accumulate = wanted["reduce"], wanted["accumulate"]
    sequence = draft.value("mesh.sp", 1) > 1
    key = "seq_parallel_communication_data_type" if sequence else "communication_data_type"
    default = "fp32" if sequence else brought["reduce"]
    if not draft.value("precision.autocast"):
        if wire in _WIRE and wire != default:
            draft.put("precision.reduce", key, wire)
            brought["reduce"] = wire
        else:
            brought["reduce"] = default
    key = "data_types.grad_accum_dtype"
    if accumulate in _WIRE and accumulate != brought["accumulate"]:
        if stage == 0:
            why = f"at stage 0 DeepSpeed accumulates in {brought['accumulate']}: take stage 1 or above"
            draft.lossy("precision.accumulate", why)
        else:
            draft.put("precision.accumulate", key, accumulate)
            brought["accumulate"] = accumulate
    if wanted["buffers"] in _WIRE and wanted["buffers"] != brought["buffers"]:
        draft.put("precision.buffers", "data_types.buffer_dtype", wanted["buffers"])
        brought["buffers"] = wanted["buffers"]


_QUANTIZED = {  # the key, and what it is where it is off and on
    "precision.gather": ("zero_optimization.zero_quantized_weights", "compute", "int8"),
    "precision.quantized_reduce": ("zero_optimization.zero_quantized_gradients", "none", "int4"),
}


def _quantized(draft: DeepSpeedDraft, path: str, stage: int) -> None:
    """What is sent in blocks."""
    key, off, on = _QUANTIZED[path]
    form = draft.value(path, off)
    if form == off:
        draft.implied(path)
    elif stage != 3:
        draft.lossy(path, "DeepSpeed sends weights and gradients in fewer bits at stage 3 only")
    elif form == on:
        draft.put(path, key, True)
    else:
        draft.put(path, key, True, f"DeepSpeed has {on} there, which is the nearer to what is sent", "lossy")


def _rest(draft: DeepSpeedDraft, wanted_dtypes: dict[str, str | None], brought: dict[str, str]) -> None:
    """A verdict for every dtype that no key has said."""
    for name in EVERY_DTYPE:
        path, wanted = f"precision.{name}", wanted_dtypes[name]
        if draft.has_verdict(path) or not draft.is_set(path):
            continue
        if wanted in (None, brought[name]):
            draft.implied(path)
        elif wanted == LOADED and brought["weight"] == "fp32":  # nothing is cast: buffers stay, weights must be fp32
            draft.holds(path, "as loaded") if name == "buffers" else draft.lossy(path, "load the model in fp32")
        elif wanted == LOADED:
            draft.lossy(path, f"DeepSpeed casts the model to {brought[name]}, in whatever dtype it was loaded")
        elif name == "saved":
            draft.lossy(path, f"the 16-bit export holds {brought[name]}; fp32 weights come from zero_to_fp32.py")
        else:
            draft.lossy(path, f"DeepSpeed has {brought[name]} there, and no setting for {wanted}")
