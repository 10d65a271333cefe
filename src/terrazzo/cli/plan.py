"""`terrazzo plan`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

__all__ = ["plan"]

MODEL, MACHINES, TRAINING, SPLITTING, OUTPUT = "Model", "Machines", "Training", "Splitting", "Output"


def _option(panel: str, *names: str, help: str, metavar: str | None = None) -> Any:
    return typer.Option(*names, help=help, metavar=metavar, rich_help_panel=panel, show_default=False)


Config = Annotated[
    Path | None,
    typer.Argument(metavar="CONFIG", help="A file of `terrazzo train`, in place of --model and the rest."),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[section.key=value]...", help="Settings that replace the file's, as in `terrazzo train`."),
]
Model = Annotated[
    str | None,
    _option(MODEL, "--model", metavar="NAME|PATH", help="a preset such as llama3-8b, a config.json, or its folder"),
]
Params = Annotated[
    str | None,
    _option(MODEL, "--params", metavar="COUNT", help="such as 70e9 or 70B: states and traffic of zero0 to zero3"),
]
Gpu = Annotated[
    str | None, _option(MACHINES, "--gpu", metavar="NAME", help="such as h100-sxm, or cpu for this machine")
]
Gpus = Annotated[
    str | None, _option(MACHINES, "--gpus", "--world", metavar="N|N..M", help="how many in all, or a range to search")
]
MinGpus = Annotated[bool, _option(MACHINES, "--min-gpus", help="find the fewest on which it runs")]
MemoryGb = Annotated[
    float | None,
    _option(MACHINES, "--memory-gb", metavar="GB", help="of one GPU, in place of the table's, in 1e9 bytes"),
]
PerNode = Annotated[int | None, _option(MACHINES, "--per-node", metavar="N", help="GPUs of one host")]
PeakTflops = Annotated[
    float | None,
    _option(MACHINES, "--peak-tflops", metavar="TFLOP/S", help="dense peak of one GPU, in place of the table's"),
]
MemoryTbS = Annotated[float | None, _option(MACHINES, "--memory-tb-s", metavar="TB/S", help="speed of its memory")]
ScaleupGbS = Annotated[
    float | None, _option(MACHINES, "--scaleup-gb-s", metavar="GB/S", help="to GPUs of the same domain, one way")
]
InternodeGbS = Annotated[
    float | None, _option(MACHINES, "--internode-gb-s", metavar="GB/S", help="to other hosts, one way and per GPU")
]
PcieGbS = Annotated[float | None, _option(MACHINES, "--pcie-gb-s", metavar="GB/S", help="to its host, one way")]
HostGb = Annotated[float | None, _option(MACHINES, "--host-memory-gb", metavar="GB", help="memory of one host")]
DiskGb = Annotated[float | None, _option(MACHINES, "--disk-gb", metavar="GB", help="disk of one host")]
DiskSpeed = Annotated[float | None, _option(MACHINES, "--disk-gb-s", metavar="GB/S", help="speed of that disk")]
Price = Annotated[
    float | None, _option(MACHINES, "--price", metavar="PRICE", help="of one GPU for one hour, in any currency")
]
Seq = Annotated[int | None, _option(TRAINING, "--seq", metavar="TOKENS", help="of a sequence; at most 4096 by default")]
MicroBatch = Annotated[
    int | None, _option(TRAINING, "--micro-batch", metavar="N", help="sequences of one forward pass of one data rank")
]
MicroBatches = Annotated[
    int | None, _option(TRAINING, "--micro-batches", metavar="N", help="forward passes of one data rank in a step")
]
GlobalBatch = Annotated[
    int | None, _option(TRAINING, "--global-batch", metavar="N", help="sequences of a step, all ranks")
]
Checkpointing = Annotated[
    str | None,
    _option(TRAINING, "--ac", metavar="MODE", help="activation checkpointing: none, selective, full, every_N"),
]
Precision = Annotated[
    str | None,
    _option(TRAINING, "--precision", metavar="NAME", help="bf16 (default), bf16-pure, fp16, fp32, fp8, fsdp2, zero"),
]
Optimizer = Annotated[
    str, _option(TRAINING, "--optimizer", metavar="NAME", help="adamw (default), sgd, lion, adamw-8bit, ...")
]
Compiled = Annotated[bool, _option(TRAINING, "--compile", help="blocks go through torch.compile")]
AttentionKind = Annotated[
    str, _option(TRAINING, "--attention", metavar="KIND", help="flash (default), or math, which keeps all scores")
]
LossKind = Annotated[
    str | None,
    _option(TRAINING, "--loss", metavar="KIND", help="full, fused (default with tp or pp), chunked"),
]
Strategy = Annotated[
    str | None,
    _option(SPLITTING, "--strategy", metavar="NAME", help="zero0 ... zero3, hybrid_shard, ...; default: the best"),
]
Offload = Annotated[
    str | None,
    _option(SPLITTING, "--offload", metavar="TIER", help="cpu, cpu-all, nvme, nvme-all, a share (cpu:0.7), or any"),
]
Tp = Annotated[int | None, _option(SPLITTING, "--tp", metavar="T", help="tensor-parallel ranks")]
Pp = Annotated[int | None, _option(SPLITTING, "--pp", metavar="K", help="pipeline stages")]
Cp = Annotated[int | None, _option(SPLITTING, "--cp", metavar="C", help="context-parallel ranks")]
Ep = Annotated[int | None, _option(SPLITTING, "--ep", metavar="E", help="expert-parallel ranks, among the data ranks")]
DpReplicate = Annotated[
    int | None,
    _option(SPLITTING, "--dp-replicate", metavar="R", help="groups of the hybrid strategies; default: hosts"),
]
Parallel = Annotated[bool, _option(SPLITTING, "--parallel", help="search tensor, pipeline and context parallelism too")]
PipelineKind = Annotated[
    str, _option(SPLITTING, "--pipeline", metavar="KIND", help="schedule: 1f1b (default) or gpipe")
]
Virtual = Annotated[int, _option(SPLITTING, "--virtual-stages", metavar="V", help="model chunks of one pipeline rank")]
NoSp = Annotated[bool, _option(SPLITTING, "--no-sequence-parallel", help="tensor-parallel ranks keep whole norms")]
Prefetch = Annotated[int, _option(SPLITTING, "--prefetch", metavar="N", help="units gathered ahead; 1 by default")]
Local = Annotated[
    bool | None, _option(SPLITTING, "--accumulate-locally/--reduce-each", help="what micro-batches before the last do")
]
Framework = Annotated[
    str,
    _option(
        OUTPUT, "--framework", metavar="NAME[@VERSION]", help="whose known limits are listed, such as deepspeed@0.18"
    ),
]
Rank = Annotated[
    str, _option(OUTPUT, "--rank", metavar="BY", help="throughput (default), gpus, or cost: what comes first")
]
AsJson = Annotated[bool, _option(OUTPUT, "--json", help="print one JSON object and nothing else")]
Explain = Annotated[
    str | None, _option(OUTPUT, "--explain", metavar="TERM", help="show formula, numbers and source of a term")
]
Emit = Annotated[Path | None, _option(OUTPUT, "--emit", metavar="FILE", help="write what `terrazzo train` runs")]
Picture = Annotated[
    Path | None, _option(OUTPUT, "--picture", metavar="FILE", help="draw memory by strategy; .png or .svg")
]
Calibrate = Annotated[
    bool, _option(OUTPUT, "--calibrate", help="first measure a few real steps of CONFIG here, and keep what was found")
]


def plan(  # structure: signature fixed by the command line
    context: typer.Context,
    config: Config = None,
    overrides: Overrides = None,
    model: Model = None,
    params: Params = None,
    gpu: Gpu = None,
    gpus: Gpus = None,
    min_gpus: MinGpus = False,
    memory_gb: MemoryGb = None,
    per_node: PerNode = None,
    peak_tflops: PeakTflops = None,
    memory_tb_s: MemoryTbS = None,
    scaleup_gb_s: ScaleupGbS = None,
    internode_gb_s: InternodeGbS = None,
    pcie_gb_s: PcieGbS = None,
    host_memory_gb: HostGb = None,
    disk_gb: DiskGb = None,
    disk_gb_s: DiskSpeed = None,
    price: Price = None,
    seq: Seq = None,
    micro_batch: MicroBatch = None,
    micro_batches: MicroBatches = None,
    global_batch: GlobalBatch = None,
    ac: Checkpointing = None,
    precision: Precision = None,
    optimizer: Optimizer = "adamw",
    compile: Compiled = False,
    attention: AttentionKind = "flash",
    loss: LossKind = None,
    strategy: Strategy = None,
    offload: Offload = None,
    tp: Tp = None,
    pp: Pp = None,
    cp: Cp = None,
    ep: Ep = None,
    dp_replicate: DpReplicate = None,
    parallel: Parallel = False,
    pipeline: PipelineKind = "1f1b",
    virtual_stages: Virtual = 1,
    no_sequence_parallel: NoSp = False,
    prefetch: Prefetch = 1,
    accumulate_locally: Local = None,
    framework: Framework = "terrazzo",
    rank: Rank = "throughput",
    as_json: AsJson = False,
    explain: Explain = None,
    emit: Emit = None,
    picture: Picture = None,
    calibrate: Calibrate = False,
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
