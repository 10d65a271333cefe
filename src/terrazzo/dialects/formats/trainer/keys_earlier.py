"""What became of the fields of TrainingArguments of earlier versions, and of their defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from terrazzo.dialects.core.dialect import ReadingContext
from terrazzo.dialects.core.keys import ANY, BOOLEAN, Key, section

__all__ = ["ALIASES", "GONE", "MOVED", "PREFIX", "RENAMED", "canonical_key", "is_before"]

_LAST = "5.23.0"
"""The release of transformers that the reader was held against."""
MOVED: Mapping[str, tuple[tuple[int, int, int], Any]] = {
    "average_tokens_across_devices": ((4, 54, 0), False),
    "fsdp_config.version": ((5, 10, 0), 1),
}
"""Defaults that were others: the first release of today's, and what held before."""
PREFIX = "fsdp_config.fsdp_"
"""How keys of `fsdp_config` may begin as well."""
ALIASES = {
    "gradient_checkpointing": "activation_checkpointing",
    "gradient_checkpointing_kwargs": "activation_checkpointing_kwargs",
}
"""Fields under an older name that still works."""
RENAMED = {
    "evaluation_strategy": "eval_strategy",
    "no_cuda": "use_cpu",
    "per_gpu_eval_batch_size": "per_device_eval_batch_size",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "push_to_hub_model_id": "hub_model_id",
    "push_to_hub_token": "hub_token",
    "torchdynamo": "torch_compile_backend",
    "warmup_ratio": "warmup_steps",
}
"""Fields of transformers 5 by the name that transformers 4 had for them, and at which 5 raises."""

_INSIDE = "say it in {}"
GONE = {
    **section(
        "",
        {
            "fp16_opt_level": ("O1", "level of apex"),
            "include_tokens_per_second": (False, "log a rate"),
            "jit_mode_eval": (False, "evaluate a compiled model"),
            "logging_dir": (None, "folder of logs"),
            "mp_parameters": ("", "for SageMaker"),
            "overwrite_output_dir": (False, "write into a folder that is not empty"),
            "past_index": (-1, "evaluation with a memory"),
            "ray_scope": ("last", "for Ray"),
            "save_safetensors": (True, "format of saved weights"),
            "tpu_num_cores": (None, "for TPUs"),
            "use_ipex": (False, "Intel's extension"),
            "use_legacy_prediction_loop": (False, "older evaluation"),
            "use_mps_device": (False, "Apple's GPU"),
        },
        "harmless",
        "what is trained is the same",
    ),
    "adafactor": Key(BOOLEAN, False, "optimizer Adafactor", "refused", "say optim: adafactor"),
    "dispatch_batches": Key(ANY, None, "rank 0 loads for all", "refused", _INSIDE.format("accelerator_config")),
    "fp16_backend": Key(ANY, "auto", "apex or torch", "refused", "there is one backend: remove it"),
    "fsdp_min_num_params": Key(ANY, 0, "smallest unit", "refused", _INSIDE.format("fsdp_config: min_num_params")),
    "fsdp_transformer_layer_cls_to_wrap": Key(
        ANY, None, "class of the units", "refused", _INSIDE.format("fsdp_config: transformer_layer_cls_to_wrap")
    ),
    "group_by_length": Key(
        BOOLEAN,
        False,
        "sequences of like lengths in a batch",
        "refused",
        "say train_sampling_strategy: group_by_length",
    ),
    "half_precision_backend": Key(ANY, "auto", "apex or torch", "refused", "there is one backend: remove it"),
    "split_batches": Key(ANY, None, "a batch is that of all ranks", "refused", _INSIDE.format("accelerator_config")),
}
"""Rows of fields of transformers 4 that transformers 5 has no longer."""


def is_before(release: tuple[int, int, int], context: ReadingContext) -> bool:
    """Whether the document is for an earlier release of transformers."""
    return context.version("transformers", _LAST) < release


def canonical_key(key: str) -> str:
    """A key under the name that is used now."""
    if key.startswith(PREFIX):
        return f"fsdp_config.{key.removeprefix(PREFIX)}"
    head, dot, rest = key.partition(".")
    return f"{(ALIASES | RENAMED).get(head, head)}{dot}{rest}"
