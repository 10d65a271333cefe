"""The precision that Accelerate trains in, and the Trainer on it, by what stands under it.

What a word such as `bf16: true` means depends on the stack: Accelerate lifts trainable FSDP parameters to fp32 before
they are sharded, and gathers and reduces in 16 bits; under DDP, weights keep the dtype in which the model was loaded.
transformers' own sharding keeps the loaded dtype, too, and gathers in it or as a key of its own says. In all of them
Accelerate runs the forward under autocast and returns fp32.
"""

from __future__ import annotations

from typing import Any

from terrazzo.dialects.core.description import LOADED, PARAMETER_DTYPES, Setting, SettingsByPath
from terrazzo.dialects.core.dialect import ReadingContext
from terrazzo.dialects.core.draft import Draft
from terrazzo.dialects.core.wording import as_text
from terrazzo.dialects.formats.shared.fsdp_policy import dtype_of_sums, load_dtype
from terrazzo.engine import LossScaling
from terrazzo.words import DTYPE_SPELLINGS

__all__ = ["AT_ONCE", "stack_precision", "under_fp8", "write_stack_precision"]

_AUTOCAST = "Accelerate runs the forward under autocast: norms, softmax and losses compute in fp32"

AT_ONCE = (
    "GradientAccumulationPlugin(sync_each_batch=True) has each micro-batch's gradients reduced, and summed in fp32"
)
"""How gradients of several micro-batches are summed in fp32 under FSDP, which else sums what it has not reduced."""
_STACKS = {"ddp": "DDP under autocast", "fsdp1": "FSDP under Accelerate", "fsdp2": "FSDP2 under Accelerate"}


def under_fp8(half: Setting[Any]) -> Setting[Any]:
    """`mixed_precision` as the dtype of what fp8 does not multiply: it lies on bf16."""
    return Setting("bf16" if half.value == "fp8" else half.value, half.origin, half.key)


def stack_precision(
    stack: str,
    half: Setting[Any],
    deferred: bool,
    context: ReadingContext,
    gathered: Setting[Any] = Setting(None, "default"),  # noqa: B008  # frozen
) -> SettingsByPath:
    """The dtype of every state, for readers and writers alike.

    Args:
        stack: `fsdp1`, `fsdp2`, `ddp`, or `native` for transformers' own sharding.
        half: `bf16`, `fp16` or None, with its key.
        deferred: gradients of several micro-batches are summed before they are reduced.
        gathered: of transformers' own sharding, the dtype that weights are gathered in, if not the loaded one; it
            reduces in fp32 then.
    """
    as_loaded = load_dtype(context, False)
    row = dict.fromkeys(PARAMETER_DTYPES, as_loaded)
    told = {"compute": half, "reduce": half}
    if gathered.value is not None:
        row |= {"compute": gathered.value, "reduce": "fp32", "accumulate": "fp32"}
        told |= {"reduce": gathered} if half.value is not None else dict.fromkeys(told, gathered)
    if half.value is not None:
        row |= {"compute": half.value}
        if stack in ("fsdp1", "fsdp2"):
            lifted = dict.fromkeys(("weight", "master", "moments", "saved"), "fp32")
            row |= {**lifted, "reduce": half.value, "accumulate": dtype_of_sums("fp32", half.value, deferred=deferred)}
    settings = {f"precision.{state}": Setting(value, "default") for state, value in row.items()}
    for state, source in told.items():
        if source.value is not None:
            settings[f"precision.{state}"] = Setting(row[state], source.origin, source.key)
    scaled = LossScaling() if half.value == "fp16" else None
    accelerated = half.value is not None  # prepare_model() wraps the forward
    return {
        **settings,
        "precision.buffers": Setting(half.value if stack == "fsdp1" and half.value else LOADED, "default"),
        "precision.autocast": Setting(accelerated, half.origin, half.key),
        "precision.loss_scaling": Setting(scaled, half.origin, half.key),
        **({"precision.output": Setting("fp32", "default")} if accelerated else {}),
    }


def write_stack_precision(
    draft: Draft, stack: str, half: Setting[Any], context: ReadingContext, *, says_accumulation: bool
) -> None:
    """A verdict on every dtype that has none yet, by the row that the stack is read as.

    Args:
        stack, half: see `stack_precision`.
        says_accumulation: the document says how many micro-batches a step has.
    """
    deferred = draft.value("batch.accumulation", 1) > 1
    for path, does in stack_precision(stack, half, deferred, context).items():
        wanted = draft.setting(path)
        if not wanted.is_set or draft.has_verdict(path):
            continue
        if wanted.value == does.value:
            until = path == "precision.accumulate" and stack in ("fsdp1", "fsdp2") and deferred
            draft.holds(path, "as long as they are not reduced" if until and not says_accumulation else "", half.key)
        else:
            key = half.key if path == "precision.autocast" else ""
            draft.lossy(path, _difference(stack, path, wanted.value, does.value, deferred=deferred), key)
    if draft.value("precision.static_loss_scale"):
        draft.lossy("precision.static_loss_scale", "the loss scale is dynamic")


def _difference(stack: str, path: str, wanted: Any, does: Any, *, deferred: bool) -> str:
    """Why a setting is another one, and what makes it what is wanted, if anything does."""
    if path == "precision.autocast":
        return _AUTOCAST if does else "without 16 bits there is none"
    if path == "precision.loss_scaling" and wanted and does:
        return "torch's GradScaler scales the loss, by its own defaults: in Accelerate's code, GradScalerKwargs"
    if path == "precision.buffers" and does == LOADED:
        return f"{path} keeps the dtype in which the model is loaded: cast it in the model"
    if does == LOADED:
        return _stays_as_loaded(wanted)
    if path == "precision.accumulate" and stack in ("fsdp1", "fsdp2") and deferred:
        return f"gradients are summed in {does} until they are reduced, or with {AT_ONCE} in fp32"
    return f"{_STACKS[stack]} has {as_text(does)} for {path}, and no key"


def _stays_as_loaded(wanted: str) -> str:
    """What becomes of a state that is to be in `wanted`, where it has the dtype in which the model is loaded."""
    edit = f"load it in {wanted}" if wanted in DTYPE_SPELLINGS else f"no setting makes it {wanted}"
    return f"it has the dtype in which the model is loaded: {edit}"
