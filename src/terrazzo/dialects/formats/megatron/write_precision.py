"""Writing the dtypes of Megatron-LM: one for weights and products, fp32 masters, and a scaled loss for fp16."""

from __future__ import annotations

from terrazzo.dialects.core.description import LOADED
from terrazzo.dialects.core.draft import Draft
from terrazzo.engine import LossScaling

__all__ = ["write_precision"]

_SCALE = {"init": "initial-loss-scale", "interval": "loss-scale-window", "hysteresis": "hysteresis"}
_THEIRS = LossScaling(init=2.0**32, interval=1000, hysteresis=2)


def write_precision(draft: Draft) -> None:
    """Every dtype."""
    kind = draft.value("precision.compute") or draft.value("precision.weight") or "fp32"
    if kind in ("bf16", "fp16"):
        draft.put("precision.compute", kind, True)
    elif kind == LOADED:
        draft.lossy("precision.compute", "it depends on the dtype that the model is loaded in; fp32: say --load-dtype")
        kind = "fp32"
    elif kind == "fp32":
        draft.implied("precision.compute")
    else:
        draft.refuse("precision.compute", f"Megatron-LM trains in fp32, bf16 or fp16, not in {kind}")
        kind = "fp32"
    _weights(draft, kind)
    _gradients(draft, kind)
    _states(draft, kind)
    _loss_scaling(draft, kind)


def _weights(draft: Draft, kind: str) -> None:
    """Weights at rest and in files have the dtype of products; outputs are fp32."""
    for name, always in (("weight", kind), ("buffers", kind), ("saved", kind), ("output", "fp32")):
        path = f"precision.{name}"
        value = draft.value(path, always)
        if value == always or (name == "weight" and kind != "fp32" and value == "fp32"):
            same = "they have the dtype of products" if name == "buffers" else ""
            draft.holds(path, same if value == always else "beside masters in fp32 it is a copy: the same numbers")
        else:
            draft.lossy(path, f"{_WORDS[name]} {always} there")
    if draft.value("precision.autocast"):
        draft.lossy("precision.autocast", f"every operator computes in {kind}; autocast keeps some in fp32")


_WORDS = {
    "weight": "weights rest in",
    "buffers": "buffers are",
    "saved": "weights are saved in",
    "output": "what the model returns is",
}


def _gradients(draft: Draft, kind: str) -> None:
    """Sums and what is sent have one dtype: fp32, or that of products, which torch's FSDP2 has in any case."""
    paths = ("precision.reduce", "precision.accumulate")
    reduce, sums = (draft.value(path) for path in paths)
    torchs = draft.has("use-torch-fsdp2")
    narrow = kind != "fp32" and (torchs or {reduce, sums} - {None} == {kind})
    dtype = kind if narrow else "fp32"
    key = "grad-reduce-in-bf16" if narrow and kind == "bf16" and not torchs else ""
    if not narrow and kind == "fp16":
        key = "accumulate-allreduce-grads-in-fp32"
    if key:
        draft.write(key, True)
    for path, value in zip(paths, (reduce, sums), strict=True):
        if value in (None, dtype):
            draft.implied(path, key=key)
        else:
            draft.lossy(path, f"gradients are summed and sent in one dtype: {dtype}")


def _states(draft: Draft, kind: str) -> None:
    """Masters in fp32; moments that are narrower, where the optimizer is split."""
    if draft.value("precision.master", "fp32") == "fp32":
        draft.implied("precision.master")
    else:
        draft.lossy("precision.master", "weights that the optimizer updates are fp32: more exact, more memory")
    moments = draft.value("precision.moments", "fp32")
    split = draft.has("use-distributed-optimizer") or draft.has("use-megatron-fsdp")
    if moments == "fp32":
        draft.implied("precision.moments")
    elif moments in ("bf16", "fp16") and split and kind != "fp32":
        draft.put("precision.moments", "exp-avg-dtype", moments)
        draft.write("exp-avg-sq-dtype", moments)
        draft.write("use-precision-aware-optimizer", True)
    else:
        draft.lossy("precision.moments", "the optimizer's state is fp32, unless the optimizer is split")


def _loss_scaling(draft: Draft, kind: str) -> None:
    scaling: LossScaling | None = draft.value("precision.loss_scaling")
    fixed = draft.value("precision.static_loss_scale")
    if fixed:
        draft.put("precision.static_loss_scale", "loss-scale", fixed)
        draft.implied("precision.loss_scaling")
    if scaling is None:
        if kind == "fp16" and not fixed and draft.is_set("precision.loss_scaling"):
            draft.lossy("precision.loss_scaling", "the loss is scaled in fp16")
        return
    if kind != "fp16":
        draft.lossy("precision.loss_scaling", f"the loss is scaled in fp16 alone, not in {kind}")
        return
    for field, key in _SCALE.items():
        if getattr(scaling, field) != getattr(_THEIRS, field):
            draft.write(key, getattr(scaling, field))
    if scaling.minimum != _THEIRS.minimum:
        draft.write("min-loss-scale", scaling.minimum)
    if (scaling.growth, scaling.backoff) == (2.0, 0.5):
        draft.put("precision.loss_scaling", "fp16", True)
    else:
        draft.lossy("precision.loss_scaling", "the scale grows to twice and shrinks to half", "fp16")
