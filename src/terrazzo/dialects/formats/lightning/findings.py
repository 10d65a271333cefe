"""What Lightning refuses, or takes otherwise than it looks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from terrazzo.dialects.core.dialect import ConfigDocument, Finding, Reading, ReadingContext
from terrazzo.dialects.formats.lightning.keys import NAMED
from terrazzo.dialects.formats.lightning.read_loop import arguments_of

__all__ = ["findings"]


def findings(document: ConfigDocument, reading: Reading, context: ReadingContext) -> Iterable[Finding]:
    """What Lightning refuses of a document, or takes otherwise than it looks."""
    trainer = arguments_of(document)
    prefix = "trainer." if trainer is not document else ""
    kind, arguments = _strategy(trainer.get("strategy", "auto"))
    if kind == "FSDPStrategy":
        yield from _fsdp(trainer, arguments, prefix)
    if kind == "ModelParallelStrategy":
        text = (
            "it shards nothing by itself: configure_model() calls fully_shard, which decides the plan and reduce dtype."
        )
        yield Finding.warning(f"{prefix}strategy", text)
        if str(trainer.get("precision")) in ("16-mixed", "16", "64-true", "64"):
            yield Finding.error(
                f"{prefix}precision", "ModelParallelStrategy has 32-true, bf16-mixed, bf16-true, 16-true."
            )
    if kind == "DeepSpeedStrategy" and arguments.get("config") is None:
        yield from _deepspeed(arguments, prefix)


def _strategy(raw: Any) -> tuple[str, Mapping[str, Any]]:
    if isinstance(raw, Mapping):
        arguments = raw.get("init_args")
        return str(raw.get("class_path", "")).rpartition(".")[2], arguments if isinstance(arguments, Mapping) else {}
    return NAMED.get(str(raw).lower(), ("", {}))


def _fsdp(trainer: Mapping[str, Any], arguments: Mapping[str, Any], prefix: str) -> Iterable[Finding]:
    if trainer.get("gradient_clip_val") and str(trainer.get("gradient_clip_algorithm") or "norm") == "norm":
        text = (
            "FSDPStrategy raises on clipping by norm: override configure_gradient_clipping and call clip_grad_norm_ of"
        )
        yield Finding.error(f"{prefix}gradient_clip_val", f"{text} the FSDP module there.")
    if str(trainer.get("precision")) in ("64", "64-true"):
        yield Finding.error(f"{prefix}precision", "FSDP has no double precision in Lightning: say 32-true.")
    if str(trainer.get("accelerator")) == "cpu":
        yield Finding.error(f"{prefix}accelerator", "FSDPStrategy needs GPUs: use ddp on CPUs.")
    chosen = ("auto_wrap_policy", "process_group", "device_mesh")
    if "HYBRID" in str(arguments.get("sharding_strategy")).upper() and not any(arguments.get(name) for name in chosen):
        text = "the hybrid strategies need auto_wrap_policy, process_group or device_mesh: Lightning raises without."
        yield Finding.error(f"{prefix}strategy.init_args.sharding_strategy", text)
    if arguments.get("process_group") is not None and arguments.get("device_mesh") is not None:
        key = f"{prefix}strategy.init_args.device_mesh"
        yield Finding.error(key, "Lightning raises when both process_group and device_mesh are given.")


def _deepspeed(arguments: Mapping[str, Any], prefix: str) -> Iterable[Finding]:
    section = f"{prefix}strategy.init_args"
    if "thread_count" in arguments:
        text = "DeepSpeed 0.19 does not read it: its word is aio.intra_op_parallelism, which only config can say."
        yield Finding.warning(f"{section}.thread_count", text)
    offloads = arguments.get("offload_optimizer") or arguments.get("offload_parameters")
    if offloads and not arguments.get("pin_memory"):
        text = "Lightning writes pin_memory: false, where DeepSpeed's own default is true: copies are slower."
        yield Finding.warning(f"{prefix}strategy", text)
