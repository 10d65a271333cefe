"""The keys that say what is trained: batch, numbers, optimizer, schedule, parallelism, checkpoints."""

from __future__ import annotations

from typing import Any

from terrazzo.dialects.core.keys import ANY, BOOLEAN, NAME_LIST, TEXT, Key, integer, number, section

__all__ = ["CORE_ROWS", "OPTIMIZER_PARAMS", "SCHEDULER_PARAMS", "argument_default"]

_DIVISION = "gradients are divided in other places, which rounds otherwise"

_TOP = {
    "train_batch_size": Key(integer(1), None, "sequences per optimizer step, over all ranks"),
    "train_micro_batch_size_per_gpu": Key(integer(1), None, "sequences per forward pass on one rank"),
    "gradient_accumulation_steps": Key(integer(1), None, "micro-batches per optimizer step"),
    "managed_gradient_accumulation": Key(BOOLEAN, True, "the engine, not the loop, says when a step is due", "lossy"),
    "gradient_clipping": Key(number(), 1.0, "largest global gradient norm; 0: no clipping"),
    "communication_data_type": Key(TEXT, None, "dtype of reduced gradients; null: the model's"),
    "seq_parallel_communication_data_type": Key(TEXT, "fp32", "the same under sequence parallelism"),
    "prescale_gradients": Key(BOOLEAN, False, "gradients are divided before they are summed", "lossy", _DIVISION),
    "gradient_predivide_factor": Key(number(), 1.0, "part of the division made before summing", "lossy", _DIVISION),
    "gradient_allreduce_op": Key(
        TEXT,
        "mean",
        "mean or sum of gradients over the ranks",
        "refused",
        "gradients are averaged there: say mean, and multiply the loss by the number of data ranks in your code",
    ),
    "disable_allgather": Key(BOOLEAN, False, "weights are broadcast, not gathered", "harmless"),
    "sequence_parallel_size": Key(integer(), None, "Ulysses sequence parallel degree"),
    "data_parallel_size": Key(integer(), None, "data parallel degree beside it"),
    "use_data_before_expert_parallelism": Key(BOOLEAN, False, "order of data and expert ranks", "lossy"),
    "zero_allow_untested_optimizer": Key(BOOLEAN, False, "optimizers off DeepSpeed's list are allowed", "harmless"),
    "zero_force_ds_cpu_optimizer": Key(BOOLEAN, True, "offload insists on DeepSpeed's CPU optimizers", "harmless"),
    "dataloader_drop_last": Key(BOOLEAN, False, "the engine's data loader drops a last short batch", "lossy"),
}
_FP16 = {
    "enabled": Key(BOOLEAN, False, "fp16 weights beside fp32 masters, with loss scaling"),
    "auto_cast": Key(BOOLEAN, False, "the model's inputs are cast to fp16", "harmless"),
    "loss_scale": Key(number(), 0, "fixed loss scale; 0: dynamic"),
    "initial_scale_power": Key(integer(), 16, "dynamic: the first scale is 2 to this power"),
    "loss_scale_window": Key(integer(), 1000, "dynamic: clean steps until the scale doubles"),
    "hysteresis": Key(integer(), 2, "dynamic: overflows until it halves"),
    "consecutive_hysteresis": Key(BOOLEAN, False, "a clean step forgives earlier overflows", "lossy"),
    "min_loss_scale": Key(integer(), 1, "dynamic: smallest scale"),
    "fp16_master_weights_and_grads": Key(BOOLEAN, False, "master weights and gradients in fp16"),
}
_BF16 = {
    "enabled": Key(BOOLEAN, False, "bf16 weights beside fp32 masters"),
    "immediate_grad_update": Key(BOOLEAN, False, "gradients are added to fp32 ones within backward", "harmless"),
    "check_grad_overflow": Key(BOOLEAN, True, "a step with an inf or nan gradient is left out"),
    "bf16_master_weights_and_grads": Key(BOOLEAN, False, "master weights and gradients in bf16"),
    "bf16_optimizer_states": Key(BOOLEAN, False, "moments in bf16 as well"),
}
_AUTOCAST = {
    "enabled": Key(BOOLEAN, False, "torch.autocast rather than a cast model"),
    "dtype": Key(TEXT, None, "dtype of autocast"),
    "lower_precision_safe_modules": Key(
        NAME_LIST, None, "module classes whose gradients are reduced in that dtype; null: linear and convolution"
    ),
}
_DATA_TYPES = {
    "grad_accum_dtype": Key(TEXT, None, "dtype of accumulated gradients; null: the model's"),
    "param_dtype": Key(TEXT, None, "must be the dtype that fp16 or bf16 says", "harmless"),
    "buffer_dtype": Key(TEXT, None, "dtype of module buffers; null: the model's"),
    "keep_in_fp32_modules": Key(ANY, "auto", "buffers that stay in fp32", "lossy"),
}
_OPTIMIZER = {
    "type": Key(TEXT, None, "name of the optimizer"),
    "legacy_fusion": Key(BOOLEAN, False, "stage 0 in fp16: an older step", "harmless"),
}
OPTIMIZER_PARAMS = {
    "lr": Key(number(), 1e-3, "learning rate"),
    "betas": Key(ANY, (0.9, 0.999), "decay of the two moments", null=True),
    "eps": Key(number(), 1e-8, "term added to the denominator"),
    "weight_decay": Key(number(), 0.0, "weight decay, decoupled unless adam_w_mode is false"),
    "bias_correction": Key(
        BOOLEAN, True, "the moments' bias is corrected", "refused", "moments are always corrected there: remove it"
    ),
    "amsgrad": Key(BOOLEAN, False, "the largest second moment is used"),
    "torch_adam": Key(BOOLEAN, False, "torch's own Adam rather than a compiled one", "harmless"),
    "adam_w_mode": Key(BOOLEAN, True, "Adam's weight decay is decoupled, as AdamW's"),
    "fp32_optimizer_states": Key(BOOLEAN, True, "the CPU's moments in fp32"),
    "max_coeff": Key(number(), 10.0, "Lamb: largest trust ratio"),
    "min_coeff": Key(number(), 0.01, "Lamb: smallest trust ratio"),
    "eps_inside_sqrt": Key(BOOLEAN, False, "Lamb: eps under the root"),
    "muon_lr": Key(number(), None, "Muon: learning rate of matrices"),
    "adam_lr": Key(number(), None, "Muon: learning rate of the rest, by Adam"),
    "momentum": Key(number(), 0.95, "Muon: momentum"),
    "ns_method": Key(TEXT, "gram", "Muon: way of making matrices orthogonal"),
    "per_head_muon": Key(ANY, None, "Muon: heads are made orthogonal one by one"),
}
"""Arguments of the optimizers that DeepSpeed builds itself, with the defaults of its Adam."""
OPTIMIZER_DEFAULTS: dict[str, dict[str, Any]] = {
    "Adagrad": {"lr": 1e-2, "betas": None, "eps": 1e-10},
    "Lion": {"eps": None},
    "MuSGD": {"betas": None, "eps": None},
    "Muon": {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10},
}
"""Where another one's are not Adam's; None: it has no such argument. Muon's are of what is no matrix."""


def argument_default(name: str, argument: str, *, by_torch: bool = False) -> Any:
    """What an argument is where it is not given: of DeepSpeed's own classes, or of torch's by `torch_adam`."""
    if by_torch and (name, argument) == ("AdamW", "weight_decay"):
        return 0.01
    return OPTIMIZER_DEFAULTS.get(name, {}).get(argument, OPTIMIZER_PARAMS[argument].default)


_SCHEDULER = {"type": Key(TEXT, None, "name of the schedule")}
SCHEDULER_PARAMS: dict[str, dict[str, Any]] = {
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
    "partition_activations": Key(BOOLEAN, False, "saved activations are split over tensor-parallel ranks", "lossy"),
    "cpu_checkpointing": Key(BOOLEAN, False, "saved activations lie in host memory"),
    "contiguous_memory_optimization": Key(BOOLEAN, False, "saved activations lie in one buffer", "harmless"),
    "number_checkpoints": Key(integer(), None, "checkpoints per forward pass", "harmless"),
    "synchronize_checkpoint_boundary": Key(BOOLEAN, False, "the device is waited for at checkpoints", "harmless"),
    "profile": Key(BOOLEAN, False, "checkpoints are timed", "harmless"),
}
_EVEN = "stages are of as many elements each, the numbers are the same"
_PIPELINE = {
    "stages": Key(ANY, "auto", "pipeline stages"),
    "partition": Key(TEXT, "best", "how layers are dealt out to stages", "lossy", _EVEN),
    "seed_layers": Key(BOOLEAN, False, "every layer has its own seed", "lossy"),
    "activation_checkpoint_interval": Key(integer(), 0, "layers of a stage between activations kept; 0: all are"),
    "pipe_partitioned": Key(BOOLEAN, True, "activations between stages are split over ranks", "harmless"),
    "grad_partitioned": Key(BOOLEAN, True, "gradients between stages are split over ranks", "harmless"),
    "use_reentrant": Key(BOOLEAN, None, "kind of activation checkpoint", "harmless"),
}
_TENSOR = {
    "autotp_size": Key(integer(), 0, "tensor parallel degree; 0: none"),
    "dtype": Key(ANY, "float16", "dtype while weights are split", "harmless"),
    "tp_overlap_comm": Key(BOOLEAN, False, "all-reduce beside compute", "harmless"),
    "vocab_parallel_lm_head": Key(BOOLEAN, None, "the head is split over the vocabulary", "lossy"),
    "vocab_parallel_ce_backend": Key(TEXT, "torch", "cross-entropy of a split head", "lossy"),
    "tp.tp_size": Key(integer(), 1, "degree for inference", "harmless"),
    "tp.tp_grain_size": Key(integer(), 1, "granularity of splits", "harmless"),
    "tp.mpu": Key(ANY, None, "an object of Python, not a value", "harmless"),
    "tp.tp_group": Key(ANY, None, "an object of Python, not a value", "harmless"),
    "injection_policy_tuple": Key(ANY, None, "which projections are split", "lossy"),
    "partition_config": Key(ANY, None, "how layers are split, by patterns of names", "lossy"),
    "preset_model": Key(TEXT, None, "named set of such patterns", "lossy"),
    "keep_module_on_host": Key(BOOLEAN, False, "weights are split on the host", "harmless"),
    "replace_with_kernel_inject": Key(BOOLEAN, False, "inference kernels", "harmless"),
}
_CHECKPOINT = {
    "tag_validation": Key(TEXT, "Warn", "tags are compared between ranks: Ignore, Warn, Fail", "harmless"),
    "load_universal": Key(BOOLEAN, False, "the checkpoint is a universal one, made by ds_to_universal.py", "lossy"),
    "use_node_local_storage": Key(BOOLEAN, False, "every node writes its own copy", "lossy"),
    "parallel_write.pipeline_stage": Key(BOOLEAN, False, "pipeline layers are written by all ranks", "harmless"),
    "checkpoint_serialization": Key(BOOLEAN, True, "zip format in the fast writer", "harmless"),
    "writer.type": Key(TEXT, "FAST", "FAST, PYTHON or MOCK", "harmless"),
    "writer.decoupled": Key(BOOLEAN, False, "training goes on while a checkpoint is written"),
    "writer.io_buffer_size": Key(integer(), 67_108_864, "bytes of the writer's buffer", "harmless"),
    "writer.io_buffer_double": Key(BOOLEAN, True, "two buffers in turn", "harmless"),
    "writer.show_statistics": Key(BOOLEAN, False, "rates are printed", "harmless"),
    "writer.data_parallel": Key(TEXT, None, "who writes: replica, socket, machine", "harmless"),
    "writer.io_multiplier": Key(integer(), 1, "multiplier of the buffer", "harmless"),
}


def _schedule_rows() -> dict[str, Key]:
    names = dict.fromkeys(name for arguments in SCHEDULER_PARAMS.values() for name in arguments)
    words = {name: _SCHEDULE_WORDS.get(name, name.replace("_", " ")) for name in (*names, "last_batch_iteration")}
    return {name: Key(ANY, None, meaning) for name, meaning in words.items()}


CORE_ROWS = {
    **_TOP,
    **section("fp16", _FP16),
    **section("bf16", _BF16),
    **section("torch_autocast", _AUTOCAST),
    **section("data_types", _DATA_TYPES),
    **section("optimizer", _OPTIMIZER),
    **section("optimizer.params", OPTIMIZER_PARAMS),
    **section("scheduler", _SCHEDULER),
    **section("scheduler.params", _schedule_rows()),
    **section("activation_checkpointing", _ACTIVATIONS),
    **section("pipeline", _PIPELINE),
    **section("tensor_parallel", _TENSOR),
    **section("checkpoint", _CHECKPOINT),
}
"""Rows by dotted key."""
