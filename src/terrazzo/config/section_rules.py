"""What sections of a configuration say together: a function for each thing that several of them decide.

`Config` asks all of them, in its order, and all that they yield is told together. What needs the model, the machine or
the number of ranks is in the trainer's `preflight`.
"""

from __future__ import annotations

from collections.abc import Iterator

from terrazzo.config.section import KeyDisagreement
from terrazzo.config.sections.batch import BatchConfig
from terrazzo.config.sections.checkpoint import CheckpointConfig
from terrazzo.config.sections.data import DataConfig
from terrazzo.config.sections.guard import GuardConfig
from terrazzo.config.sections.launch import LaunchConfig
from terrazzo.config.sections.lora import LoraConfig
from terrazzo.config.sections.model import ModelConfig
from terrazzo.config.sections.objective import ObjectiveConfig
from terrazzo.config.sections.offload import OffloadConfig
from terrazzo.config.sections.parallel import ParallelConfig
from terrazzo.config.sections.plan import MeshConfig, PlanConfig
from terrazzo.config.sections.precision import PrecisionConfig
from terrazzo.config.sections.schedule import ScheduleConfig
from terrazzo.config.sections.train import TrainConfig
from terrazzo.words import DTYPE_SPELLINGS

__all__ = [
    "adapters",
    "attention_as_mistral",
    "attention_lengths",
    "experts",
    "frozen_matrices",
    "loss_without_logits",
    "offloaded_activations",
    "preference_pairs",
    "prompts",
    "rank_range",
    "replays",
    "replicas_apart",
    "reward_head",
    "rollback",
    "schedule_lengths",
    "shared_experts",
    "shared_sequences",
    "stages",
    "why_all_logits",
]


def offloaded_activations(offload: OffloadConfig, train: TrainConfig) -> Iterator[KeyDisagreement]:
    """offload.activations moves what activation checkpointing keeps, so there has to be some."""
    if offload.activations == "cpu" and train.activation_checkpointing == "none":
        yield KeyDisagreement(
            "offload.activations",
            "'cpu' moves what activation checkpointing keeps, and train.activation_checkpointing"
            " is 'none': set train.activation_checkpointing to full, selective or every_N",
        )


def adapters(lora: LoraConfig, model: ModelConfig) -> Iterator[KeyDisagreement]:
    """Adapters are trained on a pretrained model."""
    if lora.rank is not None and (model.kind != "huggingface" or model.weights != "pretrained"):
        yield KeyDisagreement(
            "lora.rank",
            "trains adapters on a frozen model, which has to be one with weights: set model.kind to"
            " 'huggingface' and model.weights to 'pretrained'",
        )


def frozen_matrices(precision: PrecisionConfig, lora: LoraConfig) -> Iterator[KeyDisagreement]:
    """Matrices are frozen under adapters alone."""
    if precision.frozen is not None and lora.rank is None:
        yield KeyDisagreement(
            "precision.frozen",
            f"'{precision.frozen}' keeps frozen matrices in 4 bits, and without lora.rank"
            " none is: set lora.rank, such as 16, or leave precision.frozen out",
        )


def schedule_lengths(schedule: ScheduleConfig, train: TrainConfig) -> Iterator[KeyDisagreement]:
    """Warm-up and decay fit into train.steps."""
    if schedule.warmup_steps > train.steps:
        yield KeyDisagreement(
            "schedule.warmup_steps",
            f"{schedule.warmup_steps} is longer than train.steps {train.steps}:"
            f" shorten the warm-up, with schedule.warmup_steps={train.steps // 10} for instance, or train for"
            f" longer, with train.steps={schedule.warmup_steps} or more",
        )
    elif (decay := schedule.decay_steps or 0) + schedule.warmup_steps > train.steps:
        yield KeyDisagreement(
            "schedule.decay_steps",
            f"{decay} is longer than the run, whose train.steps are {train.steps}, of"
            f" which {schedule.warmup_steps} warm up: shorten it, or leave it out for a fifth of the run",
        )


def rank_range(launch: LaunchConfig, mesh: MeshConfig) -> Iterator[KeyDisagreement]:
    """A range of ranks needs a mesh that at least two of its numbers can form."""
    ranks = launch.ranks
    if not isinstance(ranks, str):
        return
    if mesh.dp_shard is not None and mesh.dp_replicate is not None:
        yield KeyDisagreement(
            "launch.ranks",
            f"'{ranks}' lets ranks become fewer, and plan.mesh.dp_shard {mesh.dp_shard} says how many"
            f" there are, {mesh.fixed * mesh.dp_shard}: leave plan.mesh.dp_shard out, which then is what the others"
            " leave, or set plan.mesh.dp_replicate to null, and groups of so many ranks come and go",
        )
    elif len(launch.numbers(mesh.fixed)) < 2:
        yield KeyDisagreement(
            "launch.ranks",
            f"'{ranks}' lets ranks become fewer, but the mesh has multiples of {mesh.fixed} of them"
            f" (plan.mesh: pp, {'dp_replicate' if mesh.dp_replicate else 'dp_shard'}, cp and tp), and two of these are"
            " not within: make the range wider",
        )


def preference_pairs(objective: ObjectiveConfig, data: DataConfig) -> Iterator[KeyDisagreement]:
    """Preference pairs are neither packed nor learnt in part."""
    if not objective.kind.of_pairs:
        return
    if data.packing not in (None, "single"):
        yield KeyDisagreement(
            "objective",
            f"'{objective.name}' compares two sequences of one text each, and data.packing is"
            f" '{data.packing}': leave it out",
        )
    if data.loss_on != "assistant":
        yield KeyDisagreement(
            "objective",
            f"'{objective.name}' is of completions, all of them, and data.loss_on is '{data.loss_on}': leave it out",
        )


def loss_without_logits(objective: ObjectiveConfig, precision: PrecisionConfig) -> Iterator[KeyDisagreement]:
    """A loss is computed in chunks of tokens where it is one sum over them, and its scale is known."""
    if objective.loss == "chunked" and (why := why_all_logits(objective, precision)):
        yield KeyDisagreement("objective.loss", f"is 'chunked', but {why}: set objective.loss to 'auto' or 'full'")


def why_all_logits(objective: ObjectiveConfig, precision: PrecisionConfig) -> str:
    """Why the loss cannot be computed without all logits of a micro-batch; empty if it can, for all that is known."""
    if objective.name != "next_token":
        return f"objective.name '{objective.name}' does not learn from one sum over all tokens"
    if precision.dtypes["compute"] == "fp16":
        return "under fp16 a chunk's gradients would be formed before their loss scale is known"
    return ""


def reward_head(
    objective: ObjectiveConfig, lora: LoraConfig, checkpoint: CheckpointConfig, model: ModelConfig
) -> Iterator[KeyDisagreement]:
    """A model that ends in a score has a new head."""
    if objective.kind.scored and lora.rank is not None:
        yield KeyDisagreement(
            "objective",
            f"'{objective.name}' trains a new head, which lora.rank would freeze: leave lora out, or set"
            " objective to 'dpo'",
        )
    if objective.kind.scored and checkpoint.save_format == "hf" and model.kind == "decoder":
        yield KeyDisagreement(
            "checkpoint.save_format",
            f"'hf' of objective '{objective.name}' needs a model that transformers has with a"
            " score: set model.kind to 'huggingface', or checkpoint.save_format to 'terrazzo'",
        )


def experts(model: ModelConfig, objective: ObjectiveConfig, checkpoint: CheckpointConfig) -> Iterator[KeyDisagreement]:
    """The decoder's mixture of experts learns next tokens, and is saved in Terrazzo's format."""
    if model.experts.count is None:
        return
    if objective.kind.of_pairs:
        yield KeyDisagreement(
            "objective",
            f"'{objective.name}' has not been tried with experts, whose auxiliary losses are of tokens:"
            " remove model.experts, or set objective.name to 'next_token'",
        )
    if checkpoint.save_format == "hf":
        yield KeyDisagreement(
            "checkpoint.save_format",
            "'hf' writes the built-in decoder as a Llama, which has no experts: remove"
            " model.experts, or set checkpoint.save_format to 'terrazzo'",
        )


def attention_lengths(model: ModelConfig, batch: BatchConfig) -> Iterator[KeyDisagreement]:
    """Window and stride of attention are no longer than a sequence."""
    for name, value in (("window", model.attention.window), ("stride", model.attention.stride)):
        if value is not None and value > batch.sequence_length:
            yield KeyDisagreement(
                f"model.attention.{name}",
                f"{value} is longer than a sequence, batch.sequence_length"
                f" {batch.sequence_length}: leave it out, or train on longer sequences",
            )


def prompts(model: ModelConfig, data: DataConfig, objective: ObjectiveConfig) -> Iterator[KeyDisagreement]:
    """A prefix mask is of what is before the first learnt token of a document, which others must not see."""
    if not model.attention.prefix:
        return
    if objective.kind.scored:
        yield KeyDisagreement(
            "objective",
            f"'{objective.name}' scores whole texts, and model.attention.prefix is of prompts: remove it, or set"
            " objective.name to 'next_token' or 'dpo'",
        )
    if data.loss_on == "all":
        yield KeyDisagreement(
            "model.attention.prefix",
            "is of what is before the first learnt token, and with data.loss_on 'all' nothing is: leave data.loss_on"
            " out, or remove model.attention.prefix",
        )
    if data.packing in ("stream", "whole") and data.attention == "sequence":
        yield KeyDisagreement(
            "model.attention.prefix",
            f"with data.packing '{data.packing}' puts several prompts in a sequence, each of its own document: set"
            " data.attention to 'document', or data.packing to 'single'",
        )


def attention_as_mistral(model: ModelConfig, checkpoint: CheckpointConfig) -> Iterator[KeyDisagreement]:
    """A decoder with a window is exported as a Mistral, which has to have all of its attention settings."""
    attention = model.attention
    if attention.prefix and checkpoint.save_format == "hf":
        yield KeyDisagreement(
            "checkpoint.save_format",
            "'hf' writes the built-in decoder as a Llama, which has no prefix mask (model.attention.prefix): set"
            " checkpoint.save_format to 'terrazzo'",
        )
    if attention.window is not None and checkpoint.save_format == "hf" and (why := attention.not_mistral):
        yield KeyDisagreement(
            "checkpoint.save_format",
            f"'hf' writes a decoder with a window as a Mistral, which has no {why}: set"
            f" checkpoint.save_format to 'terrazzo'",
        )


# -- what ranks share ----------------------------------------------------------------------------------------------


def stages(mesh: MeshConfig, objective: ObjectiveConfig, train: TrainConfig) -> Iterator[KeyDisagreement]:
    """A model in stages learns next tokens by one forward, is not compiled, and writes no text."""
    if mesh.pp == 1:
        return
    key, beside, without = "plan.mesh.pp", f"is {mesh.pp}, and", "or plan.mesh.pp=1"
    if objective.name != "next_token":
        yield KeyDisagreement(
            key,
            f"{beside} objective '{objective.name}' looks at outputs of several forwards. Set objective=next_token,"
            f" {without}",
        )
    if train.compile:
        yield KeyDisagreement(key, f"{beside} no stage is compiled yet. Set train.compile=false, {without}")
    for name in ("sample_every", "sample_chat"):
        if getattr(train, name) is not None:
            yield KeyDisagreement(
                key, f"{beside} a model in stages writes no text (train.{name}). Set train.{name}=null, {without}"
            )


def shared_sequences(mesh: MeshConfig, objective: ObjectiveConfig, train: TrainConfig) -> Iterator[KeyDisagreement]:
    """Ranks that share each sequence have a part of a text, and exchange keys in its attention."""
    if mesh.cp == 1:
        return
    key, beside = "plan.mesh.cp", f"is {mesh.cp}, and"
    if objective.kind.of_pairs:
        yield KeyDisagreement(
            key,
            f"{beside} objective '{objective.name}' compares whole texts, of which a rank would have a part. Set"
            " plan.mesh.cp=1, or objective=next_token",
        )
    if train.compile:
        yield KeyDisagreement(
            key,
            f"{beside} train.compile has not been tried with attention that exchanges with other ranks. Set"
            " train.compile=false, or plan.mesh.cp=1",
        )


def shared_experts(
    mesh: MeshConfig, model: ModelConfig, objective: ObjectiveConfig, parallel: ParallelConfig
) -> Iterator[KeyDisagreement]:
    """Ranks along `ep` share experts of next tokens, and those along `tp` give each of them other tokens."""
    count, tensor = model.experts.count, parallel.tensor
    if mesh.ep > 1 and model.kind == "huggingface" and objective.kind.of_pairs:
        yield KeyDisagreement(
            "plan.mesh.ep",
            f"is {mesh.ep}, and objective '{objective.name}' has not been tried with experts that ranks share. Set"
            " plan.mesh.ep=1, or objective=next_token",
        )
    exchanged = count is not None or mesh.ep > 1  # of others each rank's own have the same gradient, which counts once
    if mesh.tp > 1 and exchanged and not tensor.sequence:
        yield _repeated_tokens(mesh, "the same tokens", "parallel.tensor.sequence=true")
    elif mesh.tp > 1 and count is not None and tensor.plan != "auto":
        yield _repeated_tokens(mesh, "the same tokens, or may", "parallel.tensor.plan=auto")


def _repeated_tokens(mesh: MeshConfig, which: str, edit: str) -> KeyDisagreement:
    return KeyDisagreement(
        "plan.mesh.tp",
        f"is {mesh.tp}, and its ranks would all give experts {which}: each would count as often. Use {edit}, or"
        " plan.mesh.tp=1",
    )


def replicas_apart(
    plan: PlanConfig, precision: PrecisionConfig, guard: GuardConfig, train: TrainConfig, model: ModelConfig
) -> Iterator[KeyDisagreement]:
    """Groups that train by themselves are several, with fp32 masters, and no step of theirs needs all ranks."""
    if plan.sync_every is None:
        return
    for problem, edit in _needs_all_ranks(plan.mesh, precision, guard, train, model):
        yield KeyDisagreement(
            "plan.sync_every", f"is {plan.sync_every}, and {problem}: {edit}, or plan.sync_every=null"
        )


def _needs_all_ranks(
    mesh: MeshConfig, precision: PrecisionConfig, guard: GuardConfig, train: TrainConfig, model: ModelConfig
) -> Iterator[tuple[str, str]]:
    """Each obstacle to groups that train by themselves, with its edit."""
    if mesh.dp_replicate == 1:
        yield "there is one group of ranks", "set plan.mesh.dp_replicate to the number of groups, such as 2"
    master = precision.dtypes["master"]
    if master != "fp32" and precision.rounding != "remainder":
        yield f"master weights are {DTYPE_SPELLINGS[master]}", "set precision.master=fp32"
    if precision.error_feedback:
        yield "precision.error_feedback would have each group keep residuals", "set precision.error_feedback=false"
    if guard.acts:
        yield "guard judges each step by the gradients of all ranks", "set guard.action=stop and guard.spike=null"
    for name in ("replay_every", "memory_every"):
        if getattr(guard, name) is not None:
            yield f"guard.{name} compares ranks that have other weights within a round", f"set guard.{name}=null"
    if train.check_replicas_every is not None:
        yield (
            "train.check_replicas_every is set, which the first step of every round does for the groups",
            "set train.check_replicas_every=null",
        )
    if model.experts.count is not None:
        yield "model.experts are balanced by the tokens of all ranks", "train a model without experts"
    for axis in ("pp", "ep"):
        if (size := getattr(mesh, axis)) > 1:
            yield f"plan.mesh.{axis} is {size}, which has not been tried within such groups", f"set plan.mesh.{axis}=1"


# -- the guard -----------------------------------------------------------------------------------------------------


def replays(guard: GuardConfig, mesh: MeshConfig) -> Iterator[KeyDisagreement]:
    """Replays compare ranks that compute alone."""
    if guard.replay_every is not None and max(mesh.pp, mesh.ep) > 1:
        axis = "pp" if mesh.pp > 1 else "ep"
        yield KeyDisagreement(
            "guard.replay_every",
            f"is {guard.replay_every}, and plan.mesh.{axis} {getattr(mesh, axis)}: ranks along that axis compute with"
            " what others of it give them, so that a wrong one would not be told from these, and they are not"
            f" compared. Set guard.replay_every=null, or plan.mesh.{axis}=1",
        )


def rollback(guard: GuardConfig, checkpoint: CheckpointConfig) -> Iterator[KeyDisagreement]:
    """To go back to a checkpoint takes one before the end of the run."""
    if guard.action == "rollback" and checkpoint.every is None and checkpoint.local.folder is None:
        yield KeyDisagreement(
            "guard.action",
            "is 'rollback', and checkpoint.every is null: there would be no checkpoint to go back to. Set"
            " checkpoint.every, such as 100, or guard.action=skip",
        )
