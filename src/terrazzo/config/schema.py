"""What a training run is, as one strict, documented tree of settings: `Config`, and what its sections say together.

Each section is the module of its name in `sections`; all refuse unknown keys, NaN and infinities. Reading files,
overrides and the wording of errors live in `reading`; checks that need the machine (ranks, folders, devices) live in
the trainer's `preflight`.
"""

from __future__ import annotations

from collections.abc import Sequence

from terrazzo.config.section import Section
from terrazzo.config.sections.batch import BatchConfig
from terrazzo.config.sections.checkpoint import CheckpointConfig
from terrazzo.config.sections.data import DataConfig
from terrazzo.config.sections.guard import GuardConfig
from terrazzo.config.sections.launch import LaunchConfig
from terrazzo.config.sections.log import LogConfig
from terrazzo.config.sections.lora import LoraConfig
from terrazzo.config.sections.model import ModelConfig
from terrazzo.config.sections.objective import ObjectiveConfig
from terrazzo.config.sections.offload import OffloadConfig
from terrazzo.config.sections.optimizer import OptimizerConfig
from terrazzo.config.sections.parallel import ParallelConfig
from terrazzo.config.sections.plan import PlanConfig
from terrazzo.config.sections.precision import PrecisionConfig
from terrazzo.config.sections.schedule import ScheduleConfig
from terrazzo.config.sections.train import TrainConfig
from terrazzo.files import CHECKPOINTS

__all__ = ["Config"]


class Config(Section):
    """A whole training run."""

    model: ModelConfig = ModelConfig()
    lora: LoraConfig = LoraConfig()
    data: DataConfig = DataConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    plan: PlanConfig = PlanConfig()
    parallel: ParallelConfig = ParallelConfig()
    offload: OffloadConfig = OffloadConfig()
    precision: PrecisionConfig = PrecisionConfig()
    batch: BatchConfig = BatchConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    train: TrainConfig = TrainConfig()
    guard: GuardConfig = GuardConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    launch: LaunchConfig = LaunchConfig()
    log: LogConfig = LogConfig()

    @property
    def rank_numbers(self) -> Sequence[int]:
        """How many ranks there may be, in ascending order, as the mesh can be made up; none where nothing says so."""
        return self.launch.numbers(self.plan.mesh.fixed)

    @property
    def sequences_per_sample(self) -> int:
        """A preference pair is two sequences."""
        return 2 if self.objective.kind.of_pairs else 1

    @property
    def cuts_attention(self) -> bool:
        """Whether documents in one sequence are kept apart: not where each sequence has one, as far as is known.

        With `data.packing` left out it depends on the data: conversations get a sequence each.
        """
        apart = self.data.attention == "document" and self.data.packing != "single"
        return apart and not self.objective.kind.of_pairs

    @property
    def checkpoint_folder(self) -> str:
        """Where checkpoints are, whether the key was given or not."""
        return self.checkpoint.folder or str(self.log.folder / CHECKPOINTS)

    def _agrees(self) -> None:
        if self.offload.activations == "cpu" and self.train.activation_checkpointing == "none":
            raise ValueError(
                "offload.activations 'cpu' moves what activation checkpointing keeps, and"
                " train.activation_checkpointing is 'none': set it to full, selective or every_N"
            )
        if self.lora.rank is not None and (self.model.kind != "huggingface" or self.model.weights != "pretrained"):
            raise ValueError(
                "lora.rank trains adapters on a frozen model, which has to be one with weights: set model.kind to"
                " 'huggingface' and model.weights to 'pretrained'"
            )
        if self.precision.frozen is not None and self.lora.rank is None:
            raise ValueError(
                f"precision.frozen '{self.precision.frozen}' keeps frozen matrices in 4 bits, and without lora.rank"
                " none is: set lora.rank, such as 16, or leave precision.frozen out"
            )
        if self.schedule.warmup_steps > self.train.steps:
            raise ValueError(
                f"schedule.warmup_steps {self.schedule.warmup_steps} is longer than train.steps {self.train.steps}:"
                f" shorten the warm-up, with schedule.warmup_steps={self.train.steps // 10} for instance, or train for"
                f" longer, with train.steps={self.schedule.warmup_steps} or more"
            )
        if (decay := self.schedule.decay_steps or 0) + self.schedule.warmup_steps > self.train.steps:
            raise ValueError(
                f"schedule.decay_steps {decay} is longer than the run, whose train.steps are {self.train.steps}, of"
                f" which {self.schedule.warmup_steps} warm up: shorten it, or leave it out for a fifth of the run"
            )
        self._ranks_agree()
        self._pairs_agree()
        self._experts_agree()
        self._attention_agrees()

    def _ranks_agree(self) -> None:
        ranks, mesh = self.launch.ranks, self.plan.mesh
        if not isinstance(ranks, str):
            return
        if mesh.dp_shard is not None:
            raise ValueError(
                f"launch.ranks '{ranks}' lets ranks become fewer, and plan.mesh.dp_shard {mesh.dp_shard} says how many"
                f" there are, {mesh.fixed * mesh.dp_shard}: leave plan.mesh.dp_shard out, which then is what the others"
                " leave"
            )
        if len(self.rank_numbers) < 2:
            raise ValueError(
                f"launch.ranks '{ranks}' lets ranks become fewer, but the mesh has multiples of {mesh.fixed} of them"
                " (plan.mesh: pp, dp_replicate, cp and tp), and two of these are not within: make the range wider"
            )

    def _pairs_agree(self) -> None:
        objective, kind, data = self.objective.name, self.objective.kind, self.data
        if not kind.of_pairs:
            return
        if data.packing not in (None, "single"):
            raise ValueError(
                f"objective '{objective}' compares two sequences of one text each, and data.packing is"
                f" '{data.packing}': leave it out"
            )
        if data.loss_on != "assistant":
            raise ValueError(
                f"objective '{objective}' is of completions, all of them, and data.loss_on is '{data.loss_on}': leave"
                " it out"
            )
        if kind.scored and self.lora.rank is not None:
            raise ValueError(
                "objective 'reward' trains a new head, which lora.rank would freeze: leave lora out, or set objective"
                " to 'dpo'"
            )
        if kind.scored and self.checkpoint.save_format == "hf" and self.model.kind == "decoder":
            raise ValueError(
                "checkpoint.save_format 'hf' of objective 'reward' needs a model that transformers has with a score:"
                " set model.kind to 'huggingface', or save_format to 'terrazzo'"
            )

    def _experts_agree(self) -> None:
        experts, objective = self.model.experts, self.objective.name
        if experts.count is None:
            return
        if self.objective.kind.of_pairs:
            raise ValueError(
                f"objective '{objective}' has not been tried with experts, whose auxiliary losses are of tokens: remove"
                " model.experts, or set objective to 'next_token'"
            )
        if self.checkpoint.save_format == "hf":
            raise ValueError(
                "checkpoint.save_format 'hf' writes the built-in decoder as a Llama, which has no experts: remove"
                " model.experts, or set save_format to 'terrazzo'"
            )

    def _attention_agrees(self) -> None:
        attention, length = self.model.attention, self.batch.sequence_length
        for name, value in (("window", attention.window), ("stride", attention.stride)):
            if value is not None and value > length:
                longer = f"model.attention.{name} {value} is longer than a sequence, batch.sequence_length {length}"
                raise ValueError(f"{longer}: leave it out, or train on longer sequences")
        if attention.window is not None and self.checkpoint.save_format == "hf" and (why := attention.not_mistral):
            raise ValueError(
                f"checkpoint.save_format 'hf' writes a decoder with a window as a Mistral, which has no {why}: set"
                " save_format to 'terrazzo'"
            )
