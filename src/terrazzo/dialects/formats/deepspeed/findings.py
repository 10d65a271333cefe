"""Combinations that DeepSpeed refuses, or takes otherwise than they look."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from terrazzo.dialects.core.description import Description
from terrazzo.dialects.core.dialect import Finding, Reading, ReadingContext
from terrazzo.dialects.core.keys import MISSING, choice, integer, number
from terrazzo.dialects.formats.deepspeed.auto import AUTO, LITERAL
from terrazzo.dialects.formats.deepspeed.deepspeed_reader import DeepSpeedReader
from terrazzo.dialects.formats.deepspeed.keys import DTYPE_WORDS, OLD_OFFLOAD, SCHEDULER_PARAMS
from terrazzo.dialects.formats.deepspeed.versions import FIRST, FP32_SUMS, MOVED, REMOVED, in_words, sums_in_fp32
from terrazzo.messages import listed

__all__ = ["findings"]

_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_ZERO = "zero_optimization"


def findings(reading: Reading, context: ReadingContext) -> Iterator[Finding]:
    """What DeepSpeed refuses of a document, or takes otherwise than it looks, but for what verdicts say."""
    reader = DeepSpeedReader(reading.document, context)
    stage = _stage(reader)
    if reader.version < FIRST:
        text = f"defaults are known from DeepSpeed {in_words(FIRST)} on: {in_words(reader.version)} may have others"
        yield Finding.warning("", text)
    yield from _batch(reader)
    yield from _auto(reader)
    yield from _old_words(reader)
    yield from _removed(reader, [each.key for each in reading.verdicts if each.kind == "refused"])
    yield from _precision(reader, stage)
    yield from _zero(reader, stage, context.world)
    yield from _schedule(reader)
    yield from _moved(reader, reading.description)
    yield from _surprises(reader)


def _stage(reader: DeepSpeedReader) -> int:
    return int(reader.take(f"{_ZERO}.stage").value or reader.raw(_ZERO) is True)


def _on(reader: DeepSpeedReader, key: str) -> bool:
    return reader.take(key).value is True


def _batch(reader: DeepSpeedReader) -> Iterator[Finding]:
    if reader.raw(_BATCH[0]) is None and reader.raw(_BATCH[1]) is None:
        yield Finding.error(
            _BATCH[1], "DeepSpeed needs train_batch_size or train_micro_batch_size_per_gpu: set the latter"
        )


def _auto(reader: DeepSpeedReader) -> Iterator[Finding]:
    """DeepSpeed has no "auto": it fails at the top, and drops it below."""
    keys = [key for key, value in reader.flat.items() if value == AUTO and key not in LITERAL]
    if keys:
        fills = "only Hugging Face's Trainer and Accelerate fill" if reader.context.fills_auto else "nobody fills"
        text = f"{fills} 'auto' ({listed(keys, 6)}): DeepSpeed alone fails or drops it"
        yield Finding.warning(keys[0], text)


def _old_words(reader: DeepSpeedReader) -> Iterator[Finding]:
    for section, old in OLD_OFFLOAD.items():
        if reader.raw(f"{_ZERO}.{old}") is not None and f"{_ZERO}.{section}" in reader:
            yield Finding.error(f"{_ZERO}.{old}", f"an old word beside {section}, which DeepSpeed refuses: remove it")


def _removed(reader: DeepSpeedReader, refused: Sequence[str]) -> Iterator[Finding]:
    """Removed keys that are switched off; of those that are on, their verdicts say it."""
    for key, removed in REMOVED.items():
        said = any(each == key or each.startswith(f"{key}.") for each in refused)
        if key in reader and not said and reader.version >= removed.since:
            yield Finding.error(
                key, f"DeepSpeed {in_words(removed.since)} and later refuse it, even switched off: remove it"
            )


def _precision(reader: DeepSpeedReader, stage: int) -> Iterator[Finding]:
    low = "bf16" if _on(reader, "bf16.enabled") else "fp16" if _on(reader, "fp16.enabled") else "fp32"
    if _on(reader, "bf16.enabled") and _on(reader, "fp16.enabled"):
        yield Finding.error("fp16.enabled", "fp16 and bf16 are both on: switch one off")
    for key in ("fp16.fp16_master_weights_and_grads", "bf16.bf16_master_weights_and_grads"):
        if _on(reader, key) and stage == 0:
            yield Finding.error(key, "it needs ZeRO stage 1, 2 or 3")
    if _on(reader, "bf16.bf16_optimizer_states") and not _on(reader, "bf16.bf16_master_weights_and_grads"):
        yield Finding.error("bf16.bf16_optimizer_states", "it needs bf16_master_weights_and_grads")
    from_file = reader.take_as("data_types.grad_accum_dtype", choice(DTYPE_WORDS), null=True).value
    wanted = "fp32" if sums_in_fp32(low, stage, reader.version) else low
    if from_file is not None and from_file != wanted and stage == 0:
        yield Finding.error("data_types.grad_accum_dtype", f"at stage 0 it must be {wanted} beside {low}")
    param_dtype = reader.take_as("data_types.param_dtype", choice(DTYPE_WORDS), null=True).value
    if param_dtype is not None and param_dtype != low:
        yield Finding.error("data_types.param_dtype", f"it is {param_dtype}, but fp16 and bf16 say {low}")
    if _on(reader, "torch_autocast.enabled") and low != "fp32":
        yield Finding.error("torch_autocast.enabled", f"{low} casts the whole model already: switch one of them off")
    if _on(reader, "torch_autocast.enabled") and reader.raw("torch_autocast.dtype") is None:
        yield Finding.warning(
            "torch_autocast.enabled", "no dtype is given: torch takes fp16 on a GPU; set torch_autocast.dtype"
        )


def _zero(reader: DeepSpeedReader, stage: int, world: int | None) -> Iterator[Finding]:
    if (reader.take(f"{_ZERO}.offload_optimizer.ratio").value or 1) < 1 and stage != 3:
        yield Finding.error(f"{_ZERO}.offload_optimizer.ratio", "a share on the CPU needs stage 3")
    hpz = reader.take(f"{_ZERO}.zero_hpz_partition_size").value
    if (hpz or 1) > 1:
        yield from _hpz(hpz, stage, world)
    for name in ("zero_quantized_weights", "zero_quantized_gradients", "zero_quantized_nontrainable_weights"):
        if _on(reader, f"{_ZERO}.{name}") and stage != 3:
            yield Finding.warning(f"{_ZERO}.{name}", "it has an effect at stage 3 only")
    if str(reader.raw("gradient_allreduce_op")).lower() == "sum":
        taken = {"stage 3": stage == 3, "ZenFlow": f"{_ZERO}.zenflow" in reader}
        for name in [name for name, on in {**taken, "DeepCompile": _on(reader, "compile.deepcompile")}.items() if on]:
            yield Finding.error("gradient_allreduce_op", f"{name} takes the mean only")
    if reader.take(f"{_ZERO}.compute_grad_norm").value is False and stage not in (1, 2):
        yield Finding.error(f"{_ZERO}.compute_grad_norm", "it can be false at stages 1 and 2 only")
    stages = integer().parse(reader.raw("pipeline.stages"))
    if stages is not MISSING and stages > 1 and stage > 1:
        yield Finding.error("pipeline.stages", f"the pipeline engine takes ZeRO stages 0 and 1, not {stage}")
    for section in ("offload_optimizer", "offload_param"):
        if (
            reader.take(f"{_ZERO}.{section}.device").value == "nvme"
            and reader.raw(f"{_ZERO}.{section}.nvme_path") is None
        ):
            yield Finding.error(f"{_ZERO}.{section}.device", f"nvme needs a folder: set {_ZERO}.{section}.nvme_path")


def _hpz(size: int, stage: int, world: int | None) -> Iterator[Finding]:
    key = f"{_ZERO}.zero_hpz_partition_size"
    if stage != 3:
        yield Finding.warning(key, f"it has an effect at stage 3 only, this is stage {stage}")
    elif world is not None and world % size:
        yield Finding.error(key, f"{world} ranks cannot be cut into groups of {size}")


_NEEDED: dict[str, tuple[str, ...]] = {
    "WarmupDecayLR": ("total_num_steps",),
    "WarmupCosineLR": ("total_num_steps",),
    "OneCycle": ("cycle_min_lr", "cycle_max_lr"),
}


def _schedule(reader: DeepSpeedReader) -> Iterator[Finding]:
    kind = reader.raw("scheduler.type")
    for name in _NEEDED.get(kind, ()) if isinstance(kind, str) else ():
        if reader.raw(f"scheduler.params.{name}") is None:
            yield Finding.error(f"scheduler.params.{name}", f"{kind} needs it")
    rate, peak = number().parse(reader.raw("optimizer.params.lr")), reader.raw("scheduler.params.warmup_max_lr")
    default: Any = SCHEDULER_PARAMS["WarmupDecayLR"]["warmup_max_lr"]
    if kind == "WarmupDecayLR" and peak is None and rate is not MISSING and rate != default:
        text = f"without warmup_max_lr the peak is {default}, not the optimizer's {rate}: set it"
        yield Finding.warning("scheduler.type", text)


_CHANGED = {
    "gradient_clipping": ("training.clip", "clips at 1.0 since {}, and did not before; set it, 0 for none"),
    "bf16.check_grad_overflow": (
        "training.nonfinite",
        "leaves out a step whose gradients are not finite since {}, and took it before; set it",
    ),
}
"""What has changed with a default, of those in `MOVED` that numbers depend on: the setting, and the words."""


def _moved(reader: DeepSpeedReader, description: Description) -> Iterator[Finding]:
    """Defaults that are others than they were, and that the document leaves open."""
    for key, (path, text) in _CHANGED.items():
        since = MOVED[key][1]
        if description[path].is_set and key not in reader and reader.version >= since:
            yield Finding.warning(key, f"it is not given: DeepSpeed {text.format(in_words(since))}")
    sums = "data_types.grad_accum_dtype"
    bf16 = description.value("precision.compute") == "bf16" and not description.value("precision.autocast")
    whole = description.value("sharding.optim") == "-"
    if bf16 and whole and sums not in reader and reader.version >= FP32_SUMS:
        text = f"sums micro-batches in bf16 since {in_words(FP32_SUMS)}, and in fp32 before; set it"
        yield Finding.warning(sums, f"it is not given: without ZeRO, DeepSpeed {text}")


def _surprises(reader: DeepSpeedReader) -> Iterator[Finding]:
    """Keys that do not do what they seem to."""
    section = "activation_checkpointing"
    if any(name.startswith(f"{section}.") and value not in (False, None) for name, value in reader.flat.items()):
        text = "these keys reach deepspeed.checkpointing alone: Hugging Face's models use torch's, which ignores them"
        yield Finding.warning(section, text)
    if reader.raw("tensor_parallel.dtype") is not None:
        yield Finding.error("tensor_parallel.dtype", "JSON has no dtype that DeepSpeed takes there: remove it")
