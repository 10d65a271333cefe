"""What sections of a configuration say together: a function for each thing that several of them decide.

`Config` asks all of them, in its order. Each yields why something cannot be, with the edit that mends it: all are told
together.
"""

from __future__ import annotations

from collections.abc import Iterator

from terrazzo.config.sections.batch import BatchConfig
from terrazzo.config.sections.checkpoint import CheckpointConfig
from terrazzo.config.sections.data import DataConfig
from terrazzo.config.sections.launch import LaunchConfig
from terrazzo.config.sections.lora import LoraConfig
from terrazzo.config.sections.model import ModelConfig
from terrazzo.config.sections.objective import ObjectiveConfig
from terrazzo.config.sections.offload import OffloadConfig
from terrazzo.config.sections.plan import MeshConfig
from terrazzo.config.sections.precision import PrecisionConfig
from terrazzo.config.sections.schedule import ScheduleConfig
from terrazzo.config.sections.train import TrainConfig

__all__ = [
    "adapters",
    "attention_as_mistral",
    "attention_lengths",
    "experts",
    "frozen_matrices",
    "offloaded_activations",
    "preference_pairs",
    "prompts",
    "rank_range",
    "reward_head",
    "schedule_lengths",
]


def offloaded_activations(offload: OffloadConfig, train: TrainConfig) -> Iterator[str]:
    """offload.activations moves what activation checkpointing keeps, so there has to be some."""
    if offload.activations == "cpu" and train.activation_checkpointing == "none":
        yield (
            "offload.activations 'cpu' moves what activation checkpointing keeps, and"
            " train.activation_checkpointing is 'none': set it to full, selective or every_N"
        )


def adapters(lora: LoraConfig, model: ModelConfig) -> Iterator[str]:
    """Adapters are trained on a pretrained model."""
    if lora.rank is not None and (model.kind != "huggingface" or model.weights != "pretrained"):
        yield (
            "lora.rank trains adapters on a frozen model, which has to be one with weights: set model.kind to"
            " 'huggingface' and model.weights to 'pretrained'"
        )


def frozen_matrices(precision: PrecisionConfig, lora: LoraConfig) -> Iterator[str]:
    """Matrices are frozen under adapters alone."""
    if precision.frozen is not None and lora.rank is None:
        yield (
            f"precision.frozen '{precision.frozen}' keeps frozen matrices in 4 bits, and without lora.rank"
            " none is: set lora.rank, such as 16, or leave precision.frozen out"
        )


def schedule_lengths(schedule: ScheduleConfig, train: TrainConfig) -> Iterator[str]:
    """Warm-up and decay fit into train.steps."""
    if schedule.warmup_steps > train.steps:
        yield (
            f"schedule.warmup_steps {schedule.warmup_steps} is longer than train.steps {train.steps}:"
            f" shorten the warm-up, with schedule.warmup_steps={train.steps // 10} for instance, or train for"
            f" longer, with train.steps={schedule.warmup_steps} or more"
        )
    elif (decay := schedule.decay_steps or 0) + schedule.warmup_steps > train.steps:
        yield (
            f"schedule.decay_steps {decay} is longer than the run, whose train.steps are {train.steps}, of"
            f" which {schedule.warmup_steps} warm up: shorten it, or leave it out for a fifth of the run"
        )


def rank_range(launch: LaunchConfig, mesh: MeshConfig) -> Iterator[str]:
    """A range of ranks needs a mesh that at least two of its numbers can form."""
    ranks = launch.ranks
    if not isinstance(ranks, str):
        return
    if mesh.dp_shard is not None and mesh.dp_replicate is not None:
        yield (
            f"launch.ranks '{ranks}' lets ranks become fewer, and plan.mesh.dp_shard {mesh.dp_shard} says how many"
            f" there are, {mesh.fixed * mesh.dp_shard}: leave plan.mesh.dp_shard out, which then is what the others"
            " leave, or set plan.mesh.dp_replicate to null, and groups of so many ranks come and go"
        )
    elif len(launch.numbers(mesh.fixed)) < 2:
        yield (
            f"launch.ranks '{ranks}' lets ranks become fewer, but the mesh has multiples of {mesh.fixed} of them"
            f" (plan.mesh: pp, {'dp_replicate' if mesh.dp_replicate else 'dp_shard'}, cp and tp), and two of these are"
            " not within: make the range wider"
        )


def preference_pairs(objective: ObjectiveConfig, data: DataConfig) -> Iterator[str]:
    """Preference pairs are neither packed nor learnt in part."""
    if not objective.kind.of_pairs:
        return
    if data.packing not in (None, "single"):
        yield (
            f"objective '{objective.name}' compares two sequences of one text each, and data.packing is"
            f" '{data.packing}': leave it out"
        )
    if data.loss_on != "assistant":
        yield (
            f"objective '{objective.name}' is of completions, all of them, and data.loss_on is '{data.loss_on}': leave"
            " it out"
        )


def reward_head(
    objective: ObjectiveConfig, lora: LoraConfig, checkpoint: CheckpointConfig, model: ModelConfig
) -> Iterator[str]:
    """A model that ends in a score has a new head."""
    if objective.kind.scored and lora.rank is not None:
        yield (
            f"objective '{objective.name}' trains a new head, which lora.rank would freeze: leave lora out, or set"
            " objective to 'dpo'"
        )
    if objective.kind.scored and checkpoint.save_format == "hf" and model.kind == "decoder":
        yield (
            f"checkpoint.save_format 'hf' of objective '{objective.name}' needs a model that transformers has with a"
            " score: set model.kind to 'huggingface', or save_format to 'terrazzo'"
        )


def experts(model: ModelConfig, objective: ObjectiveConfig, checkpoint: CheckpointConfig) -> Iterator[str]:
    """The decoder's mixture of experts learns next tokens, and is saved in Terrazzo's format."""
    if model.experts.count is None:
        return
    if objective.kind.of_pairs:
        yield (
            f"objective '{objective.name}' has not been tried with experts, whose auxiliary losses are of tokens:"
            " remove model.experts, or set objective to 'next_token'"
        )
    if checkpoint.save_format == "hf":
        yield (
            "checkpoint.save_format 'hf' writes the built-in decoder as a Llama, which has no experts: remove"
            " model.experts, or set save_format to 'terrazzo'"
        )


def attention_lengths(model: ModelConfig, batch: BatchConfig) -> Iterator[str]:
    """Window and stride of attention are no longer than a sequence."""
    for name, value in (("window", model.attention.window), ("stride", model.attention.stride)):
        if value is not None and value > batch.sequence_length:
            yield (
                f"model.attention.{name} {value} is longer than a sequence, batch.sequence_length"
                f" {batch.sequence_length}: leave it out, or train on longer sequences"
            )


def prompts(model: ModelConfig, data: DataConfig, objective: ObjectiveConfig) -> Iterator[str]:
    """A prefix mask is of what is before the first learnt token of a document, which others must not see."""
    if not model.attention.prefix:
        return
    if objective.kind.scored:
        yield (
            f"objective '{objective.name}' scores whole texts, and model.attention.prefix is of prompts: remove it, or"
            " set objective to 'next_token' or 'dpo'"
        )
    if data.loss_on == "all":
        yield (
            "model.attention.prefix is of what is before the first learnt token, and with data.loss_on 'all' nothing"
            " is: leave data.loss_on out, or remove model.attention.prefix"
        )
    if data.packing in ("stream", "whole") and data.attention == "sequence":
        yield (
            f"model.attention.prefix with data.packing '{data.packing}' puts several prompts in a sequence, each of its"
            " own document: set data.attention to 'document', or data.packing to 'single'"
        )


def attention_as_mistral(model: ModelConfig, checkpoint: CheckpointConfig) -> Iterator[str]:
    """A decoder with a window is exported as a Mistral, which has to have all of its attention settings."""
    attention = model.attention
    if attention.prefix and checkpoint.save_format == "hf":
        yield (
            "checkpoint.save_format 'hf' writes the built-in decoder as a Llama, which has no prefix mask"
            " (model.attention.prefix): set save_format to 'terrazzo'"
        )
    if attention.window is not None and checkpoint.save_format == "hf" and (why := attention.not_mistral):
        yield (
            f"checkpoint.save_format 'hf' writes a decoder with a window as a Mistral, which has no {why}: set"
            " save_format to 'terrazzo'"
        )
