"""The keys of torchtitan before 0.3, whose configurations were TOML: what each is called today, and what is gone."""

from __future__ import annotations

from typing import Any

from terrazzo.dialects.core.keys import ANY, BOOLEAN, MISSING, TEXT, Key, Rows, Type, choice, integer, number, section

__all__ = ["EARLIER", "RENAMED", "today"]

_SECTIONS = {
    "profiling": "profiler",
    "validation": "validator",
    "model": "model_spec",
    "training.dataloader": "dataloader",
}
"""Sections under other names, with all keys that have no row here."""
_MESH = ("data_parallel_replicate_degree", "data_parallel_shard_degree", "tensor_parallel_degree")
_PIPELINE = ("pipeline_parallel_degree", "pipeline_parallel_schedule", "context_parallel_degree")
RENAMED = {
    "job.dump_folder": "dump_folder",
    "job.print_config": "debug.print_config",
    "job.save_config_file": "debug.save_config_file",
    "model.hf_assets_path": "hf_assets_path",
    "model.tokenizer_path": "hf_assets_path",
    "lr_scheduler.lr_min": "lr_scheduler.min_lr_factor",
    "training.batch_size": "training.local_batch_size",
    "training.warmup_steps": "lr_scheduler.warmup_steps",
    "training.compile": "compile.enable",
    "training.dataset": "dataloader.dataset",
    "training.dataset_path": "dataloader.dataset_path",
    **{f"training.{name}": f"debug.{name}" for name in ("seed", "deterministic")},
    **{f"training.{name}": f"parallelism.{name}" for name in _MESH},
    **{f"experimental.{name}": f"parallelism.{name}" for name in _PIPELINE},
    **{
        f"{name}.enable_async_tensor_parallel": "compile.enable_async_tensor_parallel"
        for name in ("parallelism", "experimental")
    },
    "checkpoint.enable_checkpoint": "checkpoint.enable",
    "checkpoint.model_weights_only": "checkpoint.last_save_model_only",
    "checkpoint.last_save_model_weights_only": "checkpoint.last_save_model_only",
    "checkpoint.initial_load_model_weights_only": "checkpoint.initial_load_model_only",
    "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns": (
        "activation_checkpoint.force_recompute_mm_shapes_by_fqns"
    ),
}
"""Today's key by that of an earlier version."""

_CODE = "it names code, which is not run"
_CUT = "how a pipeline is cut and run is a matter of the library"
_RUN = "it does not change what is trained"
_SAME = "the numbers are the same"
_ON = "model.converters switches it on"
_WHOLE = "plan.mesh.ep, which deals experts out whole"
_AT_ONCE = "gradients are clipped, and steps are taken, behind backward: remove it"
_LISTED = Type(
    "a list of names",
    lambda value: (
        tuple(value) if isinstance(value, list | tuple) and all(isinstance(each, str) for each in value) else MISSING
    ),
)
"""No text: each of its letters would be a name."""
_MODE = choice({name: name for name in ("none", "full", "selective", "memory_budget")}, fold=False)
_RECIPES = {"tensorwise": "fp8-tensorwise", "rowwise": "fp8-rowwise", "rowwise_with_gw_hp": "fp8-rowwise"}


def _plain(*names: str, default: Any = None) -> Rows:
    """Rows of keys that their names explain."""
    return {name: (default, name.rpartition(".")[2].replace("_", " ")) for name in names}


_OPTIMIZER: Rows = {
    "name": Key(TEXT, "AdamW", "class of torch.optim"),
    "lr": Key(number(), 8e-4, "learning rate (peak)"),
    "beta1": Key(number(high=1), 0.9, "decay of the first moment"),
    "beta2": Key(number(high=1), 0.95, "decay of the second moment"),
    "eps": Key(number(), 1e-8, "term added to the denominator"),
    "weight_decay": Key(number(), 0.1, "weight decay"),
    "early_step_in_backward": Key(BOOLEAN, False, "weights are updated within backward", "refused", _AT_ONCE),
    "fused": Key(BOOLEAN, True, "how the step is computed", "harmless", _SAME),
}
_ACTIVATION_CHECKPOINT: Rows = {
    "mode": Key(_MODE, "selective", "none, full, selective or memory_budget"),
    "selective_ac_option": Key(ANY, "2", "selective: `op` by operator, or N for one block in N"),
    "early_stop": Key(BOOLEAN, False, "recomputation ends once all is there", "harmless", _SAME),
}
_FLOAT8: Rows = {
    "recipe_name": Key(choice(_RECIPES, fold=False), None, "tensorwise, the default, rowwise or rowwise_with_gw_hp"),
    "filter_fqns": Key(_LISTED, (), "parts of names of linear layers that stay as they are", null=True),
    "enable_float8_linear": Key(BOOLEAN, None, "linear layers multiply in 8 bits"),
    "enable_fsdp_float8_all_gather": Key(
        BOOLEAN, False, "weights are gathered in 8 bits; elsewhere the same numbers, twice the traffic", "harmless"
    ),
    **section(
        "",
        _plain(
            "precompute_float8_dynamic_scale_for_fsdp", "force_recompute_fp8_weight_in_bwd", "emulate", default=False
        ),
        "harmless",
        _SAME,
    ),
    **section(
        "", _plain(*(f"scaling_type_{each}" for each in ("input", "weight", "grad_output")), default="dynamic"), "lossy"
    ),
}
_NARROW = {
    "quantize.grouped_mm.float8": ("fqns",),
    "quantize.linear.mx": ("mxfp8_dim1_cast_kernel_choice", "recipe_name", "filter_fqns"),
    "quantize.grouped_mm.mx": ("recipe_name", "fqns"),
    "mx": ("use_fp8_dim1_cast_triton_kernel", "recipe_name", "filter_fqns"),
}
_JOB = ("config_file", "description", "use_for_integration_test", "print_args", "custom_config_module")
_TUNING = (
    *("parallelism.disable_loss_parallel", "parallelism.enable_compiled_autograd"),
    *("parallelism.context_parallel_rotate_method", "parallelism.expert_parallel_comm_backend"),
    *("parallelism.pipeline_parallel_expert_parallel_overlap", "training.enable_loss_parallel"),
    *("experimental.enable_compiled_autograd", "metrics.enable_color_printing", "metrics.rank_0_only"),
    *("memory_estimation.enable", "memory_estimation.enabled", "memory_estimation.disable_fake_mode"),
)
_TOLERANCE = (
    *("enable", "process_group", "process_group_timeout_ms", "replica_id", "group_size", "min_replica_size"),
    *("semi_sync_method", "sync_steps", "should_quantize", "fragment_sync_delay", "fragment_update_alpha"),
)
EARLIER: dict[str, Key] = {
    **section("optimizer", _OPTIMIZER),
    **section("activation_checkpoint", _ACTIVATION_CHECKPOINT),
    "model.converters": Key(_LISTED, (), "what is done to the model once it is built, such as float8", null=True),
    "model.print_after_conversion": Key(BOOLEAN, False, "the model is printed then", "harmless", _RUN),
    **section("float8", _FLOAT8),
    **section("quantize.linear.float8", _FLOAT8),
    **{
        key: row
        for name, names in _NARROW.items()
        for key, row in section(name, _plain(*names), "harmless", _ON).items()
    },
    **section("job", _plain(*_JOB), "harmless", _RUN),
    **section("experimental", _plain("custom_import", "custom_args_module", default=""), "lossy", _CODE),
    **section(
        "experimental", _plain("pipeline_parallel_split_points", "pipeline_parallel_microbatches"), "lossy", _CUT
    ),
    "parallelism.pipeline_parallel_split_points": Key(ANY, [], "first layers of the stages", "lossy", _CUT),
    "parallelism.expert_tensor_parallel_degree": Key(
        integer(1), 1, "tensor parallel degree within experts", "lossy", here=_WHOLE
    ),
    **section("", _plain(*_TUNING), "harmless", _SAME),
    "checkpoint.interval_type": Key(TEXT, "steps", "unit of checkpoint.interval", "lossy", "it is counted in steps"),
    "checkpoint.enable_ft_dataloader_checkpoints": Key(BOOLEAN, True, "places in the data are saved", "harmless", _RUN),
    **section("fault_tolerance", _plain(*_TOLERANCE), "lossy", "it is no part of the trainer's config"),
}
"""Rows of keys that there are no more, or that others say together."""


def today(key: str) -> str:
    """A key as torchtitan 0.3 spells it, and one that is gone as it was."""
    if key in EARLIER or key in RENAMED:
        return RENAMED.get(key, key)
    moved = (f"{name}.{key.removeprefix(f'{old}.')}" for old, name in _SECTIONS.items() if key.startswith(f"{old}."))
    return next(moved, key)
