"""Which key of a Terrazzo configuration is which neutral setting, as far as one is one: read and written alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["KEY_OF", "PATH_OF", "WORDS"]

_SAME = (
    "offload.step", "offload.threads", "offload.pin", "offload.direct", "offload.depth", "offload.digest",
    "batch.global_batch", "batch.micro_batch", "batch.sequence_length",
    "optimizer.name", "optimizer.lr", "optimizer.weight_decay", "optimizer.decay",
    "schedule.name", "schedule.warmup_steps", "schedule.final_fraction", "schedule.decay_steps",
)  # fmt: skip
PATH_OF: Mapping[str, str] = {
    **{key: key for key in _SAME},
    "plan.mesh.pp": "mesh.pp",
    "plan.mesh.dp_replicate": "mesh.dp_replicate",
    "plan.mesh.dp_shard": "mesh.dp_shard",
    "plan.mesh.cp": "mesh.cp",
    "plan.mesh.tp": "mesh.tp",
    "plan.mesh.ep": "mesh.ep",
    "parallel.pipeline.schedule": "parallel.schedule",
    "parallel.pipeline.chunks": "parallel.chunks",
    "parallel.tensor.sequence": "parallel.sequence",
    "precision.rounding": "precision.rounding",
    "precision.gather": "precision.gather",
    "precision.quantized_reduce": "precision.quantized_reduce",
    "precision.error_feedback": "precision.error_feedback",
    "precision.linears": "precision.linears",
    "precision.skip": "precision.skip",
    "launch.ranks": "mesh.world",
    "launch.device": "training.device",
    "train.steps": "schedule.total_steps",
    "train.clip": "training.clip",
    "guard.action": "training.nonfinite",
    "train.compile": "training.compile",
    "train.seed": "training.seed",
    "train.activation_checkpointing_ops": "activation_checkpointing.ops",
    "offload.activations": "activation_checkpointing.offload",
    "checkpoint.save_format": "saving.export",
    "checkpoint.every": "saving.every",
    "checkpoint.keep_last": "saving.keep_last",
    "checkpoint.folder": "saving.folder",
    "checkpoint.background": "saving.background",
}
"""Path by key."""
KEY_OF: Mapping[str, str] = {path: key for key, path in PATH_OF.items()}

WORDS: Mapping[str, Mapping[str, Any]] = {
    "launch.device": {"auto": None, "cpu": "cpu", "cuda": "cuda"},
    "offload.activations": {"device": False, "cpu": True},
    "checkpoint.save_format": {"terrazzo": "none", "hf": "hf"},
}
"""Neutral values of the keys whose words are others."""
