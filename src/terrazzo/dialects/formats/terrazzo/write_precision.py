"""Writing the precision section."""

from __future__ import annotations

from collections.abc import Collection

from terrazzo.dialects.core.description import LOADED
from terrazzo.dialects.formats.terrazzo.terrazzo_draft import TerrazzoDraft
from terrazzo.engine import DTYPE_NAMES, MOMENTS_NAMES, PRECISIONS, LossScaling
from terrazzo.words import DTYPE_FIELDS

__all__ = ["write_precision"]

_NAME = "precision.name"
_EXPORTED = ("fp32", "bf16", "fp16")
"""What `terrazzo checkpoint convert --dtype` writes."""


def write_precision(draft: TerrazzoDraft) -> None:
    """Every dtype, by the nearest preset and what differs from it, and what follows from them."""
    _dtypes(draft)
    if draft.value("precision.autocast"):
        draft.lossy("precision.autocast", "every operator computes in precision.compute; autocast keeps some in fp32")
    if draft.value("precision.buffers", LOADED) not in (LOADED, "fp32"):
        draft.lossy("precision.buffers", "buffers keep the dtype that the model gives them")
    else:
        draft.implied("precision.buffers")
    draft.carry("precision.rounding")
    draft.carry("precision.gather")
    draft.carry("precision.quantized_reduce")
    draft.carry("precision.error_feedback")
    draft.carry("precision.linears")
    if draft.value("precision.skip") is not None:
        draft.carry("precision.skip")
    _follows(draft, "output", "compute")
    _follows(draft, "saved", "master")


def _names(field: str) -> Collection[str]:
    return (MOMENTS_NAMES if field == "moments" else DTYPE_NAMES).values()


def _dtypes(draft: TerrazzoDraft) -> None:
    paths = [f"precision.{field}" for field in DTYPE_FIELDS]
    scaling: LossScaling | None = draft.value("precision.loss_scaling")
    fixed = draft.value("precision.static_loss_scale")
    if not any(map(draft.is_set, paths)):
        return
    kept = {field: draft.value(f"precision.{field}") for field in DTYPE_FIELDS}
    if draft.value("precision.rounding") == "remainder":
        kept["master"] = "bf16"
    wanted = {field: value if value in _names(field) else None for field, value in kept.items()}
    name = _nearest_preset(wanted, scaled=bool(scaling or fixed))
    draft.write(_NAME, name)
    for field, value in kept.items():
        _one_dtype(draft, field, value, DTYPE_NAMES[getattr(PRECISIONS[name], field)])
    _loss_scaling(draft, scaling, fixed)


def _one_dtype(draft: TerrazzoDraft, field: str, value: str | None, preset: str) -> None:
    path = f"precision.{field}"
    if value == preset:
        draft.implied(path, key=_NAME)
    elif value in _names(field):
        draft.put(path, f"precision.{field}", value)
    elif value == LOADED:
        why = f"it depends on the dtype that the model is loaded in; {preset} is written: say --load-dtype"
        draft.lossy(path, why, _NAME)
    elif value is not None:
        draft.refuse(path, f"{value} is no dtype that Terrazzo trains in: use one of {', '.join(_names(field))}")


def _loss_scaling(draft: TerrazzoDraft, scaling: LossScaling | None, fixed: float | None) -> None:
    path = "precision.loss_scaling"
    if fixed:
        draft.lossy("precision.static_loss_scale", f"the scale is dynamic, from {LossScaling().init:g}", _NAME)
    elif scaling is not None and scaling != LossScaling():
        changed = [f"{name} {was:g} becomes {now:g}" for name, was, now in _changes(scaling)]
        draft.lossy(path, f"loss scaling has Terrazzo's own settings: {', '.join(changed)}", _NAME)
    else:
        draft.implied(path, key=_NAME)


def _follows(draft: TerrazzoDraft, field: str, name: str) -> None:
    """A dtype that has no key: it is that of another. fp16 with a scaled loss hands its outputs over in fp32."""
    value = draft.value(f"precision.{name}")
    if field == "output" and draft.description.value("precision.loss_scaling"):
        value = "fp32"
    path, dtype = f"precision.{field}", draft.value(f"precision.{field}")
    if dtype == LOADED:
        draft.lossy(path, f"it depends on the dtype that the model is loaded in, and here on precision.{name}")
    elif dtype in (value, None) or value not in DTYPE_NAMES.values():
        draft.implied(path)
    else:
        told = f"; `terrazzo checkpoint convert --to hf --dtype {dtype}` writes it so"
        hint = told if field == "saved" and dtype in _EXPORTED else ""
        draft.lossy(path, f"it is {value} here, as precision decides{hint}")


def _nearest_preset(wanted: dict[str, str | None], *, scaled: bool) -> str:
    """The preset that needs the fewest dtypes replaced, best not that of compute. Only `fp16` scales the loss."""

    def misses(name: str) -> tuple[int, bool]:
        wrong = [
            field
            for field, dtype in wanted.items()
            if dtype not in (None, DTYPE_NAMES[getattr(PRECISIONS[name], field)])
        ]
        return len(wrong), "compute" in wrong

    candidates = [name for name, preset in PRECISIONS.items() if bool(preset.loss_scaling) == scaled]
    return min(candidates, key=misses)


def _changes(scaling: LossScaling) -> list[tuple[str, float, float]]:
    ours = LossScaling()
    names = ("init", "growth", "backoff", "interval", "hysteresis", "minimum")
    pairs = [(name, getattr(scaling, name), getattr(ours, name)) for name in names]
    return [(name, was, now) for name, was, now in pairs if was != now]
