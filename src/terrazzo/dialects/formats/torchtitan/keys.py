"""The keys of torchtitan's `Trainer.Config` (0.3)."""

from __future__ import annotations

from terrazzo.dialects.core.keys import ANY, BOOLEAN, TEXT, Key, Rows, choice, integer, number, section

__all__ = [
    "DECAY_SHAPES",
    "DEGREES",
    "KEYS",
    "LOCAL_BATCH",
    "OPAQUE",
    "PIPELINE",
    "PIPELINED_BATCH",
    "SCHEDULES",
    "STAGE_LAYERS",
]

DEGREES = {
    f"mesh.{axis}": f"parallelism.{word}_parallel_degree"
    for axis, word in {"tp": "tensor", "cp": "context", "ep": "expert", "pp": "pipeline"}.items()
}
"""Keys of the model axes, by the setting."""

LOCAL_BATCH, PIPELINED_BATCH = "training.local_batch_size", "parallelism.pipeline_parallel_microbatch_size"
"""Sequences of a data rank in one micro-batch, and, where there are stages, in one pass through them: a part of it."""

PIPELINE, STAGE_LAYERS = (f"parallelism.pipeline_parallel_{word}" for word in ("schedule", "layers_per_stage"))
"""Order of the stages, and the number of layers of each."""

SCHEDULES = {
    "1f1b": ("1f1b", 1),
    "gpipe": ("gpipe", 1),
    "interleaved1f1b": ("1f1b", 2),
    "interleavedzerobubble": ("zero_bubble", 2),
    "zbvzerobubble": ("zero_bubble", 2),
}
"""Order of the stages and stages of each rank, where nothing else says them, by the schedule in lower case."""


_FLOATS = {"float32": "fp32", "bfloat16": "bf16"}
_DTYPE, _WIRE = choice(_FLOATS, fold=False), choice({"float32": "fp32"}, fold=False)
_EXPORT = choice({**_FLOATS, "float16": "fp16"}, fold=False)
_RESHARD = choice({"default": None, "always": True, "never": False}, fold=False)
DECAY_SHAPES = ("linear", "sqrt", "cosine")
"""Shapes of the decay, in the words of the neutral description."""
_DECAY = choice({name: name for name in DECAY_SHAPES}, fold=False)
_AC = choice({"fullac": "full", "selectiveac": "selective_half", "memorybudgetac": "selective"})
_ASYNC = choice({"disabled": False, "async": True, "async_with_pinned_mem": True})
_HF = choice({True: "hf", False: "none"})

_MODEL = "the model and its data come from your code there"
_PIPELINE = "how a pipeline is cut and run is a matter of the library"
_RUN = "it does not change what is trained"
_KERNELS = "the library chooses operators whose results are the same in each run, or for each size of a batch"
_DEALT = "how the sequence is dealt out is the library's"
_DETAILS = "details of recomputation are the library's"
_COMPILED = "what is compiled, and by what, the library decides"
_RESUMED = "how a run starts and resumes is said to the library itself"
_TRAVEL = "it changes how tensors travel, not what they are"
_TYPED = "torchtitan's own way of typing axes"
_GRAPHS = "CUDA graphs are torchtitan's; the numbers are the same"
_IN_TURN = "tokens go to other experts than the router chooses, for a measurement of speed: remove it"
_FACTORY = "arguments of torchtitan's own optimizers"

_OTHERS = {
    "comm": "init_timeout_seconds train_timeout_seconds trace_buf_size save_traces_folder save_traces_file_prefix mode",
    "metrics": "log_freq enable_tensorboard disable_color_printing save_tb_folder save_for_all_ranks enable_wandb",
    "profiler": "enable_profiling save_traces_folder profile_freq profiler_repeat profiler_skip_first"
    " profiler_skip_first_wait profiler_active profiler_warmup enable_memory_snapshot memory_snapshot_freq"
    " save_memory_snapshot_folder memory_snapshot_max_entries trace_post_processor",
    "debug": "spmd_typechecking deterministic_warn_only detect_anomaly"
    " print_config save_config_file enable_structured_logging",
}


def _untold(names: str) -> Rows:
    return dict.fromkeys(names.split(), (None, ""))


_PARALLELISM: Rows = {
    "data_parallel_replicate_degree": Key(integer(1), 1, "replicas of the weights"),
    "data_parallel_shard_degree": Key(integer(1), -1, "ranks that the weights are split over; -1: what is left"),
    "fsdp_reshard_after_forward": Key(_RESHARD, "default", "default (always, unless pipelined), always or never"),
    "enable_fsdp_symm_mem": Key(ANY, False, "collectives in symmetric memory", "harmless", _TRAVEL),
    "tensor_parallel_degree": Key(integer(1), 1, "tensor parallel degree"),
    "enable_sequence_parallel": Key(BOOLEAN, True, "norms are split along the sequence under tensor parallelism"),
    "spmd_backend": Key(ANY, "spmd_types", "how model axes are typed", "harmless", _TYPED),
    "pipeline_parallel_degree": Key(integer(1), 1, "pipeline parallel degree"),
    "module_fqns_per_model_part": (None, "modules of every stage"),
    "pipeline_parallel_first_stage_less_layers": (1, "layers taken from the first stage"),
    "pipeline_parallel_last_stage_less_layers": (1, "layers taken from the last stage"),
    "pipeline_parallel_layers_per_stage": Key(integer(1), None, "layers of one stage, of which ranks may have several"),
    "pipeline_parallel_schedule": Key(TEXT, "1F1B", "order in which stages work"),
    "pipeline_parallel_schedule_csv": ("", "file of a pipeline schedule"),
    "pipeline_parallel_microbatch_size": Key(
        integer(1), 1, "sequences in one pass through the pipeline", "harmless", "without stages it says nothing"
    ),
    "context_parallel_degree": Key(integer(1), 1, "context parallel degree"),
    "context_parallel_load_balancer": Key(ANY, "headtail", "how the sequence is dealt out", "lossy", _DEALT),
    "context_parallel_ptrr_mask_key": Key(ANY, None, "mask that the ptrr balancer goes by", "lossy", _DEALT),
    "expert_parallel_degree": Key(integer(1), 1, "expert parallel degree"),
}
_TRAINING: Rows = {
    "local_batch_size": Key(integer(1), 8, "sequences of one data rank in one micro-batch"),
    "global_batch_size": Key(integer(1), -1, "sequences per optimizer step; -1: one micro-batch per rank"),
    "seq_len": Key(integer(1), 2048, "tokens per sequence"),
    "max_norm": Key(number(), 1.0, "largest global gradient norm"),
    "steps": Key(integer(1), 10_000, "optimizer steps"),
    "enable_cpu_offload": Key(BOOLEAN, False, "weights, gradients and optimizer in host memory"),
    "disable_cuda_graphs": Key(BOOLEAN, False, "no CUDA graphs", "harmless", _GRAPHS),
    "dtype": Key(_DTYPE, "float32", "dtype of weights, gradients and optimizer state"),
    "mixed_precision_param": Key(_DTYPE, "bfloat16", "dtype of gathered weights, and so of the computation"),
    "mixed_precision_reduce": Key(_WIRE, "float32", "dtype of gradients on the wire"),
    "gc_freq": (50, "steps between collections of Python's garbage"),
    "gc_debug": (False, "collect in every step"),
}
_OPTIMIZER: Rows = {
    "param_groups": Key(ANY, [], "optimizers by pattern of parameter names"),
    "implementation": Key(TEXT, "fused", "for-loop, foreach, fused, or fused with moments in bf16"),
    "optimizer_factory_kwargs_by_name": ({}, "arguments of whole optimizers"),
}
_LR_SCHEDULER: Rows = {
    "warmup_steps": Key(integer(), 200, "steps of linear warm-up"),
    "total_steps": (None, "length that the schedule is drawn for"),
    "decay_ratio": Key(number(high=1), None, "share of the run that the decay takes; none: all after the warm-up"),
    "decay_type": Key(_DECAY, "linear", "linear, sqrt or cosine"),
    "min_lr_factor": Key(number(high=1), 0.0, "share of the peak at the last step"),
}
_TOP: Rows = {
    "activation_checkpoint": Key(_AC, "SelectiveAC", "SelectiveAC, FullAC, MemoryBudgetAC or none"),
    "hf_assets_path": (None, ""),
    "dump_folder": Key(ANY, None, "", "harmless", _RUN),
    "model_spec.*": (None, ""),
    "tokenizer.*": (None, ""),
    "dataloader.*": (None, ""),
    "validator.*": Key(ANY, None, "", "harmless", "evaluation is set up by your code there"),
    "override.*": Key(ANY, None, "", "refused", "it replaces parts of torchtitan itself"),
    "loss.*": Key(ANY, None, "", "lossy", "the loss comes from your code there"),
}
_ACTIVATION_CHECKPOINT: Rows = {
    "type": Key(_AC, "SelectiveAC", "SelectiveAC, FullAC or MemoryBudgetAC"),
    "preserve_rng_state": (True, "random numbers are the same when recomputed"),
    "determinism_check": ("default", "how recomputed tensors are compared"),
    "debug": (False, "record what is recomputed"),
    "force_recompute_mm_shapes_by_fqns": (["moe.router.gate"], "products always recomputed"),
    "memory_budget": (0.5, "share of activation memory that is kept"),
    "visualize_memory_budget_pareto": (False, "draw time against memory"),
}
_COMPILE: Rows = {
    "enable": Key(BOOLEAN, False, "torch.compile"),
    "components": (["model", "loss"], "what is compiled"),
    "enable_async_tensor_parallel": Key(
        BOOLEAN, False, "tensor parallel collectives overlap with products", "harmless", _COMPILED
    ),
    "backend": ("inductor", "compiler"),
}
_CHECKPOINT: Rows = {
    "enable": Key(BOOLEAN, False, "write checkpoints"),
    "folder": Key(TEXT, "checkpoint", "where to, below dump_folder"),
    "interval": Key(integer(1), 500, "steps between checkpoints"),
    "async_mode": Key(_ASYNC, "disabled", "train on while a checkpoint is written"),
    "initial_load_path": (None, "checkpoint that a new run starts from"),
    "initial_load_model_only": (True, "of it only the weights"),
    "initial_load_in_hf": (False, "it is a Hugging Face folder"),
    "initial_load_in_hf_quantized": (False, "its weights are quantised"),
    "enable_first_step_checkpoint": (False, "write one after the first step"),
    "load_only": Key(BOOLEAN, False, "never write"),
    "last_save_model_only": Key(BOOLEAN, True, "the last one has only weights"),
    "last_save_in_hf": Key(_HF, False, "the last one is a Hugging Face folder"),
    "export_dtype": Key(_EXPORT, "float32", "dtype of the weights in the last one"),
    "keep_latest_k": Key(integer(), 10, "checkpoints kept; 0: all"),
    "load_step": (-1, "step to resume from; -1: the latest"),
    "exclude_from_loading": ([], "states that are not resumed"),
    "create_seed_checkpoint": (False, "write an initial checkpoint on one rank"),
}
_DEBUG: Rows = {
    "seed": Key(integer(), None, "seed of the run"),
    "deterministic": Key(BOOLEAN, False, "deterministic operators", "lossy", _KERNELS),
    "batch_invariant": Key(BOOLEAN, False, "operators that go by no size of a batch", "lossy", _KERNELS),
    "moe_force_load_balance": Key(BOOLEAN, False, "experts are dealt out in turn", "refused", _IN_TURN),
    **_untold(_OTHERS["debug"]),
}
KEYS: dict[str, Key] = {
    **section("parallelism", _PARALLELISM, "lossy", _PIPELINE),
    **section("training", _TRAINING, "harmless", _RUN),
    **section("optimizer", _OPTIMIZER, "refused", _FACTORY),
    **section("lr_scheduler", _LR_SCHEDULER, "lossy", "the schedule ends with the run there"),
    **section("", _TOP, "lossy", _MODEL),
    **section("activation_checkpoint", _ACTIVATION_CHECKPOINT, "harmless", _DETAILS),
    **section("compile", _COMPILE, "harmless", _COMPILED),
    **section("checkpoint", _CHECKPOINT, "lossy", _RESUMED),
    **section("debug", _DEBUG, "harmless", _RUN),
    **section("comm", _untold(_OTHERS["comm"]), "harmless", _RUN),
    **section("metrics", _untold(_OTHERS["metrics"]), "harmless", _RUN),
    **section("profiler", _untold(_OTHERS["profiler"]), "harmless", _RUN),
}
"""Rows by dotted key; `.*` stands for anything below."""

OPAQUE = ("optimizer.param_groups", "optimizer.optimizer_factory_kwargs_by_name")
"""Keys whose values are taken as a whole."""
