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
    model: str | None = _model("--model NAME|PATH", "a preset such as llama3-8b, a config.json, or its folder"),
    params: str | None = _model("--params COUNT", "such as 70e9 or 70B: states and traffic of zero0 to zero3"),
    gpu: str | None = _machine("--gpu NAME", "such as h100-sxm, or cpu for this machine"),
    gpus: str | None = _machine("--gpus --world N|N..M", "how many in all, or a range to search"),
    min_gpus: bool = _machine("--min-gpus", "find the fewest on which it runs", False),
    memory_gb: float | None = _machine("--memory-gb GB", "of one GPU, in place of the table's, in 1e9 bytes"),
    per_node: int | None = _machine("--per-node N", "GPUs of one host"),
    peak_tflops: float | None = _machine("--peak-tflops TFLOP/S", "dense peak of one GPU, in place of the table's"),
    memory_tb_s: float | None = _machine("--memory-tb-s TB/S", "speed of its memory"),
    scaleup_gb_s: float | None = _machine("--scaleup-gb-s GB/S", "to GPUs of the same domain, one way"),
    internode_gb_s: float | None = _machine("--internode-gb-s GB/S", "to other hosts, one way and per GPU"),
    pcie_gb_s: float | None = _machine("--pcie-gb-s GB/S", "to its host, one way"),
    host_memory_gb: float | None = _machine("--host-memory-gb GB", "memory of one host"),
    disk_gb: float | None = _machine("--disk-gb GB", "disk of one host"),
    disk_gb_s: float | None = _machine("--disk-gb-s GB/S", "speed of that disk"),
    price: float | None = _machine("--price PRICE", "of one GPU for one hour, in any currency"),
    seq: int | None = _training("--seq TOKENS", "of a sequence; at most 4096 by default"),
    micro_batch: int | None = _training("--micro-batch N", "sequences of one forward pass of one data rank"),
    micro_batches: int | None = _training("--micro-batches N", "forward passes of one data rank in a step"),
    global_batch: int | None = _training("--global-batch N", "sequences of a step, all ranks"),
    ac: str | None = _training("--ac MODE", "activation checkpointing: none, selective, full, every_N"),
    precision: str | None = _training("--precision NAME", "bf16 (default), bf16-pure, fp16, fp32, fp8, fsdp2, zero"),
    optimizer: str = _training("--optimizer NAME", "adamw (default), sgd, lion, adamw-8bit, ...", "adamw"),
    compile: bool = _training("--compile", "blocks go through torch.compile", False),
    attention: str = _training("--attention KIND", "flash (default), or math, which keeps all scores", "flash"),
    loss: str | None = _training("--loss KIND", "full, fused (default with tp or pp), chunked"),
    strategy: str | None = _splitting("--strategy NAME", "zero0 ... zero3, hybrid_shard, ...; default: the best"),
    offload: str | None = _splitting("--offload TIER", "cpu, cpu-all, nvme, nvme-all, a share (cpu:0.7), or any"),
    tp: int | None = _splitting("--tp T", "tensor-parallel ranks"),
    pp: int | None = _splitting("--pp K", "pipeline stages"),
    cp: int | None = _splitting("--cp C", "context-parallel ranks"),
    ep: int | None = _splitting("--ep E", "expert-parallel ranks, among the data ranks"),
    dp_replicate: int | None = _splitting("--dp-replicate R", "groups of the hybrid strategies; default: hosts"),
    parallel: bool = _splitting("--parallel", "search tensor, pipeline and context parallelism too", False),
    pipeline: str = _splitting("--pipeline KIND", "schedule: 1f1b (default) or gpipe", "1f1b"),
    virtual_stages: int = _splitting("--virtual-stages V", "model chunks of one pipeline rank", 1),
    no_sequence_parallel: bool = _splitting("--no-sequence-parallel", "tensor-parallel ranks keep whole norms", False),
    prefetch: int = _splitting("--prefetch N", "units gathered ahead; 1 by default", 1),
    accumulate_locally: bool | None = _splitting(
        "--accumulate-locally/--reduce-each", "what micro-batches before the last do"
    ),
    framework: str = _output(
        "--framework NAME[@VERSION]", "whose known limits are listed, such as deepspeed@0.18", "terrazzo"
    ),
    rank: str = _output("--rank BY", "throughput (default), gpus, or cost: what comes first", "throughput"),
    as_json: bool = _output("--json", "print one JSON object and nothing else", False),
    explain: str | None = _output("--explain TERM", "show formula, numbers and source of a term"),
    emit: Path | None = _output("--emit FILE", "write what `terrazzo train` runs"),
    picture: Path | None = _output("--picture FILE", "draw memory by strategy; .png or .svg"),
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
    from terrazzo.cli.planning import run  # imports the planner and the trainer, which --help can do without

    sources = {name: context.get_parameter_source(name) for name in context.params}
    run(context.params, [name for name, source in sources.items() if source and source.name == "COMMANDLINE"])
