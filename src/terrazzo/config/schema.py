"""What a training run is, as one strict, documented tree of settings: `Config`.

Each section is the module of its name in `sections`; all refuse unknown keys, NaN and infinities. What sections say
together is in `section_rules`. Reading files, overrides and the wording of errors live in `reading`; checks that need
the machine (ranks, folders, devices) live in the trainer's `preflight`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from terrazzo.config import section_rules as rules
from terrazzo.config.section import KeyDisagreement, Section
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
        """Numbers of ranks that `launch.ranks` allows and the mesh can use, ascending; empty where it is null."""
        return self.launch.numbers(self.plan.mesh.fixed)

    @property
    def sequences_per_sample(self) -> int:
        """Sequences in one sample: 2 for a preference pair, else 1."""
        return 2 if self.objective.kind.of_pairs else 1

    @property
    def cuts_attention(self) -> bool:
        """Whether documents in one sequence are kept apart: not where each sequence has one, as far as is known.

        With `data.packing` left out it depends on the data: conversations get a sequence each.
        """
        apart = self.data.attention == "document" and self.data.packing != "single"
        return apart and not self.objective.kind.of_pairs

    @property
    def needs_all_logits(self) -> bool:
        """Whether the loss cannot be computed without all logits of a micro-batch, whatever the model is."""
        return bool(rules.why_all_logits(self.objective, self.precision))

    @property
    def checkpoint_folder(self) -> str:
        """Folder or URL of the checkpoints: `checkpoint.folder`, by default `log.folder/checkpoints`."""
        return self.checkpoint.folder or str(self.log.folder / CHECKPOINTS)

    def _disagreements(self) -> Iterator[KeyDisagreement]:
        yield from rules.offloaded_activations(self.offload, self.train)
        yield from rules.adapters(self.lora, self.model)
        yield from rules.frozen_matrices(self.precision, self.lora)
        yield from rules.schedule_lengths(self.schedule, self.train)
        yield from rules.rank_range(self.launch, self.plan.mesh)
        yield from rules.preference_pairs(self.objective, self.data)
        yield from rules.loss_without_logits(self.objective, self.precision)
        yield from rules.reward_head(self.objective, self.lora, self.checkpoint, self.model)
        yield from rules.experts(self.model, self.objective, self.checkpoint)
        yield from rules.attention_lengths(self.model, self.batch)
        yield from rules.prompts(self.model, self.data, self.objective)
        yield from rules.attention_as_mistral(self.model, self.checkpoint)
        yield from rules.stages(self.plan.mesh, self.objective, self.train)
        yield from rules.shared_sequences(self.plan.mesh, self.objective, self.train)
        yield from rules.shared_experts(self.plan.mesh, self.model, self.objective, self.parallel)
        yield from rules.replicas_apart(self.plan, self.precision, self.guard, self.train, self.model)
        yield from rules.replays(self.guard, self.plan.mesh)
        yield from rules.rollback(self.guard, self.checkpoint)
