"""What TrainingArguments have where they are not given, of the fields that fill "auto" in a DeepSpeed document."""

from __future__ import annotations

from typing import Any

__all__ = ["TRAINER_DEFAULTS"]

TRAINER_DEFAULTS: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "learning_rate": 5e-5,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "bf16": False,
    "fp16": False,
    "warmup_steps": 0,
}
