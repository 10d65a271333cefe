"""Example values of a peer's keys, and the configurations beside which they mean something.

A key whose value is not given here is tried with values of every kind until the reader takes one: see `fates`.
"""

from __future__ import annotations

from typing import Any

__all__ = ["BESIDE", "CONCRETE", "VALUES"]

Document = dict[str, Any]

_ZERO3: Document = {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 2}
_DEEPSPEED: Document = {**_ZERO3, "bf16": {"enabled": True}}
_FSDP1 = {"sharding_strategy": "FULL_SHARD", "mixed_precision": {"param_dtype": "bfloat16"}}
_FSDP2 = {"mp_policy": {"param_dtype": "bfloat16"}}
_RUN = {"distributed_type": "FSDP", "mixed_precision": "bf16", "num_processes": 8}
_ACCELERATE = {**_RUN, "fsdp_config": {"fsdp_version": 2}}
_MEGATRON = {
    "bf16": True,
    "use-distributed-optimizer": True,
    "micro-batch-size": 2,
    "global-batch-size": 64,
    "lr": 1e-3,
}
_FP16 = {"fp16": True, "micro-batch-size": 2}
_TRAINER = {"output_dir": "out", "bf16": True, "fsdp": True}


def _optimizer(kind: str) -> Document:
    return {**_DEEPSPEED, "optimizer": {"type": kind, "params": {}}}


def _schedule(kind: str) -> Document:
    params = {} if kind in ("OneCycle", "LRRangeTest") else {"warmup_num_steps": 10, "warmup_type": "linear"}
    total = {"total_num_steps": 100} if kind in ("WarmupDecayLR", "WarmupCosineLR") else {}
    return {**_optimizer("AdamW"), "scheduler": {"type": kind, "params": {**params, **total}}}


def _zero(**more: Any) -> Document:
    return {**_DEEPSPEED, "zero_optimization": {"stage": 3, **more}}


def _zero3(**more: Any) -> Document:
    return {**_RUN, "distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 3, **more}}


_NVME = {"device": "nvme", "nvme_path": "/swap"}
_PARAMS = "scheduler.params."
_ONE_CYCLE = ("cycle", "decay")

BESIDE: dict[str, dict[str, Document]] = {
    "deepspeed": {
        "": _DEEPSPEED,
        "fp16": {**_ZERO3, "fp16": {"enabled": True}},
        "torch_autocast": {**_ZERO3, "torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
        "optimizer.params": _optimizer("AdamW"),
        "optimizer.params.<argument>": _optimizer("SGD"),
        **dict.fromkeys((f"optimizer.params.{name}" for name in ("max_c", "min_c", "eps_inside")), _optimizer("Lamb")),
        **dict.fromkeys(
            (f"optimizer.params.{name}" for name in ("muon_lr", "adam_lr", "momentum", "ns_", "per_head")),
            _optimizer("Muon"),
        ),
        "scheduler": _optimizer("AdamW"),
        "scheduler.params": _schedule("WarmupDecayLR"),
        f"{_PARAMS}warmup_min_ratio": _schedule("WarmupCosineLR"),
        f"{_PARAMS}cos_min_ratio": _schedule("WarmupCosineLR"),
        f"{_PARAMS}lr_range": _schedule("LRRangeTest"),
        **dict.fromkeys((f"{_PARAMS}{name}" for name in _ONE_CYCLE), _schedule("OneCycle")),
        "zero_optimization.offload_param": _zero(offload_param=_NVME),
        "zero_optimization.offload_optimizer": _zero(offload_optimizer=_NVME),
        "zero_optimization.offload_optimizer.ratio": _zero(offload_optimizer={"device": "cpu"}),
        "aio": _zero(offload_optimizer=_NVME),
        "expert_parallel": {**_DEEPSPEED, "expert_parallel": {"enabled": True, "autoep_size": 2}},
    },
    "fsdp1": {
        "": _FSDP1,
        "auto_wrap_policy.size": {
            **_FSDP1,
            "auto_wrap_policy": {"size_based_auto_wrap_policy": {"min_num_params": 1000}},
        },
        "device_mesh": {**_FSDP1, "sharding_strategy": "HYBRID_SHARD"},
        "device_mesh.<axis>": {**_FSDP1, "sharding_strategy": "HYBRID_SHARD", "device_mesh": {"dp_replicate": 2}},
    },
    "fsdp2": {
        "": _FSDP2,
        "mesh.<axis>": {**_FSDP2, "mesh": {"dp_replicate": 2}},
        "dp_mesh_dims": {**_FSDP2, "mesh": {"dp_replicate": 2, "dp_shard": 4}},
    },
    "accelerate": {
        "": _ACCELERATE,
        **{
            f"fsdp_config.fsdp_{name}": {**_RUN, "fsdp_config": {"fsdp_version": 1}}
            for name in ("sharding", "backward_prefetch", "forward_prefetch", "sync_module")
        },
        "fsdp_config.fsdp_min_num": {**_RUN, "fsdp_config": {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP"}},
        "fsdp_config.fsdp_transformer": {
            **_RUN,
            "fsdp_config": {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
        },
        "fsdp_config.fsdp_activation_checkpointing_off": {
            **_RUN,
            "fsdp_config": {"fsdp_activation_checkpointing": True},
        },
        "deepspeed_config": _zero3(),
        "deepspeed_config.deepspeed_config_file": {"distributed_type": "DEEPSPEED", "num_processes": 8},
        "deepspeed_config.offload_optimizer_nvme": _zero3(offload_optimizer_device="nvme"),
        "deepspeed_config.offload_param_nvme": _zero3(offload_param_device="nvme"),
        "dynamo": {**_RUN, "distributed_type": "MULTI_GPU", "dynamo_config": {"dynamo_backend": "INDUCTOR"}},
        "fp8_config": {**_RUN, "mixed_precision": "fp8", "fsdp_config": {"fsdp_version": 2}},
        "fp16": {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}},
        "parallelism_config.": {**_ACCELERATE, "num_processes": 2},  # an axis of 2 by itself
    },
    "megatron": {
        "": _MEGATRON,
        **dict.fromkeys(("fp16", "initial-loss", "min-loss", "loss-scale-window", "hysteresis"), _FP16),
        "bf16": {"micro-batch-size": 2},
        "num-layers-per": {**_MEGATRON, "pipeline-model-parallel-size": 2, "num-layers": 32},
        "num-virtual": {**_MEGATRON, "pipeline-model-parallel-size": 2},
        "sequence-parallel": {**_MEGATRON, "tensor-model-parallel-size": 2},
        "cp-comm": {**_MEGATRON, "context-parallel-size": 2},
        "use-": {"bf16": True, "micro-batch-size": 2},
        "data-parallel-sharding": {"bf16": True, "use-megatron-fsdp": True},
        "outer-dp": {"bf16": True, "use-megatron-fsdp": True, "num-distributed-optimizer-instances": 2},
        "torch-fsdp2": {"bf16": True, "use-torch-fsdp2": True},
        "exp-avg": {**_MEGATRON, "use-precision-aware-optimizer": True},
        "main-params": {**_MEGATRON, "use-precision-aware-optimizer": True},
        "optimizer-offload": {**_MEGATRON, "optimizer-cpu-offload": True},
        "sgd": {**_MEGATRON, "optimizer": "sgd"},
        "lr-warmup-init": {**_MEGATRON, "lr-warmup-iters": 100},
        "lr-wsd": {**_MEGATRON, "lr-decay-style": "WSD", "train-iters": 100},
        "recompute-": {**_MEGATRON, "recompute-granularity": "full"},
        "recompute-granularity": _MEGATRON,
        "save": {**_MEGATRON, "save-interval": 500},
        "save-interval": {**_MEGATRON, "save": "x"},
        "recompute-activations": _MEGATRON,
        "torchrun.nnodes": {**_MEGATRON, "torchrun": {"nproc-per-node": 4}},
    },
    "trainer": {
        "": _TRAINER,
        "fp16": {"output_dir": "out", "fsdp": True},
        "fsdp": {"output_dir": "out", "bf16": True},
        "fsdp_config": _TRAINER,
        **{
            f"fsdp_config.{name}": {**_TRAINER, "fsdp_config": {"version": 1}}
            for name in ("forward_prefetch", "backward_prefetch", "use_orig", "sync_module", "limit_all")
        },
        "fsdp_config.min_num": {**_TRAINER, "fsdp_config": {"auto_wrap_policy": "SIZE_BASED_WRAP"}},
        "distributed_config": {"output_dir": "out", "distributed_config": {"fsdp_size": 8}},
        "deepspeed": {"output_dir": "out", "bf16": True},
        "ddp": {"output_dir": "out", "bf16": True},
        "lr_scheduler_kwargs": {**_TRAINER, "lr_scheduler_type": "cosine_with_min_lr", "max_steps": 100},
        "warmup_steps": {**_TRAINER, "lr_scheduler_type": "cosine", "max_steps": 100},
    },
}
"""By dialect and the beginning of a key: the longest that fits is taken."""

_SWITCHED = ("nebula", "amp", "eigenvalue", "elasticity", "curriculum_learning", "progressive_layer_drop")
CONCRETE = {
    "device_mesh.<axis>": "device_mesh.dp_shard",
    "mesh.<axis>": "mesh.dp_shard",
    "auto_wrap_policy.size_based_auto_wrap_policy.<argument>": (
        "auto_wrap_policy.size_based_auto_wrap_policy.exclude_wrap_modules"
    ),
    "optimizer.params.<argument>": "optimizer.params.nesterov",
    **{f"{section}.*": f"{section}.enabled" for section in _SWITCHED},
    "torchrun.<argument>": "torchrun.rdzv-id",
    "lr_scheduler_kwargs.*": "lr_scheduler_kwargs.min_lr_rate",
}
"""Keys that stand for a pattern."""

VALUES: dict[str, Document] = {
    "megatron": {
        "torchrun.nproc-per-node": 8,
        "torchrun.<argument>": "x",
        "micro-batch-size": 4,
        "global-batch-size": 128,
        "seq-length": 4096,
        "train-iters": 5000,
        "train-samples": 64000,
        "lr-decay-iters": 4000,
        "lr-warmup-iters": 100,
        "lr-warmup-samples": 6400,
        "lr-warmup-init": 1e-4,
        "lr": 3e-4,
        "min-lr": 1e-4,
        "lr-decay-style": "cosine",
        "lr-wsd-decay-iters": 20,
        "weight-decay": 0.1,
        "clip-grad": 0.5,
        "save-interval": 500,
        "cp-comm-type": "a2a",
        "optimizer": "sgd",
        "num-experts": 8,
        "recompute-num-layers": 4,
    },
    "deepspeed": {
        "train_batch_size": 64,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 0.5,
        "gradient_allreduce_op": "sum",
        "data_parallel_size": 8,
        "optimizer.type": "AdamW",
        "optimizer.params.lr": 3e-4,
        "optimizer.params.betas": [0.9, 0.95],
        "optimizer.params.weight_decay": 0.1,
        "optimizer.params.eps": 1e-6,
        "optimizer.params.adam_w_mode": False,
        "optimizer.params.amsgrad": True,
        "scheduler.type": "WarmupCosineLR",
        "scheduler.params.warmup_num_steps": 100,
        "scheduler.params.total_num_steps": 5000,
        "scheduler.params.warmup_max_lr": 3e-4,
        "scheduler.params.warmup_min_lr": 1e-4,
        "scheduler.params.warmup_type": "log",
        "fp16.enabled": True,
        "torch_autocast.enabled": True,
        "torch_autocast.dtype": "bfloat16",
        "zero_optimization.zero_hpz_partition_size": 4,
        "zero_optimization.stage3_prefetch_bucket_size": 50_000_000,
        "zero_optimization.offload_param.device": "cpu",
        "zero_optimization.offload_param.nvme_path": "/swap",
        "zero_optimization.offload_optimizer.device": "cpu",
        "zero_optimization.offload_optimizer.nvme_path": "/swap",
        "zero_optimization.offload_optimizer.ratio": 0.5,
        "aio.block_size": 1_048_576,
        "aio.queue_depth": 16,
        "expert_parallel.autoep_size": 2,
        "expert_parallel.enabled": True,
        "optimizer.params.<argument>": True,
        **{f"{section}.*": True for section in _SWITCHED},
    },
    "fsdp1": {
        "auto_wrap_policy.size_based_auto_wrap_policy.<argument>": [],
        "sharding_strategy": "SHARD_GRAD_OP",
        "backward_prefetch": "BACKWARD_PRE",
        "cpu_offload": {"offload_params": True},
        "device_mesh": [2, 4],
        "device_mesh.<axis>": 4,
        "mixed_precision": {"param_dtype": "bfloat16"},
        "mixed_precision.reduce_dtype": "float32",
        "auto_wrap_policy.min_num_params": 100_000_000,
        "auto_wrap_policy.size_based_auto_wrap_policy.min_num_params": 100_000_000,
    },
    "fsdp2": {
        "mesh": [2, 4],
        "dp_mesh_dims": {"shard": "dp_shard"},
        "dp_mesh_dims.shard": "dp_shard",
        "dp_mesh_dims.replicate": "dp_replicate",
        "set_modules_to_forward_prefetch": 2,
        "set_modules_to_backward_prefetch": 2,
        "mesh.<axis>": 4,
        "mp_policy": {"param_dtype": "bfloat16"},
        "mp_policy.reduce_dtype": "float32",
        "module": ["Block"],
        "offload_policy": "CPUOffloadPolicy",
    },
    "accelerate": {
        "num_processes": 16,
        "num_machines": 2,
        "mixed_precision": "fp16",
        "distributed_type": "MULTI_GPU",
        "dynamo_backend": "INDUCTOR",
        "dynamo_config.dynamo_backend": "INDUCTOR",
        "fsdp_config.fsdp_sharding_strategy": "HYBRID_SHARD",
        "fsdp_config.fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_config.fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
        "fsdp_config.fsdp_min_num_params": 100_000_000,
        "fsdp_config.fsdp_backward_prefetch": "BACKWARD_PRE",
        "fsdp_config.fsdp_version": 2,
        "deepspeed_config.deepspeed_config_file": "deepspeed.json",
        "deepspeed_config.offload_optimizer_nvme_path": "/swap",
        "deepspeed_config.offload_param_nvme_path": "/swap",
        "deepspeed_config.zero_stage": 3,
        "deepspeed_config.offload_optimizer_device": "cpu",
        "deepspeed_config.offload_param_device": "cpu",
        "deepspeed_config.gradient_accumulation_steps": 4,
        "deepspeed_config.gradient_clipping": 0.5,
    },
    "trainer": {
        "fsdp": True,
        "fp16": True,
        "bf16": True,
        "learning_rate": 3e-4,
        "weight_decay": 0.1,
        "optim": "sgd",
        "max_steps": 5000,
        "max_grad_norm": 0.5,
        "warmup_steps": 100,
        "lr_scheduler_type": "cosine",
        "adam_beta1": 0.8,
        "adam_beta2": 0.95,
        "adam_epsilon": 1e-6,
        "seed": 7,
        "output_dir": "runs/a",
        "deepspeed": {"zero_optimization": {"stage": 2}},
        "lr_scheduler_kwargs.*": 0.1,
        "fsdp_config": {"reshard_after_forward": False},
        "fsdp_config.transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        "fsdp_config.min_num_params": 100_000_000,
    },
}
"""By dialect and key."""
