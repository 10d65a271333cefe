"""The keys of DeepSpeed's compiler passes, mixture-of-experts, data library, monitors and tools."""

from __future__ import annotations

from terrazzo.dialects.core.keys import ANY, BOOLEAN, NAME_LIST, TEXT, Key, RowLoss, integer, number, section

__all__ = ["TOOL_ROWS"]


def _switches(loss: RowLoss, **meanings: str) -> dict[str, Key]:
    return {name: Key(BOOLEAN, False, meaning, loss) for name, meaning in meanings.items()}


_COMPILE = {
    "deepcompile": Key(BOOLEAN, False, "torch.compile with DeepSpeed's graph passes"),
    "free_activation_threshold": Key(integer(), 10_485_760, "bytes from which activations are freed early", "harmless"),
    "offload_activation_pin_memory": Key(BOOLEAN, True, "page-locked memory for offloaded activations", "harmless"),
    "double_buffer": Key(BOOLEAN, True, "two reduction buffers in turn", "harmless"),
    "keep_int_input_tensors": Key(BOOLEAN, True, "integer inputs are kept for tracing", "harmless"),
    "passes": Key(ANY, None, "graph passes: z1, z3, autosp, autotp", "lossy"),
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
_ROUTING = "a model routes there as its own code and config.json say: remove it, and set it in the model's config.json"
_WHOLE = "plan.mesh.ep, which deals experts out whole, over tensor parallel ranks too"
_EXPERTS = {
    "enabled": Key(BOOLEAN, False, "experts of Hugging Face's models are dealt out to ranks"),
    "autoep_size": Key(integer(1), 1, "expert parallel degree"),
    "expert_tensor_parallel_size": Key(integer(), 1, "tensor parallel degree within experts", "lossy", here=_WHOLE),
    "use_grouped_mm": Key(BOOLEAN, True, "one matrix product for all experts", "harmless"),
    "route_scale": Key(number(), 1.0, "factor on the router's weights", "refused", _ROUTING),
    "routed_scaling_factor": Key(ANY, "auto", "factor on the experts' output", "refused", _ROUTING),
    "top_k": Key(ANY, "auto", "experts per token", "refused", _ROUTING, here="model.experts.top_k"),
    "score_func": Key(TEXT, "auto", "softmax or sigmoid", "refused", _ROUTING, here="model.experts.scores"),
    "score_apply": Key(
        TEXT, "auto", "scores before or after the experts", "refused", _ROUTING, here="model.experts.apply"
    ),
    "combine_impl": Key(TEXT, "auto", "kernel that combines", "harmless"),
    "row_weighting_impl": Key(TEXT, "auto", "kernel that weights rows", "harmless"),
    "gate_up_impl": Key(TEXT, "separate", "gate and up projection apart or as one", "harmless"),
    "comm_backend": Key(TEXT, "comm", "comm or deepep", "harmless"),
    "comm_num_sm": Key(integer(), 12, "multiprocessors for DeepEP", "harmless"),
    "comm_qp_margin": Key(integer(), 4, "spare queue pairs", "harmless"),
    "comm_max_tokens_per_rank": Key(integer(), 0, "size of its buffer; 0: as needed", "harmless"),
    **_switches(
        "harmless",
        validate_folding_routing="routing is compared over tensor-parallel ranks",
        async_split_plan="split sizes are worked out beside compute",
        disable_triton_grouped_mm="no Triton kernel",
    ),
    **{
        name: Key(ANY, None, f"how the model says it: {name.replace('_', ' ')}", "lossy")
        for name in (
            *("preset_model", "moe_layer_pattern", "expert_pattern", "router_pattern", "expert_activation"),
            *("expert_w1", "expert_w2", "expert_w3", "num_experts_attr", "top_k_attr", "has_shared_experts"),
            *("shared_experts_pattern", "shared_experts_gate_pattern"),
        )
    },
    **{
        name: Key(ANY, None, f"routing: {name.replace('_', ' ')}", "refused", _ROUTING)
        for name in ("route_norm", "num_expert_groups", "num_limited_groups", "load_balance_coeff")
    },
}
_TOP = {
    "datastates_ckpt": Key(ANY, None, "checkpoints by the package DataStates", "lossy"),
    "steps_per_print": Key(ANY, None, "steps between printed lines", "harmless", here="log.every"),
    "log_level": Key(TEXT, None, "how much is logged", "harmless"),
    "vocabulary_size": Key(integer(), None, "a warning if it is no multiple of 8", "harmless"),
    "timers.throughput.enabled": Key(BOOLEAN, True, "throughput is measured", "harmless"),
    "timers.throughput.synchronized": Key(BOOLEAN, True, "the device is waited for meanwhile", "harmless"),
    **_switches(
        "harmless",
        wall_clock_breakdown="forward, backward and step are timed",
        memory_breakdown="memory is logged",
        dump_state="the engine's state is printed",
        disable_python_gc="Python's garbage collector is off",
    ),
}


def _monitor(**more: Key) -> dict[str, Key]:
    return {"enabled": Key(BOOLEAN, False, "metrics are logged there", "harmless"), **more}


def _texts(*names: str, default: str | None = None) -> dict[str, Key]:
    return {name: Key(TEXT, default, name.replace("_", " "), "harmless") for name in names}


_FILES = {**_texts("output_path", default=""), **_texts("job_name", default="DeepSpeedJobName")}
_MONITORS = {
    **section("tensorboard", _monitor(**_FILES)),
    **section("csv_monitor", _monitor(**_FILES)),
    **section("wandb", _monitor(**_texts("group", "team"), **_texts("project", default="deepspeed"))),
    **section(
        "comet",
        _monitor(
            samples_log_interval=Key(integer(), 100, "samples between entries", "harmless"),
            online=Key(BOOLEAN, None, "sent at once", "harmless"),
            **_texts("project", "workspace", "api_key", "experiment_name", "experiment_key", "mode"),
        ),
    ),
    **section(
        "comms_logger",
        {
            **_switches("harmless", enabled="collectives are logged", verbose="each is printed", debug="with callers"),
            "prof_all": Key(BOOLEAN, True, "all of them", "harmless"),
            "prof_ops": Key(NAME_LIST, (), "only these", "harmless"),
        },
    ),
    **section(
        "flops_profiler",
        {
            "enabled": Key(BOOLEAN, False, "one step is profiled", "harmless"),
            "recompute_fwd_factor": Key(number(), 0.0, "share of forward that is done again", "harmless"),
            "profile_step": Key(integer(), 1, "which step", "harmless"),
            "module_depth": Key(integer(-1), -1, "depth of the table", "harmless"),
            "top_modules": Key(integer(), 1, "modules listed", "harmless"),
            "detailed": Key(BOOLEAN, True, "the whole model is printed", "harmless"),
            "output_file": Key(TEXT, None, "a file rather than the console", "harmless"),
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
    "enabled": Key(BOOLEAN, False, "jobs are run to find stage and batch", "lossy"),
    "model_info.profile": Key(BOOLEAN, False, "the model is profiled first", "harmless"),
    "arg_mappings": Key(ANY, None, "keys to the script's arguments", "harmless"),
    **_texts("metric_path", "model_info_path"),
    **_texts("results_dir", default="autotuning_results"),
    **_texts("exps_dir", default="autotuning_exps"),
    **_texts("metric", default="throughput"),
    **_texts("tuner_type", default="gridsearch"),
    **{name: Key(BOOLEAN, True, name, "harmless") for name in ("fast", "overwrite")},
    **{
        name: Key(integer(), default, name.replace("_", " ").replace(".", " "), "harmless")
        for name, default in _TUNER_NUMBERS.items()
    },
}
_ORDER = "other data is seen, or in another order: keep DeepSpeed's data library in the training script"
_SAMPLING, _LTD = "data_efficiency.data_sampling", "data_efficiency.data_routing.random_ltd"
_DATA = {
    "data_efficiency.enabled": Key(BOOLEAN, False, "DeepSpeed's data library", "refused", _ORDER),
    "data_efficiency.seed": Key(integer(), 1234, "its seed", "harmless"),
    f"{_SAMPLING}.enabled": Key(BOOLEAN, False, "curriculum sampling", "refused", _ORDER),
    f"{_SAMPLING}.num_epochs": Key(integer(), 1000, "most epochs", "harmless"),
    f"{_SAMPLING}.num_workers": Key(integer(), 0, "workers of the loader", "harmless"),
    f"{_SAMPLING}.pin_memory": Key(BOOLEAN, False, "page-locked batches", "harmless"),
    f"{_SAMPLING}.curriculum_learning.enabled": Key(BOOLEAN, False, "easy samples first", "refused", _ORDER),
    f"{_SAMPLING}.curriculum_learning.data_cluster_path": Key(TEXT, None, "folder of the index", "harmless"),
    f"{_SAMPLING}.curriculum_learning.curriculum_metrics.*": Key(ANY, None, "a measure of difficulty", "harmless"),
    f"{_SAMPLING}.dynamic_batching.enabled": Key(BOOLEAN, False, "batches by number of tokens", "refused", _ORDER),
    **section(
        f"{_SAMPLING}.dynamic_batching",
        {
            **_texts("metrics_path"),
            **_texts("lr_scaling_method", default="linear"),
            **_texts("sequence_picking_order", default="dataloader"),
            "min_batch_size": Key(integer(), 1, "smallest batch", "harmless"),
            "max_batch_size": Key(integer(), None, "largest batch", "harmless"),
            "max_tokens": Key(integer(), None, "tokens per batch", "harmless"),
            "verbose": Key(BOOLEAN, False, "log", "harmless"),
        },
    ),
    "data_efficiency.data_routing.enabled": Key(BOOLEAN, False, "tokens skip layers", "refused", _ORDER),
    f"{_LTD}.enabled": Key(BOOLEAN, False, "random tokens skip layers", "refused", _ORDER),
    f"{_LTD}.layer_token_lr_schedule.enabled": Key(BOOLEAN, False, "the rate follows tokens", "refused", _ORDER),
    "data_efficiency.data_routing.random_ltd.*": Key(ANY, None, "which layers, and how many tokens", "harmless"),
}
_HYBRID = {
    "enabled": Key(BOOLEAN, False, "training and generation in turn", "lossy"),
    "max_out_tokens": Key(integer(), 512, "generated tokens", "harmless"),
    "inference_tp_size": Key(integer(), 1, "tensor parallel degree of generation", "harmless"),
    "release_inference_cache": Key(BOOLEAN, False, "the cache is freed", "harmless"),
    "pin_parameters": Key(BOOLEAN, True, "inference weights are kept", "harmless"),
    "tp_gather_partition_size": Key(integer(), 8, "weights gathered at a time", "harmless"),
    "enable_cuda_graph": Key(BOOLEAN, False, "generation as a CUDA graph", "harmless"),
}
_EIGHT_BITS = "weights are quantised"
_REMOVE = f"{_EIGHT_BITS}, which changes the numbers: remove it"
_QUANTIZATION = {
    "enabled": Key(BOOLEAN, None, _EIGHT_BITS, "refused", _REMOVE),
    "num_bits": Key(integer(), 8, "bits", "harmless"),
    "q_type": Key(TEXT, "symmetric", "symmetric or asymmetric", "harmless"),
    "q_groups": Key(integer(), 1, "groups", "harmless"),
    "quantized_initialization.*": Key(ANY, None, "weights are quantised as they are made", "refused", _REMOVE),
    "post_init_quant.*": Key(ANY, None, "weights are quantised once they are made", "refused", _REMOVE),
}

TOOL_ROWS = {
    **_TOP,
    **section("compile", _COMPILE),
    **section("expert_parallel", _EXPERTS),
    **_MONITORS,
    **section("autotuning", _AUTOTUNING),
    **_DATA,
    **section("hybrid_engine", _HYBRID),
    **section("weight_quantization", _QUANTIZATION),
}
"""Rows by dotted key; `.*` at the end stands for anything below."""
