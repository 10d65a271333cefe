"""What TrainingArguments and the Trainer refuse, or take otherwise than it looks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from terrazzo.dialects.core.description import Description
from terrazzo.dialects.core.dialect import ConfigDocument, Finding, Reading, ReadingContext
from terrazzo.dialects.core.keys import MISSING, number
from terrazzo.dialects.formats.nested import DEEPSPEED, filled, load_named, nested_findings, resolve_auto
from terrazzo.dialects.formats.shared.accelerate_stack import AXES, axis_faults
from terrazzo.dialects.formats.trainer.deepspeed_inside import completed
from terrazzo.dialects.formats.trainer.keys import MATCHED, POLYNOMIAL_END
from terrazzo.dialects.formats.trainer.keys_earlier import GONE, RENAMED
from terrazzo.dialects.formats.trainer.trainer_reader import default_of
from terrazzo.documents.dotted_keys import flatten

__all__ = ["findings"]

_VERSION = "fsdp_config.version"


def findings(reading: Reading, context: ReadingContext) -> Iterable[Finding]:
    """What the Trainer refuses of a document, or takes otherwise than it looks.

    Values are those that count: of a field with two names the one that wins, and those of files that are named.
    """
    document = reading.document
    values = reading.values
    yield from _together(document, values)
    yield from _axes(document, values, context)
    yield from _best_at_end(values)
    yield from _schedule(document, values, context)
    if values.get("fsdp"):
        yield from _fsdp(values)
    yield from _deepspeed(document, values, context)
    yield from _moved(document, values, reading.description, context)
    saves = values.get("save_strategy", "steps") != "no" and not values.get("save_only_model")
    if document.get("distributed_config") and saves:
        text = "the Trainer raises for a model sharded by distributed_config: say save_only_model: true."
        yield Finding.error("distributed_config", text)


def _moved(
    document: ConfigDocument, values: Mapping[str, Any], description: Description, context: ReadingContext
) -> Iterable[Finding]:
    """Defaults that were others in transformers 4, of a document with words that 5 has no longer, or deprecates."""
    key, older = "average_tokens_across_devices", [name for name in document if name in RENAMED or name in GONE]
    alone = description.value("mesh.world") == 1
    if older and key not in document and default_of(key, context) and not alone:
        text = (
            f"it is not given, and {older[0]} is a word of transformers 4, where the loss was a mean over each rank's"
            " tokens up to 4.53; it is read as one over all ranks' tokens, which it is since: set it"
        )
        yield Finding.warning(key, text)
    key, worded = _VERSION, isinstance(document.get("fsdp"), str | list) and bool(document["fsdp"])
    if worded and values.get(key) is None and default_of(key, context) == 2:
        text = (
            "it is not given, and words in fsdp are of transformers 4, where it was 1, as up to 5.9; it is read as 2,"
            " which it is since: set it"
        )
        yield Finding.warning(key, text)


def _together(document: ConfigDocument, values: Mapping[str, Any]) -> Iterable[Finding]:
    if document.get("fsdp") and document.get("deepspeed"):
        yield Finding.error("fsdp", "the Trainer raises when both fsdp and deepspeed are on: keep one.")
    named = values.get("torch_compile_backend") or values.get("torch_compile_mode")
    if named and values.get("torch_compile") is False:
        yield Finding.warning("torch_compile", "a backend or mode is named, which turns torch_compile on.")


def _axes(document: ConfigDocument, values: Mapping[str, Any], context: ReadingContext) -> Iterable[Finding]:
    """What Accelerate, which gets it as it is, refuses of `parallelism_config`, where no `distributed_config` is."""
    if not document.get("parallelism_config") or document.get("distributed_config"):
        return
    stack = "deepspeed" if document.get("deepspeed") else "fsdp2" if values.get("fsdp") else "ddp"
    if stack == "fsdp2" and (values.get(_VERSION) or default_of(_VERSION, context)) == 1:
        yield Finding.error("parallelism_config", "Accelerate takes it with version 2 of FSDP alone.")
    sizes = {axis: values.get(f"parallelism_config.{axis}_size") or 1 for axis in AXES}
    for axis, text in axis_faults(sizes, stack):
        yield Finding.error(f"parallelism_config.{axis}_size", f"{text}.")


def _best_at_end(values: Mapping[str, Any]) -> Iterable[Finding]:
    """The best checkpoint is one that was saved: each save has to be behind an evaluation."""
    every, evaluated = values.get("save_strategy", "steps"), values.get("eval_strategy") or "no"
    if not values.get("load_best_model_at_end") or every == "best":
        return
    if evaluated != every:
        text = f"save_strategy is {every} and eval_strategy {evaluated}: they must be the same."
        yield Finding.error("load_best_model_at_end", text)
        return
    saves, evaluates = values.get("save_steps", 500), values.get("eval_steps") or values.get("logging_steps", 500)
    numbers = [each for each in map(number().parse, (saves, evaluates)) if each is not MISSING and each > 0]
    if every == "steps" and len(numbers) == 2 and not _is_multiple(*numbers):
        text = f"save_steps {saves} is no multiple of the {evaluates} steps between evaluations: transformers raises."
        yield Finding.error("load_best_model_at_end", text)


def _is_multiple(saves: float, evaluates: float) -> bool:
    """Whether each save is at an evaluation; numbers below 1 are shares of the run, which do not mix with steps."""
    if (saves < 1) != (evaluates < 1):
        return False
    return abs(saves / evaluates - round(saves / evaluates)) < 1e-9


def _schedule(document: ConfigDocument, values: Mapping[str, Any], context: ReadingContext) -> Iterable[Finding]:
    """Arguments on which Hugging Face's schedules raise, or without which they do."""
    word, options = document.get("lr_scheduler_type"), values.get("lr_scheduler_kwargs")
    given = {key for key, value in options.items() if value is not None} if isinstance(options, Mapping) else set()
    if word == "cosine_with_min_lr" and len(given & {"min_lr", "min_lr_rate"}) != 1:
        yield Finding.error("lr_scheduler_kwargs", f"{word} needs one of min_lr and min_lr_rate, and not both.")
    if word == "warmup_stable_decay" and "num_decay_steps" not in given:
        yield Finding.error("lr_scheduler_kwargs", f"{word} needs num_decay_steps.")
    peak = values.get("learning_rate", default_of("learning_rate", context))
    end = number().parse(options.get("lr_end", POLYNOMIAL_END)) if isinstance(options, Mapping) else POLYNOMIAL_END
    if word == "polynomial" and peak is not None and end is not MISSING and end >= peak:
        text = (
            f"{word} raises where lr_end, {end:g}, is not below learning_rate, {peak:g}: say constant, or a lower end."
        )
        yield Finding.error("lr_scheduler_kwargs", text)


def _fsdp(values: Mapping[str, Any]) -> Iterable[Finding]:
    if values.get("activation_checkpointing"):
        text = "under FSDP it gathers all weights once more in backward: say fsdp_config.activation_checkpointing."
        yield Finding.warning("activation_checkpointing", text)
    if values.get("fsdp_config.version") == 1:
        text = "FSDP1 is on its way out of transformers: say version: 2 with reshard_after_forward: true or false."
        yield Finding.warning("fsdp_config.version", text)
    if values.get("fsdp_config.state_dict_type") == "sharded":
        text = "save_model() writes no Hugging Face weights then, only shards: merge them, or say FULL_STATE_DICT."
        yield Finding.warning("fsdp_config.state_dict_type", text)


def _deepspeed(document: ConfigDocument, values: Mapping[str, Any], context: ReadingContext) -> Iterable[Finding]:
    """What is wrong within the DeepSpeed document, whether it stands there or in a file that is named."""
    inner, named = document.get("deepspeed"), ""
    if isinstance(inner, str):
        named = inner
        inner, fault = load_named(named, context)
        if fault:
            return  # the verdict of the key says so
    if not isinstance(inner, Mapping) or not inner:
        return
    told = {field: value for field, value in values.items() if value is not None}
    within = replace(context, trainer={"output_dir": None, **told})
    inner, _ = completed(inner, within.trainer)
    for key, field, text in _mismatches(DEEPSPEED.read(inner, within).values, flatten(inner), within):
        where, what = ("deepspeed", f"{key}: {text}") if named else (f"deepspeed.{key}", text)
        yield Finding.error(f"{where}, {field}", what)
    yield from nested_findings(DEEPSPEED, inner, within, "deepspeed", named=bool(named), leave=filled(inner))


def _mismatches(
    inner: Mapping[str, Any], in_file: Mapping[str, Any], context: ReadingContext
) -> Iterable[tuple[str, str, str]]:
    """Keys of the DeepSpeed document that differ from the field that transformers holds them against, and the words."""
    for key, field in MATCHED.items():
        does, wanted = (
            inner.get(key),
            resolve_auto(key, context).value,
        )  # None: not known, such as a share of no known run
        if wanted is None:
            continue
        if in_file.get(key) not in (None, "auto") and isinstance(does, int | float) and does != wanted:
            text = f"it is {does}, but {field} is {wanted}: transformers raises. Say auto, or the same in both."
            yield key, field, text
