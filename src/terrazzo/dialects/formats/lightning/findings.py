"""What Lightning refuses, or takes otherwise than it looks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from terrazzo.dialects.core.dialect import Finding, Reading, ReadingContext
from terrazzo.dialects.formats.lightning.cli_findings import cli_findings
from terrazzo.dialects.formats.lightning.deepspeed_document import strategy_document
from terrazzo.dialects.formats.lightning.keys import KEYS
from terrazzo.dialects.formats.lightning.model_checkpoint import steps_left_out
from terrazzo.dialects.formats.lightning.precision import GATHERS_NARROW, LAST
from terrazzo.dialects.formats.lightning.read_strategy import passed_on
from terrazzo.dialects.formats.lightning.trainer_arguments import TrainerArguments, trainer_arguments
from terrazzo.dialects.formats.nested import DEEPSPEED, FSDP_STRATEGY, nested_findings

__all__ = ["findings"]


def findings(reading: Reading, context: ReadingContext) -> Iterable[Finding]:
    """What Lightning refuses of a document, or takes otherwise than it looks."""

    def value(key: str) -> Any:
        return KEYS[key].neutral if (parsed := reading.values.get(key)) is None else parsed

    trainer = trainer_arguments(reading.document, value)
    strategy, callbacks = trainer.strategy, f"{trainer.prefix}callbacks"
    if lost := steps_left_out(reading.values.get(callbacks), trainer.max_steps):
        yield Finding.warning(callbacks, lost)
    if strategy.kind == "FSDPStrategy":
        yield from _fsdp(trainer, context)
    if strategy.kind == "ModelParallelStrategy":
        yield from _model_parallel(trainer)
    if strategy.kind == "DeepSpeedStrategy":
        yield from _deepspeed(trainer) if strategy.arguments.get("config") is None else _within(trainer, context)


def _fsdp(trainer: TrainerArguments, context: ReadingContext) -> Iterable[Finding]:
    prefix, strategy = trainer.prefix, trainer.strategy
    if trainer.gradient_clip_val and trainer.gradient_clip_algorithm != "value":
        text = (
            "FSDPStrategy raises on clipping by norm: override configure_gradient_clipping and call clip_grad_norm_ of"
        )
        yield Finding.error(f"{prefix}gradient_clip_val", f"{text} the FSDP module there.")
    if trainer.precision == "64-true":
        yield Finding.error(f"{prefix}precision", "FSDP has no double precision in Lightning: say 32-true.")
    if trainer.accelerator == "cpu":
        yield Finding.error(f"{prefix}accelerator", "FSDPStrategy needs GPUs: use ddp on CPUs.")
    worded = strategy.arguments.get("mixed_precision") is None and trainer.precision.endswith("-mixed")
    if worded and context.version("lightning", LAST) >= GATHERS_NARROW:
        dtype = trainer.precision.removesuffix("-mixed")
        text = f"FSDP gathers weights in {dtype} since Lightning 2.6, and did in fp32 before."
        yield Finding.warning(f"{prefix}precision", text)
    if strategy.by_class and prefix:
        yield from cli_findings(strategy)
    where = strategy.section if strategy.by_class else strategy.where
    passed = passed_on(strategy.arguments)
    yield from nested_findings(FSDP_STRATEGY, passed, context, where, named=not strategy.by_class)


def _model_parallel(trainer: TrainerArguments) -> Iterable[Finding]:
    text = "it shards nothing by itself: configure_model() calls fully_shard, which decides the plan and reduce dtype."
    yield Finding.warning(trainer.strategy.where, text)
    if trainer.precision in ("16-mixed", "64-true"):
        text = "ModelParallelStrategy has 32-true, bf16-mixed, bf16-true, 16-true."
        yield Finding.error(f"{trainer.prefix}precision", text)


def _deepspeed(trainer: TrainerArguments) -> Iterable[Finding]:
    arguments = trainer.strategy.arguments
    if "thread_count" in arguments:
        text = "DeepSpeed 0.19 does not read it: its word is aio.intra_op_parallelism, which only config can say."
        yield Finding.warning(f"{trainer.strategy.section}.thread_count", text)
    offloads = arguments.get("offload_optimizer") or arguments.get("offload_parameters")
    if offloads and not arguments.get("pin_memory"):
        text = "Lightning writes pin_memory: false, where DeepSpeed's own default is true: copies are slower."
        yield Finding.warning(trainer.strategy.where, text)


_SET_BY_LIGHTNING = ("train_micro_batch_size_per_gpu", "gradient_clipping")


def _within(trainer: TrainerArguments, context: ReadingContext) -> Iterable[Finding]:
    """What is wrong with a whole DeepSpeed configuration, once Lightning has put in what it says itself."""
    handed = strategy_document(trainer, context)
    if not handed.fault:  # else the verdict of the key says it
        named = not isinstance(trainer.strategy.arguments["config"], Mapping)
        within, leave = replace(context, fills_auto=False), {*_SET_BY_LIGHTNING} - handed.own
        where = f"{trainer.strategy.section}.config"
        yield from nested_findings(DEEPSPEED, handed.document, within, where, named=named, leave=leave)
