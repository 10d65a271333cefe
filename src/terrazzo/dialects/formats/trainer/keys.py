"""The fields of Hugging Face's TrainingArguments (transformers 5.23)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from terrazzo.dialects.core.keys import ANY, BOOLEAN, NAME_LIST, TEXT, Key, Rows, Type, choice, integer, number, section
from terrazzo.dialects.formats.shared.accelerate_stack import AXES
from terrazzo.dialects.formats.shared.fsdp_words import VERSION
from terrazzo.dialects.formats.shared.trainer_defaults import TRAINER_DEFAULTS
from terrazzo.dialects.formats.trainer.keys_earlier import ALIASES, GONE, RENAMED

__all__ = [
    "AT_ONCE",
    "BETA3",
    "DECAY_SHAPES",
    "DISTRIBUTED",
    "EIGHT_BITS",
    "FIELDS",
    "FSDP_KEYS",
    "FSDP_VERSION_1",
    "KEYS",
    "MATCHED",
    "MISNAMED",
    "OPTIMIZERS",
    "OWN_SCHEDULES",
    "POLYNOMIAL_END",
]

OPTIMIZERS = {
    "adamw_torch_fused": "AdamW",
    "adamw_torch": "AdamW",
    "adamw_torch_xla": "AdamW",
    "adamw_torch_npu_fused": "AdamW",
    "sgd": "SGD",
    "adagrad": "Adagrad",
    "rmsprop": "RMSprop",
    "lion_32bit": "Lion",
    "ademamix": "AdEMAMix",
}
"""Class of torch.optim, or of tz.optim, by the Trainer's word."""
BETA3 = 0.9999
"""AdEMAMix's decay of the slow average, where optim_args say none."""
EIGHT_BITS = {"adamw_8bit": "AdamW", "adamw_bnb_8bit": "AdamW", "adamw_torch_8bit": "AdamW", "lion_8bit": "Lion"}
"""Classes whose states are in 8 bits by it: of bitsandbytes, or of torchao."""
_OTHERS = (
    *("adafactor", "adamw_anyprecision", "adamw_torch_4bit", "ademamix_8bit"),
    *("paged_adamw_32bit", "paged_adamw_8bit"),
    *("paged_ademamix_32bit", "paged_ademamix_8bit", "paged_lion_32bit", "paged_lion_8bit", "rmsprop_bnb"),
    *("rmsprop_bnb_8bit", "rmsprop_bnb_32bit", "galore_adamw", "galore_adamw_8bit", "galore_adafactor"),
    *("galore_adamw_layerwise", "galore_adamw_8bit_layerwise", "galore_adafactor_layerwise", "lomo", "adalomo"),
    *("grokadamw", "schedule_free_radam", "schedule_free_adamw", "schedule_free_sgd", "apollo_adamw"),
    *("apollo_adamw_layerwise", "stable_adamw"),
)
OWN_SCHEDULES = ("cosine_with_restarts", "inverse_sqrt", "reduce_lr_on_plateau", "cosine_warmup_with_min_lr", "greedy")
SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "warmup_stable_decay": "wsd",
    "polynomial": "polynomial",
    **{name: name for name in OWN_SCHEDULES},
}
POLYNOMIAL_END = 1e-7
"""Where a polynomial schedule ends, if `lr_end` does not say it."""
DECAY_SHAPES = {"linear": "linear", "cosine": "cosine", "1-sqrt": "sqrt"}
"""Shapes of the final decay of warmup_stable_decay by Hugging Face's word."""
_OPTIM = choice({**OPTIMIZERS, **EIGHT_BITS, **{name: name for name in _OTHERS}}, fold=False)
_SAVE = choice({name: name for name in ("no", "steps", "epoch", "best")}, fold=False)
_STATE = choice({"full_state_dict": "full", "sharded_state_dict": "sharded", "local_state_dict": "local"})
_POLICY = choice({name.lower(): name for name in ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")})
_PREFETCH = choice({"no_prefetch": 0, "backward_pre": 1, "backward_post": 0})


def _steps(value: Any) -> Any:
    """Steps of a run; None where its length is counted in passes over the data."""
    steps = integer(-1).parse(value)
    return None if steps in (-1, 0) else steps


_STEPS = Type("a whole number from 1, or -1", _steps)
_FIELDS: Rows = {
    "output_dir": Key(TEXT, None, "folder of checkpoints"),
    "per_device_train_batch_size": Key(
        integer(1), TRAINER_DEFAULTS["per_device_train_batch_size"], "sequences per forward pass on one rank"
    ),
    "num_train_epochs": Key(number(), 3.0, "length of the run in passes over the data"),
    "max_steps": Key(_STEPS, -1, "length of the run in optimizer steps; -1: by num_train_epochs"),
    "learning_rate": Key(number(), TRAINER_DEFAULTS["learning_rate"], "peak learning rate"),
    "lr_scheduler_type": Key(choice(SCHEDULES, fold=False), "linear", "learning rate over the run"),
    "lr_scheduler_kwargs": Key(ANY, None, "further arguments of the schedule"),
    "warmup_steps": Key(number(), TRAINER_DEFAULTS["warmup_steps"], "steps of warm-up; below 1: a share of the run"),
    "optim": Key(_OPTIM, "adamw_torch_fused", "optimizer"),
    "optim_args": (None, "further arguments of the optimizer"),
    "weight_decay": Key(number(), TRAINER_DEFAULTS["weight_decay"], "weight decay; norms and biases are not decayed"),
    "adam_beta1": Key(number(high=1), TRAINER_DEFAULTS["adam_beta1"], "Adam: decay of the first moment"),
    "adam_beta2": Key(number(high=1), TRAINER_DEFAULTS["adam_beta2"], "Adam: decay of the second moment"),
    "adam_epsilon": Key(number(), TRAINER_DEFAULTS["adam_epsilon"], "Adam: term added to the denominator"),
    "optim_target_modules": Key(
        ANY,
        None,
        "modules that the optimizer projects",
        "refused",
        "only some modules are projected: choose a plain optimizer",
    ),
    "gradient_accumulation_steps": Key(
        integer(1), TRAINER_DEFAULTS["gradient_accumulation_steps"], "micro-batches per optimizer step"
    ),
    "average_tokens_across_devices": Key(BOOLEAN, True, "the loss is a mean over the tokens of all ranks"),
    "max_grad_norm": Key(number(), TRAINER_DEFAULTS["max_grad_norm"], "largest global gradient norm; 0: no clipping"),
    "label_smoothing_factor": Key(
        ANY, 0.0, "label smoothing", "refused", "the loss is another one: smooth the labels in your own loss"
    ),
    "bf16": Key(BOOLEAN, TRAINER_DEFAULTS["bf16"], "bf16 mixed precision"),
    "fp16": Key(BOOLEAN, TRAINER_DEFAULTS["fp16"], "fp16 mixed precision with loss scaling"),
    "tf32": (None, "TF32 products"),
    "activation_checkpointing": Key(BOOLEAN, None, "recompute blocks in backward"),
    "activation_checkpointing_kwargs": (None, "how they are recomputed"),
    "torch_compile": Key(BOOLEAN, False, "torch.compile"),
    "use_liger_kernel": (False, "Liger's kernels"),
    "liger_kernel_config": (None, "which of Liger's kernels"),
    "neftune_noise_alpha": Key(
        ANY, None, "noise on embeddings", "refused", "noise is added to embeddings: add it in your own model"
    ),
    "auto_find_batch_size": (False, "halve the micro-batch until it fits"),
    "save_only_model": (False, "checkpoints without optimizer state"),
    "save_strategy": Key(_SAVE, "steps", "when a checkpoint is written: no, steps, epoch, best"),
    "save_steps": Key(number(), 500, "steps between checkpoints; below 1: a share of the run"),
    "save_total_limit": Key(integer(1), None, "checkpoints kept; none: all"),
    "load_best_model_at_end": (False, "end with the best checkpoint"),
    "ignore_data_skip": (False, "resume with the first batch again"),
    "full_determinism": (False, "deterministic operators"),
    "seed": Key(integer(), 42, "seed of the run"),
    "data_seed": (None, "seed of the data order"),
    "use_cpu": Key(BOOLEAN, False, "train on the CPU"),
    "accelerator_config": (None, "arguments of Accelerate's Accelerator"),
    "parallelism_config": (None, "degrees of parallelism"),
    "dataloader_drop_last": (False, "drop the last batch if it is short"),
    "dataloader_in_order": (True, "batches come in order"),
    "remove_unused_columns": (True, "drop columns that the model does not take"),
    "label_names": (None, "names of the labels"),
    "train_sampling_strategy": ("random", "order of the data"),
    "length_column_name": ("length", "column of lengths"),
    "fsdp": Key(ANY, None, "turn FSDP on"),
    "fsdp_config": Key(ANY, None, "how FSDP runs"),
    "deepspeed": Key(ANY, None, "DeepSpeed's configuration"),
    "resume_from_checkpoint": (None, "for scripts: checkpoint to resume from"),
}
_HARMLESS: Rows = {
    "bf16_full_eval": (False, "evaluate in bf16"),
    "fp16_full_eval": (False, "evaluate in fp16"),
    "torch_compile_backend": (None, "compiler; turns torch_compile on"),
    "torch_compile_mode": (None, "mode of the compiler; turns torch_compile on"),
    "use_cache": (False, "key-value cache in training"),
    "torch_empty_cache_steps": (None, "steps between empties of the allocator's cache"),
    "logging_strategy": ("steps", "when a line is logged"),
    "logging_steps": Key(ANY, 500, "steps between lines", "harmless", here="log.every"),
    "logging_first_step": (False, "log the first step"),
    "log_on_each_node": (True, "log on every node"),
    "logging_nan_inf_filter": (True, "hide losses that are not finite"),
    "include_num_input_tokens_seen": ("no", "count tokens"),
    "log_level": ("passive", "log level"),
    "log_level_replica": ("warning", "log level of other ranks"),
    "disable_tqdm": (None, "no progress bar"),
    "report_to": ("none", "trackers"),
    "run_name": (None, "name of the run"),
    "project": ("huggingface", "project of the run"),
    "trackio_space_id": (None, "Trackio"),
    "trackio_bucket_id": (None, "Trackio"),
    "trackio_static_space_id": (None, "Trackio"),
    "eval_strategy": ("no", "when to evaluate"),
    "eval_steps": Key(ANY, None, "steps between evaluations", "harmless", here="train.eval_every"),
    "eval_delay": (0, "steps before the first evaluation"),
    "per_device_eval_batch_size": (8, "sequences of evaluation on one rank"),
    "prediction_loss_only": (False, "evaluate the loss only"),
    "eval_on_start": (False, "evaluate before training"),
    "eval_do_concat_batches": (True, "put evaluated batches together"),
    "eval_use_gather_object": (False, "gather evaluated objects"),
    "eval_accumulation_steps": (None, "evaluation: steps before results go to host memory"),
    "include_for_metrics": ([], "what metrics see"),
    "batch_eval_metrics": (False, "metrics batch by batch"),
    "save_on_each_node": (False, "write on every node"),
    "enable_jit_checkpoint": (False, "write a checkpoint when the job is preempted"),
    "push_to_hub": (False, "upload"),
    "hub_token": (None, "upload"),
    "hub_private_repo": (None, "upload"),
    "hub_model_id": (None, "upload"),
    "hub_strategy": ("every_save", "upload"),
    "hub_always_push": (False, "upload"),
    "hub_revision": (None, "upload"),
    "metric_for_best_model": (None, "which metric tells the best"),
    "greater_is_better": (None, "whether more is better"),
    "restore_callback_states_from_checkpoint": (False, "resume callbacks"),
    "dataloader_num_workers": (0, "processes that load data"),
    "dataloader_pin_memory": (True, "batches in pinned memory"),
    "dataloader_persistent_workers": (False, "keep the processes that load data"),
    "dataloader_prefetch_factor": (None, "batches loaded ahead"),
    "dataloader_multiprocessing_context": (None, "how processes are started"),
    "ddp_find_unused_parameters": (None, "DDP: look for parameters without gradients"),
    "ddp_bucket_cap_mb": (None, "DDP: size of a bucket"),
    "ddp_broadcast_buffers": (None, "DDP: send buffers"),
    "ddp_static_graph": (None, "DDP: the graph does not change"),
    "ddp_backend": (None, "backend of the process group"),
    "ddp_timeout": (1800, "longest wait for another rank"),
    "debug": ("", "debugging"),
    "skip_memory_metrics": (True, "no memory report"),
    "do_train": (False, "for scripts"),
    "do_eval": (False, "for scripts"),
    "do_predict": (False, "for scripts"),
    "local_rank": (-1, "rank on the node"),
}
FIELDS = {**section("", _FIELDS, "lossy"), **section("", _HARMLESS, "harmless")}
"""All fields. Without the harmless ones the run ends with the same weights."""

FSDP_KEYS = {
    "version": Key(VERSION, 2, "1: FullyShardedDataParallel, 2: fully_shard"),
    "reshard_after_forward": Key(
        BOOLEAN, True, "whether weights are freed after forward; version 1: the sharding strategy"
    ),
    "cpu_offload": Key(BOOLEAN, False, "weights, gradients and optimizer in host memory"),
    "activation_checkpointing": Key(BOOLEAN, False, "recompute blocks in backward", null=True),
    "cpu_ram_efficient_loading": Key(BOOLEAN, False, "rank 0 loads the weights and sends them"),
    "state_dict_type": Key(_STATE, "FULL_STATE_DICT", "FULL_STATE_DICT or SHARDED_STATE_DICT"),
    "auto_wrap_policy": Key(_POLICY, "TRANSFORMER_BASED_WRAP", "TRANSFORMER_BASED_WRAP, SIZE_BASED_WRAP or NO_WRAP"),
    "transformer_layer_cls_to_wrap": Key(NAME_LIST, None, "class names of the units"),
    "min_num_params": Key(integer(), 0, "SIZE_BASED_WRAP: smallest number of elements"),
    "xla": Key(ANY, False, "torch_xla's FSDP, for TPUs"),
    "xla_fsdp_v2": Key(ANY, False, "torch_xla's SPMD"),
    "xla_fsdp_settings": Key(ANY, None, "arguments of torch_xla's FSDP"),
    "xla_fsdp_grad_ckpt": Key(ANY, False, "recompute blocks on TPUs"),
    "forward_prefetch": Key(BOOLEAN, False, "version 1: forward gathers one unit ahead"),
    "backward_prefetch": Key(_PREFETCH, "NO_PREFETCH", "version 1: when backward gathers the next unit"),
    "use_orig_params": Key(ANY, True, "version 1: parameters keep their names and shapes"),
    "sync_module_states": Key(BOOLEAN, True, "version 1: rank 0's weights are sent to all"),
    "limit_all_gathers": Key(ANY, None, "version 1: the host waits when too many gathers are under way"),
}
"""Keys of `fsdp_config`, all of which may also start with `fsdp_`."""
FSDP_VERSION_1 = ("forward_prefetch", "backward_prefetch", "use_orig_params", "sync_module_states", "limit_all_gathers")
"""Keys of `fsdp_config` that TrainingArguments read with version 1 and ignore in silence with version 2."""

MISNAMED = {
    "offload_params": "cpu_offload",
    "sharding_strategy": "reshard_after_forward",
    "backward_prefetch_policy": "backward_prefetch",
    "transformer_cls_names_to_wrap": "transformer_layer_cls_to_wrap",
    "fsdp_version": "version",
}
"""Accelerate's words, which TrainingArguments pass over."""

DISTRIBUTED = {
    "tp_size": Key(integer(1), None, "tensor parallel degree"),
    "tp_plan": Key(ANY, None, "which modules are split, and how"),
    "enable_sequence_parallel": Key(ANY, False, "without effect"),
    "enable_expert_parallel": Key(ANY, False, "older word for ep_size"),
    "fsdp_size": Key(integer(1), None, "ranks that the weights are split over"),
    "dp_replicate_size": Key(integer(1), None, "replicas"),
    "fsdp_plan": Key(ANY, None, "which modules are units, and whether they are freed"),
    "fsdp_cpu_offload": Key(BOOLEAN, False, "weights, gradients and optimizer in host memory"),
    "fsdp_mixed_precision": Key(BOOLEAN, False, "compute in bf16, reduce in fp32"),
    "pp_size": Key(integer(1), None, "pipeline parallel degree, for inference"),
    "ep_size": Key(integer(1), None, "expert parallel degree"),
    "ep_plan": Key(ANY, None, "how experts are split"),
    "ep_implementation": Key(ANY, "auto", "how tokens reach the experts"),
}
"""Fields of transformers' own DistributedConfig, an argument of `from_pretrained`."""

_OWN = "which modules are split, and how, is transformers' own"
_ACCELERATOR: Rows = {
    "split_batches": Key(
        BOOLEAN,
        False,
        "per_device_train_batch_size is that of all ranks together",
        "refused",
        "a micro-batch is that of one rank: divide it by the number of ranks",
    ),
    "dispatch_batches": (None, "rank 0 loads for all"),
    "even_batches": (True, "the last batch is filled up for all ranks"),
    "use_seedable_sampler": (True, "the order of the data follows the seed"),
    "non_blocking": Key(BOOLEAN, False, "batches are copied behind other work", "harmless"),
    "gradient_accumulation_kwargs.*": (None, "how gradients are accumulated"),
    "use_configured_state": (False, "an Accelerator's state is made before"),
}
"""Keys of `accelerator_config`, Accelerate's AcceleratorConfig."""
AT_ONCE = "accelerator_config.gradient_accumulation_kwargs.sync_each_batch"
"""Whether gradients are reduced in each micro-batch rather than in the last of a step."""
_PARALLELISM: Rows = {
    **{f"{axis}_size": Key(integer(1), 1, "", null=True) for axis in AXES},
    **{f"{axis}_backend": (None, "") for axis in ("cp", "sp")},
    **{f"{axis}_handler.*": (None, "") for axis in ("tp", "cp", "sp")},
}
_BELOW: tuple[str, ...] = (
    "deepspeed",
    "lr_scheduler_kwargs",
    "activation_checkpointing_kwargs",
    "liger_kernel_config",
)
_BELOW += ("trackio_static_space_id",)

KEYS: dict[str, Key] = {
    **FIELDS,
    **{old: FIELDS[new] for old, new in (ALIASES | RENAMED).items()},
    **GONE,
    **section("fsdp_config", {f"{prefix}{name}": row for prefix in ("", "fsdp_") for name, row in FSDP_KEYS.items()}),
    **dict.fromkeys(("fsdp_config.xla_fsdp_settings.*", "fsdp_config.fsdp_xla_fsdp_settings.*"), Key(ANY, None, "")),
    **section("accelerator_config", _ACCELERATOR, "lossy"),
    **section("parallelism_config", _PARALLELISM),
    **{key: replace(row, loss="lossy", why=_OWN) for key, row in section("distributed_config", DISTRIBUTED).items()},
    **{
        f"{name}.*": replace(FIELDS[name], loss=FIELDS[name].loss or "lossy", why=FIELDS[name].meaning, meaning="")
        for name in _BELOW
    },
    "gradient_checkpointing_kwargs.*": Key(ANY, None, ""),
}
"""Rows by dotted key; `.*` stands for anything below."""

MATCHED = {
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.eps": "adam_epsilon",
    "optimizer.params.weight_decay": "weight_decay",
    "scheduler.params.warmup_max_lr": "learning_rate",
    "scheduler.params.warmup_num_steps": "warmup_steps",
    "scheduler.params.total_num_steps": "max_steps",
    "fp16.enabled": "fp16",
    "bf16.enabled": "bf16",
}
"""Keys of a DeepSpeed document whose value must be that of a field, or "auto"."""
