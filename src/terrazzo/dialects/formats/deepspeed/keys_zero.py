"""The keys of `zero_optimization` and of what feeds its NVMe tier."""

from __future__ import annotations

import sys
from dataclasses import replace

from terrazzo.dialects.core.keys import ANY, BOOLEAN, NAME_LIST, TEXT, Key, integer, number, section
from terrazzo.dialects.formats.shared.deepspeed_words import DEVICE

__all__ = ["FLOW", "ZERO_ROWS"]

_QUANTIZED = "weights rest in 8 bits, which changes the numbers: switch it off"
_ZENFLOW = "ZenFlow updates most parameters late, which changes the numbers: use plain offload"
_ELEMENTS = "counted in elements"

_ZERO = {
    "stage": Key(integer(0, 3), 0, "0: replicas; 1: splits optimizer state; 2: and gradients; 3: and weights"),
    "contiguous_gradients": Key(BOOLEAN, True, "gradients are copied into one buffer as they come", "harmless"),
    "reduce_scatter": Key(BOOLEAN, True, "gradients are reduced or reduce-scattered, not all-reduced", "harmless"),
    "reduce_bucket_size": Key(integer(), 500_000_000, f"gradients reduced at once, {_ELEMENTS}", "harmless"),
    "use_multi_rank_bucket_allreduce": Key(BOOLEAN, True, "stages 1, 2: one all-reduce for all ranks", "harmless"),
    "allgather_partitions": Key(BOOLEAN, True, "stages 1, 2: all-gather rather than broadcasts", "harmless"),
    "allgather_bucket_size": Key(integer(), 500_000_000, f"weights gathered at once, {_ELEMENTS}", "harmless"),
    "overlap_comm": Key(BOOLEAN, None, "reduction beside backward; null: at stage 3 only", "harmless"),
    "compute_grad_norm": Key(BOOLEAN, True, "the global gradient norm is worked out", "harmless"),
    "load_from_fp32_weights": Key(BOOLEAN, True, "master weights are loaded from fp32 copies", "lossy"),
    "elastic_checkpoint": Key(BOOLEAN, False, "stages 1, 2: optimizer state without padding", "harmless"),
    "sub_group_size": Key(integer(), 1_000_000_000, f"optimizer tile, {_ELEMENTS}", "harmless"),
    "ignore_unused_parameters": Key(BOOLEAN, True, "parameters without a gradient are no error", "harmless"),
    "legacy_stage1": Key(BOOLEAN, False, "an older stage 1", "refused", "it no longer exists: remove it"),
    "round_robin_gradients": Key(BOOLEAN, False, "stages 1, 2: gradient copies are spread over ranks", "harmless"),
    "parameter_alignment": Key(BOOLEAN, False, "each parameter starts at a multiple of 16 bytes", "harmless"),
    "zero_hpz_partition_size": Key(integer(), 1, "ranks that share a second copy of the weights for backward (hpZ)"),
    "zero_quantized_weights": Key(BOOLEAN, False, "stage 3: weights are gathered in int8"),
    "zero_quantized_nontrainable_weights": Key(BOOLEAN, False, "frozen weights rest in int8", "refused", _QUANTIZED),
    "zero_quantized_gradients": Key(BOOLEAN, False, "stage 3: gradients are reduced in int4"),
    "memory_efficient_linear": Key(BOOLEAN, True, "stage 3: linear layers that keep no gathered weight", "harmless"),
    "pipeline_loading_checkpoint": Key(BOOLEAN, False, "stage 3: reading and copying overlap on load", "harmless"),
    "override_module_apply": Key(BOOLEAN, True, "stage 3: Module.apply gathers weights", "harmless"),
    "log_trace_cache_warnings": Key(BOOLEAN, False, "a changed order of modules is logged", "harmless"),
    "enable_sanity_checks": Key(BOOLEAN, False, "further checks between ranks", "harmless"),
    "save_muon_momentum_buffer_in_memory": Key(BOOLEAN, False, "Muon's momentum stays off NVMe", "harmless"),
    "stage3_prefetch_bucket_size": Key(integer(), 50_000_000, f"weights gathered ahead, {_ELEMENTS}; 0: none"),
    "stage3_param_persistence_threshold": Key(integer(), 100_000, "parameters up to this size stay whole", "harmless"),
    "stage3_model_persistence_threshold": Key(integer(), sys.maxsize, "how much may stay whole in all", "harmless"),
    "stage3_max_live_parameters": Key(integer(), 1_000_000_000, f"weights gathered at a time, {_ELEMENTS}", "harmless"),
    "stage3_max_reuse_distance": Key(integer(), 1_000_000_000, "weights used again so soon stay whole", "harmless"),
    "stage3_gather_16bit_weights_on_model_save": Key(BOOLEAN, False, "save_16bit_model writes the whole model"),
    "stage3_module_granularity_threshold": Key(
        integer(), 0, "finer modules are gathered with their parent", "harmless"
    ),
    "stage3_use_all_reduce_for_fetch_params": Key(BOOLEAN, False, "weights are gathered by all-reduce", "harmless"),
    "stage3_allgather_sequential": Key(BOOLEAN, False, "weights are gathered one by one", "harmless"),
    "cpu_offload": Key(BOOLEAN, None, "old word for offload_optimizer.device 'cpu'"),
    "cpu_offload_param": Key(BOOLEAN, None, "old word for offload_param.device 'cpu'"),
    "cpu_offload_use_pin_memory": Key(BOOLEAN, None, "old word for pin_memory"),
}
_OFFLOAD_PARAM = {
    "device": Key(DEVICE, "none", "where the weights' shards live: none, cpu, nvme"),
    "nvme_path": Key(TEXT, None, "folder of the swap files"),
    "buffer_count": Key(integer(), 5, "staging buffers between NVMe and the device"),
    "buffer_size": Key(integer(), 100_000_000, f"size of one of them, {_ELEMENTS}", "harmless"),
    "max_in_cpu": Key(integer(), 1_000_000_000, f"kept in host memory beside NVMe, {_ELEMENTS}", "lossy"),
    "pin_memory": Key(BOOLEAN, True, "host memory is page-locked"),
}
_OFFLOAD_OPTIMIZER = {
    "device": Key(DEVICE, "none", "where optimizer state lives: none, cpu, nvme"),
    "nvme_path": Key(TEXT, None, "folder of the swap files"),
    "buffer_count": Key(integer(), 4, "staging buffers between NVMe and host"),
    "pin_memory": Key(BOOLEAN, True, "host memory is page-locked"),
    "pipeline_read": Key(BOOLEAN, False, "the next tile is read during a tile's update", "harmless"),
    "pipeline_write": Key(BOOLEAN, False, "the last tile is written during a tile's update", "harmless"),
    "fast_init": Key(BOOLEAN, False, "quicker start of NVMe state", "harmless"),
    "ratio": Key(number(high=1.0), 1.0, "share of the optimizer state on the CPU (stage 3)"),
    "super_offload": Key(BOOLEAN, False, "a process of its own runs the CPU step ahead of the checks", "lossy"),
    "cpuadam_cores_perc": Key(number(), 0.8, "share of the cores for that process", "harmless"),
}
FLOW = "zero_optimization.zenflow"
"""A section that is on where it is there."""
_ZENFLOW_ROWS = {
    "topk_ratio": Key(number(), 0.1, "share of gradients updated at once on the device", "refused", _ZENFLOW),
    "select_strategy": Key(TEXT, "auto", "auto, step or epoch", "refused", _ZENFLOW),
    "select_interval": Key(ANY, "auto", "how often that share is chosen anew", "refused", _ZENFLOW),
    "update_interval": Key(ANY, "auto", "steps between updates of the rest", "refused", _ZENFLOW),
    "overlap_step": Key(BOOLEAN, False, "the CPU step runs beside the next forward", "refused", _ZENFLOW),
    "offload": Key(BOOLEAN, False, "the selective state is offloaded as well", "refused", _ZENFLOW),
    "auto_ratio": Key(number(), 0.99, "threshold of the automatic interval", "refused", _ZENFLOW),
    "full_warm_up_rounds": Key(integer(), 0, "first rounds with plain updates", "refused", _ZENFLOW),
    "pt_reserved_cores_perc": Key(number(), 0.5, "share of the cores for PyTorch", "harmless"),
    "steps_per_epoch": Key(integer(), None, "filled in by the engine", "harmless"),
}
_WHOLE = "other engines gather whole blocks anyway"
_LEAF = {
    "classes": Key(NAME_LIST, None, "module classes gathered as one", "harmless", _WHOLE),
    "names": Key(NAME_LIST, (), "module names gathered as one", "harmless", _WHOLE),
    "name_suffixes": Key(NAME_LIST, (), "endings of module names gathered as one", "harmless", _WHOLE),
}
_AIO = {
    "block_size": Key(integer(1), 1_048_576, "bytes of one read or write"),
    "queue_depth": Key(integer(1), 8, "reads and writes in flight"),
    "intra_op_parallelism": Key(integer(), 1, "threads per tensor", "harmless"),
    "single_submit": Key(BOOLEAN, False, "requests are submitted one by one", "harmless"),
    "overlap_events": Key(BOOLEAN, True, "submitting and completing overlap", "harmless"),
    "use_gds": Key(BOOLEAN, False, "NVMe straight to the GPU (GPUDirect)", "lossy"),
}

ZERO_ROWS = {
    **section("zero_optimization", _ZERO),
    **section("zero_optimization.offload_param", _OFFLOAD_PARAM),
    **section("zero_optimization.offload_optimizer", _OFFLOAD_OPTIMIZER),
    **{key: replace(row, lost_beside=FLOW) for key, row in section(FLOW, _ZENFLOW_ROWS).items()},
    **section("zero_optimization.leaf_module", _LEAF),
    **section("aio", _AIO),
}
"""Rows by dotted key."""
