"""The arguments of FSDP1 with their meanings."""

from __future__ import annotations

from terrazzo.dialects.core.keys import ANY, BOOLEAN, Key, choice, integer
from terrazzo.dialects.formats.shared.fsdp_arguments import WRAP_KEYS
from terrazzo.dialects.formats.shared.fsdp_words import DTYPE, STRATEGIES

__all__ = ["KEYS"]


_STRATEGY = choice({**STRATEGIES, **{f"shardingstrategy.{word}": row for word, row in STRATEGIES.items()}})
_AHEAD = {"backward_pre": 1, "backward_post": 0}
_PREFETCH = choice({**_AHEAD, **{f"backwardprefetch.{word}": units for word, units in _AHEAD.items()}})
_NEEDLESS = "FSDP1 only: every other stack keeps parameters with their names and shapes"
_ORDERED = "FSDP1 only: elsewhere streams wait for each other and the host needs no limit"
_CLASSES = "only FSDP1 keeps module classes out of mixed precision"
_FILLED = "it names code, which is not run: other stacks fill meta modules by themselves"
_GROUP = "a process group is an object of the running program: say the sizes as device_mesh"

KEYS: dict[str, Key] = {
    "process_group": Key(ANY, None, "ranks to shard over; a pair of groups: hybrid sharding", "refused", _GROUP),
    "sharding_strategy": Key(
        _STRATEGY, "full_shard", "which states are split, and when the weights are freed", null=True
    ),
    "cpu_offload": Key(BOOLEAN, False, "weights, gradients and optimizer in host memory", null=True),
    "cpu_offload.offload_params": Key(BOOLEAN, False, "weights, gradients and optimizer in host memory", null=True),
    **{f"auto_wrap_policy{suffix}": Key(ANY, None, "what is gathered and released as one") for suffix in WRAP_KEYS},
    "backward_prefetch": Key(_PREFETCH, "backward_pre", "when backward gathers the next unit"),
    "mixed_precision": Key(ANY, None, "dtypes of gather, reduction and buffers"),
    "mixed_precision.param_dtype": Key(DTYPE, None, "dtype of gathered weights, and so of the computation"),
    "mixed_precision.reduce_dtype": Key(DTYPE, None, "dtype of gradients on the wire; none: as param_dtype"),
    "mixed_precision.buffer_dtype": Key(DTYPE, None, "dtype of module buffers"),
    "mixed_precision.keep_low_precision_grads": Key(BOOLEAN, False, "gradients stay in the dtype of the reduction"),
    "mixed_precision.cast_forward_inputs": Key(BOOLEAN, False, "inputs of inner units are cast"),
    "mixed_precision.cast_root_forward_inputs": Key(BOOLEAN, True, "inputs of the whole model are cast"),
    "mixed_precision._module_classes_to_ignore": Key(
        ANY, None, "module classes kept out of mixed precision", "lossy", _CLASSES
    ),
    "ignored_modules": Key(ANY, None, "modules that are not sharded"),
    "ignored_states": Key(ANY, None, "parameters or modules that are not sharded"),
    "param_init_fn": Key(ANY, None, "function that fills modules built on the meta device", "lossy", _FILLED),
    "device_id": Key(ANY, None, "device that the units are moved to", "harmless", "units go to the rank's own device"),
    "sync_module_states": Key(BOOLEAN, False, "rank 0's weights are sent to all"),
    "forward_prefetch": Key(BOOLEAN, False, "forward gathers one unit ahead"),
    "limit_all_gathers": Key(BOOLEAN, True, "the host waits when too many gathers are under way", "harmless", _ORDERED),
    "use_orig_params": Key(BOOLEAN, False, "parameters keep their names and shapes", "harmless", _NEEDLESS),
    "device_mesh": Key(ANY, None, "sizes of the replica and shard axes"),
    "device_mesh.<axis>": Key(integer(1), None, "size of one axis, replicas first"),
}
