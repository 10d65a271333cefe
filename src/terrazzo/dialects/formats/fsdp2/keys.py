"""The arguments of `fully_shard`, of its policies and of the calls on an `FSDPModule`.

`module` is its first argument: the class names of the modules that are units beside the root. `mesh` is sizes, or names
with sizes. What `reduce_dtype: null` means has changed: the dtype of the computation up to torch 2.14, that of the
parameter from 2.15 on.
"""

from __future__ import annotations

from terrazzo.dialects.core.keys import ANY, BOOLEAN, NAME_LIST, Key, choice, integer
from terrazzo.dialects.formats.shared.fsdp_words import DTYPE

__all__ = ["KEYS", "MESH_ORDER"]

_OFFLOAD = choice({"cpuoffloadpolicy": True, "offloadpolicy": False, True: True, False: False})
_LOOP = "it belongs to the training loop there"
_FASTER = "it changes how gradients travel, not what they are"
_CODE = "it names code, which is not run"
_DIM = f"{_CODE}; parameters are split along dim 0 without it"
_FACTOR = "gradients are divided by another number: scale the loss instead"
_FREED = "weights that are split at rest are freed after backward"
_OLD_FACTOR = "gradients are divided by another number: scale the loss"
_MISSING = "what a missing gradient counts as is the library's"

KEYS: dict[str, Key] = {
    "module": Key(NAME_LIST, (), "class names of the modules that are units, beside the root"),
    "mesh": Key(ANY, None, "sizes of the data axes: shards, or replicas and shards"),
    "mesh.<axis>": Key(ANY, None, "size of an axis by name"),
    "dp_mesh_dims": Key(ANY, None, "which axes of a larger mesh are data axes"),
    "dp_mesh_dims.shard": Key(NAME_LIST, (), "axes to shard over"),
    "dp_mesh_dims.replicate": Key(NAME_LIST, (), "axes to replicate over"),
    "reshard_after_forward": Key(
        BOOLEAN, True, "whether weights are freed after forward; a number: kept split over so many ranks", null=True
    ),
    "shard_placement_fn": Key(ANY, None, "function that chooses the tensor dim to split", "lossy", _DIM),
    "mp_policy": Key(ANY, None, "dtypes of gather and reduction"),
    "mp_policy.param_dtype": Key(DTYPE, None, "dtype of gathered weights, and so of the computation"),
    "mp_policy.reduce_dtype": Key(
        DTYPE, None, "dtype of gradients on the wire, and of their sum while reduction is off"
    ),
    "mp_policy.output_dtype": Key(DTYPE, None, "dtype that outputs of a unit are cast to"),
    "mp_policy.cast_forward_inputs": Key(BOOLEAN, True, "inputs of a unit are cast"),
    "offload_policy": Key(
        _OFFLOAD, False, "CPUOffloadPolicy: weights, gradients and optimizer in host memory", null=True
    ),
    "offload_policy.pin_memory": Key(BOOLEAN, True, "host memory is page-locked"),
    "ignored_params": Key(ANY, None, "parameters that are not sharded"),
    "set_modules_to_forward_prefetch": Key(integer(), 0, "units that forward gathers ahead"),
    "set_modules_to_backward_prefetch": Key(integer(), 1, "units that backward gathers ahead"),
    "set_requires_gradient_sync": Key(ANY, None, "whether backward reduces gradients", "lossy", _LOOP),
    "set_requires_all_reduce": Key(ANY, None, "whether backward reduces over replicas", "lossy", _LOOP),
    "set_is_last_backward": Key(ANY, None, "marks the last micro-batch", "lossy", _LOOP),
    "set_gradient_divide_factor": Key(ANY, None, "divisor of the reduced gradient", "refused", _FACTOR),
    "set_force_sum_reduction_for_comms": Key(
        ANY, None, "gradients are summed, and divided on the rank", "harmless", _FASTER
    ),
    "set_reshard_after_forward": Key(
        ANY, None, "changes the policy while training", "lossy", "a plan is fixed when training starts"
    ),
    "set_reshard_after_backward": Key(ANY, None, "whether weights are freed after backward", "lossy", _FREED),
    "set_unshard_in_backward": Key(
        ANY, None, "whether backward gathers weights", "lossy", "backward gathers whatever it needs"
    ),
    "set_all_reduce_hook": Key(ANY, None, "function in place of the reduction over replicas", "refused", _CODE),
    "set_custom_all_gather": Key(ANY, None, "class in place of the gather", "refused", _CODE),
    "set_custom_reduce_scatter": Key(ANY, None, "class in place of the reduction", "refused", _CODE),
    "set_symm_mem_for_comm": Key(ANY, None, "collectives in symmetric memory", "harmless", _FASTER),
    "set_reduce_scatter_max_input_buffers": Key(ANY, None, "most buffers of reductions under way", "harmless", _FASTER),
    "set_reduce_scatter_divide_factor": Key(
        ANY, None, "older word for set_gradient_divide_factor", "refused", _OLD_FACTOR
    ),
    "set_reduce_scatter_unused_params": Key(
        ANY, None, "whether parameters without gradients are reduced", "lossy", _MISSING
    ),
    "set_separate_reduce_scatter_group": Key(
        ANY, None, "a process group of its own for the reduction", "harmless", _FASTER
    ),
    "set_allocate_memory_from_process_group_for_comm": Key(
        ANY, None, "buffers from the process group's memory", "harmless", _FASTER
    ),
    "set_post_optim_event": Key(ANY, None, "event that the next gather waits for", "harmless", _FASTER),
    "unshard": Key(ANY, None, "gathers by hand", "harmless", "gathers are scheduled by the library there"),
    "reshard": Key(ANY, None, "frees by hand", "harmless", "gathers are scheduled by the library there"),
}

MESH_ORDER = ("pp", "ep", "cp", "sp", "tp")
"""Axes that are no data axes by their names, as they stand in a mesh: pipelines before the data axes, others after.

The order counts: context parallel ranks join the shards, and a tensor that FSDP cuts after tensor parallelism did is
stored in strides (DTensor's `_StridedShard`) that only the same order of axes reads back as one.

Ranks along `ep` are data ranks of all but the experts: the data axis whose ranks have other experts each is cut in two,
the rest of it and `ep`, and `dp_mesh_dims` names both. Calls on the experts name the rest alone.
"""
