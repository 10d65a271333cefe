"""The keys of torchtitan's `Trainer.Config` (0.3) with their defaults and meanings, and what is kept as it is."""

from __future__ import annotations

from typing import Any

__all__ = ["BELOW", "DEGREES", "KEPT", "KEYS", "OPAQUE", "REMOVED"]

DEGREES = {
    f"mesh.{axis}": f"parallelism.{word}_parallel_degree"
    for axis, word in {"tp": "tensor", "cp": "context", "ep": "expert", "pp": "pipeline"}.items()
}
"""Keys of the model axes, by the setting."""

KEYS: dict[str, tuple[Any, str]] = {
    "parallelism.data_parallel_replicate_degree": (1, "replicas of the weights"),
    "parallelism.data_parallel_shard_degree": (-1, "ranks that the weights are split over; -1: what is left"),
    "parallelism.fsdp_reshard_after_forward": ("default", "default (always, unless pipelined), always or never"),
    "parallelism.enable_fsdp_symm_mem": (False, "collectives in symmetric memory"),
    "parallelism.tensor_parallel_degree": (1, "tensor parallel degree"),
    "parallelism.enable_sequence_parallel": (True, "norms are split along the sequence under tensor parallelism"),
    "parallelism.spmd_backend": ("spmd_types", "how model axes are typed"),
    "parallelism.pipeline_parallel_degree": (1, "pipeline parallel degree"),
    "parallelism.module_fqns_per_model_part": (None, "modules of every stage"),
    "parallelism.pipeline_parallel_first_stage_less_layers": (1, "layers taken from the first stage"),
    "parallelism.pipeline_parallel_last_stage_less_layers": (1, "layers taken from the last stage"),
    "parallelism.pipeline_parallel_layers_per_stage": (None, "layers of one virtual stage"),
    "parallelism.pipeline_parallel_schedule": ("1F1B", "pipeline schedule"),
    "parallelism.pipeline_parallel_schedule_csv": ("", "file of a pipeline schedule"),
    "parallelism.pipeline_parallel_microbatch_size": (1, "sequences in one pass through the pipeline"),
    "parallelism.context_parallel_degree": (1, "context parallel degree"),
    "parallelism.context_parallel_load_balancer": ("headtail", "how the sequence is dealt out"),
    "parallelism.context_parallel_ptrr_mask_key": (None, "mask that the ptrr balancer goes by"),
    "parallelism.expert_parallel_degree": (1, "expert parallel degree"),
    "training.local_batch_size": (8, "sequences of one data rank in one micro-batch"),
    "training.global_batch_size": (-1, "sequences per optimizer step; -1: one micro-batch per rank"),
    "training.seq_len": (2048, "tokens per sequence"),
    "training.max_norm": (1.0, "largest global gradient norm"),
    "training.steps": (10000, "optimizer steps"),
    "training.enable_cpu_offload": (False, "weights, gradients and optimizer in host memory"),
    "training.disable_cuda_graphs": (False, "no CUDA graphs"),
    "training.dtype": ("float32", "dtype of weights, gradients and optimizer state"),
    "training.mixed_precision_param": ("bfloat16", "dtype of gathered weights, and so of the computation"),
    "training.mixed_precision_reduce": ("float32", "dtype of gradients on the wire"),
    "training.gc_freq": (50, "steps between collections of Python's garbage"),
    "training.gc_debug": (False, "collect in every step"),
    "optimizer.param_groups": ([], "optimizers by pattern of parameter names"),
    "optimizer.implementation": ("fused", "for-loop, foreach, fused, or fused with moments in bf16"),
    "optimizer.optimizer_factory_kwargs_by_name": ({}, "arguments of whole optimizers"),
    "lr_scheduler.warmup_steps": (200, "steps of linear warm-up"),
    "lr_scheduler.total_steps": (None, "length that the schedule is drawn for"),
    "lr_scheduler.decay_ratio": (None, "share of the run that the decay takes; none: all after the warm-up"),
    "lr_scheduler.decay_type": ("linear", "linear, sqrt or cosine"),
    "lr_scheduler.min_lr_factor": (0.0, "share of the peak at the last step"),
    "activation_checkpoint": ("SelectiveAC", "SelectiveAC, FullAC, MemoryBudgetAC or none"),
    "activation_checkpoint.type": ("SelectiveAC", "SelectiveAC, FullAC or MemoryBudgetAC"),
    "activation_checkpoint.preserve_rng_state": (True, "random numbers are the same when recomputed"),
    "activation_checkpoint.determinism_check": ("default", "how recomputed tensors are compared"),
    "activation_checkpoint.debug": (False, "record what is recomputed"),
    "activation_checkpoint.force_recompute_mm_shapes_by_fqns": (["moe.router.gate"], "products always recomputed"),
    "activation_checkpoint.memory_budget": (0.5, "share of activation memory that is kept"),
    "activation_checkpoint.visualize_memory_budget_pareto": (False, "draw time against memory"),
    "compile.enable": (False, "torch.compile"),
    "compile.components": (["model", "loss"], "what is compiled"),
    "compile.enable_async_tensor_parallel": (False, "tensor parallel collectives overlap with products"),
    "compile.backend": ("inductor", "compiler"),
    "checkpoint.enable": (False, "write checkpoints"),
    "checkpoint.folder": ("checkpoint", "where to, below dump_folder"),
    "checkpoint.interval": (500, "steps between checkpoints"),
    "checkpoint.async_mode": ("disabled", "train on while a checkpoint is written"),
    "checkpoint.initial_load_path": (None, "checkpoint that a new run starts from"),
    "checkpoint.initial_load_model_only": (True, "of it only the weights"),
    "checkpoint.initial_load_in_hf": (False, "it is a Hugging Face folder"),
    "checkpoint.initial_load_in_hf_quantized": (False, "its weights are quantised"),
    "checkpoint.enable_first_step_checkpoint": (False, "write one after the first step"),
    "checkpoint.load_only": (False, "never write"),
    "checkpoint.last_save_model_only": (True, "the last one has only weights"),
    "checkpoint.last_save_in_hf": (False, "the last one is a Hugging Face folder"),
    "checkpoint.export_dtype": ("float32", "dtype of the weights in the last one"),
    "checkpoint.keep_latest_k": (10, "checkpoints kept; 0: all"),
    "checkpoint.load_step": (-1, "step to resume from; -1: the latest"),
    "checkpoint.exclude_from_loading": ([], "states that are not resumed"),
    "checkpoint.create_seed_checkpoint": (False, "write an initial checkpoint on one rank"),
    "debug.seed": (None, "seed of the run"),
    "debug.deterministic": (False, "deterministic operators"),
}
"""Default and meaning by dotted key."""

_OTHERS = {
    "comm": "init_timeout_seconds train_timeout_seconds trace_buf_size save_traces_folder save_traces_file_prefix mode",
    "metrics": "log_freq enable_tensorboard disable_color_printing save_tb_folder save_for_all_ranks enable_wandb",
    "profiler": "enable_profiling save_traces_folder profile_freq profiler_repeat profiler_skip_first"
    " profiler_skip_first_wait profiler_active profiler_warmup enable_memory_snapshot memory_snapshot_freq"
    " save_memory_snapshot_folder memory_snapshot_max_entries trace_post_processor",
    "debug": "spmd_typechecking deterministic_warn_only moe_force_load_balance detect_anomaly batch_invariant"
    " print_config save_config_file enable_structured_logging",
}
BELOW: tuple[str, ...] = (
    *(f"{section}.{name}" for section, names in _OTHERS.items() for name in names.split()),
    *("hf_assets_path", "dump_folder", "model_spec.*", "tokenizer.*", "dataloader.*", "validator.*", "override.*"),
    "loss.*",
)
"""Further keys, none of which the neutral description has."""

OPAQUE = ("optimizer.param_groups", "optimizer.optimizer_factory_kwargs_by_name")

_MODEL = "the model and its data come from your code there"
_PIPELINE = "how a pipeline is cut and run is a matter of the library"
_RUN = "it does not change what is trained"
KEPT: dict[str, tuple[str, dict[str, bool]]] = {
    "model_spec": (_MODEL, {}),
    "hf_assets_path": (_MODEL, {}),
    "tokenizer": (_MODEL, {}),
    "dataloader": (_MODEL, {}),
    "validator": ("evaluation is set up by your code there", {"harmless": True}),
    "loss": ("the loss comes from your code there", {}),
    "override": ("it replaces parts of torchtitan itself", {"refused": True}),
    "dump_folder": (_RUN, {"harmless": True}),
    "comm": (_RUN, {"harmless": True}),
    "metrics": (_RUN, {"harmless": True}),
    "profiler": (_RUN, {"harmless": True}),
    "debug": (_RUN, {"harmless": True}),
    "training.gc_": (_RUN, {"harmless": True}),
    "training.disable_cuda_graphs": ("CUDA graphs are torchtitan's; the numbers are the same", {"harmless": True}),
    "parallelism.enable_fsdp_symm_mem": ("it changes how tensors travel, not what they are", {"harmless": True}),
    "parallelism.enable_sequence_parallel": ("norms are whole on every rank without it: more memory", {}),
    "parallelism.spmd_backend": ("torchtitan's own way of typing axes", {"harmless": True}),
    "parallelism.module_fqns_per_model_part": (_PIPELINE, {}),
    "parallelism.pipeline_parallel_": (_PIPELINE, {}),
    "parallelism.context_parallel_": ("how the sequence is dealt out is the library's", {}),
    "optimizer.optimizer_factory_kwargs_by_name": ("arguments of torchtitan's own optimizers", {"refused": True}),
    "lr_scheduler.total_steps": ("the schedule ends with the run there", {}),
    "activation_checkpoint": ("details of recomputation are the library's", {"harmless": True}),
    "compile": ("what is compiled, and by what, the library decides", {"harmless": True}),
    "checkpoint": ("how a run starts and resumes is said to the library itself", {}),
}
"""What only torchtitan has, by the beginning of its keys: what another dialect loses, and how grave it is."""

REMOVED = {
    "job": "gone with the command line: name the run's folder in dump_folder",
    "model": "the model is chosen by the Python function that builds the config (MODULE and CONFIG)",
    "optimizer.name": "an optimizer is an entry of optimizer.param_groups: {pattern: '.*', optimizer_name: AdamW, ...}",
    "optimizer.lr": "the learning rate is in optimizer.param_groups: optimizer_kwargs: {lr: ...}",
    "activation_checkpoint.mode": "say activation_checkpoint.type: FullAC, SelectiveAC or MemoryBudgetAC",
    "training.compile": "it is compile.enable",
    "parallelism.enable_async_tensor_parallel": "it is compile.enable_async_tensor_parallel",
    "experimental": "the section is gone",
    "profiling": "the section is profiler",
    "validation": "the section is validator",
    **dict.fromkeys(
        ("quantize", "float8", "mx"), "quantisation is chosen by the Python function that builds the config"
    ),
    "memory_estimation": "the tool is gone",
    "fault_tolerance": "it is no part of the trainer's config",
}
"""Keys of earlier versions, and what took their place."""
