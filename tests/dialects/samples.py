"""Configurations of every dialect, rich enough that most of its keys mean something beside them."""

from __future__ import annotations

from typing import Any

__all__ = ["SAMPLES", "STACKS"]

_DS_ADAM = {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}}
_DS_ZERO3 = {
    "stage": 3,
    "overlap_comm": True,
    "stage3_gather_16bit_weights_on_model_save": True,
    "offload_optimizer": {"device": "nvme", "nvme_path": "/local", "pin_memory": True, "buffer_count": 5},
    "offload_param": {"device": "cpu", "pin_memory": True},
}
_DS_BATCH = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}

SAMPLES: dict[str, dict[str, dict[str, Any]]] = {
    "deepspeed": {
        "zero3": {
            **_DS_BATCH,
            "gradient_clipping": 0.5,
            "bf16": {"enabled": True},
            "zero_optimization": _DS_ZERO3,
            "optimizer": _DS_ADAM,
            "scheduler": {
                "type": "WarmupCosineLR",
                "params": {
                    "warmup_num_steps": 10,
                    "total_num_steps": 100,
                    "warmup_type": "linear",
                    "cos_min_ratio": 0.1,
                },
            },
            "aio": {"block_size": 1048576, "queue_depth": 16},
            "steps_per_print": 100,
        },
        "zero2, fp16": {
            **_DS_BATCH,
            "train_batch_size": 64,
            "fp16": {"enabled": True, "initial_scale_power": 16, "hysteresis": 1, "loss_scale_window": 2000},
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
            "optimizer": {"type": "Adam", "params": {"lr": 1e-4}},
            "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 10, "total_num_steps": 100}},
        },
        "zero1": {**_DS_BATCH, "bf16": {"enabled": True}, "zero_optimization": {"stage": 1}, "gradient_clipping": 0.0},
        "hpz": {
            **_DS_BATCH,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 4},
        },
    },
    "accelerate": {
        "fsdp 2": {
            "compute_environment": "LOCAL_MACHINE",
            "distributed_type": "FSDP",
            "mixed_precision": "bf16",
            "num_machines": 1,
            "num_processes": 8,
            "machine_rank": 0,
            "fsdp_config": {
                "fsdp_version": 2,
                "fsdp_reshard_after_forward": True,
                "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
                "fsdp_state_dict_type": "SHARDED_STATE_DICT",
                "fsdp_activation_checkpointing": True,
                "fsdp_offload_params": False,
                "fsdp_cpu_ram_efficient_loading": True,
            },
        },
        "fsdp 1": {
            "compute_environment": "LOCAL_MACHINE",
            "distributed_type": "FSDP",
            "mixed_precision": "bf16",
            "num_processes": 8,
            "fsdp_config": {
                "fsdp_version": 1,
                "fsdp_sharding_strategy": "FULL_SHARD",
                "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
                "fsdp_backward_prefetch": "BACKWARD_PRE",
                "fsdp_forward_prefetch": True,
                "fsdp_state_dict_type": "FULL_STATE_DICT",
                "fsdp_use_orig_params": True,
                "fsdp_sync_module_states": True,
            },
        },
        "deepspeed": {
            "compute_environment": "LOCAL_MACHINE",
            "distributed_type": "DEEPSPEED",
            "mixed_precision": "bf16",
            "num_processes": 8,
            "deepspeed_config": {
                "zero_stage": 3,
                "gradient_accumulation_steps": 4,
                "gradient_clipping": 1.0,
                "offload_optimizer_device": "cpu",
                "offload_param_device": "none",
                "zero3_init_flag": True,
                "zero3_save_16bit_model": True,
            },
        },
        "mesh": {
            "compute_environment": "LOCAL_MACHINE",
            "distributed_type": "FSDP",
            "mixed_precision": "bf16",
            "num_processes": 8,
            "fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": True},
            "parallelism_config": {
                "parallelism_config_dp_replicate_size": 2,
                "parallelism_config_dp_shard_size": 4,
            },
        },
    },
    "trainer": {
        "fsdp": {
            "output_dir": "out",
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 4,
            "learning_rate": 3e-4,
            "weight_decay": 0.1,
            "max_grad_norm": 0.5,
            "bf16": True,
            "max_steps": 100,
            "warmup_steps": 10,
            "lr_scheduler_type": "cosine",
            "fsdp": True,
            "fsdp_config": {
                "version": 2,
                "reshard_after_forward": True,
                "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
                "activation_checkpointing": True,
            },
        },
        "ddp": {"output_dir": "out", "per_device_train_batch_size": 2, "max_steps": 100, "learning_rate": 1e-4},
    },
    "lightning": {
        "fsdp": {
            "strategy": "fsdp",
            "devices": 8,
            "precision": "bf16-mixed",
            "accumulate_grad_batches": 4,
        },
        "deepspeed": {
            "strategy": "deepspeed_stage_3",
            "devices": 8,
            "precision": "bf16-mixed",
            "gradient_clip_val": 0.5,
        },
        "ddp": {"strategy": "ddp", "devices": 8, "precision": "32-true", "gradient_clip_val": 0.5},
    },
    "fsdp1": {
        "full": {
            "sharding_strategy": "FULL_SHARD",
            "mixed_precision": {"param_dtype": "bfloat16", "reduce_dtype": "bfloat16", "buffer_dtype": "bfloat16"},
            "backward_prefetch": "BACKWARD_PRE",
            "forward_prefetch": True,
            "use_orig_params": True,
            "cpu_offload": {"offload_params": True},
        },
        "grad": {"sharding_strategy": "SHARD_GRAD_OP", "mixed_precision": {"param_dtype": "float16"}},
    },
    "fsdp2": {
        "full": {
            "reshard_after_forward": True,
            "mp_policy": {"param_dtype": "bfloat16", "reduce_dtype": "float32"},
            "offload_policy": "CPUOffloadPolicy",
        },
        "grad": {"reshard_after_forward": False, "mp_policy": {"param_dtype": "bfloat16", "reduce_dtype": "bfloat16"}},
        "hybrid": {"reshard_after_forward": True, "mesh": {"dp_replicate": 2, "dp_shard": 4}},
    },
    "torchtitan": {
        "fsdp": {
            "parallelism": {"data_parallel_shard_degree": -1, "fsdp_reshard_after_forward": "always"},
            "training": {"local_batch_size": 2, "global_batch_size": 64, "seq_len": 128, "steps": 100},
        },
        "hybrid": {
            "parallelism": {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 4},
            "training": {"local_batch_size": 2, "seq_len": 128, "steps": 100},
        },
    },
    "megatron": {
        "stages": {
            "torchrun": {"nproc-per-node": 8},
            "tensor-model-parallel-size": 2,
            "pipeline-model-parallel-size": 2,
            "num-virtual-stages-per-pipeline-rank": 2,
            "sequence-parallel": True,
            "use-distributed-optimizer": True,
            "overlap-grad-reduce": True,
            "num-layers": 32,
            "hidden-size": 4096,
            "bf16": True,
            "micro-batch-size": 1,
            "global-batch-size": 64,
            "seq-length": 4096,
            "train-iters": 1000,
            "lr": 3e-4,
            "min-lr": 3e-5,
            "lr-decay-style": "cosine",
            "lr-warmup-iters": 100,
            "weight-decay": 0.1,
            "adam-beta1": 0.9,
            "adam-beta2": 0.95,
            "clip-grad": 0.5,
            "recompute-granularity": "full",
            "recompute-method": "uniform",
            "recompute-num-layers": 1,
            "save": "out",
            "save-interval": 100,
        },
        "experts, fp16": {
            "fp16": True,
            "hysteresis": 1,
            "expert-model-parallel-size": 4,
            "num-experts": 8,
            "moe-router-topk": 2,
            "micro-batch-size": 2,
            "train-samples": 6400,
            "global-batch-size": 64,
            "recompute-activations": True,
        },
        "fsdp": {
            "use-megatron-fsdp": True,
            "ckpt-format": "fsdp_dtensor",
            "bf16": True,
            "micro-batch-size": 2,
            "train-iters": 100,
        },
    },
    "terrazzo": {
        "zero3": {
            "plan": {"name": "zero3", "units": ["LlamaDecoderLayer"]},
            "precision": {"name": "bf16", "reduce": "bf16"},
            "batch": {"global_batch": 64, "micro_batch": 2, "sequence_length": 128},
            "optimizer": {"name": "AdamW", "lr": 3e-4, "weight_decay": 0.1, "options": {"betas": [0.9, 0.95]}},
            "schedule": {"name": "cosine", "warmup_steps": 10, "final_fraction": 0.1},
            "train": {"steps": 100, "clip": 0.5, "activation_checkpointing": "full"},
            "launch": {"ranks": 8},
        },
        "offload": {
            "plan": "zero3@nvme",
            "offload": {"path": "/local", "depth": 16},
            "precision": "bf16",
            "batch": {"global_batch": 64, "micro_batch": 2},
        },
        "hybrid": {"plan": {"name": "hybrid_shard", "mesh": {"dp_replicate": 2}}, "precision": "bf16"},
        "fp16": {"plan": "zero2@cpu", "precision": "fp16", "train": {"clip": None}},
    },
}
"""By dialect, then by what is special about it."""

_INNER = {"zero_optimization": {"stage": 3}}
STACKS: dict[str, list[dict[str, Any]]] = {
    "accelerate": [
        {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}},
        {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 3}},
        {"distributed_type": "MULTI_GPU"},
    ],
    "deepspeed": [{"train_micro_batch_size_per_gpu": 1}, {"train_micro_batch_size_per_gpu": 1, **_INNER}],
    "fsdp1": [{"sharding_strategy": "FULL_SHARD"}],
    "fsdp2": [{"module": ["A"]}],
    "lightning": [
        {"trainer": {"strategy": "ddp"}},
        {"trainer": {"strategy": "fsdp"}},
        {"trainer": {"strategy": "deepspeed"}},
        {"trainer": {"strategy": {"class_path": "DeepSpeedStrategy", "init_args": {"config": _INNER}}}},
    ],
    "megatron": [{"bf16": True, "micro-batch-size": 1}],
    "terrazzo": [{"plan": {"name": "zero3"}}],
    "torchtitan": [{"training": {"steps": 10}}],
    "trainer": [
        {"output_dir": "o"},
        {"output_dir": "o", "deepspeed": _INNER},
        {"output_dir": "o", "fsdp": True},
        {"output_dir": "o", "distributed_config": {"fsdp_size": 8}, "save_only_model": True},
    ],
}
"""What may stand under a configuration, each said by as little as says it."""
