"""What Accelerate refuses, and what it takes otherwise than it looks."""

from __future__ import annotations

from collections.abc import Iterator

from terrazzo.dialects.core.dialect import Finding, Reading, ReadingContext
from terrazzo.dialects.formats.accelerate.accelerate_reader import AccelerateReader
from terrazzo.dialects.formats.accelerate.keys import TYPES
from terrazzo.dialects.formats.accelerate.read_deepspeed import FILE
from terrazzo.dialects.formats.nested import DEEPSPEED, filled, load_named, nested_findings
from terrazzo.dialects.formats.shared.accelerate_dtypes import AT_ONCE
from terrazzo.dialects.formats.shared.accelerate_stack import AXES, axis_faults
from terrazzo.dialects.formats.shared.fsdp_policy import narrow_sums

__all__ = ["findings"]

_F, _P = "fsdp_config.fsdp_", "parallelism_config.parallelism_config_"


def findings(reading: Reading, context: ReadingContext) -> Iterator[Finding]:
    """What Accelerate refuses of a document, or takes otherwise than it looks."""
    document = reading.document
    reader = AccelerateReader(document, context)
    kind = str(reader.raw("distributed_type", "")).upper()
    if reader.raw("distributed_type") is None:
        yield Finding.error(
            "distributed_type", "Accelerate refuses a file without it: write distributed_type: NO for one GPU"
        )
    yield from _parallelism(reader, kind)
    if kind == "FSDP":
        yield from _fsdp(reader, reading)
    if kind == "DEEPSPEED":
        yield from _deepspeed(reader)
        yield from _deepspeed_file(reader, context)
    if kind in TYPES and kind not in ("FSDP", "DEEPSPEED"):
        for section in ("fsdp_config", "deepspeed_config"):
            if section in reader and document.get(section):
                yield Finding.warning(section, f"nothing reads it: distributed_type is {kind}")


def _parallelism(reader: AccelerateReader, kind: str) -> Iterator[Finding]:
    if "parallelism_config" not in reader:
        return
    sizes = {axis: reader.take(f"{_P}{axis}_size").value for axis in AXES}
    if kind == "FSDP" and _version(reader) == 1:
        yield Finding.error(f"{_F}version", "parallelism_config needs version 2")
    for axis, text in axis_faults(sizes, "fsdp2" if kind == "FSDP" else kind.lower()):
        yield Finding.error(f"{_P}{axis}_size", text)


def _version(reader: AccelerateReader) -> int:
    return 2 if str(reader.raw(f"{_F}version") or 1) == "2" else 1


def _fsdp(reader: AccelerateReader, reading: Reading) -> Iterator[Finding]:
    version = _version(reader)
    if reader.raw(f"{_F}version") is None:
        yield Finding.warning(f"{_F}version", "it is not given: the launcher takes 1, and accelerate config proposes 2")
    value = reading.description.value
    if version == 2:
        text = "prepare(model, optimizer) must be one call, with one model: it swaps the optimizer's parameters"
        yield Finding.warning(f"{_F}version", text)
    if version == 2 and value("saving.state") == "local":
        yield Finding.error(f"{_F}state_dict_type", "version 2 has no LOCAL_STATE_DICT: SHARDED_STATE_DICT")
    if value("activation_checkpointing.offload") and value("activation_checkpointing.mode") == "none":
        yield Finding.error(f"{_F}activation_checkpointing_offload", "it needs fsdp_activation_checkpointing: true")
    if value("activation_checkpointing.offload") and version == 1:
        yield Finding.error(f"{_F}activation_checkpointing_offload", "it needs version 2")
    synced, loads = (reader.take(f"{_F}{name}") for name in ("sync_module_states", "cpu_ram_efficient_loading"))
    if synced.value is False and loads.value is not False:
        yield Finding.error(f"{_F}sync_module_states", "fsdp_cpu_ram_efficient_loading, on by default, needs it: true")
    if version == 1:
        yield from _version_1(reader)
    if low := narrow_sums(reading.description):
        text = f"a loop that accumulates sums gradients in {low} until they are reduced: {AT_ONCE}"
        yield Finding.warning("mixed_precision", text)
    if reader.raw(f"{_F}auto_wrap_policy") is None:
        text = "without it the whole model is one unit: all weights are gathered at once. Say TRANSFORMER_BASED_WRAP"
        yield Finding.warning(f"{_F}auto_wrap_policy", text)
    if value("saving.state") == "sharded" and version == 2:
        yield Finding.warning(
            f"{_F}state_dict_type", "checkpoints are shards: accelerate merge-weights makes a model of them"
        )


def _version_1(reader: AccelerateReader) -> Iterator[Finding]:
    if reader.raw(f"{_F}backward_prefetch") is None:
        text = (
            "it is not given: Accelerate takes NO_PREFETCH where torch takes BACKWARD_PRE, and gathers do not overlap"
        )
        yield Finding.warning(f"{_F}backward_prefetch", text)


def _deepspeed(reader: AccelerateReader) -> Iterator[Finding]:
    named = reader.raw(FILE) not in (None, "none")
    if named and reader.raw("mixed_precision") is not None:
        yield Finding.error(
            "mixed_precision", "Accelerate refuses it beside deepspeed_config_file: say bf16 or fp16 there"
        )
    if not named and reader.raw("deepspeed_config.zero_stage") is None:
        text = "it is not given: Accelerate takes 2, where DeepSpeed itself takes 0"
        yield Finding.warning("deepspeed_config.zero_stage", text)
    for name in ("offload_optimizer", "offload_param") if not named else ():
        key = f"deepspeed_config.{name}_device"
        if reader.take(key).value == "nvme":
            yield Finding.error(key, "no folder reaches DeepSpeed for it: say nvme_path in a deepspeed_config_file")
    if reader.raw("deepspeed_config.gradient_accumulation_steps") is not None:
        text = "DeepSpeed's engine divides the loss and steps: optimizer.step() and scheduler.step() do nothing"
        yield Finding.warning("deepspeed_config.gradient_accumulation_steps", text)


def _deepspeed_file(reader: AccelerateReader, context: ReadingContext) -> Iterator[Finding]:
    """What is wrong within the file that is named, but for "auto", which Accelerate fills in."""
    name = reader.raw(FILE)
    if name in (None, "none"):
        return
    document, fault = load_named(name, context)
    if not fault:  # else the verdict of the key says it
        yield from nested_findings(DEEPSPEED, document, context, FILE, named=True, leave=filled(document))
