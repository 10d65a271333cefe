"""`deepspeed.ops.adam`: torch's AdamW and Adam under DeepSpeed's names; the plan says where they run."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from terrazzo.integrations.deepspeed.absent import absent_names
from terrazzo.integrations.deepspeed.optimizers import Parameters, build_optimizer

__all__ = ["DeepSpeedCPUAdam", "FusedAdam"]

__getattr__ = absent_names(__name__)


def FusedAdam(params: Parameters, lr: float = 1e-3, *, adam_w_mode: bool = True, **options: Any) -> Optimizer:
    """AdamW, or Adam if `adam_w_mode` is false, with DeepSpeed's defaults."""
    return build_optimizer("AdamW" if adam_w_mode else "Adam", {"lr": lr, **options}, params)


def DeepSpeedCPUAdam(
    model_params: Parameters, lr: float = 1e-3, *, adamw_mode: bool = True, **options: Any
) -> Optimizer:
    """The same under its other name."""
    return FusedAdam(model_params, lr, adam_w_mode=adamw_mode, **options)
