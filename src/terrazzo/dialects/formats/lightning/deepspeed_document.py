"""The document that Lightning's DeepSpeedStrategy hands to DeepSpeed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from terrazzo.dialects.core.dialect import ReadingContext
from terrazzo.dialects.formats.lightning.keys import DEEPSPEED_STRATEGY
from terrazzo.dialects.formats.lightning.trainer_arguments import TrainerArguments
from terrazzo.dialects.formats.nested import load_named

__all__ = ["FP16", "DeepSpeedDocument", "strategy_document"]

_AIO = ("block_size", "queue_depth", "single_submit", "overlap_events", "thread_count")
_ACTIVATIONS = ("partition_activations", "cpu_checkpointing", "contiguous_memory_optimization")
_ACTIVATIONS_ALL = (*_ACTIVATIONS, "synchronize_checkpoint_boundary")
_ZERO = ("stage", "contiguous_gradients", "overlap_comm", "allgather_partitions", "reduce_scatter")
_ZERO_ALL = (*_ZERO, "allgather_bucket_size", "reduce_bucket_size", "sub_group_size")
FP16 = ("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale")


@dataclass
class DeepSpeedDocument:
    """A document on its way to DeepSpeed.

    Attributes:
        source: names of the strategy's arguments behind each key that Lightning writes by them.
        own: top keys that the argument `config` has itself.
        fault: why `config` cannot be read; empty where it can, or there is none.
    """

    document: dict[str, Any]
    source: dict[str, tuple[str, ...]]
    own: frozenset[str] = frozenset()
    fault: str = ""

    @property
    def used(self) -> frozenset[str]:
        """Arguments that it says something of."""
        return frozenset(name for names in self.source.values() for name in names)


def strategy_document(trainer: TrainerArguments, context: ReadingContext) -> DeepSpeedDocument:
    """What DeepSpeedStrategy hands to DeepSpeed: its argument `config`, or what it makes of all others."""
    config = trainer.strategy.arguments.get("config")
    if config is None:
        handed = _of_arguments(trainer)
    else:
        document, fault = (dict(config), "") if isinstance(config, Mapping) else load_named(config, context)
        handed = DeepSpeedDocument(document, {}, frozenset(document), fault)
    if not handed.fault:
        _complete(handed, trainer)
    return handed


def _of_arguments(trainer: TrainerArguments) -> DeepSpeedDocument:
    values = _values(trainer)
    document: dict[str, Any] = {
        "activation_checkpointing": {name: values[name] for name in _ACTIVATIONS_ALL},
        "aio": {name: values[name] for name in _AIO},
    }
    source: dict[str, tuple[str, ...]] = {f"activation_checkpointing.{name}": (name,) for name in _ACTIVATIONS_ALL}
    source |= {f"aio.{name}": (name,) for name in _AIO}
    if values["zero_optimization"]:
        document["zero_allow_untested_optimizer"] = values["zero_allow_untested_optimizer"]
        document["zero_optimization"] = {name: values[name] for name in _ZERO_ALL} | _offloads(values, source)
        source |= {f"zero_optimization.{name}": (name,) for name in _ZERO_ALL}
        source["zero_allow_untested_optimizer"] = ("zero_allow_untested_optimizer",)
    if values["logging_batch_size_per_gpu"] != "auto":
        document["train_micro_batch_size_per_gpu"] = values["logging_batch_size_per_gpu"]
        source["train_micro_batch_size_per_gpu"] = ("logging_batch_size_per_gpu",)
    return DeepSpeedDocument(document, source)


def _values(trainer: TrainerArguments) -> dict[str, Any]:
    """All arguments of DeepSpeedStrategy, with its defaults."""
    return {name: trainer.strategy.arguments.get(name, row.default) for name, row in DEEPSPEED_STRATEGY.items()}


def _complete(handed: DeepSpeedDocument, trainer: TrainerArguments) -> None:
    """Add what Lightning adds to any document: accumulation, clipping, and the 16-bit section of the precision."""
    document = handed.document
    document["gradient_accumulation_steps"] = trainer.accumulate_grad_batches
    document.setdefault("gradient_clipping", trainer.gradient_clip_val or 0.0)
    if trainer.precision.startswith("16-") and "fp16" not in document:
        values = _values(trainer)
        document["fp16"] = {"enabled": True, **{name: values[name] for name in FP16}}
        handed.source.update({f"fp16.{name}": (name,) for name in FP16})
    elif trainer.precision.startswith("bf16-"):
        document.setdefault("bf16", {"enabled": True})


def _offloads(values: Mapping[str, Any], source: dict[str, tuple[str, ...]]) -> dict[str, Any]:
    sections = {
        "offload_optimizer": {
            "device": "offload_optimizer_device",
            "nvme_path": "nvme_path",
            "buffer_count": "optimizer_buffer_count",
            "pin_memory": "pin_memory",
        },
        "offload_param": {
            "device": "offload_params_device",
            "nvme_path": "nvme_path",
            "buffer_count": "params_buffer_count",
            "buffer_size": "params_buffer_size",
            "max_in_cpu": "max_in_cpu",
            "pin_memory": "pin_memory",
        },
    }
    offloads = {}
    for section, switch in (("offload_optimizer", "offload_optimizer"), ("offload_param", "offload_parameters")):
        if values[switch]:
            offloads[section] = {name: values[argument] for name, argument in sections[section].items()}
            inner = f"zero_optimization.{section}"
            source |= {f"{inner}.{name}": (argument,) for name, argument in sections[section].items()}
            source[f"{inner}.device"] = (switch, sections[section]["device"])
    return offloads
