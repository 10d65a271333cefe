"""Which attention kernel runs: the one that was named, if model and device let it, or what torch takes by itself."""

from __future__ import annotations

from typing import Literal

from terrazzo.errors import BadInput
from terrazzo.planner.machine.devices import Device
from terrazzo.planner.model.shapes import BlockShape, ModelShape
from terrazzo.planner.setup.setup import AttentionKernel

__all__ = ["Unfused", "attention_of", "unfused_by_itself", "why_unfused"]

WITH_CAP = ("flash", "flash3")
"""Kernels whose packages compute a soft cap: flash-attn from 2.6 on, and FlashAttention-3."""

Unfused = Literal["eager", "one key", "dropout", "value width"]

_REASONS: dict[Unfused, str] = {
    "eager": "Transformers computes the attention of {model} eagerly, in plain operators",
    "one key": "Torch has no fused kernel for the one key head that {model} gives to all query heads",
    "dropout": "Torch's fused attention on CPUs has no dropout, and {model} drops scores in training",
    "value width": "Torch's fused attention on CPUs takes values as wide as keys alone, and those of {model} are not",
}


def unfused_by_itself(block: BlockShape, on_cpu: bool) -> Unfused | None:
    """Why a block's attention keeps its scores where nobody asks for it; None where a fused kernel runs.

    `eager` is code of the model's own; else torch's scaled_dot_product_attention takes its math path without a word
    (aten/src/ATen/native/transformers/sdp_utils_cpp.cpp; tests ask torch).
    """
    if block.eager:
        return "eager"
    if block.one_key:
        return "one key"
    if on_cpu and block.attention_dropout:
        return "dropout"
    return "value width" if on_cpu and block.value_dim != block.head_dim else None


def why_unfused(model: ModelShape, device: Device) -> str | None:
    """Why a run in torch keeps the scores of `model`, as a sentence without its end; None where it does not."""
    reasons = (unfused_by_itself(block, device.kind == "cpu") for block in model.blocks)
    first = next((reason for reason in reasons if reason is not None), None)
    return None if first is None else _REASONS[first].format(model=model.name)


def attention_of(
    named: AttentionKernel | None, model: ModelShape, device: Device, as_megatron: bool
) -> AttentionKernel:
    """The kernel that runs: by default `flash`, or `math` where torch or transformers keep scores; see `why_unfused`.

    Megatron-core has kernels of its own, but none with a soft cap.

    Raises: `BadInput` where the named one needs other hardware, or has no soft cap and the model needs one.
    """
    if named is None:
        keeps = model.soft_caps if as_megatron else why_unfused(model, device) is not None
        return "math" if keeps else "flash"
    if named in ("cudnn", "flash3") and not device.wide_warps:
        raise BadInput(
            f"attention {named} is made for Hopper and later, whose instructions {device.name} has not. Use flash."
        )
    if model.soft_caps and named not in (*WITH_CAP, "math"):
        raise BadInput(
            f"attention {named} has no soft cap, and {model.name} caps its scores. Use math, or a kernel with one: "
            f"{' or '.join(WITH_CAP)}."
        )
    return named
