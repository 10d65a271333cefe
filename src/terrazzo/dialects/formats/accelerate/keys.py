"""The keys of Accelerate's YAML (accelerate 1.15), with the defaults that `accelerate launch` gives them.

The launcher's defaults are not those of the plugins' constructors: `use_orig_params`, `cpu_ram_efficient_loading` and
`sync_module_states` are on here and off there, and the size of `SIZE_BASED_WRAP` is 100 million here and 0 there.
"""

from __future__ import annotations

from collections.abc import Mapping

from terrazzo.dialects.core.keys import ANY, BOOLEAN, TEXT, Key, Rows, Type, choice, integer, number, section
from terrazzo.dialects.formats.shared.deepspeed_words import DEVICE
from terrazzo.dialects.formats.shared.fsdp_arguments import MIN_NUMEL
from terrazzo.dialects.formats.shared.fsdp_words import STRATEGIES as FSDP_STRATEGIES
from terrazzo.dialects.formats.shared.fsdp_words import VERSION

__all__ = ["GHOSTS", "KEYS", "SECTIONS", "STRATEGIES", "TOP", "TYPES", "canonical_key"]

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

_HALF = choice({"no": None, "fp16": "fp16", "bf16": "bf16", "fp8": "fp8"})
_POLICY = choice({"transformer_based_wrap": "classes", "size_based_wrap": "min_numel", "no_wrap": "none"})
_PREFETCH = choice({"backward_pre": 1, "backward_post": 0, "no_prefetch": 0, 1: 1, 2: 0, "1": 1, "2": 0})
CHECKPOINTS = {"full_state_dict": "full", "local_state_dict": "local", "sharded_state_dict": "sharded"}
"""Kind of checkpoint by its name."""


def _numbered(choices: Mapping[str, str]) -> Type:
    """Words that may also be said by their number, from 1 on."""
    numbers = dict(enumerate(dict.fromkeys(choices.values()), 1))
    return choice({**choices, **{key: each for number, each in numbers.items() for key in (number, str(number))}})


STRATEGIES = {name: row for name, row in FSDP_STRATEGIES.items() if not name.startswith("_")}
"""Row by the strategy's name."""
_STATE, _STRATEGY = _numbered(CHECKPOINTS), _numbered(STRATEGIES)

_TOP: Rows = {
    "compute_environment": ("LOCAL_MACHINE", "where it runs"),
    "distributed_type": Key(
        choice({name.lower(): name for name in TYPES}),
        None,
        "what shards: FSDP, DEEPSPEED, or plain replicas",
        null=False,
    ),
    "mixed_precision": Key(_HALF, None, "no, fp16, bf16 or fp8"),
    "num_processes": Key(integer(-1), -1, "ranks in all"),
    "use_cpu": Key(BOOLEAN, False, "on CPUs"),
    "debug": (False, "shapes are compared between ranks"),
    "num_machines": Key(integer(1), 1, "nodes"),
    "machine_rank": (0, "number of this node"),
    "main_process_ip": (None, "address of the first node"),
    "main_process_port": (None, "port there"),
    "rdzv_backend": ("static", "how ranks find each other"),
    "same_network": (False, "nodes share a network"),
    "gpu_ids": (None, "which GPUs of a node"),
    "main_training_function": ("main", "function that notebooks and TPUs start"),
    "enable_cpu_affinity": (False, "ranks are bound to cores"),
    "downcast_bf16": (False, "TPU: fp32 as bf16"),
    "fp16": Key(BOOLEAN, None, "older word for mixed_precision fp16"),
    "dynamo_backend": Key(TEXT, None, "older word for dynamo_config.dynamo_backend", null=True),
    **dict.fromkeys(("tpu_name", "tpu_zone", "tpu_vm", "tpu_env", "command_file", "commands"), (None, "TPU pods")),
    **dict.fromkeys(("tpu_use_cluster", "tpu_use_sudo"), (False, "TPU pods")),
}

_FSDP: Rows = {
    "fsdp_version": Key(VERSION, 1, "FSDP1 or FSDP2"),
    "fsdp_sharding_strategy": Key(_STRATEGY, "FULL_SHARD", "version 1: which states are split"),
    "fsdp_reshard_after_forward": Key(BOOLEAN, True, "version 2: weights are freed after forward"),
    "fsdp_offload_params": Key(BOOLEAN, False, "weights, gradients and optimizer in host memory"),
    "fsdp_min_num_params": Key(integer(), MIN_NUMEL, "SIZE_BASED_WRAP: smallest unit, in elements"),
    "fsdp_auto_wrap_policy": Key(_POLICY, "NO_WRAP", "units: by class, by size, or one for all"),
    "fsdp_transformer_layer_cls_to_wrap": Key(TEXT, None, "class names of the units, with commas"),
    "fsdp_backward_prefetch": Key(
        _PREFETCH, "NO_PREFETCH", "version 1: when backward gathers the next unit", null=True
    ),
    "fsdp_state_dict_type": Key(_STATE, None, "checkpoints whole or in shards"),
    "fsdp_forward_prefetch": Key(BOOLEAN, False, "version 1: forward gathers one unit ahead"),
    "fsdp_use_orig_params": Key(BOOLEAN, True, "version 1: parameters keep names and shapes"),
    "fsdp_cpu_ram_efficient_loading": Key(BOOLEAN, True, "rank 0 alone loads the weights"),
    "fsdp_sync_module_states": Key(BOOLEAN, True, "version 1: rank 0's weights are sent to all"),
    "fsdp_activation_checkpointing": Key(BOOLEAN, False, "units are recomputed in backward"),
    "fsdp_activation_checkpointing_offload": Key(BOOLEAN, False, "version 2: what is kept lies in host memory"),
    "fsdp_ignored_modules": Key(TEXT, None, "modules that are not sharded, as a regular expression"),
}
"""Keys of fsdp_config. The prefix may be left out."""

_DEEPSPEED: Rows = {
    "deepspeed_config_file": Key(TEXT, None, "a DeepSpeed JSON, in place of most other keys"),
    "zero_stage": Key(integer(0, 3), 2, "ZeRO stage"),
    "offload_optimizer_device": Key(DEVICE, "none", "where optimizer state lives", null=True),
    "offload_param_device": Key(DEVICE, "none", "where weights live", null=True),
    "offload_optimizer_nvme_path": Key(TEXT, None, "folder of the swap files"),
    "offload_param_nvme_path": Key(TEXT, None, "folder of the swap files"),
    "gradient_accumulation_steps": Key(integer(1), None, "micro-batches per optimizer step"),
    "gradient_clipping": Key(number(), None, "largest global gradient norm"),
    "zero3_init_flag": Key(BOOLEAN, None, "stage 3: the model is built split"),
    "zero3_save_16bit_model": Key(BOOLEAN, False, "stage 3: the whole model is written", null=True),
    "deepspeed_moe_layer_cls_names": (None, "classes of mixture-of-experts blocks"),
    "deepspeed_hostfile": (None, "list of nodes"),
    "deepspeed_exclusion_filter": (None, "nodes left out"),
    "deepspeed_inclusion_filter": (None, "nodes taken"),
    "deepspeed_multinode_launcher": ("pdsh", "how other nodes are started"),
}
"""Keys of deepspeed_config."""

_AXES: Rows = {
    "dp_replicate_size": Key(integer(1), 1, "replicas"),
    "dp_shard_size": Key(integer(1), 1, "ranks per replica"),
    "tp_size": Key(integer(1), 1, "tensor parallel degree"),
    "cp_size": Key(integer(1), 1, "context parallel degree"),
    "sp_size": Key(integer(1), 1, "sequence parallel degree (Ulysses, with DeepSpeed)"),
    "cp_backend": ("torch", "library of context parallelism"),
    "cp_comm_strategy": ("allgather", "how keys and values go round"),
    "sp_backend": ("deepspeed", "library of sequence parallelism"),
    "sp_seq_length": (None, "tokens per sequence"),
    "sp_seq_length_is_variable": (True, "sequences differ in length"),
    "sp_attn_implementation": ("sdpa", "attention kernel"),
}
_PARALLELISM: Rows = {f"parallelism_config_{name}": row for name, row in _AXES.items()}
"""Keys of parallelism_config. The prefix must be there."""

_DYNAMO: Rows = {
    "dynamo_backend": Key(TEXT, "NO", "compiler; NO: none", null=True),
    "dynamo_mode": ("default", "mode of the compiler"),
    "dynamo_use_fullgraph": (False, "one graph, or an error"),
    "dynamo_use_dynamic": (False, "shapes may change"),
    "dynamo_use_regional_compilation": (False, "blocks are compiled one by one"),
}
"""Keys of dynamo_config. The prefix may be left out."""

_BY_TORCHAO = "fp8 is by torchao's recipe tensorwise"
_FP8: Rows = {
    "fp8_backend": Key(
        choice({"ao": None, "te": "te", "msamp": "msamp"}), None, "library; AO is what is read", "lossy", _BY_TORCHAO
    ),
    "fp8_use_autocast_during_eval": Key(BOOLEAN, False, "TE: evaluate in fp8", "lossy", _BY_TORCHAO),
    "fp8_margin": (0, "TE: margin of the scales"),
    "fp8_interval": (1, "TE: steps between scales"),
    "fp8_format": ("HYBRID", "TE: E4M3 everywhere, or gradients in E5M2"),
    "fp8_amax_history_len": (1024, "TE: steps that a scale looks back on"),
    "fp8_opt_level": ("O2", "MSAMP: what is sent in 8 bits"),
    "fp8_amax_compute_algo": ("most_recent", "TE: which of these steps tells the scale"),
    "fp8_override_linear_precision": ([False, False, False], "TE: products that stay in 16 bits"),
    "fp8_enable_fsdp_float8_all_gather": Key(
        BOOLEAN, True, "AO: weights are gathered in 8 bits; elsewhere the same numbers, twice the traffic", "harmless"
    ),
    "fp8_pad_inner_dim": Key(BOOLEAN, True, "AO: sizes that do not divide are padded", "lossy", _BY_TORCHAO),
}
"""Keys of fp8_config. The prefix may be left out."""
_MPI: Rows = {"mpirun_hostfile": (None, "list of nodes")}

TOP = section("", _TOP, "harmless")
"""Keys at the top. Others are refused."""
SECTIONS = {
    "fsdp_config": section("", _FSDP, "harmless"),
    "deepspeed_config": section("", _DEEPSPEED, "harmless"),
    "parallelism_config": section("", _PARALLELISM, "harmless"),
    "dynamo_config": section("", _DYNAMO, "harmless"),
    "fp8_config": section("", _FP8, "lossy", _BY_TORCHAO),
    "mpirun_config": section("", _MPI, "harmless"),
}
"""Keys of each section."""
_PREFIXES = {"fsdp_config": "fsdp_", "dynamo_config": "dynamo_", "fp8_config": "fp8_"}
"""What Accelerate puts before a key of a section that lacks it."""


def canonical_key(key: str) -> str:
    """A key with its section's prefix."""
    section, dot, name = key.partition(".")
    prefix = _PREFIXES.get(section, "")
    return f"{section}.{prefix}{name.removeprefix(prefix)}" if dot else key


GHOSTS = {
    "fsdp_config.fsdp_backward_prefetch_policy": "fsdp_config.fsdp_backward_prefetch",
    "fsdp_config.fsdp_cpu_offload": "fsdp_config.fsdp_offload_params",
    "fsdp_config.fsdp_offload": "fsdp_config.fsdp_offload_params",
    "fp8_config.fp8_amax_history_length": "fp8_config.fp8_amax_history_len",
    "fp8_config.fp8_amax_compute_algorithm": "fp8_config.fp8_amax_compute_algo",
    "fp8_config.fp8_optimization_level": "fp8_config.fp8_opt_level",
    **{
        f"parallelism_config.{name.removeprefix('parallelism_config_')}": f"parallelism_config.{name}"
        for name in _PARALLELISM
    },
}
"""Keys that nothing reads, some of them out of Accelerate's own documentation and questionnaire, and what was meant."""

_ROWS = {
    **TOP,
    **{key: row for name, rows in SECTIONS.items() for key, row in section(name, rows).items()},
}
_SHORT = [f"{name}.{prefix}" for name, prefix in _PREFIXES.items()]
KEYS: dict[str, Key] = {
    **_ROWS,
    **{
        key.replace(start, start.split(".")[0] + ".", 1): row
        for start in _SHORT
        for key, row in _ROWS.items()
        if key.startswith(start)
    },
    "megatron_lm_config.*": Key(ANY, None, "", "harmless"),
}
"""All keys, dotted. What has a reader and is not read changes nothing: the engine that it belongs to does not run."""
