"""`terrazzo plan`"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

__all__ = ["plan"]


def _panel(name: str) -> Callable[..., Any]:
    """Options of one panel of the help: `what` is their names and the metavar, as the help shows them."""

    def option(what: str, help: str, default: Any = None) -> Any:
        names = [word for word in what.split() if word.startswith("--")]
        metavar = " ".join(word for word in what.split() if word not in names) or None
        return typer.Option(default, *names, help=help, metavar=metavar, rich_help_panel=name, show_default=False)

    return option


_model, _machine, _training = _panel("Model"), _panel("Machines"), _panel("Training")
_splitting, _output = _panel("Splitting"), _panel("Output")


_Config = Annotated[
    Path | None, typer.Argument(metavar="CONFIG", help="A file of `terrazzo train`, in place of --model and the rest.")
]
_Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[section.key=value]...", help="Settings that replace the file's, as in `terrazzo train`."),
]


def plan(  # structure: signature fixed by the command line
    context: typer.Context,
    config: _Config = None,
    overrides: _Overrides = None,
    model: str | None = _model(
        "--model NAME|PATH", "a preset such as llama3-8b ('?' lists them), a config.json, or its folder"
    ),
    params: str | None = _model("--params COUNT", "a number such as 70e9 or 70B: states and traffic of zero0 to zero3"),
    gpu: str | None = _machine(
        "--gpu NAME", "such as h100-sxm (default), a100, mi300x ('?' lists them), or cpu for this machine"
    ),
    gpus: str | None = _machine(
        "--gpus --world N|N..M", "how many in all, or a range to search, of which whole hosts are tried"
    ),
    min_gpus: bool = _machine("--min-gpus", "find the fewest on which it runs; a range in --gpus bounds it", False),
    memory_gb: float | None = _machine("--memory-gb GB", "memory of one GPU, in 1e9 bytes"),
    per_node: int | None = _machine("--per-node N", "GPUs of one host"),
    peak_tflops: float | None = _machine("--peak-tflops TFLOP/S", "dense peak of one GPU, in the format of products"),
    memory_tb_s: float | None = _machine("--memory-tb-s TB/S", "speed of one GPU's memory"),
    scaleup_gb_s: float | None = _machine("--scaleup-gb-s GB/S", "of one GPU to others of its domain, one way"),
    internode_gb_s: float | None = _machine("--internode-gb-s GB/S", "of one GPU to other hosts, one way"),
    pcie_gb_s: float | None = _machine("--pcie-gb-s GB/S", "of one GPU to its host, one way"),
    host_memory_gb: float | None = _machine("--host-memory-gb GB", "memory of one host, for offload"),
    disk_gb: float | None = _machine("--disk-gb GB", "disk of one host, for offload"),
    disk_gb_s: float | None = _machine("--disk-gb-s GB/S", "speed of that disk"),
    price: float | None = _machine("--price PRICE", "of one GPU for one hour: adds the cost of a million tokens"),
    seq: int | None = _training("--seq TOKENS", "of a sequence; default: the model's positions, at most 4096"),
    micro_batch: int | None = _training(
        "--micro-batch N", "sequences of one forward pass of one data rank; default: 1, or searched"
    ),
    micro_batches: int | None = _training(
        "--micro-batches N", "forward passes of one data rank in a step; default: 1, or 8 per stage"
    ),
    global_batch: int | None = _training(
        "--global-batch N", "sequences of a step over all ranks, in place of --micro-batches"
    ),
    ac: str | None = _training(
        "--ac MODE", "activation checkpointing: none, selective, full or every_N; default: none, or searched"
    ),
    precision: str | None = _training("--precision NAME", "bf16 (default), bf16-pure, fp16, fp32, fp8, fsdp2, zero"),
    optimizer: str | None = _training(
        "--optimizer NAME",
        "adamw (default), adam, sgd, momentum, lion, adagrad, rmsprop, adamw-8bit, adamw-4bit and others",
    ),
    compile: bool = _training("--compile", "blocks go through torch.compile", False),
    attention: str = _training("--attention KIND", "flash (default), or math, which keeps all scores", "flash"),
    loss: str | None = _training(
        "--loss KIND",
        "full (default; torch's, in fp32), fused, chunked, or parts (default with --tp): of the vocabulary",
    ),
    strategy: str | None = _splitting("--strategy NAME", "a row of the table, or fsdp, fsdp2, hsdp; default: the best"),
    offload: str | None = _splitting(
        "--offload TIER", "cpu, cpu-all, nvme, nvme-all, each also with a share (cpu:0.7); any: the search may"
    ),
    tp: int | None = _splitting("--tp T", "tensor-parallel ranks; default: 1"),
    pp: int | None = _splitting("--pp K", "pipeline stages; default: 1"),
    cp: int | None = _splitting("--cp C", "context-parallel ranks; default: 1"),
    cp_mode: str | None = _splitting(
        "--context MODE", "attention over cp: gather (default), ulysses or ring; default: gather, or searched"
    ),
    ep: int | None = _splitting("--ep E", "expert-parallel ranks, among those of dp_shard, cp and tp; default: 1"),
    dp_replicate: int | None = _splitting(
        "--dp-replicate R", "groups of the hybrid strategies; default: one shard group per host"
    ),
    parallel: bool = _splitting("--parallel", "search tensor, pipeline, context and expert parallelism too", False),
    pipeline: str | None = _splitting(
        "--pipeline KIND", "schedule: 1f1b, gpipe or zero_bubble; default: 1f1b, or searched"
    ),
    virtual_stages: int | None = _splitting(
        "--virtual-stages V", "stages of one pipeline rank, which interleave 1f1b; default: 1, or searched"
    ),
    no_sequence_parallel: bool = _splitting(
        "--no-sequence-parallel", "tensor-parallel ranks keep whole norms and residuals", False
    ),
    prefetch: int = _splitting("--prefetch N", "units gathered ahead; default: 1", 1),
    accumulate_locally: bool | None = _splitting(
        "--accumulate-locally/--reduce-each",
        "what micro-batches before the last do with gradients; default: as terrazzo train",
    ),
    framework: str = _output(
        "--framework NAME[@VERSION]",
        "whose known limits are listed: terrazzo (default), deepspeed@0.18, fsdp1, fsdp2, megatron, torchao",
        "terrazzo",
    ),
    rank: str = _output("--rank BY", "what comes first: throughput (default), gpus or cost", "throughput"),
    as_json: bool = _output("--json", "print one JSON object and nothing else", False),
    explain: str | None = _output("--explain TERM", "show a term's formula, the numbers put in, and the source"),
    emit: Path | None = _output("--emit FILE", "write the plan as a configuration for terrazzo train; .yaml or .json"),
    picture: Path | None = _output("--picture FILE", "draw memory by strategy, and a pipeline's step; .png or .svg"),
    calibrate: bool = _output(
        "--calibrate", "first measure a few real steps of CONFIG here, and keep what was found", False
    ),
) -> None:
    """Will it fit, how fast, on how many GPUs, with which strategy, and what exactly to run: from shapes alone.

    With --strategy, or a configuration, it describes that plan. Without, it tries all that make sense and ranks them.
    No GPU is needed. That a plan does not fit is an answer and ends with exit code 0; impossible input ends with 2.

    terrazzo plan --params 70e9 --world 256

    terrazzo plan --model llama3-8b --gpu h100-sxm --gpus 8 --seq 8192

    terrazzo plan --model llama3-70b --gpu h100-sxm --min-gpus --picture memory.png

    terrazzo plan examples/quickstart.yaml plan.name=zero1
    """
    from terrazzo.cli.plan.answer import run  # imports the planner and the trainer, which --help can do without

    sources = {name: context.get_parameter_source(name) for name in context.params}
    run(context.params, [name for name, source in sources.items() if source and source.name == "COMMANDLINE"])
