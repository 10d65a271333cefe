"""Arguments of Lightning's Trainer and strategies with their defaults and meanings, and the strategies by name."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from terrazzo.dialects.core.keys import (
    ANY,
    BOOLEAN,
    MISSING,
    NAME_LIST,
    TEXT,
    Key,
    Rows,
    Type,
    choice,
    integer,
    number,
    section,
)
from terrazzo.dialects.formats.lightning.precision import WORDS

__all__ = [
    "ARGUMENTS",
    "DDP",
    "DDP_CLASSES",
    "DEEPSPEED_STRATEGY",
    "FSDP",
    "FSDP_BY_NAME",
    "KEYS",
    "MODEL_PARALLEL",
    "NAMED",
    "SHARED",
    "TRAINER",
    "WATCHERS",
    "canonical_key",
    "rows_for",
]

_PRECISION = choice(WORDS, fold=False)
_CLIPPED = choice({"norm": "norm", "value": "value"})
_ACCELERATOR = choice(
    {"auto": None, "cpu": "cpu", "gpu": "cuda", "cuda": "cuda", "tpu": "tpu", "mps": "mps"}, fold=False
)


def _devices(value: Any) -> Any:
    """How many: of a number, a list of devices, or one as text such as `0,1`; None where the machine decides."""
    if value in ("auto", -1, "-1") and not isinstance(value, bool):
        return None
    if isinstance(value, str) and "," in value:
        value = value.rstrip(", ").split(",")
        value = [int(each) if re.fullmatch(r" *[0-9]{1,9} *", each) else each for each in value]
    if isinstance(value, list):
        return len(value) if value and all(type(each) is int and each >= 0 for each in value) else MISSING
    return integer(1).parse(value)


def _steps(value: Any) -> Any:
    """Steps of a run; None of -1, where its length is another key's."""
    return None if value in (-1, "-1") else integer(1).parse(value)


_STEPS = Type("a whole number from 1, or -1", _steps)
_DEVICES = Type("a number of devices, a list of them, -1 or auto", _devices)
_READ: Rows = {
    "strategy": Key(ANY, "auto", "how the model is spread over ranks"),
    "strategy.class_path": Key(ANY, None, "class of the strategy", why="how the model is spread over ranks"),
    "accelerator": Key(_ACCELERATOR, "auto", "kind of device"),
    "devices": Key(_DEVICES, "auto", "ranks per node", null=True),
    "num_nodes": Key(integer(1), 1, "nodes"),
    "precision": Key(_PRECISION, None, "dtypes of weights and computation"),
    "accumulate_grad_batches": Key(integer(1), 1, "micro-batches per optimizer step"),
    "gradient_clip_val": Key(number(), None, "largest gradient norm, or value"),
    "gradient_clip_algorithm": Key(_CLIPPED, None, "norm or value"),
    "max_steps": Key(_STEPS, -1, "optimizer steps of the run; -1: by max_epochs"),
    "default_root_dir": Key(TEXT, None, "folder of logs and checkpoints"),
}
_OTHER: Rows = {
    "max_epochs": (None, "length of the run in passes over the data"),
    "min_epochs": (None, "shortest run in passes over the data"),
    "min_steps": (None, "shortest run in steps"),
    "max_time": (None, "longest time of the run"),
    "fast_dev_run": (False, "a few batches only"),
    "limit_train_batches": (None, "batches of training"),
    "overfit_batches": (0.0, "train on these batches only"),
    "deterministic": (None, "deterministic operators"),
    "use_distributed_sampler": (True, "every rank sees other data"),
    "plugins": (None, "plugins"),
    "callbacks": Key(ANY, None, "callbacks", "lossy", "callbacks may change what is trained, or when it ends"),
    "sync_batchnorm": (False, "batch norm over all ranks"),
    "reload_dataloaders_every_n_epochs": (0, "make data loaders again"),
}
_HARMLESS: Rows = {
    "logger": (None, "loggers"),
    "limit_val_batches": (None, "batches of validation"),
    "limit_test_batches": (None, "batches of testing"),
    "limit_predict_batches": (None, "batches of prediction"),
    "val_check_interval": (None, "steps between validations"),
    "check_val_every_n_epoch": (1, "passes between validations"),
    "num_sanity_val_steps": (None, "batches of validation before training"),
    "log_every_n_steps": Key(ANY, None, "steps between lines", "harmless", here="log.every"),
    "enable_checkpointing": Key(BOOLEAN, None, "write checkpoints", "harmless"),
    "enable_progress_bar": (None, "progress bar"),
    "enable_model_summary": (None, "summary of the model"),
    "benchmark": (None, "cuDNN's benchmark"),
    "inference_mode": (True, "no autograd in evaluation"),
    "profiler": (None, "profiler"),
    "detect_anomaly": (False, "autograd's anomaly detection"),
    "barebones": (False, "nothing but training"),
    "enable_autolog_hparams": (True, "log hyper-parameters"),
    "model_registry": (None, "where checkpoints are registered"),
}
TRAINER = {
    **{name: replace(row, loss="lossy") for name, row in section("", _READ).items()},  # beside a `trainer` section
    **section("", _OTHER, "lossy"),
    **section("", _HARMLESS, "harmless"),
}
"""Arguments of the Trainer."""

WATCHERS = {
    *("ModelCheckpoint", "OnExceptionCheckpoint", "LearningRateMonitor", "DeviceStatsMonitor", "ThroughputMonitor"),
    *("ModelSummary", "RichModelSummary", "ProgressBar", "RichProgressBar", "TQDMProgressBar"),
}
"""Callbacks that watch a run or save it, and change nothing of it."""

_ONLY = "only Lightning has it"
_BY_EPOCH = "LightningCLI steps it once an epoch, and how many optimizer steps that is, is not known here"
_TOP: Rows = {
    "seed_everything": Key(integer(), True, "seed of the run"),
    "optimizer.class_path": Key(TEXT, None, "class of the optimizer", "lossy", _ONLY, null=False),
    "optimizer.init_args.<argument>": (None, "argument of the optimizer"),
    "lr_scheduler.class_path": Key(ANY, None, "class of the schedule", "lossy", _BY_EPOCH),
    "lr_scheduler.init_args.<argument>": Key(ANY, None, "argument of the schedule", "lossy", _BY_EPOCH),
    "ckpt_path": (None, "checkpoint to resume from"),
}
TOP = section("", _TOP, "lossy", _ONLY)
"""What LightningCLI adds beside `trainer`."""

_SHARED = {
    "accelerator": "plugin of the strategy",
    "parallel_devices": "devices of the strategy",
    "cluster_environment": "how ranks are found",
    "checkpoint_io": "how checkpoints are written",
    "precision_plugin": "plugin for dtypes",
    "process_group_backend": "backend of the process group",
    "timeout": "longest wait for another rank",
    "start_method": "how processes are started",
}
SHARED = section(
    "", {name: (None, meaning) for name, meaning in _SHARED.items()}, "harmless", "how ranks find each other"
)
"""Arguments that several strategies take."""
_BUCKETS = (
    *("device_ids", "output_device", "dim", "init_sync", "process_group", "device_mesh", "check_reduction"),
    *("bucket_cap_mb", "bucket_cap_mb_list", "batched_grad_copy", "gradient_as_bucket_view", "static_graph"),
    *("find_unused_parameters", "skip_all_reduce_unused_params", "broadcast_buffers", "forward_sync_buffers"),
)
_HOOK = "gradients are reduced by it, to other numbers: remove it, or say a dtype for gradients on the wire"
_AVERAGED = "between averages ranks train by themselves"
_CAST = "DDP's own policy has other dtypes than precision says: leave it out"
_APART = "gradients of some parameters are reduced apart: leave it out"
DDP = {
    **section("", dict.fromkeys(_BUCKETS, (None, "")), "harmless", "details of DDP are the library's"),
    "ddp_comm_hook": Key(ANY, None, "function in place of the reduction of gradients", "refused", _HOOK),
    "ddp_comm_wrapper": Key(ANY, None, "function around that one", "refused", _HOOK),
    "ddp_comm_state": Key(ANY, None, "what that function is given", "lossy", _HOOK),
    "model_averaging_period": Key(
        ANY, None, "steps between averages of weights", "refused", _AVERAGED, here="plan.sync_every"
    ),
    "mixed_precision": Key(ANY, None, "dtypes of weights and gradients", "refused", _CAST),
    "delay_all_reduce_named_params": Key(ANY, None, "parameters that are reduced apart", "lossy", _APART),
    "param_to_hook_all_reduce": Key(ANY, None, "parameter after which they are", "lossy", _APART),
}
"""Arguments of DDPStrategy, with those of DistributedDataParallel, to which it passes them on."""
SINGLE = {"device": Key(ANY, "cpu", "the one device", "harmless", "which device a rank has is the library's")}
"""Arguments of SingleDeviceStrategy."""
FSDP = {
    "state_dict_type": Key(
        choice({"full": "full", "sharded": "sharded"}), "full", "full: one file; sharded: one per rank"
    ),
    "activation_checkpointing": Key(NAME_LIST, None, "older form of activation_checkpointing_policy"),
    "activation_checkpointing_policy": Key(NAME_LIST, None, "classes of blocks that are recomputed in backward"),
}
"""Arguments of FSDPStrategy beside those of FullyShardedDataParallel."""
FSDP_BY_NAME = ("cpu_offload", "mixed_precision", "auto_wrap_policy", "sharding_strategy", "device_mesh")
"""What FSDPStrategy takes of those by name. Of the others LightningCLI knows none: they stand in `dict_kwargs`."""
MODEL_PARALLEL = {
    "data_parallel_size": Key(integer(1), "auto", "ranks of a data parallel group; auto: nodes"),
    "tensor_parallel_size": Key(integer(1), "auto", "ranks of a tensor parallel group; auto: ranks per node"),
    "save_distributed_checkpoint": Key(choice({True: "sharded", False: "full"}), True, "one file per rank"),
}
_DEEPSPEED: Rows = {
    "zero_optimization": (True, "use ZeRO"),
    "stage": (2, "ZeRO stage"),
    "remote_device": (None, "where the model is built"),
    "offload_optimizer": (False, "optimizer off the device"),
    "offload_parameters": (False, "weights off the device"),
    "offload_params_device": ("cpu", "cpu or nvme"),
    "offload_optimizer_device": ("cpu", "cpu or nvme"),
    "nvme_path": ("/local_nvme", "folder of swap files"),
    "params_buffer_count": (5, "staging buffers of weights"),
    "params_buffer_size": (100_000_000, "elements of one of them"),
    "max_in_cpu": (1_000_000_000, "elements kept in host memory"),
    "optimizer_buffer_count": (4, "staging buffers of the optimizer"),
    "block_size": (1_048_576, "bytes of one read or write"),
    "queue_depth": (8, "reads and writes in flight"),
    "single_submit": (False, "submit one by one"),
    "overlap_events": (True, "submit without waiting"),
    "thread_count": (1, "threads of one read or write"),
    "pin_memory": (False, "host memory is page-locked"),
    "sub_group_size": (1_000_000_000_000, "elements that are stepped at once"),
    "contiguous_gradients": (True, "gradients in one buffer"),
    "overlap_comm": (True, "reduction overlaps with backward"),
    "allgather_partitions": (True, "gather by all-gather"),
    "reduce_scatter": (True, "reduce by reduce-scatter"),
    "allgather_bucket_size": (200_000_000, "elements gathered at once"),
    "reduce_bucket_size": (200_000_000, "elements reduced at once"),
    "zero_allow_untested_optimizer": (True, "any optimizer"),
    "logging_batch_size_per_gpu": ("auto", "micro-batch, for logs"),
    "config": (None, "a whole DeepSpeed configuration"),
    "logging_level": (30, "log level"),
    "loss_scale": (0, "fp16: fixed scale; 0: dynamic"),
    "initial_scale_power": (16, "fp16: first scale, as a power of two"),
    "loss_scale_window": (1000, "fp16: steps between growths of the scale"),
    "hysteresis": (2, "fp16: overflows before the scale shrinks"),
    "min_loss_scale": (1, "fp16: smallest scale"),
    "partition_activations": (False, "split kept activations"),
    "cpu_checkpointing": (False, "kept activations in host memory"),
    "contiguous_memory_optimization": (False, "kept activations in one buffer"),
    "synchronize_checkpoint_boundary": (False, "wait at every boundary"),
    "load_full_weights": (False, "load one file of weights"),
    "exclude_frozen_parameters": (False, "frozen weights are not saved"),
}
DEEPSPEED_STRATEGY = section("", _DEEPSPEED)
"""Arguments of DeepSpeedStrategy."""

ARGUMENTS = {
    "FSDPStrategy": {**FSDP, **SHARED},
    "DeepSpeedStrategy": {**DEEPSPEED_STRATEGY, **SHARED},
    "ModelParallelStrategy": {**MODEL_PARALLEL, **SHARED},
    "DDPStrategy": {**DDP, **SHARED},
    "SingleDeviceStrategy": {**SINGLE, **SHARED},
}
"""Arguments by the strategy's class. What FSDPStrategy has none for goes on to FullyShardedDataParallel."""
DDP_CLASSES = ("DDPStrategy", "SingleDeviceStrategy")

_NVME = {"remote_device": "nvme", "offload_params_device": "nvme", "offload_optimizer_device": "nvme"}
_OFFLOAD = {"offload_optimizer": True, "offload_parameters": True}
NAMED: dict[str, tuple[str, dict[str, Any]]] = {
    "auto": ("DDPStrategy", {}),
    "single_device": ("SingleDeviceStrategy", {}),
    **{name: ("DDPStrategy", {}) for name in ("ddp", "ddp_spawn", "ddp_fork", "ddp_notebook")},
    **{
        f"{name}_find_unused_parameters_{word}": ("DDPStrategy", {"find_unused_parameters": word == "true"})
        for name in ("ddp", "ddp_spawn", "ddp_fork", "ddp_notebook")
        for word in ("true", "false")
    },
    "fsdp": ("FSDPStrategy", {}),
    "fsdp_cpu_offload": ("FSDPStrategy", {"cpu_offload": True}),
    "deepspeed": ("DeepSpeedStrategy", {}),
    **{f"deepspeed_stage_{stage}": ("DeepSpeedStrategy", {"stage": stage}) for stage in (1, 2, 3)},
    "deepspeed_stage_2_offload": ("DeepSpeedStrategy", {"stage": 2, "offload_optimizer": True}),
    "deepspeed_stage_3_offload": ("DeepSpeedStrategy", {"stage": 3, **_OFFLOAD}),
    "deepspeed_stage_3_offload_nvme": ("DeepSpeedStrategy", {"stage": 3, **_OFFLOAD, **_NVME}),
}
"""Class and arguments by the name that `strategy` takes."""


def canonical_key(key: str) -> str:
    """A key under the name of its row: of arguments of a strategy LightningCLI takes some in `dict_kwargs`."""
    for prefix in ("strategy.", "trainer.strategy."):
        if key.startswith(f"{prefix}dict_kwargs."):
            return f"{prefix}init_args.{key.removeprefix(f'{prefix}dict_kwargs.')}"
    return key


_BELOW = ("config", "mixed_precision", "auto_wrap_policy", "timeout", "cpu_offload", "device_mesh")
_WHOLE = ("logger", "callbacks", "profiler", "plugins", "max_time", "val_check_interval")
_INNER = {
    f"strategy.init_args.{name}": Key(ANY, None, "", "lossy", TRAINER["strategy"].meaning)
    for name in ("<argument>", *(f"{name}.*" for name in _BELOW))
}
_INNER["strategy.dict_kwargs.<argument>"] = _INNER["strategy.init_args.<argument>"]
_INNER |= {f"{name}.*": replace(TRAINER[name], meaning="", why=TRAINER[name].meaning) for name in _WHOLE}
_CODE = "the model and its data come from your code there"

KEYS: dict[str, Key] = {
    **TRAINER,
    **section("trainer", TRAINER),
    **_INNER,
    **section("trainer", _INNER),
    **TOP,
    **section("", {"model.*": (None, ""), "data.*": (None, "")}, "lossy", _CODE),
}
"""By dotted key: the Trainer's arguments stand at the top, or below `trainer` as LightningCLI writes them."""


def rows_for(kind: str, where: str) -> dict[str, Key]:
    """`KEYS`, with the arguments of a strategy's class in place of any; `where`: the key of its arguments."""
    if kind not in ARGUMENTS:
        return KEYS
    return {key: row for key, row in KEYS.items() if not key.startswith(where)} | section(where, ARGUMENTS[kind])
