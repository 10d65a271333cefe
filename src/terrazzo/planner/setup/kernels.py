"""Which attention kernel runs: the one that was named, if model and device let it, or the default."""

from __future__ import annotations

from terrazzo.errors import BadInput
from terrazzo.planner.machine.devices import Device
from terrazzo.planner.model.shapes import ModelShape
from terrazzo.planner.setup.setup import AttentionKernel

__all__ = ["attention_of"]

WITH_CAP = ("flash", "flash3")
"""Kernels whose packages compute a soft cap: flash-attn from 2.6 on, and FlashAttention-3."""


def attention_of(named: AttentionKernel | None, model: ModelShape, device: Device) -> AttentionKernel:
    """The kernel that runs: by default `flash`, or `math` of a model that caps its scores, as transformers takes it.

    Raises: `BadInput` where the named one needs other hardware, or has no soft cap and the model needs one.
    """
    if named is None:
        return "math" if model.soft_caps else "flash"
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
