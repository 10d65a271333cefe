"""Every key that DeepSpeed 0.19.8 reads, how it spelled them before, and which sections refuse strangers."""

from __future__ import annotations

from terrazzo.dialects.core.keys import ANY, Key
from terrazzo.dialects.formats.deepspeed.keys_core import (
    CORE_ROWS,
    OPTIMIZER_PARAMS,
    SCHEDULER_PARAMS,
    argument_default,
)
from terrazzo.dialects.formats.deepspeed.keys_tools import TOOL_ROWS
from terrazzo.dialects.formats.deepspeed.keys_zero import ZERO_ROWS
from terrazzo.dialects.formats.deepspeed.versions import REMOVED

__all__ = [
    "ALIASES",
    "BUILT_IN",
    "DECAY_LAGS",
    "DTYPE_WORDS",
    "INTERVAL",
    "KEYS",
    "NEUTRAL",
    "NULLABLE",
    "OLD_OFFLOAD",
    "OPTIMIZER_PARAMS",
    "PATTERNS",
    "SCHEDULER_PARAMS",
    "SECTIONS",
    "STRICT",
    "TABLE",
    "WARMUP_LAG",
    "argument_default",
]

TABLE: dict[str, Key] = {**CORE_ROWS, **ZERO_ROWS, **TOOL_ROWS}
"""Rows by dotted key, in today's spelling."""

PATTERNS = frozenset(key for key in TABLE if key.endswith(".*"))

_STAGE3 = "zero_optimization.stage3_"
ALIASES: dict[str, str] = {
    **{key.replace(_STAGE3, "zero_optimization."): key for key in TABLE if key.startswith(_STAGE3)},
    f"{_STAGE3}gather_fp16_weights_on_model_save": f"{_STAGE3}gather_16bit_weights_on_model_save",
    **{key.replace("bf16.", "bfloat16.", 1): key for key in TABLE if key.startswith("bf16.")},
    **{key.replace(".tp.", ".tensor_parallel."): key for key in TABLE if key.startswith("tensor_parallel.tp.")},
    "tensor_parallel.kernel_inject": "tensor_parallel.replace_with_kernel_inject",
}
"""Today's key by another spelling that DeepSpeed takes as well."""

KEYS: dict[str, Key] = {
    **TABLE,
    **{alias: TABLE[key] for alias, key in ALIASES.items()},
    **{key: Key(ANY, None, f"removed: {each.what}") for key, each in REMOVED.items()},
    **{f"{key}.*": Key(ANY, None, f"removed: {each.what}") for key, each in REMOVED.items()},
    "optimizer.params.<argument>": Key(ANY, None, ""),
}
"""Rows under every spelling, removed keys included."""

SECTIONS = frozenset(
    ".".join(parts[:depth])
    for parts in (key.removesuffix(".*").split(".") for key in (*TABLE, *ALIASES))
    for depth in range(1, len(parts))
)
"""Dotted names of everything that holds keys."""

NULLABLE = frozenset(
    {
        *("aio", "bf16", "checkpoint.writer", "expert_parallel", "optimizer.params", "scheduler.params"),
        *(f"zero_optimization.{name}" for name in ("offload_param", "offload_optimizer", "zenflow", "leaf_module")),
    }
)
"""Sections that may be null."""

STRICT = frozenset(
    {
        *("bf16", "bfloat16", "fp16", "compile", "comms_logger", "comet", "csv_monitor", "tensorboard", "wandb"),
        *("hybrid_engine", "tensor_parallel", "tensor_parallel.tp", "tensor_parallel.tensor_parallel"),
        *("timers.throughput", "weight_quantization", "zero_optimization", "zero_optimization.leaf_module"),
        *("zero_optimization.offload_optimizer", "zero_optimization.offload_param", "zero_optimization.zenflow"),
    }
)
"""Sections that refuse a file with a key that they do not know. All others, the top among them, ignore it."""

DTYPE_WORDS = {
    **dict.fromkeys(("fp32", "float32", "float", "torch.float32"), "fp32"),
    **dict.fromkeys(("fp16", "float16", "half", "torch.float16"), "fp16"),
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), "bf16"),
}
"""Neutral dtype by DeepSpeed's words for it."""

OLD_OFFLOAD = {"offload_optimizer": "cpu_offload", "offload_param": "cpu_offload_param"}
"""A section's older word, for states on the CPU."""

BUILT_IN = {
    "adam": "AdamW",
    "adamw": "AdamW",
    "adagrad": "Adagrad",
    "lamb": "Lamb",
    "lion": "Lion",
    "muon": "Muon",
    "muadam": "MuAdam",
    "muadamw": "MuAdamW",
    "musgd": "MuSGD",
}
"""The optimizers that DeepSpeed builds itself, by their names in lower case. Its Adam is AdamW unless told."""

INTERVAL = "pipeline.activation_checkpoint_interval"

NEUTRAL = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
"""The neutral name of a schedule of DeepSpeed's; others keep their own."""
WARMUP_LAG = 2
"""Steps with the rate of warm-up's start: a schedule counts from -1, and is stepped behind the optimizer."""
DECAY_LAGS = {"WarmupDecayLR": 2, "WarmupCosineLR": 1}
"""Steps behind the last one at which the rate is at its lowest; the cosine looks one ahead."""
