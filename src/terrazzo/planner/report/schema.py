"""The JSON that `terrazzo plan --json` prints. `docs/reference/plan-json.md` describes every field.

One object, of one of two kinds: `PlanReport` for a model on machines, `StatesReport` for a bare number of parameters.
GB is 1e9 bytes, GiB is 2^30 bytes, `_s` is seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

__all__ = [
    "CollectiveReport",
    "EditRow",
    "ExplainedReport",
    "ExplainedTerm",
    "FindingReport",
    "FrontierRow",
    "MemoryReport",
    "PerRank",
    "PlanReport",
    "RefusedRow",
    "RoomReport",
    "SetupReport",
    "SizingReport",
    "SizingRow",
    "StatesReport",
    "StatesRow",
    "TermReport",
    "TimeReport",
    "TrafficReport",
]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    @classmethod
    def of(cls, origin: object, **others: Any) -> Self:
        """A report with what `origin` has under the names of fields, and `others`."""
        same = {
            name: getattr(origin, name) for name in cls.model_fields if name not in others and hasattr(origin, name)
        }
        return cls(**same, **others)


class TermReport(_Model):
    """One addend."""

    name: str = Field(description="unique in its part of the answer")
    value: float = Field(description="expected, in `unit`")
    upper: float = Field(description="at most, in `unit`")
    unit: Literal["B", "s"] = Field(description="bytes or seconds")
    formula: str = Field(description="key of the formula; `--explain NAME` prints it")
    inputs: Mapping[str, float] = Field(description="the numbers that were put in")


class ExplainedTerm(TermReport):
    """A term with the formula behind it."""

    part: str = Field(description="memory, host memory, disk, disk writes, traffic or time")
    text: str = Field(description="the formula")
    source: str = Field(description="where it is from")


class ExplainedReport(_Model):
    """What `--explain TERM --json` prints."""

    version: Literal[1] = Field(1, description="of this format")
    terms: tuple[ExplainedTerm, ...] = Field(description="all of that name")


class SetupReport(_Model):
    """What was asked, with everything that was left open filled in."""

    model: str = Field(description="preset, name of the folder, or decoder")
    parameters: int = Field(description="all of them, tied ones once")
    active_parameters: int = Field(description="those that one token meets")
    gpu: str = Field(description="as the table names it")
    gpus: int = Field(description="in all")
    nodes: int = Field(description="hosts")
    strategy: str = Field(description="name of the plan, with its offload, such as zero3@cpu")
    plan: Mapping[str, str] = Field(description="the four places: weight, between, grad, optim")
    mesh: Mapping[str, int] = Field(description="sizes of pp, dp_replicate, dp_shard, cp, tp, ep")
    context: str = Field("gather", description="of attention over cp: gather, ulysses or ring")
    tensor_overlap: str = Field("none", description="exchanges over tp beside products: none, backward or async")
    pipeline: str = Field("1f1b", description="schedule of stages over pp: 1f1b, gpipe or zero_bubble")
    virtual_stages: int = Field(1, description="stages of each rank over pp")
    sequence: int = Field(description="tokens")
    micro_batch: int = Field(description="sequences of one forward pass of one data rank")
    micro_batches: int = Field(description="forward passes of one data rank in an optimizer step")
    global_batch: int = Field(description="sequences of an optimizer step")
    empty_rows: int = Field(0, description="rows of its micro-batches, over all ranks, that have no sequence")
    precision: str = Field(description="as in `--precision`, with keys where it has them: `bf16,moments=int8`")
    optimizer: str = Field(description="as in `--optimizer`")
    activation_checkpointing: str = Field(description="none, selective, selective_half, full, or `full, 1 in 2`")
    compile: bool = Field(description="whether blocks are compiled")
    ema: bool = Field(False, description="whether there is an average of the weights")
    attention: str = Field(description="flash, cudnn, flash3, triton or math")
    loss: str = Field(description="full, fused, chunked or parts")


class RoomReport(_Model):
    """What the ranks of one host keep in its memory or on its disks; only places that hold something."""

    name: Literal["host", "disk"] = Field(description="which")
    expected_gib: float = Field(description="of all its ranks")
    upper_gib: float = Field(description="the same at most")
    capacity_gib: float | None = Field(description="of one host; null without --host-memory-gb or --disk-gb")


class MemoryReport(_Model):
    """Peak of the fullest rank."""

    expected_gib: float = Field(description="all that is expected in the device's memory: what has to fit")
    expected_gb: float = Field(description="the same in GB")
    upper_gib: float = Field(description="the same at most, whatever the device has")
    upper_gb: float = Field(description="the same in GB")
    allocated_gib: float = Field(description="what tensors hold: torch's allocated")
    allocated_gb: float = Field(description="the same in GB")
    reserved_gib: float = Field(description="allocated, with what the caching allocator keeps")
    device_gib: float = Field(description="reserved, with context and communicators: what nvidia-smi shows")
    capacity_gib: float | None = Field(description="what torch reports as total; null where it is not known")
    terms: Mapping[str, float] = Field(description="GiB by name; their sum is `allocated_gib`")
    breakdown: tuple[TermReport, ...] = Field(description="the same terms in bytes, with their formulas")
    per_pp_rank_gib: tuple[float, ...] = Field(description="allocated of each rank along pp")
    host: tuple[TermReport, ...] = Field(description="bytes of one rank in host memory")
    disk: tuple[TermReport, ...] = Field(description="bytes of one rank on disk")
    disk_writes: tuple[TermReport, ...] = Field((), description="bytes that one rank writes to disk in a step")
    hosts: tuple[RoomReport, ...] = Field((), description="what the ranks of one host keep there together")


class CollectiveReport(_Model):
    """What one rank sends for one purpose in one optimizer step."""

    name: str = Field(description="collective and what it moves")
    gb: float = Field(description="GB")
    formula: str = Field(description="key of the formula")
    inputs: Mapping[str, float] = Field(description="the numbers that were put in")


class TrafficReport(_Model):
    """What one rank sends in one optimizer step."""

    total_gb: float = Field(description="GB, all links together")
    collectives: tuple[CollectiveReport, ...] = Field(description="what it consists of")
    links_gb: Mapping[str, float] = Field(description="by link: scaleup, internode, pcie, disk")


class TimeReport(_Model):
    """One optimizer step."""

    step_s: float = Field(description="seconds")
    tokens_per_s_per_gpu: float = Field(description="tokens of all ranks per second, over the number of GPUs")
    mfu: float | None = Field(description="share of the dense peak; null where the peak is not known")
    bound_by: str = Field(
        description="what limits it: compute, communication, memory bandwidth, kernel launches, pipeline bubble or "
        "offload"
    )
    hidden_s: float = Field(description="communication behind computation, no part of `step_s`")
    calibrated: bool = Field(description="whether steps of this model under this plan were measured on this device")
    rates_measured: bool = Field(
        False, description="whether the device's rates were, with this or another model or plan"
    )
    band: float = Field(description="relative error that nine of ten published steps stay within; less if calibrated")
    cost_per_million_tokens: float | None = Field(description="in the currency of --price; null without it")
    terms: Mapping[str, float] = Field(description="seconds by name; their sum is `step_s`")
    breakdown: tuple[TermReport, ...] = Field(description="the same terms with their formulas")


class FindingReport(_Model):
    """A combination that is known not to work, or to work badly, in Terrazzo or in what `--framework` names."""

    rule: str = Field(description="name of the rule")
    severity: Literal["refuse", "planned", "warn"] = Field(
        description="refuse: it fails, or trains something else; planned: this version cannot run it yet; warn: it runs"
    )
    reason: str = Field(description="what is wrong")
    alternative: str = Field(description="what to do instead")
    source: str = Field(description="where it is known from")


class FrontierRow(_Model):
    """A plan that fits, in short. Fields mean what they mean in `setup`, `memory` and `time`."""

    strategy: str
    mesh: Mapping[str, int]
    context: str = "gather"
    pipeline: str = "1f1b"
    virtual_stages: int = 1
    gpus: int
    activation_checkpointing: str
    micro_batch: int
    micro_batches: int
    global_batch: int = Field(description="sequences of a step, in which speeds of plans are compared")
    runs_now: bool = Field(description="whether the framework runs it; else it is planned alone, and stands behind")
    expected_gib: float
    allocated_gib: float
    device_gib: float
    upper_gib: float
    fits: bool | None
    fits_surely: bool | None
    step_s: float | None
    tokens_per_s_per_gpu: float | None
    mfu: float | None
    bound_by: str | None


class EditRow(_Model):
    """A change with which what does not fit does, as it was planned."""

    options: str = Field(description="to add to the command")
    cost: str = Field(description="what that takes, against the plan without it if there were room")
    plan: FrontierRow = Field(description="what it is then")


class RefusedRow(_Model):
    """Plans of one strategy on one number of GPUs that do not run, and why the nearest of them does not."""

    strategy: str = Field(description="name of the plan")
    gpus: int = Field(description="in all")
    reason: str = Field(description="of the one that comes nearest")
    candidates: int = Field(description="how many plans these are")
    needed_gib: float | None = Field(
        description="what the smallest needs in the device's memory; null: memory is not the reason"
    )


class SizingRow(_Model):
    """The best plan on one number of GPUs."""

    gpus: int = Field(description="in all")
    fits: bool = Field(description="whether what is expected of some plan fits")
    fits_surely: bool = Field(description="whether some plan fits at most, 2 % to spare")
    strategy: str | None = Field(description="of the best plan; null where nothing runs, as the next three")
    device_gib: float | None = Field(description="expected in the device's memory")
    upper_gib: float | None = Field(description="the same at most")
    tokens_per_s_per_gpu: float | None = Field(description="of the best plan")
    reason: str = Field(description="why nothing runs; empty where something does")


class SizingReport(_Model):
    """How many GPUs are needed."""

    states_floor_gpus: int = Field(description="the fewest whose memory holds the model states alone")
    states_gb: float = Field(description="of all ranks together")
    gpus: int | None = Field(description="the fewest tried on which a plan fits at most; null if there is none")
    expected_gpus: int | None = Field(description="the fewest tried on which what is expected fits")
    parallel_gpus: int | None = Field(
        description="the fewest with tensor, pipeline and context parallelism beside, tried where `gpus` is null"
    )
    rows: tuple[SizingRow, ...] = Field(description="each number that was tried")


class PlanReport(_Model):
    """A model on machines: the plan that was asked for, or the best of those that were tried."""

    version: Literal[2] = Field(
        2, description="of this format; it changes when a field is renamed, removed or redefined"
    )
    setup: SetupReport = Field(description="what was planned")
    memory: MemoryReport = Field(description="peak of the fullest rank")
    fits: bool | None = Field(
        description="whether what is expected fits the device, and the host and its disks as far as known; null: the "
        "device's memory is not known"
    )
    fits_surely: bool | None = Field(
        description="whether it fits at most, 2 % to spare; null too where activations are not counted"
    )
    blocker: str = Field("", description="which state or buffer on which place is in the way; empty where it fits")
    edits: tuple[EditRow, ...] = Field((), description="of what does not fit, the nearest changes with which it does")
    limiting_rank: str = Field(description="which rank is fullest, when, and why")
    time: TimeReport | None = Field(description="null where nothing can be said")
    no_time: str = Field(description="why not")
    traffic: TrafficReport = Field(description="bytes that a rank sends")
    warnings: tuple[str, ...] = Field((), description="what was assumed, and what to beware of")
    findings: tuple[FindingReport, ...] = Field((), description="combinations known not to work, or to work badly")
    considered: int = Field(1, description="plans that were compared")
    frontier: tuple[FrontierRow, ...] | None = Field(
        None, description="the best of each strategy and mesh, and what no other beats in memory and speed, best first"
    )
    refused: tuple[RefusedRow, ...] | None = Field(None, description="what does not run; null with --strategy")
    sizing: SizingReport | None = Field(None, description="with --min-gpus")


class PerRank(_Model):
    """States of one rank."""

    weights_gb: float = Field(description="compute weights")
    grads_gb: float = Field(description="gradients")
    optimizer_gb: float = Field(description="master weights and moments")
    states_gb: float = Field(description="all of them")
    states_gib: float = Field(description="the same in GiB")


class StatesRow(_Model):
    """One strategy."""

    strategy: str = Field(description="name of the plan")
    per_rank: PerRank = Field(description="bytes of each state")
    traffic_gb: Mapping[str, float] = Field(
        description="`total`: what one rank sends in a step, without the factor (n - 1) / n of n ranks; 0 on one rank"
    )
    fits: bool | None = Field(description="whether the states alone fit; null without --gpu and --memory-gb")
    min_ranks: int | None = Field(
        description="the fewest whose memory holds the states; null if there is none, in groups, and as above"
    )


class StatesReport(_Model):
    """A bare number of parameters: states and traffic, nothing else can be said."""

    version: Literal[1] = Field(1, description="of this format")
    parameters: int = Field(description="as given")
    world: int = Field(description="ranks")
    recipe: Mapping[str, float] = Field(description="bytes per parameter of the whole model: weights, grads, optimizer")
    capacity_gib: float | None = Field(description="memory of one device; null without --gpu and --memory-gb")
    plans: tuple[StatesRow, ...] = Field(description="zero0 to zero3, or the one of --strategy")
