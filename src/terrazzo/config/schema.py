"""What a training run is, as one strict, documented tree of settings.

Every section refuses unknown keys, NaN and infinities. Reading files, overrides and the wording of errors live in
`reading`; checks that need the machine (ranks, folders, devices) live in the trainer's `preflight`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from terrazzo.config.axes import ParallelConfig
from terrazzo.config.guard import GuardConfig
from terrazzo.config.optimizer import OptimizerConfig
from terrazzo.config.precision import PrecisionConfig
from terrazzo.config.running import CheckpointConfig, LaunchConfig, LogConfig
from terrazzo.config.section import Named, Section
from terrazzo.config.task import DataConfig, LoraConfig, ModelConfig, ObjectiveConfig
from terrazzo.errors import did_you_mean
from terrazzo.files import CHECKPOINTS
from terrazzo.words import TIERS, tier_shares

__all__ = [
    "BatchConfig",
    "Config",
    "MeshConfig",
    "OffloadConfig",
    "OptimizerConfig",
    "PlanConfig",
    "ScheduleConfig",
    "tier_text",
]


class MeshConfig(Section):
    """How the ranks are arranged: `pp` times `dp_replicate` groups of `dp_shard` times `cp` times `tp` ranks each.

    `ep` is cut out of these groups, and takes no ranks of its own.
    """

    pp: int = Field(1, gt=0, description="parts of the ranks that have other layers each (pipeline parallelism)")
    dp_replicate: int = Field(1, gt=0, description="groups of ranks; each group holds all states of a hybrid plan")
    dp_shard: int | None = Field(None, gt=0, description="default: the number of ranks divided by the others")
    cp: int = Field(1, gt=0, description="ranks that share each sequence (context parallelism)")
    tp: int = Field(1, gt=0, description="neighbouring ranks that share each matrix (tensor parallelism)")
    ep: int = Field(1, gt=0, description="neighbouring ranks, of the axes above, that have other experts each")

    @property
    def ranks_per_batch(self) -> int:
        """Neighbouring ranks that read the same sequences."""
        return self.cp * self.tp

    @property
    def fixed(self) -> int:
        """Ranks that the axes beside `dp_shard` make up: there are so many, or a multiple of it."""
        return self.pp * self.dp_replicate * self.ranks_per_batch

    def readers(self, world_size: int) -> int:
        """How many shares there are of all sequences; each is read by the ranks of all stages, too."""
        return world_size // (self.ranks_per_batch * self.pp)


class PlanConfig(Named):
    """The row of the table: a preset by name, or four custom places such as "-", "D" or "S,R"."""

    name: str | None = Field(
        None, description="preset, such as zero0, zero1, zero2, zero3, hybrid_shard; zero3@cpu with offload"
    )
    weight: str | None = Field(None, description="compute weights, at rest")
    between: str | None = Field(None, description="compute weights, from the end of forward to backward")
    grad: str | None = Field(None, description="gradients, once reduced")
    optim: str | None = Field(None, description="master weights and optimizer state")
    mesh: MeshConfig = MeshConfig()
    units: list[str] | None = Field(None, description="class names or name globs; default: found by themselves")
    prefetch: int = Field(1, ge=0, description="units gathered ahead of the one that runs")

    @model_validator(mode="before")
    @classmethod
    def _usual(cls, value: Any) -> Any:
        """`zero3` where neither a name nor a place is given."""
        keys = ("name", "weight", "between", "grad", "optim")
        open_ = isinstance(value, Mapping) and all(value.get(key) is None for key in keys)
        return {**value, "name": "zero3"} if open_ else value

    def _agrees(self) -> None:
        rows = {"weight": self.weight, "between": self.between, "grad": self.grad, "optim": self.optim}
        places = [key for key, value in rows.items() if value is not None]
        if places and self.name is not None:
            raise ValueError(f"a preset name ('{self.name}') and custom places ({', '.join(places)}): give one of them")
        if places and len(places) < len(rows):
            missing = ", ".join(key for key in rows if key not in places)
            raise ValueError(f"a custom plan names all four places; missing: {missing} ('-' means not split)")


def tier_text(value: str | Mapping[Any, Any]) -> str:
    """`cpu`, or a mapping such as `{cpu: 0.7}`, as the text that `Place` reads. Raises: `ValueError` for no tier."""
    shares = value if isinstance(value, Mapping) else dict(part.partition(":")[::2] for part in value.split(","))
    for tier in shares:
        if str(tier).strip() not in TIERS:
            raise ValueError(f"{tier!r} is no tier.{did_you_mean(str(tier), TIERS)} Tiers: {', '.join(TIERS)}")
    return ",".join(f"{tier}:{share}" for tier, share in value.items()) if isinstance(value, Mapping) else value


class OffloadConfig(Section):
    """The tiers of states that are not on the device, in place of the plan's, and how they come and go."""

    weight: str | None = Field(
        None, description="weights at rest: device, cpu, nvme, or shares of the units; null: as the plan says"
    )
    grad: str | None = Field(None, description="finished gradients, likewise")
    optim: str | None = Field(None, description="optimizer state, likewise, master weights included")
    activations: Literal["device", "cpu"] = Field(
        "device", description="inputs that activation checkpointing keeps: `device`, or `cpu` for host memory"
    )
    path: str | list[str] | None = Field(
        None,
        description="nvme: folder for swap files; several are striped. Those in log.folder are made, others must exist",
    )
    step: Literal["auto", "overlapped", "synchronous", "backward"] = Field(
        "auto",
        description="when units are updated: `overlapped` behind the next forward, `backward` behind the rest of "
        "backward, `synchronous` on the spot; `auto`: backward where nothing is clipped or scaled, else overlapped",
    )
    threads: int | None = Field(
        None, gt=0, description="of the update on the CPU, per rank; default: its share of cores"
    )
    pin: bool = Field(True, description="CUDA: page-lock the host memory of states and activations")
    direct: bool = Field(True, description="nvme: go past the page cache (O_DIRECT) where the file system can")
    block_mib: float = Field(4.0, gt=0, le=1024, description="nvme: size of one read or write")
    depth: int = Field(8, gt=0, description="nvme: reads and writes in flight per rank")
    digest: bool = Field(False, description="nvme: check what is read against a CRC-32 of what was written")

    @field_validator("weight", "grad", "optim", mode="before")
    @classmethod
    def _as_tiers(cls, value: Any) -> Any:
        if not isinstance(value, str | dict):
            return value
        text = tier_text(value)
        return "device" if set(tier_shares(text)) == {"device"} else text


class BatchConfig(Section):
    """Sizes in sequences and tokens. The number of micro-batches per step follows from these and the rank count."""

    global_batch: int = Field(32, gt=0, description="sequences per optimizer step, over all ranks")
    micro_batch: int = Field(4, gt=0, description="sequences per forward pass on one rank")
    sequence_length: int = Field(256, gt=1, description="tokens per sequence")


class ScheduleConfig(Section):
    """The learning rate as a share of `optimizer.lr` over the run."""

    name: Literal["constant", "cosine", "linear", "wsd"] = Field(
        "cosine", description="shape of the learning rate; wsd: warm-up, stable, decay"
    )
    warmup_steps: int = Field(0, ge=0, description="linear warm-up; at most train.steps")
    final_fraction: float = Field(0.1, ge=0, le=1, description="share of the peak that is left at the last step")
    decay_steps: int | None = Field(None, gt=0, description="wsd: length of the final decay; default: a fifth")

    def _agrees(self) -> None:
        if self.decay_steps is not None and self.name != "wsd":
            raise ValueError(f"decay_steps belongs to schedule 'wsd', this one is '{self.name}': remove it")


class TrainConfig(Section):
    """The loop."""

    steps: int = Field(1000, gt=0, description="optimizer steps")
    clip: float | None = Field(1.0, gt=0, description="largest global gradient norm; null: no clipping")
    seed: int = Field(0, ge=0, lt=2**63, description="of initial weights, data order, dropout and samples")
    eval_every: int | None = Field(None, gt=0, description="steps between evaluations; null: only at the end")
    eval_batches: int = Field(8, gt=0, description="micro-batches per rank in one evaluation")
    sample_every: int | None = Field(None, gt=0, description="steps between text samples; null: only at the end")
    check_replicas_every: int | None = Field(
        None,
        gt=0,
        description="steps between comparisons of ranks' copies of weights and optimizer states, which end the run "
        "when one differs; null: never",
    )
    sample_tokens: int = Field(128, ge=0, description="length of a text sample; 0: none at all")
    sample_prompt: str = Field("\n", description="what a text sample begins with")
    sample_chat: str | None = Field(
        None, description="a user's message; a sample is then its answer by the chat template, the likeliest tokens"
    )
    activation_checkpointing: str = Field(
        "none", description="none, full, selective, selective_half, or every_N such as every_2"
    )
    activation_checkpointing_ops: list[str] | None = Field(None, description="selective: operators kept, not redone")
    compile: bool = Field(False, description="torch.compile for each unit")

    def _agrees(self) -> None:
        if self.sample_chat is not None and self.sample_prompt != type(self).model_fields["sample_prompt"].default:
            raise ValueError(
                "sample_prompt and sample_chat: give one of them, what a text begins with or what is asked"
            )

    @field_validator("activation_checkpointing")
    @classmethod
    def _known_mode(cls, value: str) -> str:
        if not re.fullmatch(r"none|full|selective|selective_half|every_[1-9][0-9]{0,8}", value):
            modes = ("none", "full", "selective", "selective_half", "every_N")
            near = did_you_mean(value, modes)
            raise ValueError(f"'{value}' is not one of {', '.join(modes)} (such as every_2).{near}".rstrip("."))
        return value

    @property
    def checkpointing(self) -> tuple[Literal["none", "full", "selective", "selective_half"], int]:
        """Mode, and one unit in how many, of `activation_checkpointing`: `every_2` is `("full", 2)`."""
        mode, _, every = self.activation_checkpointing.partition("every_")
        return ("full", int(every)) if every else (mode, 1)  # type: ignore[return-value]  # as the pattern has it


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
