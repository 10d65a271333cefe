"""What Lightning refuses, or takes otherwise than it looks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from terrazzo.dialects.core.dialect import Finding, Reading, ReadingContext
from terrazzo.dialects.formats.lightning.cli_findings import cli_findings
from terrazzo.dialects.formats.lightning.deepspeed_document import configured
from terrazzo.dialects.formats.lightning.keys import strategy_of
from terrazzo.dialects.formats.lightning.model_checkpoint import steps_left_out
from terrazzo.dialects.formats.lightning.precision import GATHERS_NARROW, LAST, WORDS
from terrazzo.dialects.formats.lightning.read_loop import arguments_of
from terrazzo.dialects.formats.lightning.read_strategy import passed_on
from terrazzo.dialects.formats.nested import DEEPSPEED, FSDP_STRATEGY, nested_findings

__all__ = ["findings"]


def findings(reading: Reading, context: ReadingContext) -> Iterable[Finding]:
    """What Lightning refuses of a document, or takes otherwise than it looks."""
    document = reading.document
    trainer = arguments_of(document)
    prefix = "trainer." if trainer is not document else ""
    values = {**trainer, **{key.removeprefix(prefix): value for key, value in reading.values.items()}}
    kind, arguments = strategy_of(trainer.get("strategy", "auto"))
    if lost := steps_left_out(trainer):
        yield Finding.warning(f"{prefix}callbacks", lost)
    if kind == "FSDPStrategy":
        yield from _fsdp(values, prefix)
        if arguments.get("mixed_precision") is None and context.version("lightning", LAST) >= GATHERS_NARROW:
            yield from _gathers(values, prefix)
        own = isinstance(trainer["strategy"], Mapping)
        if own and prefix:
            yield from cli_findings(trainer["strategy"], f"{prefix}strategy")
        where = f"{prefix}strategy.init_args" if own else f"{prefix}strategy"
        yield from nested_findings(FSDP_STRATEGY, passed_on(arguments), context, where, named=not own)
    if kind == "ModelParallelStrategy":
        yield from _model_parallel(values, prefix)
    if kind == "DeepSpeedStrategy" and arguments.get("config") is None:
        yield from _deepspeed(arguments, prefix)
    elif kind == "DeepSpeedStrategy":
        yield from _within(arguments, context, values, f"{prefix}strategy.init_args.config")


def _fsdp(values: Mapping[str, Any], prefix: str) -> Iterable[Finding]:
    if values.get("gradient_clip_val") and values.get("gradient_clip_algorithm") != "value":
        text = (
            "FSDPStrategy raises on clipping by norm: override configure_gradient_clipping and call clip_grad_norm_ of"
        )
        yield Finding.error(f"{prefix}gradient_clip_val", f"{text} the FSDP module there.")
    if values.get("precision") == "64-true":
        yield Finding.error(f"{prefix}precision", "FSDP has no double precision in Lightning: say 32-true.")
    if values.get("accelerator") == "cpu":
        yield Finding.error(f"{prefix}accelerator", "FSDPStrategy needs GPUs: use ddp on CPUs.")


def _gathers(values: Mapping[str, Any], prefix: str) -> Iterable[Finding]:
    word = WORDS.get(values.get("precision"), "")
    if word.endswith("-mixed"):
        text = f"FSDP gathers weights in {word.removesuffix('-mixed')} since Lightning 2.6, and did in fp32 before."
        yield Finding.warning(f"{prefix}precision", text)


def _model_parallel(values: Mapping[str, Any], prefix: str) -> Iterable[Finding]:
    text = "it shards nothing by itself: configure_model() calls fully_shard, which decides the plan and reduce dtype."
    yield Finding.warning(f"{prefix}strategy", text)
    if values.get("precision") in ("16-mixed", "64-true"):
        yield Finding.error(f"{prefix}precision", "ModelParallelStrategy has 32-true, bf16-mixed, bf16-true, 16-true.")


def _deepspeed(arguments: Mapping[str, Any], prefix: str) -> Iterable[Finding]:
    section = f"{prefix}strategy.init_args"
    if "thread_count" in arguments:
        text = "DeepSpeed 0.19 does not read it: its word is aio.intra_op_parallelism, which only config can say."
        yield Finding.warning(f"{section}.thread_count", text)
    offloads = arguments.get("offload_optimizer") or arguments.get("offload_parameters")
    if offloads and not arguments.get("pin_memory"):
        text = "Lightning writes pin_memory: false, where DeepSpeed's own default is true: copies are slower."
        yield Finding.warning(f"{prefix}strategy", text)


_SET_BY_LIGHTNING = ("train_micro_batch_size_per_gpu", "gradient_clipping")


def _within(
    arguments: Mapping[str, Any], context: ReadingContext, values: Mapping[str, Any], where: str
) -> Iterable[Finding]:
    """What is wrong with a whole DeepSpeed configuration, once Lightning has put in what it says itself."""
    trainer = {**values, "precision": values.get("precision") or "32-true"}
    document, own, fault = configured(arguments, context, trainer)
    if not fault:  # else the verdict of the key says it
        named = not isinstance(arguments["config"], Mapping)
        within, leave = replace(context, fills_auto=False), {*_SET_BY_LIGHTNING} - own
        yield from nested_findings(DEEPSPEED, document, within, where, named=named, leave=leave)
