"""The keys of `zero_optimization` and of what feeds its NVMe tier."""

from __future__ import annotations

import sys

from terrazzo.dialects.deepspeed.rows import Row, below

__all__ = ["ZERO_ROWS"]

_QUANTIZED = "weights or gradients travel in 8 bits, which changes the numbers: switch it off"
_ZENFLOW = "ZenFlow updates most parameters late, which changes the numbers: use plain offload"
_ELEMENTS = "counted in elements"

_ZERO = {
    "stage": Row("int", 0, "0: replicas; 1: splits optimizer state; 2: and gradients; 3: and weights"),
    "contiguous_gradients": Row("bool", True, "gradients are copied into one buffer as they come", "harmless"),
    "reduce_scatter": Row("bool", True, "gradients are averaged without division beforehand", "harmless"),
    "reduce_bucket_size": Row("int", 500_000_000, f"gradients reduced at once, {_ELEMENTS}", "harmless"),
    "use_multi_rank_bucket_allreduce": Row("bool", True, "stages 1, 2: one all-reduce for all ranks", "harmless"),
    "allgather_partitions": Row("bool", True, "stages 1, 2: all-gather rather than broadcasts", "harmless"),
    "allgather_bucket_size": Row("int", 500_000_000, f"weights gathered at once, {_ELEMENTS}", "harmless"),
    "overlap_comm": Row("bool", None, "reduction beside backward; null: at stage 3 only", "harmless"),
    "compute_grad_norm": Row("bool", True, "the global gradient norm is worked out", "harmless"),
    "load_from_fp32_weights": Row("bool", True, "master weights are loaded from fp32 copies", "lossy"),
    "elastic_checkpoint": Row("bool", False, "stages 1, 2: optimizer state without padding", "harmless"),
    "sub_group_size": Row("int", 1_000_000_000, f"optimizer tile, {_ELEMENTS}", "harmless"),
    "ignore_unused_parameters": Row("bool", True, "parameters without a gradient are no error", "harmless"),
    "legacy_stage1": Row("bool", False, "an older stage 1, which no longer exists", "refused"),
    "round_robin_gradients": Row("bool", False, "stages 1, 2: gradient copies are spread over ranks", "harmless"),
    "parameter_alignment": Row("bool", False, "each parameter starts at a multiple of 16 bytes", "harmless"),
    "zero_hpz_partition_size": Row("int", 1, "ranks that share a second copy of the weights for backward (hpZ)"),
    "zero_quantized_weights": Row("bool", False, "weights are gathered in int8", "refused", _QUANTIZED),
    "zero_quantized_nontrainable_weights": Row("bool", False, "frozen weights rest in int8", "refused", _QUANTIZED),
    "zero_quantized_gradients": Row("bool", False, "gradients are reduced in int8", "refused", _QUANTIZED),
    "memory_efficient_linear": Row("bool", True, "stage 3: linear layers that keep no gathered weight", "harmless"),
    "pipeline_loading_checkpoint": Row("bool", False, "stage 3: reading and copying overlap on load", "harmless"),
    "override_module_apply": Row("bool", True, "stage 3: Module.apply gathers weights", "harmless"),
    "log_trace_cache_warnings": Row("bool", False, "a changed order of modules is logged", "harmless"),
    "enable_sanity_checks": Row("bool", False, "further checks between ranks", "harmless"),
    "save_muon_momentum_buffer_in_memory": Row("bool", False, "Muon's momentum stays off NVMe", "harmless"),
    "stage3_prefetch_bucket_size": Row("int", 50_000_000, f"weights gathered ahead, {_ELEMENTS}; 0: none", "harmless"),
    "stage3_param_persistence_threshold": Row("int", 100_000, "parameters up to this size stay whole", "harmless"),
    "stage3_model_persistence_threshold": Row("int", sys.maxsize, "how much may stay whole in all", "harmless"),
    "stage3_max_live_parameters": Row("int", 1_000_000_000, f"weights gathered at a time, {_ELEMENTS}", "harmless"),
    "stage3_max_reuse_distance": Row("int", 1_000_000_000, "weights used again so soon stay whole", "harmless"),
    "stage3_gather_16bit_weights_on_model_save": Row("bool", False, "save_16bit_model writes the whole model"),
    "stage3_module_granularity_threshold": Row("int", 0, "finer modules are gathered with their parent", "harmless"),
    "stage3_use_all_reduce_for_fetch_params": Row("bool", False, "weights are gathered by all-reduce", "harmless"),
    "stage3_allgather_sequential": Row("bool", False, "weights are gathered one by one", "harmless"),
    "cpu_offload": Row("bool", None, "old word for offload_optimizer.device 'cpu'"),
    "cpu_offload_param": Row("bool", None, "old word for offload_param.device 'cpu'"),
    "cpu_offload_use_pin_memory": Row("bool", None, "old word for pin_memory"),
}
_OFFLOAD_PARAM = {
    "device": Row("text", "none", "where the weights' shards live: none, cpu, nvme"),
    "nvme_path": Row("text", None, "folder of the swap files"),
    "buffer_count": Row("int", 5, "staging buffers between NVMe and the device"),
    "buffer_size": Row("int", 100_000_000, f"size of one of them, {_ELEMENTS}", "harmless"),
    "max_in_cpu": Row("int", 1_000_000_000, f"kept in host memory beside NVMe, {_ELEMENTS}", "lossy"),
    "pin_memory": Row("bool", True, "host memory is page-locked"),
}
_OFFLOAD_OPTIMIZER = {
    "device": Row("text", "none", "where optimizer state lives: none, cpu, nvme"),
    "nvme_path": Row("text", None, "folder of the swap files"),
    "buffer_count": Row("int", 4, "staging buffers between NVMe and host"),
    "pin_memory": Row("bool", True, "host memory is page-locked"),
    "pipeline_read": Row("bool", False, "the next tile is read during a tile's update", "harmless"),
    "pipeline_write": Row("bool", False, "the last tile is written during a tile's update", "harmless"),
    "fast_init": Row("bool", False, "quicker start of NVMe state", "harmless"),
    "ratio": Row("number", 1.0, "share of the optimizer state on the CPU (stage 3)"),
    "super_offload": Row("bool", False, "a process of its own runs the CPU step ahead of the checks", "lossy"),
    "cpuadam_cores_perc": Row("number", 0.8, "share of the cores for that process", "harmless"),
}
_ZENFLOW_ROWS = {
    "topk_ratio": Row("number", 0.1, "share of gradients updated at once on the device", "refused", _ZENFLOW),
    "select_strategy": Row("text", "auto", "auto, step or epoch", "refused", _ZENFLOW),
    "select_interval": Row("any", "auto", "how often that share is chosen anew", "refused", _ZENFLOW),
    "update_interval": Row("any", "auto", "steps between updates of the rest", "refused", _ZENFLOW),
    "overlap_step": Row("bool", False, "the CPU step runs beside the next forward", "refused", _ZENFLOW),
    "offload": Row("bool", False, "the selective state is offloaded as well", "refused", _ZENFLOW),
    "auto_ratio": Row("number", 0.99, "threshold of the automatic interval", "refused", _ZENFLOW),
    "full_warm_up_rounds": Row("int", 0, "first rounds with plain updates", "refused", _ZENFLOW),
    "pt_reserved_cores_perc": Row("number", 0.5, "share of the cores for PyTorch", "harmless"),
    "steps_per_epoch": Row("int", None, "filled in by the engine", "harmless"),
}
_WHOLE = "other engines gather whole blocks anyway"
_LEAF = {
    "classes": Row("names", None, "module classes gathered as one", "harmless", _WHOLE),
    "names": Row("names", (), "module names gathered as one", "harmless", _WHOLE),
    "name_suffixes": Row("names", (), "endings of module names gathered as one", "harmless", _WHOLE),
}
_AIO = {
    "block_size": Row("int", 1_048_576, "bytes of one read or write"),
    "queue_depth": Row("int", 8, "reads and writes in flight"),
    "intra_op_parallelism": Row("int", 1, "threads per tensor", "harmless"),
    "single_submit": Row("bool", False, "requests are submitted one by one", "harmless"),
    "overlap_events": Row("bool", True, "submitting and completing overlap", "harmless"),
    "use_gds": Row("bool", False, "NVMe straight to the GPU (GPUDirect)", "lossy"),
}

ZERO_ROWS = {
    **below("zero_optimization", _ZERO),
    **below("zero_optimization.offload_param", _OFFLOAD_PARAM),
    **below("zero_optimization.offload_optimizer", _OFFLOAD_OPTIMIZER),
    **below("zero_optimization.zenflow", _ZENFLOW_ROWS),
    **below("zero_optimization.leaf_module", _LEAF),
    **below("aio", _AIO),
}
"""By dotted key."""
