"""Settings, and the sections that a description is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Generic, Literal, TypeVar

from terrazzo.documents.dotted_keys import keys_in
from terrazzo.engine import LossScaling

__all__ = [
    "OFF",
    "TIER_PATHS",
    "UNSET",
    "ActivationCheckpointingSection",
    "BatchSection",
    "LoadingSection",
    "MeshSection",
    "OffloadSection",
    "OptimizerSection",
    "ParallelSection",
    "PrecisionSection",
    "PrefetchSection",
    "SavingSection",
    "ScheduleSection",
    "Setting",
    "SettingOrigin",
    "SettingsByPath",
    "ShardingSection",
    "TrainingSection",
    "UnitsSection",
]

T = TypeVar("T")
SettingOrigin = Literal["file", "default", "auto", "derived", "unset"]
"""Who gave a value: the file, the default, a rule that replaced "auto", arithmetic on other values, or nobody."""


@dataclass(frozen=True)
class Setting(Generic[T]):
    """One value.

    Attributes:
        value: plain, in neutral words: `"bf16"`, `8`, `("LlamaDecoderLayer",)`.
        origin: who gave it.
        key: the source's dotted key that it came from; several as `keys_in` splits them; empty where no key gave it.
    """

    value: T
    origin: SettingOrigin = "file"
    key: str = ""

    @property
    def keys(self) -> tuple[str, ...]:
        return keys_in(self.key)

    @property
    def is_set(self) -> bool:
        return self.origin != "unset"


SettingsByPath = dict[str, Setting[Any]]
"""Settings by path."""
UNSET: Setting[Any] = Setting(None, "unset")
"""Left to the user's code: the dialect has no such setting, or gives it no default."""


@dataclass(frozen=True)
class ShardingSection:
    """The row of the table: over which data axes each state is split, as `Place` writes it (`-`, `S`, `S,R`, `D`)."""

    weight: Annotated[Setting[str], "axes that the compute weights are split over, at rest"] = UNSET
    between: Annotated[Setting[str], "the same, from the end of forward to backward"] = UNSET
    grad: Annotated[Setting[str], "axes that the reduced gradient is split over"] = UNSET
    optim: Annotated[Setting[str], "axes that master weights and optimizer state are split over"] = UNSET


@dataclass(frozen=True)
class MeshSection:
    """Degrees of parallelism. None: what is left of the world."""

    world: Annotated[Setting[int | None], "number of ranks"] = UNSET
    nodes: Annotated[Setting[int | None], "machines that they are on, as many on each"] = UNSET
    dp_replicate: Annotated[Setting[int | None], "replicas (outer data axis, R)"] = UNSET
    dp_shard: Annotated[Setting[int | None], "ranks per replica (inner data axis, S); none: what is left"] = UNSET
    tp: Annotated[Setting[int | None], "tensor parallel degree"] = UNSET
    cp: Annotated[Setting[int | None], "context parallel degree (ring attention)"] = UNSET
    sp: Annotated[Setting[int | None], "sequence parallel degree (Ulysses)"] = UNSET
    ep: Annotated[Setting[int | None], "expert parallel degree"] = UNSET
    pp: Annotated[Setting[int | None], "pipeline parallel degree"] = UNSET


@dataclass(frozen=True)
class ParallelSection:
    """How ranks work together that share more than data."""

    schedule: Annotated[
        Setting[str], "order in which stages work: 1f1b, gpipe, zero_bubble, or the source's own name"
    ] = UNSET
    chunks: Annotated[Setting[int | None], "stages of each rank"] = UNSET
    sequence: Annotated[Setting[bool], "tensor parallel ranks split sequences between matrices"] = UNSET


@dataclass(frozen=True)
class UnitsSection:
    """What is gathered and released as one."""

    policy: Annotated[
        Setting[str], "auto (found by themselves), classes, min_numel, or none (the whole model is one)"
    ] = UNSET
    classes: Annotated[Setting[tuple[str, ...]], "classes: class names of the modules"] = UNSET
    min_numel: Annotated[Setting[int | None], "min_numel: smallest number of elements"] = UNSET
    ignored: Annotated[Setting[Any], "modules or parameters that are not sharded"] = UNSET


@dataclass(frozen=True)
class PrecisionSection:
    """Every dtype, pinned: one of `DTYPES`; None: "auto", and what fills it is not known."""

    weight: Annotated[Setting[str], "storage of the compute weights at rest"] = UNSET
    compute: Annotated[Setting[str], "weights inside modules, and activations"] = UNSET
    reduce: Annotated[Setting[str], "gradients on the wire"] = UNSET
    accumulate: Annotated[Setting[str], "gradients kept across micro-batches"] = UNSET
    master: Annotated[Setting[str], "weights that the optimizer updates"] = UNSET
    moments: Annotated[Setting[str], "the rest of the optimizer's state"] = UNSET
    buffers: Annotated[Setting[str], "module buffers"] = UNSET
    output: Annotated[Setting[str], "what the model returns"] = UNSET
    saved: Annotated[Setting[str], "weights in an exported checkpoint"] = UNSET
    autocast: Annotated[
        Setting[bool], "torch.autocast to compute, operator by operator; weights that are not gathered keep their dtype"
    ] = UNSET
    loss_scaling: Annotated[Setting[LossScaling | None], "dynamic loss scaling"] = UNSET
    static_loss_scale: Annotated[Setting[float | None], "fixed loss scale"] = UNSET
    rounding: Annotated[Setting[str], "of weights that the optimizer updates: nearest, stochastic, or remainder"] = (
        UNSET
    )
    gather: Annotated[Setting[str], "matrices on the wire as they are gathered: compute, int8 or fp8"] = UNSET
    quantized_reduce: Annotated[Setting[str], "matrices' gradients on the wire: none, int8 or int4"] = UNSET
    error_feedback: Annotated[Setting[bool], "what codes of quantized_reduce lose is added to the next gradients"] = (
        UNSET
    )
    linears: Annotated[Setting[str], "how linear layers multiply: compute, fp8-tensorwise or fp8-rowwise"] = UNSET
    skip: Annotated[Setting[tuple[str, ...]], "globs over names of linear layers that stay in compute"] = UNSET


@dataclass(frozen=True)
class BatchSection:
    """Sizes in sequences and tokens."""

    global_batch: Annotated[Setting[int | None], "sequences per optimizer step, over all ranks"] = UNSET
    micro_batch: Annotated[Setting[int | None], "sequences per forward pass on one rank"] = UNSET
    accumulation: Annotated[Setting[int | None], "micro-batches per optimizer step"] = UNSET
    sequence_length: Annotated[Setting[int | None], "tokens per sequence"] = UNSET


@dataclass(frozen=True)
class OptimizerSection:
    """The optimizer: the class name as in torch.optim where it is one of those."""

    name: Annotated[Setting[str | None], "class, as in torch.optim"] = UNSET
    lr: Annotated[Setting[float | None], "learning rate (peak)"] = UNSET
    betas: Annotated[Setting[tuple[float, float] | None], "Adam: decay of the two moments"] = UNSET
    eps: Annotated[Setting[float | None], "Adam: term added to the denominator"] = UNSET
    weight_decay: Annotated[Setting[float | None], "weight decay"] = UNSET
    decay: Annotated[Setting[str], "what it is for: matrices (no norms and biases), or all parameters"] = UNSET
    options: Annotated[Setting[Mapping[str, Any]], "further arguments of the class"] = UNSET


@dataclass(frozen=True)
class ScheduleSection:
    """The learning rate over the run."""

    name: Annotated[Setting[str | None], "constant, cosine, linear, wsd, or the source's own name"] = UNSET
    warmup_steps: Annotated[Setting[int | None], "steps of linear warm-up"] = UNSET
    warmup_fraction: Annotated[Setting[float | None], "the same as a share of the run"] = UNSET
    warmup_start: Annotated[Setting[float | None], "share of the peak that warm-up starts at"] = UNSET
    total_steps: Annotated[Setting[int | None], "optimizer steps of the run"] = UNSET
    decay_steps: Annotated[Setting[int | None], "wsd: length of the final decay"] = UNSET
    decay_shape: Annotated[
        Setting[str],
        "wsd: of the final decay, as t goes from 0 to 1: linear, cosine, sqrt (1 - √t), exponential (2^(1-t) - 1)",
    ] = UNSET
    final_fraction: Annotated[Setting[float | None], "share of the peak that is left at the last step"] = UNSET
    warmup_lag: Annotated[
        Setting[int], "steps that warm-up is behind: step s, from 0, has s + 1 less so many of its parts of the peak"
    ] = UNSET
    decay_lag: Annotated[Setting[int], "steps behind the last one at which the rate would be at its lowest"] = UNSET
    options: Annotated[Setting[Mapping[str, Any]], "further arguments of the schedule"] = UNSET


@dataclass(frozen=True)
class TrainingSection:
    """The loop."""

    loss_mean: Annotated[
        Setting[str],
        "what a step's loss is the mean over: tokens (all alike), rank_tokens (the means of ranks), or micro_batches"
        " (the means of those)",
    ] = UNSET
    clip: Annotated[Setting[float | None], "largest global gradient norm; none: no clipping"] = UNSET
    nonfinite: Annotated[
        Setting[str],
        "where a loss or gradients are not finite: stop, skip (the step), rollback (to a checkpoint), or go_on",
    ] = UNSET
    compile: Annotated[Setting[bool], "torch.compile"] = UNSET
    seed: Annotated[Setting[int | None], "seed of the run"] = UNSET
    device: Annotated[Setting[str | None], "cpu or cuda"] = UNSET


@dataclass(frozen=True)
class PrefetchSection:
    """Units gathered ahead of the one that runs."""

    forward: Annotated[Setting[int | None], "in forward"] = UNSET
    backward: Annotated[Setting[int | None], "in backward"] = UNSET


@dataclass(frozen=True)
class ActivationCheckpointingSection:
    """What of the activations is kept."""

    mode: Annotated[Setting[str], "none, full, selective (by operator), selective_half, every (N-th block)"] = UNSET
    every: Annotated[Setting[int | None], "every: N"] = UNSET
    ops: Annotated[Setting[tuple[str, ...] | None], "selective: operators whose results are kept"] = UNSET
    offload: Annotated[Setting[bool], "what is kept lies in host memory"] = UNSET


@dataclass(frozen=True)
class OffloadSection:
    """Tiers: `device`, `cpu`, `nvme`, or shares of the units such as `cpu:0.7` (the rest is on the device)."""

    weight: Annotated[Setting[str], "tier of the compute weights"] = UNSET
    grad: Annotated[Setting[str], "tier of the reduced gradient"] = UNSET
    optim: Annotated[Setting[str], "tier of master weights and optimizer state"] = UNSET
    path: Annotated[Setting[tuple[str, ...]], "nvme: folders of the swap files"] = UNSET
    pin: Annotated[Setting[bool], "host memory is page-locked"] = UNSET
    buffers: Annotated[Setting[int | None], "staging buffers"] = UNSET
    step: Annotated[Setting[str | None], "step on the CPU: auto, overlapped, synchronous, backward"] = UNSET
    threads: Annotated[Setting[int | None], "threads of the step on the CPU, per rank"] = UNSET
    direct: Annotated[Setting[bool], "nvme: past the page cache (O_DIRECT)"] = UNSET
    block_bytes: Annotated[Setting[int | None], "nvme: size of one read or write"] = UNSET
    depth: Annotated[Setting[int | None], "nvme: reads and writes in flight per rank"] = UNSET
    digest: Annotated[Setting[bool], "nvme: what is read is checked"] = UNSET


@dataclass(frozen=True)
class LoadingSection:
    """How weights come in."""

    low_memory: Annotated[Setting[bool], "no rank but the first holds the whole model in host memory"] = UNSET
    broadcast: Annotated[Setting[bool], "rank 0's weights are sent to all"] = UNSET


@dataclass(frozen=True)
class SavingSection:
    """What is written."""

    state: Annotated[
        Setting[str], "training state: sharded (any number of ranks can resume), local, or full (on one rank)"
    ] = UNSET
    export: Annotated[Setting[str], "weights beside it: none, full (one state dict), hf (a Hugging Face folder)"] = (
        UNSET
    )
    when: Annotated[
        Setting[str], "training state by itself: never, end (of the run), or steps (every so many, and at the end)"
    ] = UNSET
    every: Annotated[Setting[int | None], "steps: optimizer steps between checkpoints"] = UNSET
    keep_last: Annotated[Setting[int | None], "checkpoints kept; none: all"] = UNSET
    folder: Annotated[Setting[str | None], "where to"] = UNSET
    background: Annotated[Setting[bool], "training goes on meanwhile"] = UNSET


TIER_PATHS = ("offload.weight", "offload.grad", "offload.optim")
OFF: dict[str, Any] = {
    **dict.fromkeys(("mesh.nodes", "mesh.dp_replicate", "mesh.tp", "mesh.cp", "mesh.sp", "mesh.ep", "mesh.pp"), 1),
    **dict.fromkeys(("precision.autocast", "training.compile", "activation_checkpointing.offload"), False),
    **dict.fromkeys(("offload.digest", "loading.low_memory", "loading.broadcast", "saving.background"), False),
    **dict.fromkeys(("activation_checkpointing.mode", "saving.export"), "none"),
    **dict.fromkeys((f"schedule.warmup_{name}" for name in ("steps", "fraction", "start", "lag")), 0),
    "schedule.decay_lag": 0,
    "precision.rounding": "nearest",
    "precision.gather": "compute",
    "precision.quantized_reduce": "none",
    "precision.error_feedback": False,
    "precision.linears": "compute",
    "optimizer.options": {},
    "schedule.options": {},
    **dict.fromkeys(("units.classes", "offload.path"), ()),
    "training.nonfinite": "go_on",
    "saving.when": "never",
    **dict.fromkeys(TIER_PATHS, "device"),
}
"""The value that asks for nothing to happen, by path."""
