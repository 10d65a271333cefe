"""What DeepSpeed does, for its own document and for the keys that Accelerate has for it."""

from __future__ import annotations

from terrazzo.dialects.core.draft import Draft
from terrazzo.dialects.core.keys import choice

__all__ = ["BY_PARAMETER", "DEVICE", "STAGES", "WHOLE_BETWEEN_STEPS", "write_grad"]

DEVICE = choice({"none": "none", "cpu": "cpu", "nvme": "nvme"})
"""The type of a key that says where states live."""
STAGES = {"zero0": 0, "zero1": 1, "zero2": 2, "zero3": 3, "hpz": 3, "shard_grad_op": 2}
"""The stage that a row is, or is nearest to; of all others it is 3."""
WHOLE_BETWEEN_STEPS = "DeepSpeed keeps the weights whole between steps as well: more memory, the same numbers"
"""How stage 2 differs from a row that splits the weights at rest."""
BY_PARAMETER = "DeepSpeed gathers parameter by parameter"


def write_grad(draft: Draft, optim: str) -> None:
    """Gradients go where the optimizer's step is. `optim`: the tier of its state."""
    there = "cpu" if optim == "nvme" else optim
    if draft.value("offload.grad", "device") == there:
        draft.implied("offload.grad", "with the optimizer's state" if there != "device" else "")
    else:
        draft.lossy("offload.grad", f"DeepSpeed keeps gradients where the step is: {there}")
