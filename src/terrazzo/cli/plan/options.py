"""The options of `terrazzo plan`, each a row: how it is written, what the help says, and what it is to the planner."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

__all__ = ["OPTIONS", "OPTION_ROWS", "PlanOption"]

GIGA, TERA = 1e9, 1e12
CONFIG, PARAMS = frozenset({"CONFIG"}), frozenset({"--params"})


@dataclass(frozen=True)
class PlanOption:
    """One option.

    Attributes:
        usage: its names and the metavar, as the help shows them.
        help: what it says of them.
        field: of a `Request` that the value is; empty where it is none.
        kind: of the value; a `bool` is a switch, which is off by default.
        beside: what it has a meaning beside, but for `--model`: `CONFIG`, `--params`.
        default: what is meant without it; None leaves a choice open.
        unit: how many times as much the field is.
    """

    usage: str
    help: str
    field: str = ""
    kind: type = str
    beside: frozenset[str] = frozenset()
    default: Any = None
    unit: float | None = None

    @cached_property
    def names(self) -> list[str]:
        """As they are written, with `--`."""
        return [word for word in self.usage.split() if word.startswith("--")]

    @cached_property
    def metavar(self) -> str | None:
        """What stands for the value."""
        return " ".join(word for word in self.usage.split() if word not in self.names) or None

    @cached_property
    def flag(self) -> str:
        """The first name, of a pair the one that turns it on."""
        return self.names[0].partition("/")[0]

    @cached_property
    def is_number(self) -> bool:
        """Whether the value is a number, which is read from text so that a wrong one has an answer."""
        return self.kind in (int, float)

    @cached_property
    def argument(self) -> str:
        """The name of the parameter by which the command gets the value."""
        return self.flag.removeprefix("--").replace("-", "_")

    def in_unit(self, value: Any) -> Any:
        """A value of the option as the field has it: GB in bytes."""
        return value if value is None or self.unit is None else value * self.unit


_MODEL = (
    PlanOption(
        "--model NAME|PATH",
        "a preset such as llama3-8b ('?' lists them), a config.json, or its folder",
        "model",
    ),
    PlanOption("--params COUNT", "a number such as 70e9 or 70B: states and traffic of zero0 to zero3", beside=PARAMS),
)
_MACHINES = (
    PlanOption(
        "--gpu NAME",
        "such as h100-sxm (default), a100, mi300x ('?' lists them), or cpu for this machine",
        "gpu",
        beside=CONFIG | PARAMS,
    ),
    PlanOption(
        "--gpus --world N|N..M",
        "how many in all, or a range to search, of which whole hosts are tried",
        "gpus",
        beside=CONFIG | PARAMS,
    ),
    PlanOption("--min-gpus", "find the fewest on which it runs; a range in --gpus bounds it", kind=bool),
    PlanOption("--memory-gb GB", "memory of one GPU, in 1e9 bytes", "memory_bytes", float, CONFIG | PARAMS, unit=GIGA),
    PlanOption("--per-node N", "GPUs of one host", "per_node", int, CONFIG | PARAMS),
    PlanOption(
        "--peak-tflops TFLOP/S",
        "dense peak of one GPU, in the format of products",
        "peak_flops",
        float,
        CONFIG,
        unit=TERA,
    ),
    PlanOption("--memory-tb-s TB/S", "speed of one GPU's memory", "memory_bandwidth", float, CONFIG, unit=TERA),
    PlanOption(
        "--scaleup-gb-s GB/S",
        "of one GPU to others of its domain, one way",
        "scaleup_bandwidth",
        float,
        CONFIG,
        unit=GIGA,
    ),
    PlanOption(
        "--internode-gb-s GB/S", "of one GPU to other hosts, one way", "internode_bandwidth", float, CONFIG, unit=GIGA
    ),
    PlanOption("--pcie-gb-s GB/S", "of one GPU to its host, one way", "pcie_bandwidth", float, CONFIG, unit=GIGA),
    PlanOption("--watts W", "power that one GPU may draw, where it is capped", "watts", float, CONFIG),
    PlanOption(
        "--launch-ms MS",
        "in which the host launches one eager block's kernels, forward and backward; default: 2.8",
        "launch_s",
        float,
        CONFIG,
        unit=1e-3,
    ),
    PlanOption("--host-memory-gb GB", "memory of one host, for offload", "host_memory_bytes", float, CONFIG, unit=GIGA),
    PlanOption("--disk-gb GB", "disk of one host, for offload", "disk_bytes", float, CONFIG, unit=GIGA),
    PlanOption("--disk-gb-s GB/S", "speed of that disk", "disk_bandwidth", float, CONFIG, unit=GIGA),
    PlanOption(
        "--price PRICE",
        "of one GPU for one hour: adds the cost of a million tokens",
        "price_per_hour",
        float,
        CONFIG,
    ),
)
_TRAINING = (
    PlanOption("--seq TOKENS", "of a sequence; default: the model's positions, at most 4096", "sequence", int),
    PlanOption(
        "--micro-batch N", "sequences of one forward pass of one data rank; default: 1, or searched", "micro_batch", int
    ),
    PlanOption(
        "--micro-batches N",
        "forward passes of one data rank in a step; default: 1, or 8 per stage",
        "micro_batches",
        int,
    ),
    PlanOption(
        "--global-batch N", "sequences of a step over all ranks, in place of --micro-batches", "global_batch", int
    ),
    PlanOption(
        "--ac MODE",
        "activation checkpointing: none, selective, selective_half, full or every_N; default: none, or searched",
        "checkpointing",
    ),
    PlanOption(
        "--precision NAME",
        "bf16 (default; fp16 before Ampere), bf16-pure, fp16, fp32, fp8, fp8-rowwise, fsdp2, zero",
        "precision",
        beside=PARAMS,
    ),
    PlanOption(
        "--optimizer NAME",
        "adamw (default), adam, sgd, momentum, lion, adagrad, rmsprop, adamw-8bit, adamw-4bit and others",
        "optimizer",
        beside=PARAMS,
    ),
    PlanOption(
        "--optimizer-kernel KIND",
        "fused, foreach or loop; default: as terrazzo train, fused for adam and adamw",
        "optimizer_kernel",
    ),
    PlanOption("--lora RANK", "adapters beside all linear layers but the head, on a frozen base", "lora", int),
    PlanOption("--qlora", "with the base's matrices in 4 bits (NF4); --lora 16 unless it is given", "qlora", bool),
    PlanOption("--freeze PATTERNS", "globs over names of parameters that are not trained, with commas", "freeze"),
    PlanOption("--compile", "blocks go through torch.compile", "compile", bool),
    PlanOption(
        "--attention KIND",
        "flash (default), the faster cudnn and flash3 of Hopper and later, the older triton, or math: scores are kept "
        "(default where they have a soft cap)",
        "attention",
    ),
    PlanOption(
        "--loss KIND",
        "full (default; torch's, in fp32), fused, chunked, or parts (default with --tp): of the vocabulary",
        "loss",
    ),
)
_SPLITTING = (
    PlanOption(
        "--strategy NAME",
        "a row of the table, or fsdp, fsdp2, hsdp; default: the best",
        "strategy",
        beside=PARAMS,
    ),
    PlanOption("--offload TIER", "cpu, cpu-all, nvme, nvme-all, each also with a share (cpu:0.7); any: the search may"),
    PlanOption("--tp T", "tensor-parallel ranks; default: 1", "tp", int),
    PlanOption("--pp K", "pipeline stages; default: 1", "pp", int),
    PlanOption("--cp C", "context-parallel ranks; default: 1", "cp", int),
    PlanOption(
        "--context MODE",
        "attention over cp: gather (default), ulysses or ring; default: gather, or searched",
        "context",
    ),
    PlanOption("--ep E", "expert-parallel ranks, among those of dp_shard, cp and tp; default: 1", "ep", int),
    PlanOption(
        "--dp-replicate R",
        "groups of the hybrid strategies; default: one shard group per host",
        "dp_replicate",
        int,
        PARAMS,
    ),
    PlanOption("--parallel", "search tensor, pipeline, context and expert parallelism too", "parallel", bool),
    PlanOption("--pipeline KIND", "schedule: 1f1b, gpipe or zero_bubble; default: 1f1b, or searched", "pipeline"),
    PlanOption(
        "--virtual-stages V",
        "stages of one pipeline rank, which interleave 1f1b; default: 1, or searched",
        "virtual_stages",
        int,
    ),
    PlanOption("--no-sequence-parallel", "tensor-parallel ranks keep whole norms and residuals", kind=bool),
    PlanOption("--prefetch N", "units gathered ahead; default: 1", "prefetch", int, default=1),
    PlanOption(
        "--accumulate-locally/--reduce-each",
        "what micro-batches before the last do with gradients; default: as terrazzo train",
        "accumulate_locally",
        bool,
    ),
)
_OUTPUT = (
    PlanOption(
        "--framework NAME[@VERSION]",
        "whose known limits are listed: terrazzo (default), deepspeed@0.18, fsdp1, fsdp2, megatron, torchao",
        beside=CONFIG,
        default="terrazzo",
    ),
    PlanOption("--rank BY", "what comes first: throughput (default), gpus or cost", "rank", default="throughput"),
    PlanOption("--json", "print one JSON object and nothing else", kind=bool, beside=CONFIG | PARAMS),
    PlanOption("--explain TERM", "show a term's formula, the numbers put in, and the source", beside=CONFIG),
    PlanOption(
        "--emit FILE",
        "write the plan as a configuration for terrazzo train; .yaml or .json",
        kind=Path,
        beside=CONFIG,
    ),
    PlanOption(
        "--picture FILE",
        "draw memory by strategy, and a pipeline's step; .png or .svg",
        kind=Path,
        beside=CONFIG | PARAMS,
    ),
    PlanOption(
        "--html FILE",
        "write a page that draws all plans, and what changes with micro-batch, sequence, checkpointing and GPUs; .html",
        kind=Path,
        beside=CONFIG | PARAMS,
    ),
    PlanOption(
        "--calibrate",
        "first measure a few real steps of CONFIG here, and keep what was found",
        kind=bool,
        beside=CONFIG,
    ),
)

OPTIONS = {
    "Model": _MODEL, "Machines": _MACHINES, "Training": _TRAINING, "Splitting": _SPLITTING, "Output": _OUTPUT,
}  # fmt: skip
"""By the panel of the help."""

OPTION_ROWS = [option for options in OPTIONS.values() for option in options]
