"""What "auto" stands for. It is no word of DeepSpeed's own: Hugging Face's Trainer and Accelerate put a value there.

The rules are those of transformers 5.23 and accelerate 1.15. What a rule needs and is not known leaves the key open:
it is reported, never guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from terrazzo.dialects.core.dialect import ReadingContext
from terrazzo.dialects.formats.shared.schedule_words import warmup_steps
from terrazzo.dialects.formats.shared.trainer_defaults import TRAINER_DEFAULTS

__all__ = ["AUTO", "LITERAL", "Auto", "resolve"]

AUTO = "auto"
LITERAL = (
    "pipeline.stages",
    "data_types.keep_in_fp32_modules",
    "zero_optimization.zenflow.select_strategy",
    "zero_optimization.zenflow.select_interval",
    "zero_optimization.zenflow.update_interval",
    *(f"expert_parallel.{name}" for name in ("top_k", "routed_scaling_factor", "score_func", "score_apply")),
    *(f"expert_parallel.{name}" for name in ("combine_impl", "row_weighting_impl")),
)
"""Keys at which "auto" is a value of DeepSpeed's own."""


@dataclass(frozen=True)
class Auto:
    """What "auto" stands for at one key.

    Attributes:
        value: None where it is not known.
        why: the rule, and what it lacks.
        rule: whether there is one.
    """

    value: Any
    why: str
    rule: bool = True


_AutoRule = tuple[str, Callable[[ReadingContext], Any]]
_ZERO = "zero_optimization"


def _trainer(context: ReadingContext, name: str) -> Any:
    """A field of TrainingArguments, or their default; None if none of them is known."""
    default = TRAINER_DEFAULTS.get(name)
    value = context.trainer.get(name, default) if context.trainer else None
    if value is None or isinstance(default, bool):
        return value if isinstance(value, bool) else None
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _field(name: str) -> _AutoRule:
    return f"TrainingArguments' {name}", lambda context: _trainer(context, name)


def _hidden(rule: str, work: Callable[[int], int]) -> _AutoRule:
    return rule, lambda context: None if context.hidden_size is None else work(context.hidden_size)


def _fixed(value: Any) -> _AutoRule:
    return f"{value!r}, always".lower(), lambda context: value


def _train_batch(context: ReadingContext) -> Any:
    parts = (_trainer(context, "per_device_train_batch_size"), _trainer(context, "gradient_accumulation_steps"))
    if context.world is None or None in parts:
        return None
    return context.world * parts[0] * parts[1]


def _length(context: ReadingContext) -> Any:
    """The steps of the run; by passes over the data nobody knows them."""
    steps = _trainer(context, "max_steps")
    return steps if steps is not None and steps > 0 else None


def _warmup(context: ReadingContext) -> Any:
    """TrainingArguments' warm-up: a share of the run below 1, else steps; DeepSpeed wants one at least."""
    steps, total = _trainer(context, "warmup_steps"), _length(context)
    if steps is None or (0 < steps < 1 and not total):
        return None
    return max(1, warmup_steps(steps, total) if 0 < steps < 1 else int(steps))


def _clip(context: ReadingContext) -> Any:
    """Accelerate fills in 1.0 as well."""
    norm = _trainer(context, "max_grad_norm")
    return 1.0 if norm is None else norm


def _betas(context: ReadingContext) -> Any:
    return [_trainer(context, "adam_beta1"), _trainer(context, "adam_beta2")] if context.trainer else None


_RULES: Mapping[str, _AutoRule] = {
    "train_micro_batch_size_per_gpu": _field("per_device_train_batch_size"),
    "gradient_accumulation_steps": _field("gradient_accumulation_steps"),
    "train_batch_size": ("ranks × micro-batch × accumulation", _train_batch),
    "gradient_clipping": ("TrainingArguments' max_grad_norm, by default 1.0", _clip),
    "optimizer.params.lr": _field("learning_rate"),
    "optimizer.params.betas": ("TrainingArguments' adam_beta1 and adam_beta2", _betas),
    "optimizer.params.eps": _field("adam_epsilon"),
    "optimizer.params.weight_decay": _field("weight_decay"),
    "scheduler.params.warmup_min_lr": _fixed(0),
    "scheduler.params.warmup_max_lr": _field("learning_rate"),
    "scheduler.params.warmup_num_steps": ("TrainingArguments' warmup_steps, 1 at least", _warmup),
    "scheduler.params.total_num_steps": ("TrainingArguments' max_steps", _length),
    "fp16.enabled": _field("fp16"),
    "bf16.enabled": _field("bf16"),
    f"{_ZERO}.reduce_bucket_size": _hidden("hidden_size²", lambda hidden: hidden * hidden),
    f"{_ZERO}.stage3_prefetch_bucket_size": _hidden("0.9 · hidden_size²", lambda hidden: int(0.9 * hidden * hidden)),
    f"{_ZERO}.stage3_param_persistence_threshold": _hidden("10 · hidden_size", lambda hidden: 10 * hidden),
    f"{_ZERO}.stage3_gather_16bit_weights_on_model_save": _fixed(False),
    f"{_ZERO}.offload_optimizer.device": _fixed("none"),
    f"{_ZERO}.offload_param.device": _fixed("none"),
}


def resolve(key: str, context: ReadingContext) -> Auto:
    """What Hugging Face puts in place of "auto" at a key; nothing where another library hands the document on."""
    if not context.fills_auto:
        return Auto(None, "nobody puts a value there", rule=False)
    if key not in _RULES:
        return Auto(None, "Hugging Face has no rule for it", rule=False)
    name, rule = _RULES[key]
    value = rule(context)
    if value is None:
        return Auto(None, f"Hugging Face fills it with {name}: not known here, so it stays open")
    return Auto(value, f"Hugging Face fills it with {name}: {value}")
