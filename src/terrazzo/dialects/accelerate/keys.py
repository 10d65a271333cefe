"""The keys of Accelerate's YAML (accelerate 1.15), with the defaults that `accelerate launch` gives them.

The launcher's defaults are not those of the plugins' constructors: `use_orig_params`, `cpu_ram_efficient_loading` and
`sync_module_states` are on here and off there, and the size of `SIZE_BASED_WRAP` is 100 million here and 0 there.
"""

from __future__ import annotations

from typing import Any

__all__ = ["DEEPSPEED", "DYNAMO", "FSDP", "GHOSTS", "KNOWN", "PARALLELISM", "PREFIXES", "SECTIONS", "TOP", "TYPES"]

TYPES = {
    "NO": "one process",
    "MULTI_GPU": "ddp",
    "MULTI_CPU": "ddp",
    "FSDP": "fsdp",
    "DEEPSPEED": "deepspeed",
    **{f"MULTI_{name}": "ddp" for name in ("NPU", "MLU", "SDAA", "MUSA", "XPU", "HPU", "NEURON")},
    "MEGATRON_LM": "another engine",
    "XLA": "another engine",
}
"""What each `distributed_type` runs."""

TOP: dict[str, tuple[Any, str]] = {
    "compute_environment": ("LOCAL_MACHINE", "where it runs"),
    "distributed_type": (None, "what shards: FSDP, DEEPSPEED, or plain replicas"),
    "mixed_precision": (None, "no, fp16, bf16 or fp8"),
    "num_processes": (-1, "ranks in all"),
    "use_cpu": (False, "on CPUs"),
    "debug": (False, "shapes are compared between ranks"),
    "num_machines": (1, "nodes"),
    "machine_rank": (0, "number of this node"),
    "main_process_ip": (None, "address of the first node"),
    "main_process_port": (None, "port there"),
    "rdzv_backend": ("static", "how ranks find each other"),
    "same_network": (False, "nodes share a network"),
    "gpu_ids": (None, "which GPUs of a node"),
    "main_training_function": ("main", "function that notebooks and TPUs start"),
    "enable_cpu_affinity": (False, "ranks are bound to cores"),
    "downcast_bf16": (False, "TPU: fp32 as bf16"),
    "fp16": (None, "older word for mixed_precision fp16"),
    "dynamo_backend": (None, "older word for dynamo_config.dynamo_backend"),
    **dict.fromkeys(("tpu_name", "tpu_zone", "tpu_vm", "tpu_env", "command_file", "commands"), (None, "TPU pods")),
    **dict.fromkeys(("tpu_use_cluster", "tpu_use_sudo"), (False, "TPU pods")),
}
"""Keys at the top, with default and meaning. Others are refused."""

FSDP: dict[str, tuple[Any, str]] = {
    "fsdp_version": (1, "FSDP1 or FSDP2"),
    "fsdp_sharding_strategy": ("FULL_SHARD", "version 1: which states are split"),
    "fsdp_reshard_after_forward": (True, "version 2: weights are freed after forward"),
    "fsdp_offload_params": (False, "weights, gradients and optimizer in host memory"),
    "fsdp_min_num_params": (100_000_000, "SIZE_BASED_WRAP: smallest unit, in elements"),
    "fsdp_auto_wrap_policy": ("NO_WRAP", "units: by class, by size, or one for all"),
    "fsdp_transformer_layer_cls_to_wrap": (None, "class names of the units, with commas"),
    "fsdp_backward_prefetch": ("NO_PREFETCH", "version 1: when backward gathers the next unit"),
    "fsdp_state_dict_type": (None, "checkpoints whole or in shards"),
    "fsdp_forward_prefetch": (False, "version 1: forward gathers one unit ahead"),
    "fsdp_use_orig_params": (True, "version 1: parameters keep names and shapes"),
    "fsdp_cpu_ram_efficient_loading": (True, "rank 0 alone loads the weights"),
    "fsdp_sync_module_states": (True, "version 1: rank 0's weights are sent to all"),
    "fsdp_activation_checkpointing": (False, "units are recomputed in backward"),
    "fsdp_activation_checkpointing_offload": (False, "version 2: what is kept lies in host memory"),
    "fsdp_ignored_modules": (None, "modules that are not sharded, as a regular expression"),
}
"""Keys of fsdp_config. The prefix may be left out."""

DEEPSPEED: dict[str, tuple[Any, str]] = {
    "deepspeed_config_file": (None, "a DeepSpeed JSON, in place of most other keys"),
    "zero_stage": (2, "ZeRO stage"),
    "offload_optimizer_device": ("none", "where optimizer state lives"),
    "offload_param_device": ("none", "where weights live"),
    "offload_optimizer_nvme_path": (None, "folder of the swap files"),
    "offload_param_nvme_path": (None, "folder of the swap files"),
    "gradient_accumulation_steps": (None, "micro-batches per optimizer step"),
    "gradient_clipping": (None, "largest global gradient norm"),
    "zero3_init_flag": (None, "stage 3: the model is built split"),
    "zero3_save_16bit_model": (False, "stage 3: the whole model is written"),
    "deepspeed_moe_layer_cls_names": (None, "classes of mixture-of-experts blocks"),
    "deepspeed_hostfile": (None, "list of nodes"),
    "deepspeed_exclusion_filter": (None, "nodes left out"),
    "deepspeed_inclusion_filter": (None, "nodes taken"),
    "deepspeed_multinode_launcher": ("pdsh", "how other nodes are started"),
}
"""Keys of deepspeed_config."""

PARALLELISM: dict[str, tuple[Any, str]] = {
    f"parallelism_config_{name}": row
    for name, row in {
        "dp_replicate_size": (1, "replicas"),
        "dp_shard_size": (1, "ranks per replica"),
        "tp_size": (1, "tensor parallel degree"),
        "cp_size": (1, "context parallel degree"),
        "sp_size": (1, "sequence parallel degree (Ulysses, with DeepSpeed)"),
        "cp_backend": ("torch", "library of context parallelism"),
        "cp_comm_strategy": ("allgather", "how keys and values go round"),
        "sp_backend": ("deepspeed", "library of sequence parallelism"),
        "sp_seq_length": (None, "tokens per sequence"),
        "sp_seq_length_is_variable": (True, "sequences differ in length"),
        "sp_attn_implementation": ("sdpa", "attention kernel"),
    }.items()
}
"""Keys of parallelism_config. The prefix must be there."""

DYNAMO: dict[str, tuple[Any, str]] = {
    "dynamo_backend": ("NO", "compiler; NO: none"),
    "dynamo_mode": ("default", "mode of the compiler"),
    "dynamo_use_fullgraph": (False, "one graph, or an error"),
    "dynamo_use_dynamic": (False, "shapes may change"),
    "dynamo_use_regional_compilation": (False, "blocks are compiled one by one"),
}
"""Keys of dynamo_config. The prefix may be left out."""

_FP8: dict[str, tuple[Any, str]] = {
    f"fp8_{name}": (None, f"fp8: {name.replace('_', ' ')}")
    for name in (
        *("backend", "use_autocast_during_eval", "margin", "interval", "format", "amax_history_len", "opt_level"),
        *("amax_compute_algo", "override_linear_precision", "enable_fsdp_float8_all_gather", "pad_inner_dim"),
    )
}
_MPI = {"mpirun_hostfile": (None, "list of nodes")}

SECTIONS: dict[str, dict[str, tuple[Any, str]]] = {
    "fsdp_config": FSDP,
    "deepspeed_config": DEEPSPEED,
    "parallelism_config": PARALLELISM,
    "dynamo_config": DYNAMO,
    "fp8_config": _FP8,
    "mpirun_config": _MPI,
}
PREFIXES = {"fsdp_config": "fsdp_", "dynamo_config": "dynamo_", "fp8_config": "fp8_"}
"""What Accelerate puts before a key of a section that lacks it."""

GHOSTS = {
    "fsdp_config.fsdp_backward_prefetch_policy": "fsdp_config.fsdp_backward_prefetch",
    "fsdp_config.fsdp_cpu_offload": "fsdp_config.fsdp_offload_params",
    "fsdp_config.fsdp_offload": "fsdp_config.fsdp_offload_params",
    "fp8_config.fp8_amax_history_length": "fp8_config.fp8_amax_history_len",
    "fp8_config.fp8_amax_compute_algorithm": "fp8_config.fp8_amax_compute_algo",
    "fp8_config.fp8_optimization_level": "fp8_config.fp8_opt_level",
    **{
        f"parallelism_config.{name.removeprefix('parallelism_config_')}": f"parallelism_config.{name}"
        for name in PARALLELISM
    },
}
"""Keys that nothing reads, some of them out of Accelerate's own documentation and questionnaire, and what was meant."""

KNOWN = (
    *TOP,
    *(f"{section}.{name}" for section, rows in SECTIONS.items() for name in rows),
    *(f"{section}.{name.removeprefix(prefix)}" for section, prefix in PREFIXES.items() for name in SECTIONS[section]),
    "megatron_lm_config.*",
)
"""All keys, dotted."""
