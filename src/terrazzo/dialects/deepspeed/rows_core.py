"""The keys that say what is trained: batch, numbers, optimizer, schedule, parallelism, checkpoints."""

from __future__ import annotations

from terrazzo.dialects.deepspeed.rows import Row, below

__all__ = ["CORE_ROWS", "OPTIMIZER_PARAMS", "SCHEDULER_PARAMS"]

_DIVISION = "gradients are divided in other places, which rounds otherwise"

_TOP = {
    "train_batch_size": Row("int", None, "sequences per optimizer step, over all ranks"),
    "train_micro_batch_size_per_gpu": Row("int", None, "sequences per forward pass on one rank"),
    "gradient_accumulation_steps": Row("int", None, "micro-batches per optimizer step"),
    "managed_gradient_accumulation": Row("bool", True, "the engine, not the loop, says when a step is due", "lossy"),
    "gradient_clipping": Row("number", 1.0, "largest global gradient norm; 0: no clipping"),
    "communication_data_type": Row("text", None, "dtype of reduced gradients; null: the model's"),
    "seq_parallel_communication_data_type": Row("text", "fp32", "the same under sequence parallelism"),
    "prescale_gradients": Row("bool", False, "gradients are divided before they are summed", "lossy", _DIVISION),
    "gradient_predivide_factor": Row("number", 1.0, "part of the division made before summing", "lossy", _DIVISION),
    "gradient_allreduce_op": Row("text", "mean", "mean or sum of gradients over the ranks", "refused"),
    "disable_allgather": Row("bool", False, "weights are broadcast, not gathered", "harmless"),
    "sequence_parallel_size": Row("int", None, "Ulysses sequence parallel degree"),
    "data_parallel_size": Row("int", None, "data parallel degree beside it"),
    "use_data_before_expert_parallelism": Row("bool", False, "order of data and expert ranks", "lossy"),
    "zero_allow_untested_optimizer": Row("bool", False, "optimizers off DeepSpeed's list are allowed", "harmless"),
    "zero_force_ds_cpu_optimizer": Row("bool", True, "offload insists on DeepSpeed's CPU optimizers", "harmless"),
    "dataloader_drop_last": Row("bool", False, "the engine's data loader drops a last short batch", "lossy"),
}
_FP16 = {
    "enabled": Row("bool", False, "fp16 weights beside fp32 masters, with loss scaling"),
    "auto_cast": Row("bool", False, "the model's inputs are cast to fp16", "harmless"),
    "loss_scale": Row("number", 0, "fixed loss scale; 0: dynamic"),
    "initial_scale_power": Row("int", 16, "dynamic: the first scale is 2 to this power"),
    "loss_scale_window": Row("int", 1000, "dynamic: clean steps until the scale doubles"),
    "hysteresis": Row("int", 2, "dynamic: overflows until it halves"),
    "consecutive_hysteresis": Row("bool", False, "a clean step forgives earlier overflows", "lossy"),
    "min_loss_scale": Row("int", 1, "dynamic: smallest scale"),
    "fp16_master_weights_and_grads": Row("bool", False, "master weights and gradients in fp16"),
}
_BF16 = {
    "enabled": Row("bool", False, "bf16 weights beside fp32 masters"),
    "immediate_grad_update": Row("bool", False, "gradients are added to fp32 ones within backward", "harmless"),
    "check_grad_overflow": Row("bool", True, "a step with an inf or nan gradient is left out", "lossy"),
    "bf16_master_weights_and_grads": Row("bool", False, "master weights and gradients in bf16"),
    "bf16_optimizer_states": Row("bool", False, "moments in bf16 as well"),
}
_AUTOCAST = {
    "enabled": Row("bool", False, "torch.autocast rather than a cast model"),
    "dtype": Row("text", None, "dtype of autocast"),
    "lower_precision_safe_modules": Row(
        "names", None, "module classes whose gradients are reduced in that dtype; null: linear and convolution"
    ),
}
_DATA_TYPES = {
    "grad_accum_dtype": Row("text", None, "dtype of accumulated gradients; null: the model's"),
    "param_dtype": Row("text", None, "must be the dtype that fp16 or bf16 says", "harmless"),
    "buffer_dtype": Row("text", None, "dtype of module buffers; null: the model's"),
    "keep_in_fp32_modules": Row("any", "auto", "buffers that stay in fp32", "lossy"),
}
_OPTIMIZER = {
    "type": Row("text", None, "name of the optimizer"),
    "legacy_fusion": Row("bool", False, "stage 0 in fp16: an older step", "harmless"),
}
OPTIMIZER_PARAMS = {
    "lr": Row("number", 1e-3, "learning rate"),
    "betas": Row("any", None, "decay of the two moments"),
    "eps": Row("number", 1e-8, "term added to the denominator"),
    "weight_decay": Row("number", 0.0, "weight decay, decoupled unless adam_w_mode is false"),
    "bias_correction": Row("bool", True, "the moments' bias is corrected", "refused"),
    "amsgrad": Row("bool", False, "the largest second moment is used"),
    "torch_adam": Row("bool", False, "torch's own Adam rather than a compiled one", "harmless"),
    "adam_w_mode": Row("bool", True, "Adam's weight decay is decoupled, as AdamW's"),
    "fp32_optimizer_states": Row("bool", True, "the CPU's moments in fp32"),
    "max_coeff": Row("number", 10.0, "Lamb: largest trust ratio"),
    "min_coeff": Row("number", 0.01, "Lamb: smallest trust ratio"),
    "eps_inside_sqrt": Row("bool", False, "Lamb: eps under the root"),
    "muon_lr": Row("number", None, "Muon: learning rate of matrices"),
    "adam_lr": Row("number", None, "Muon: learning rate of the rest, by Adam"),
    "momentum": Row("number", 0.95, "Muon: momentum"),
    "ns_method": Row("text", "gram", "Muon: way of making matrices orthogonal"),
    "per_head_muon": Row("any", None, "Muon: heads are made orthogonal one by one"),
}
"""Arguments of the optimizers that DeepSpeed builds itself."""
_SCHEDULER = {"type": Row("text", None, "name of the schedule")}
SCHEDULER_PARAMS: dict[str, dict[str, object]] = {
    "WarmupLR": {"warmup_min_lr": 0.0, "warmup_max_lr": None, "warmup_num_steps": 1000, "warmup_type": "log"},
    "WarmupDecayLR": {
        "total_num_steps": None,
        "warmup_min_lr": 0.0,
        "warmup_max_lr": 0.001,
        "warmup_num_steps": 1000,
        "warmup_type": "log",
    },
    "WarmupCosineLR": {
        "total_num_steps": None,
        "warmup_min_ratio": 0.0,
        "warmup_num_steps": 1000,
        "cos_min_ratio": 0.0001,
        "warmup_type": "log",
    },
    "LRRangeTest": {
        "lr_range_test_min_lr": 0.001,
        "lr_range_test_step_size": 2000,
        "lr_range_test_step_rate": 1.0,
        "lr_range_test_staircase": False,
    },
    "OneCycle": {
        "cycle_min_lr": None,
        "cycle_max_lr": None,
        "decay_lr_rate": 0.0,
        "cycle_first_step_size": 2000,
        "cycle_second_step_size": None,
        "cycle_first_stair_count": 0,
        "cycle_second_stair_count": None,
        "decay_step_size": 0,
        "cycle_momentum": True,
        "cycle_min_mom": 0.8,
        "cycle_max_mom": 0.9,
        "decay_mom_rate": 0.0,
    },
}
"""The schedules that DeepSpeed has, with their arguments' defaults. All take `last_batch_iteration` besides."""
_SCHEDULE_WORDS = {
    "warmup_min_lr": "rate at the start of warm-up",
    "warmup_max_lr": "rate at its end",
    "warmup_min_ratio": "share of the rate at the start of warm-up",
    "warmup_num_steps": "steps of warm-up, at least 2",
    "warmup_type": "warm-up along a logarithm (log) or a line (linear)",
    "total_num_steps": "steps until the rate is at its end",
    "cos_min_ratio": "share of the rate that is left at the end",
    "last_batch_iteration": "step to start counting at",
}
_ACTIVATIONS = {
    "partition_activations": Row("bool", False, "saved activations are split over tensor-parallel ranks", "lossy"),
    "cpu_checkpointing": Row("bool", False, "saved activations lie in host memory"),
    "contiguous_memory_optimization": Row("bool", False, "saved activations lie in one buffer", "harmless"),
    "number_checkpoints": Row("int", None, "checkpoints per forward pass", "harmless"),
    "synchronize_checkpoint_boundary": Row("bool", False, "the device is waited for at checkpoints", "harmless"),
    "profile": Row("bool", False, "checkpoints are timed", "harmless"),
}
_PIPELINE = {
    "stages": Row("any", "auto", "pipeline stages"),
    "partition": Row("text", "best", "how layers are dealt out to stages", "lossy"),
    "seed_layers": Row("bool", False, "every layer has its own seed", "lossy"),
    "activation_checkpoint_interval": Row("int", 0, "layers per activation checkpoint", "lossy"),
    "pipe_partitioned": Row("bool", True, "activations between stages are split over ranks", "harmless"),
    "grad_partitioned": Row("bool", True, "gradients between stages are split over ranks", "harmless"),
    "use_reentrant": Row("bool", None, "kind of activation checkpoint", "harmless"),
}
_TENSOR = {
    "autotp_size": Row("int", 0, "tensor parallel degree; 0: none"),
    "dtype": Row("any", "float16", "dtype while weights are split", "harmless"),
    "tp_overlap_comm": Row("bool", False, "all-reduce beside compute", "harmless"),
    "vocab_parallel_lm_head": Row("bool", None, "the head is split over the vocabulary", "lossy"),
    "vocab_parallel_ce_backend": Row("text", "torch", "cross-entropy of a split head", "lossy"),
    "tp.tp_size": Row("int", 1, "degree for inference", "harmless"),
    "tp.tp_grain_size": Row("int", 1, "granularity of splits", "harmless"),
    "tp.mpu": Row("any", None, "an object of Python, not a value", "harmless"),
    "tp.tp_group": Row("any", None, "an object of Python, not a value", "harmless"),
    "injection_policy_tuple": Row("any", None, "which projections are split", "lossy"),
    "partition_config": Row("any", None, "how layers are split, by patterns of names", "lossy"),
    "preset_model": Row("text", None, "named set of such patterns", "lossy"),
    "keep_module_on_host": Row("bool", False, "weights are split on the host", "harmless"),
    "replace_with_kernel_inject": Row("bool", False, "inference kernels", "harmless"),
}
_CHECKPOINT = {
    "tag_validation": Row("text", "Warn", "tags are compared between ranks: Ignore, Warn, Fail", "harmless"),
    "load_universal": Row("bool", False, "the checkpoint is a universal one, made by ds_to_universal.py", "lossy"),
    "use_node_local_storage": Row("bool", False, "every node writes its own copy", "lossy"),
    "parallel_write.pipeline_stage": Row("bool", False, "pipeline layers are written by all ranks", "harmless"),
    "checkpoint_serialization": Row("bool", True, "zip format in the fast writer", "harmless"),
    "writer.type": Row("text", "FAST", "FAST, PYTHON or MOCK", "harmless"),
    "writer.decoupled": Row("bool", False, "training goes on while a checkpoint is written"),
    "writer.io_buffer_size": Row("int", 67_108_864, "bytes of the writer's buffer", "harmless"),
    "writer.io_buffer_double": Row("bool", True, "two buffers in turn", "harmless"),
    "writer.show_statistics": Row("bool", False, "rates are printed", "harmless"),
    "writer.data_parallel": Row("text", None, "who writes: replica, socket, machine", "harmless"),
    "writer.io_multiplier": Row("int", 1, "multiplier of the buffer", "harmless"),
}


def _schedule_rows() -> dict[str, Row]:
    names = dict.fromkeys(name for arguments in SCHEDULER_PARAMS.values() for name in arguments)
    words = {name: _SCHEDULE_WORDS.get(name, name.replace("_", " ")) for name in (*names, "last_batch_iteration")}
    return {name: Row("any", None, meaning) for name, meaning in words.items()}


CORE_ROWS = {
    **_TOP,
    **below("fp16", _FP16),
    **below("bf16", _BF16),
    **below("torch_autocast", _AUTOCAST),
    **below("data_types", _DATA_TYPES),
    **below("optimizer", _OPTIMIZER),
    **below("optimizer.params", OPTIMIZER_PARAMS),
    **below("scheduler", _SCHEDULER),
    **below("scheduler.params", _schedule_rows()),
    **below("activation_checkpointing", _ACTIVATIONS),
    **below("pipeline", _PIPELINE),
    **below("tensor_parallel", _TENSOR),
    **below("checkpoint", _CHECKPOINT),
}
"""By dotted key."""
