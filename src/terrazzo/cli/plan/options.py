"""The options of `terrazzo plan`. Each is declared once, as a field of `PlanArguments`; `OPTION_ROWS` lists them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from inspect import Parameter
from pathlib import Path
from typing import Any

from terrazzo.cli.shared.options import CommandOption, option_field, rows_of

__all__ = ["OPTION_ROWS", "PlanArguments", "PlanOption"]

GIGA, TERA = 1e9, 1e12
CONFIG, PARAMS = frozenset({"CONFIG"}), frozenset({"--params"})


@dataclass(frozen=True)
class PlanOption(CommandOption):
    """An option of `terrazzo plan`.

    Attributes:
        field: the field of the planner's `Request` that it sets; empty if it sets none.
        beside: what it may be given with other than `--model`: `CONFIG`, `--params`.
        unit: the factor from the option's value to the field's: 1e9 for GB.
    """

    field: str = ""
    beside: frozenset[str] = frozenset()
    unit: float | None = None

    @property
    def is_number(self) -> bool:
        """Whether the value is a number. typer gets it as text, so that errors are in our own words."""
        return self.kind in (int, float)

    @property
    def parameter(self) -> Parameter:
        return replace(self, kind=str, default=None).parameter if self.is_number else super().parameter

    def in_unit(self, value: Any) -> Any:
        """The option's value in the unit of the field: GB in bytes."""
        return value if value is None or self.unit is None else value * self.unit

    def words(self, value: Any) -> list[str]:
        """What gives the option this value on a command line."""
        if self.kind is bool:
            return [self.flag if value else self.names[0].rpartition("/")[2]]
        return [self.flag, str(value).removesuffix(".0") if self.is_number else str(value)]


def _option(panel: str, usage: str, words: str, name: str = "", **more: Any) -> Any:
    return option_field(PlanOption(usage, words, panel, field=name, **more))


_model, _machines, _training = partial(_option, "Model"), partial(_option, "Machines"), partial(_option, "Training")
_splitting, _output = partial(_option, "Splitting"), partial(_option, "Output")


@dataclass(frozen=True)
class PlanArguments:
    """The arguments that `terrazzo plan` was called with. Fields have the names of their options; None if left out.

    Attributes:
        config: a configuration of `terrazzo train`, in place of `--model` and the rest.
        overrides: settings that replace those of `config`.
        written: names of the arguments that were given, not left at their defaults.
    """

    config: Path | None
    overrides: list[str]
    written: frozenset[str]

    # Model
    model: str | None = _model(
        "--model NAME|PATH", "a preset such as llama3-8b ('?' lists them), a config.json, or its folder", "model"
    )
    params: str | None = _model(
        "--params COUNT", "a number such as 70e9 or 70B: states and traffic of zero0 to zero3", beside=PARAMS
    )

    # Machines
    gpu: str | None = _machines(
        "--gpu NAME",
        "such as h100-sxm (default), a100, mi300x ('?' lists them), or cpu for this machine",
        "gpu",
        beside=CONFIG | PARAMS,
    )
    gpus: str | None = _machines(
        "--gpus --world N|N..M",
        "how many in all, or a range to search, of which whole hosts are tried",
        "gpus",
        beside=CONFIG | PARAMS,
    )
    min_gpus: bool = _machines("--min-gpus", "find the fewest on which it runs; a range in --gpus bounds it")
    memory_gb: float | None = _machines(
        "--memory-gb GB", "memory of one GPU, in 1e9 bytes", "memory_bytes", beside=CONFIG | PARAMS, unit=GIGA
    )
    reserve_gb: float | None = _machines(
        "--reserve-gb GB",
        "memory of one GPU that is left to others, such as a display",
        "reserve_bytes",
        beside=CONFIG | PARAMS,
        unit=GIGA,
    )
    per_node: int | None = _machines("--per-node N", "GPUs of one host", "per_node", beside=CONFIG | PARAMS)
    peak_tflops: float | None = _machines(
        "--peak-tflops TFLOP/S",
        "dense peak of one GPU, which counts in every format",
        "peak_flops",
        beside=CONFIG,
        unit=TERA,
    )
    memory_tb_s: float | None = _machines(
        "--memory-tb-s TB/S", "speed of one GPU's memory", "memory_bandwidth", beside=CONFIG, unit=TERA
    )
    scaleup_gb_s: float | None = _machines(
        "--scaleup-gb-s GB/S",
        "of one GPU to others of its domain, one way",
        "scaleup_bandwidth",
        beside=CONFIG,
        unit=GIGA,
    )
    internode_gb_s: float | None = _machines(
        "--internode-gb-s GB/S", "of one GPU to other hosts, one way", "internode_bandwidth", beside=CONFIG, unit=GIGA
    )
    pcie_gb_s: float | None = _machines(
        "--pcie-gb-s GB/S", "of one GPU to its host, one way", "pcie_bandwidth", beside=CONFIG, unit=GIGA
    )
    watts: float | None = _machines(
        "--watts W", "power that one GPU may draw, where it is capped", "watts", beside=CONFIG
    )
    launch_ms: float | None = _machines(
        "--launch-ms MS",
        "in which the host launches one eager block's kernels, forward and backward; default: 2.8",
        "launch_s",
        beside=CONFIG,
        unit=1e-3,
    )
    host_memory_gb: float | None = _machines(
        "--host-memory-gb GB", "memory of one host, for offload", "host_memory_bytes", beside=CONFIG, unit=GIGA
    )
    disk_gb: float | None = _machines(
        "--disk-gb GB", "disk of one host, for offload", "disk_bytes", beside=CONFIG, unit=GIGA
    )
    disk_gb_s: float | None = _machines(
        "--disk-gb-s GB/S", "speed of that disk", "disk_bandwidth", beside=CONFIG, unit=GIGA
    )
    price: float | None = _machines(
        "--price PRICE", "of one GPU for one hour: adds the cost of a million tokens", "price_per_hour", beside=CONFIG
    )

    # Training
    seq: int | None = _training(
        "--seq TOKENS", "of a sequence; default: the model's positions, at most 4096", "sequence"
    )
    micro_batch: int | None = _training(
        "--micro-batch N", "sequences of one forward pass of one data rank; default: 1, or searched", "micro_batch"
    )
    micro_batches: int | None = _training(
        "--micro-batches N", "forward passes of one data rank in a step; default: 1, or 8 per stage", "micro_batches"
    )
    global_batch: int | None = _training(
        "--global-batch N", "sequences of a step over all ranks, in place of --micro-batches", "global_batch"
    )
    ac: str | None = _training(
        "--ac MODE",
        "activation checkpointing: none, selective, selective_half, full or every_N; default: none, or searched",
        "checkpointing",
    )
    precision: str | None = _training(
        "--precision NAME[,KEY=VALUE]...",
        "bf16 (default; fp16 before Ampere), bf16-pure, fp16, fp32, fp8, fp8-rowwise, fsdp2, zero; behind it keys of a "
        "configuration's precision: weight, compute, reduce, accumulate, master, moments, rounding, frozen (nf4, "
        "nf4-double), gather and quantized_reduce (int8 and others), error_feedback, linears; such as "
        "bf16,gather=int8,moments=int8",
        "precision",
        beside=PARAMS,
    )
    optimizer: str | None = _training(
        "--optimizer NAME",
        "adamw (default), adam, sgd, momentum, lion, adagrad, rmsprop, adamw-8bit, adamw-4bit and others",
        "optimizer",
        beside=PARAMS,
    )
    optimizer_kernel: str | None = _training(
        "--optimizer-kernel KIND",
        "fused, foreach or loop; default: as terrazzo train, fused for adam and adamw",
        "optimizer_kernel",
    )
    lora: int | None = _training(
        "--lora RANK", "adapters beside all linear layers but the head, on a frozen base", "lora"
    )
    qlora: bool = _training(
        "--qlora", "with the base's matrices in 4 bits (NF4); --lora 16 unless it is given", "qlora"
    )
    freeze: str | None = _training(
        "--freeze PATTERNS", "globs over names of parameters that are not trained, with commas", "freeze"
    )
    ema: bool = _training("--ema", "a moving average of the weights is kept, as with tz.EMA", "ema")
    compile: bool = _training("--compile", "blocks go through torch.compile", "compile")
    attention: str | None = _training(
        "--attention KIND",
        "flash (default), the faster cudnn and flash3 of Hopper and later, the older triton, or math: scores are kept "
        "(default where torch or transformers have no fused kernel)",
        "attention",
    )
    loss: str | None = _training(
        "--loss KIND",
        "full (default; torch's, in fp32), fused, chunked, or parts (default with --tp): of the vocabulary",
        "loss",
    )

    # Splitting
    strategy: str | None = _splitting(
        "--strategy NAME", "a row of the table, or fsdp, fsdp2, hsdp; default: the best", "strategy", beside=PARAMS
    )
    offload: str | None = _splitting(
        "--offload TIER", "cpu, cpu-all, nvme, nvme-all, each also with a share (cpu:0.7); any: the search may"
    )
    tp: int | None = _splitting("--tp T", "tensor-parallel ranks; default: 1", "tp")
    pp: int | None = _splitting("--pp K", "pipeline stages; default: 1", "pp")
    cp: int | None = _splitting("--cp C", "context-parallel ranks; default: 1", "cp")
    context: str | None = _splitting(
        "--context MODE",
        "attention over cp: gather (default), ulysses or ring; default: gather, or searched with --parallel",
        "context",
    )
    ep: int | None = _splitting("--ep E", "expert-parallel ranks, among those of dp_shard, cp and tp; default: 1", "ep")
    dp_replicate: int | None = _splitting(
        "--dp-replicate R",
        "groups of the hybrid strategies; default: one shard group per host",
        "dp_replicate",
        beside=PARAMS,
    )
    tensor_overlap: str | None = _splitting(
        "--tensor-overlap KIND",
        "exchanges along tp beside products: none (default), backward (of Megatron), or async",
        "tensor_overlap",
    )
    parallel: bool = _splitting("--parallel", "search tensor, pipeline, context and expert parallelism too", "parallel")
    pipeline: str | None = _splitting(
        "--pipeline KIND",
        "schedule: 1f1b, gpipe or zero_bubble; default: 1f1b, or searched with --parallel",
        "pipeline",
    )
    virtual_stages: int | None = _splitting(
        "--virtual-stages V",
        "stages of one pipeline rank, which interleave 1f1b; default: 1, or searched with --parallel",
        "virtual_stages",
    )
    no_sequence_parallel: bool = _splitting(
        "--no-sequence-parallel", "tensor-parallel ranks keep whole norms and residuals"
    )
    prefetch: int = _splitting("--prefetch N", "units gathered ahead; default: 1", "prefetch", default=1)
    accumulate_locally: bool | None = _splitting(
        "--accumulate-locally/--reduce-each",
        "what micro-batches before the last do with gradients; default: as terrazzo train",
        "accumulate_locally",
    )

    # Output
    framework: str = _output(
        "--framework NAME[@VERSION]",
        "whose known limits are listed: terrazzo (default), deepspeed@0.18, fsdp1, fsdp2, megatron, torchao",
        beside=CONFIG,
        default="terrazzo",
    )
    rank_by: str = _output(
        "--rank-by WHAT", "what comes first: throughput (default), gpus or cost", "rank_by", default="throughput"
    )
    json: bool = _output("--json", "print one JSON object and nothing else", beside=CONFIG | PARAMS)
    explain: str | None = _output(
        "--explain TERM", "show a term's formula, the numbers put in, and the source", beside=CONFIG
    )
    emit: Path | None = _output(  # noqa: RUF009 - a field
        "--emit FILE", "write the plan as a configuration for terrazzo train; .yaml or .json", beside=CONFIG
    )
    picture: Path | None = _output(  # noqa: RUF009 - a field
        "--picture FILE", "draw memory by strategy, and a pipeline's step; .png or .svg", beside=CONFIG | PARAMS
    )
    html: Path | None = _output(  # noqa: RUF009 - a field
        "--html FILE",
        "write a page that draws all plans, and what changes with micro-batch, sequence, checkpointing and GPUs; .html",
        beside=CONFIG | PARAMS,
    )
    calibrate: bool = _output(
        "--calibrate", "first measure a few real steps of CONFIG here, and keep what was found", beside=CONFIG
    )

    @property
    def request_fields(self) -> dict[str, Any]:
        """The fields of the planner's `Request` that options set, in the fields' units."""
        return {row.field: row.in_unit(getattr(self, row.argument)) for row in OPTION_ROWS if row.field}

    @property
    def question(self) -> list[str]:
        """The options that were given, as words of a command line, without those that say how the answer is shown."""
        asked = [row for row in OPTION_ROWS if row.argument in self.written - _SHOWING]
        return [word for row in asked for word in row.words(getattr(self, row.argument))]


_SHOWING = {"json", "explain", "emit", "picture", "html"}


OPTION_ROWS: list[PlanOption] = rows_of(PlanArguments)
"""All options, in the order of the help."""
