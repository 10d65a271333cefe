"""The keys of DeepSpeed's compiler passes, mixture-of-experts, data library, monitors and tools."""

from __future__ import annotations

from terrazzo.dialects.deepspeed.rows import Keep, Row, below

__all__ = ["TOOL_ROWS"]


def _switches(keep: Keep, **meanings: str) -> dict[str, Row]:
    return {name: Row("bool", False, meaning, keep) for name, meaning in meanings.items()}


_COMPILE = {
    "deepcompile": Row("bool", False, "torch.compile with DeepSpeed's graph passes"),
    "free_activation_threshold": Row("int", 10_485_760, "bytes from which activations are freed early", "harmless"),
    "offload_activation_pin_memory": Row("bool", True, "page-locked memory for offloaded activations", "harmless"),
    "double_buffer": Row("bool", True, "two reduction buffers in turn", "harmless"),
    "keep_int_input_tensors": Row("bool", True, "integer inputs are kept for tracing", "harmless"),
    "passes": Row("any", None, "graph passes: z1, z3, autosp, autotp", "lossy"),
    **_switches(
        "harmless",
        free_activation="activations are freed early",
        symmetric_memory="torch's symmetric memory for collectives",
        debug_log="graphs are dumped",
        sync_before_reduce="the device is waited for before a reduction",
        sync_after_reduce="the device is waited for after a reduction",
        sync_before_allgather="the device is waited for before a gather",
        sync_after_allgather="the device is waited for after a gather",
        keep_all_input_tensors="all inputs are kept for tracing",
    ),
    **_switches(
        "lossy",
        autoep_non_moe="only what is no expert is compiled",
        offload_activation="activations are offloaded by a graph pass",
        offload_opt_states="optimizer state is offloaded by a graph pass",
        offload_parameters="weights are offloaded by a graph pass",
    ),
}
_EXPERTS = {
    "enabled": Row("bool", False, "experts of Hugging Face's models are dealt out to ranks"),
    "autoep_size": Row("int", 1, "expert parallel degree"),
    "expert_tensor_parallel_size": Row("int", 1, "tensor parallel degree within experts", "lossy"),
    "use_grouped_mm": Row("bool", True, "one matrix product for all experts", "harmless"),
    "route_scale": Row("number", 1.0, "factor on the router's weights", "refused"),
    "routed_scaling_factor": Row("any", "auto", "factor on the experts' output", "refused"),
    "top_k": Row("any", "auto", "experts per token", "refused"),
    "score_func": Row("text", "auto", "softmax or sigmoid", "refused"),
    "score_apply": Row("text", "auto", "scores before or after the experts", "refused"),
    "combine_impl": Row("text", "auto", "kernel that combines", "harmless"),
    "row_weighting_impl": Row("text", "auto", "kernel that weights rows", "harmless"),
    "gate_up_impl": Row("text", "separate", "gate and up projection apart or as one", "harmless"),
    "comm_backend": Row("text", "comm", "comm or deepep", "harmless"),
    "comm_num_sm": Row("int", 12, "multiprocessors for DeepEP", "harmless"),
    "comm_qp_margin": Row("int", 4, "spare queue pairs", "harmless"),
    "comm_max_tokens_per_rank": Row("int", 0, "size of its buffer; 0: as needed", "harmless"),
    **_switches(
        "harmless",
        validate_folding_routing="routing is compared over tensor-parallel ranks",
        async_split_plan="split sizes are worked out beside compute",
        disable_triton_grouped_mm="no Triton kernel",
    ),
    **{
        name: Row("any", None, f"how the model says it: {name.replace('_', ' ')}", "lossy")
        for name in (
            *("preset_model", "moe_layer_pattern", "expert_pattern", "router_pattern", "expert_activation"),
            *("expert_w1", "expert_w2", "expert_w3", "num_experts_attr", "top_k_attr", "has_shared_experts"),
            *("shared_experts_pattern", "shared_experts_gate_pattern"),
        )
    },
    **{
        name: Row("any", None, f"routing: {name.replace('_', ' ')}", "refused")
        for name in ("route_norm", "num_expert_groups", "num_limited_groups", "load_balance_coeff")
    },
}
_TOP = {
    "datastates_ckpt": Row("any", None, "checkpoints by the package DataStates", "lossy"),
    "steps_per_print": Row("any", None, "steps between printed lines", "harmless"),
    "log_level": Row("text", None, "how much is logged", "harmless"),
    "vocabulary_size": Row("int", None, "a warning if it is no multiple of 8", "harmless"),
    "timers.throughput.enabled": Row("bool", True, "throughput is measured", "harmless"),
    "timers.throughput.synchronized": Row("bool", True, "the device is waited for meanwhile", "harmless"),
    **_switches(
        "harmless",
        wall_clock_breakdown="forward, backward and step are timed",
        memory_breakdown="memory is logged",
        dump_state="the engine's state is printed",
        disable_python_gc="Python's garbage collector is off",
    ),
}


def _monitor(**more: Row) -> dict[str, Row]:
    return {"enabled": Row("bool", False, "metrics are logged there", "harmless"), **more}


def _texts(*names: str, default: str | None = None) -> dict[str, Row]:
    return {name: Row("text", default, name.replace("_", " "), "harmless") for name in names}


_FILES = {**_texts("output_path", default=""), **_texts("job_name", default="DeepSpeedJobName")}
_MONITORS = {
    **below("tensorboard", _monitor(**_FILES)),
    **below("csv_monitor", _monitor(**_FILES)),
    **below("wandb", _monitor(**_texts("group", "team"), **_texts("project", default="deepspeed"))),
    **below(
        "comet",
        _monitor(
            samples_log_interval=Row("int", 100, "samples between entries", "harmless"),
            online=Row("bool", None, "sent at once", "harmless"),
            **_texts("project", "workspace", "api_key", "experiment_name", "experiment_key", "mode"),
        ),
    ),
    **below(
        "comms_logger",
        {
            **_switches("harmless", enabled="collectives are logged", verbose="each is printed", debug="with callers"),
            "prof_all": Row("bool", True, "all of them", "harmless"),
            "prof_ops": Row("names", (), "only these", "harmless"),
        },
    ),
    **below(
        "flops_profiler",
        {
            "enabled": Row("bool", False, "one step is profiled", "harmless"),
            "recompute_fwd_factor": Row("number", 0.0, "share of forward that is done again", "harmless"),
            "profile_step": Row("int", 1, "which step", "harmless"),
            "module_depth": Row("int", -1, "depth of the table", "harmless"),
            "top_modules": Row("int", 1, "modules listed", "harmless"),
            "detailed": Row("bool", True, "the whole model is printed", "harmless"),
            "output_file": Row("text", None, "a file rather than the console", "harmless"),
        },
    ),
}
_TUNER_NUMBERS = {
    "start_profile_step": 3,
    "end_profile_step": 5,
    "tuner_early_stopping": 5,
    "tuner_num_trials": 50,
    "mp_size": 1,
    "max_train_batch_size": None,
    "min_train_batch_size": 1,
    "max_train_micro_batch_size_per_gpu": 1024,
    "min_train_micro_batch_size_per_gpu": 1,
    "num_tuning_micro_batch_sizes": 3,
    "model_info.num_params": None,
    "model_info.hidden_size": None,
    "model_info.num_layers": None,
}
_AUTOTUNING = {
    "enabled": Row("bool", False, "jobs are run to find stage and batch", "lossy"),
    "model_info.profile": Row("bool", False, "the model is profiled first", "harmless"),
    "arg_mappings": Row("any", None, "keys to the script's arguments", "harmless"),
    **_texts("metric_path", "model_info_path"),
    **_texts("results_dir", default="autotuning_results"),
    **_texts("exps_dir", default="autotuning_exps"),
    **_texts("metric", default="throughput"),
    **_texts("tuner_type", default="gridsearch"),
    **{name: Row("bool", True, name, "harmless") for name in ("fast", "overwrite")},
    **{
        name: Row("int", default, name.replace("_", " ").replace(".", " "), "harmless")
        for name, default in _TUNER_NUMBERS.items()
    },
}
_ORDER = "other data is seen, or in another order: keep DeepSpeed's data library in the training script"
_SAMPLING, _LTD = "data_efficiency.data_sampling", "data_efficiency.data_routing.random_ltd"
_DATA = {
    "data_efficiency.enabled": Row("bool", False, "DeepSpeed's data library", "refused", _ORDER),
    "data_efficiency.seed": Row("int", 1234, "its seed", "harmless"),
    f"{_SAMPLING}.enabled": Row("bool", False, "curriculum sampling", "refused", _ORDER),
    f"{_SAMPLING}.num_epochs": Row("int", 1000, "most epochs", "harmless"),
    f"{_SAMPLING}.num_workers": Row("int", 0, "workers of the loader", "harmless"),
    f"{_SAMPLING}.pin_memory": Row("bool", False, "page-locked batches", "harmless"),
    f"{_SAMPLING}.curriculum_learning.enabled": Row("bool", False, "easy samples first", "refused", _ORDER),
    f"{_SAMPLING}.curriculum_learning.data_cluster_path": Row("text", None, "folder of the index", "harmless"),
    f"{_SAMPLING}.curriculum_learning.curriculum_metrics.*": Row("any", None, "a measure of difficulty", "harmless"),
    f"{_SAMPLING}.dynamic_batching.enabled": Row("bool", False, "batches by number of tokens", "refused", _ORDER),
    **below(
        f"{_SAMPLING}.dynamic_batching",
        {
            **_texts("metrics_path"),
            **_texts("lr_scaling_method", default="linear"),
            **_texts("sequence_picking_order", default="dataloader"),
            "min_batch_size": Row("int", 1, "smallest batch", "harmless"),
            "max_batch_size": Row("int", None, "largest batch", "harmless"),
            "max_tokens": Row("int", None, "tokens per batch", "harmless"),
            "verbose": Row("bool", False, "log", "harmless"),
        },
    ),
    "data_efficiency.data_routing.enabled": Row("bool", False, "tokens skip layers", "refused", _ORDER),
    f"{_LTD}.enabled": Row("bool", False, "random tokens skip layers", "refused", _ORDER),
    f"{_LTD}.layer_token_lr_schedule.enabled": Row("bool", False, "the rate follows tokens", "refused", _ORDER),
    "data_efficiency.data_routing.random_ltd.*": Row("any", None, "which layers, and how many tokens", "harmless"),
}
_HYBRID = {
    "enabled": Row("bool", False, "training and generation in turn", "lossy"),
    "max_out_tokens": Row("int", 512, "generated tokens", "harmless"),
    "inference_tp_size": Row("int", 1, "tensor parallel degree of generation", "harmless"),
    "release_inference_cache": Row("bool", False, "the cache is freed", "harmless"),
    "pin_parameters": Row("bool", True, "inference weights are kept", "harmless"),
    "tp_gather_partition_size": Row("int", 8, "weights gathered at a time", "harmless"),
    "enable_cuda_graph": Row("bool", False, "generation as a CUDA graph", "harmless"),
}
_EIGHT_BITS = "weights are quantised"
_QUANTIZATION = {
    "enabled": Row("bool", None, _EIGHT_BITS, "refused", f"{_EIGHT_BITS}, which changes the numbers: remove it"),
    "num_bits": Row("int", 8, "bits", "harmless"),
    "q_type": Row("text", "symmetric", "symmetric or asymmetric", "harmless"),
    "q_groups": Row("int", 1, "groups", "harmless"),
    "quantized_initialization.*": Row("any", None, "weights are quantised as they are made", "refused"),
    "post_init_quant.*": Row("any", None, "weights are quantised once they are made", "refused"),
}

TOOL_ROWS = {
    **_TOP,
    **below("compile", _COMPILE),
    **below("expert_parallel", _EXPERTS),
    **_MONITORS,
    **below("autotuning", _AUTOTUNING),
    **_DATA,
    **below("hybrid_engine", _HYBRID),
    **below("weight_quantization", _QUANTIZATION),
}
"""By dotted key; `.*` at the end stands for anything below."""
