"""What changed between DeepSpeed's releases: defaults that moved, and features that are gone.

Found by comparing the released sources: the version given is the first in which the change is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = [
    "CODED",
    "FIRST",
    "FP32_SUMS",
    "GHOSTS",
    "LAST",
    "MOVED",
    "REMOVED",
    "REMOVED_OPTIMIZERS",
    "STRICT_WARMUP",
    "SWITCHED",
    "default_of",
    "in_words",
    "sums_in_fp32",
]

Version = tuple[int, ...]

LAST = "0.19.8"
"""The release that the reader and the writer were held against."""
FIRST = (0, 17, 0)
"""The oldest release whose defaults were compared with that one's."""
FP32_SUMS = (0, 17, 6)
"""Before it, bf16 without ZeRO summed micro-batches in fp32, and refused to do it in bf16 outside of a pipeline."""
STRICT_WARMUP = (0, 19, 3)
"""From here on, schedules refuse a warm-up of no steps."""

MOVED: Mapping[str, tuple[Any, Version]] = {
    "gradient_clipping": (0.0, (0, 19, 3)),
    "bf16.check_grad_overflow": (False, (0, 19, 3)),
    "zero_optimization.offload_optimizer.pin_memory": (False, (0, 19, 5)),
    "zero_optimization.offload_param.pin_memory": (False, (0, 19, 5)),
}
"""The default before, and the first version with today's, of keys whose default is another than it was."""


def sums_in_fp32(low: str, stage: int | None, version: Version) -> bool:
    """Whether micro-batches in these 16 bits are summed in fp32 where nothing is said."""
    return low == "bf16" and stage == 0 and version < FP32_SUMS


def default_of(key: str, version: Version, today: Any) -> Any:
    """A key's default in a version, where `today` is that of the last one."""
    before, since = MOVED.get(key, (today, ()))
    return today if version >= since else before


@dataclass(frozen=True)
class Removed:
    """A feature that DeepSpeed no longer has.

    Attributes:
        since: the first version without it; from there on the key alone stops a run, even if it is switched off.
        what: it was.
        instead: what to do.
    """

    since: Version
    what: str
    instead: str

    def in_words(self, version: Version) -> str:
        gone = f"DeepSpeed {in_words(self.since)} removed {self.what} and refuses the key"
        later = f"{self.what}; gone from DeepSpeed {in_words(self.since)} on"
        return f"{gone if version >= self.since else later}. Instead: {self.instead}."


def in_words(version: Version) -> str:
    """As it is written: "0.19.8"."""
    return ".".join(str(part) for part in version)


_7, _8 = (0, 19, 7), (0, 19, 8)
_ZERO = "zero_optimization"
REMOVED: Mapping[str, Removed] = {
    "nebula": Removed(_7, "Nebula checkpoints", "remove it; checkpoints in the background are Terrazzo's own"),
    "compression_training": Removed(_7, "the compression library", "quantise or prune with torchao, then train"),
    "quantize_training": Removed(_7, "mixture of quantisation", "quantisation-aware training of torchao"),
    "sparse_attention": Removed(_7, "block-sparse attention", "FlexAttention with a block mask, in the model's code"),
    "amp": Removed(_8, "Apex AMP", "'bf16', 'fp16' or 'torch_autocast'"),
    "sparse_gradients": Removed(
        _8, "sparse reduction of dense embeddings' gradients", "nn.Embedding(sparse=True) where it pays"
    ),
    "eigenvalue": Removed(_8, "eigenvalues for mixture of quantisation", "remove it"),
    "elasticity": Removed(
        _8, "elastic batch sizes", "set the batch keys; Terrazzo's checkpoints resume on any number of ranks"
    ),
    "graph_harvesting": Removed(_8, "capture of CUDA graphs", "torch.compile with mode 'reduce-overhead'"),
    "curriculum_learning": Removed(
        _8, "the old curriculum by sequence length", "data_efficiency.data_sampling.curriculum_learning"
    ),
    "progressive_layer_drop": Removed(_8, "progressive layer dropping", "stochastic depth in the model's code"),
    f"{_ZERO}.mics_shard_size": Removed(
        _7, "MiCS (shards within a group, replicas over groups)", "plan hybrid_shard with dp_shard of that size"
    ),
    f"{_ZERO}.mics_hierarchical_params_gather": Removed(_7, "MiCS's two-step gather", "remove it"),
    f"{_ZERO}.zeropp_loco_param": Removed(
        _8, "LoCo's error feedback for quantised gradients", "Terrazzo's precision.error_feedback"
    ),
}
"""Removed features by dotted key; all keys below are removed too."""

SWITCHED = frozenset({"nebula", "amp", "eigenvalue", "elasticity", "curriculum_learning", "progressive_layer_drop"})
"""Removed sections that are off unless their `enabled` is true."""

GHOSTS: Mapping[str, str] = {
    "fp32_allreduce": "DeepSpeed no longer reads it: communication_data_type 'fp32' says the same",
    "aio.thread_count": "DeepSpeed no longer reads it: today's word is aio.intra_op_parallelism",
    "zero_optimization.offload_optimizer.buffer_size": "offload_param alone has it: DeepSpeed refuses the file",
    "allgather_size": "DeepSpeed reads it beside 'zero_optimization: true' alone",
}
"""Keys that look known and are not, and what to write instead."""

_MOE, _PIPE = "deepspeed.moe.layer.MoE", "deepspeed.pipe.PipelineModule"
CODED: Mapping[str, tuple[str, str]] = {
    "ep_size": (_MOE, "plan.mesh.ep"),
    "num_experts": (_MOE, "model.experts.count"),
    "k": (_MOE, "model.experts.top_k"),
    "use_residual": (_MOE, "model.experts.shared, an expert beside them that computes every token"),
    **dict.fromkeys(("capacity_factor", "min_capacity", "drop_tokens"), (_MOE, "experts that drop no token")),
    "eval_capacity_factor": (_MOE, "experts that drop no token"),
    **dict.fromkeys(("noisy_gate_policy", "use_rts", "top2_2nd_expert_sampling"), (_MOE, "a router without noise")),
    "use_tutel": (_MOE, ""),
    "enable_expert_tensor_parallelism": (_MOE, "plan.mesh.ep, which takes tensor parallel ranks as well"),
    "num_stages": (_PIPE, "plan.mesh.pp"),
    "partition_method": (_PIPE, "stages of as many elements each"),
    "checkpointable_layers": (_PIPE, "train.activation_checkpointing"),
    **dict.fromkeys(("topology", "num_dp", "num_mp"), (_PIPE, "plan.mesh")),
    **dict.fromkeys(("base_seed", "dynamic_shape", "loss_fn", "activation_checkpoint_func"), (_PIPE, "")),
}
"""Arguments of DeepSpeed's classes, which are no keys of its file: the class, and what there is in Terrazzo's."""

_COMPRESSED = "an optimizer that compresses what it sends"
REMOVED_OPTIMIZERS: Mapping[str, Removed] = {
    "onebitadam": Removed(_7, _COMPRESSED, "AdamW with communication_data_type 'bf16'"),
    "onebitlamb": Removed(_7, _COMPRESSED, "Lamb with communication_data_type 'bf16'"),
    "zerooneadam": Removed(_7, _COMPRESSED, "AdamW with communication_data_type 'bf16'"),
}
"""Removed optimizers by `optimizer.type` in lower case."""
