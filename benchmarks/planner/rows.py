"""Published measurements as the planner's setups. What a source leaves out and how it was filled in is written here.

`rows()` gives every row that can be planned, `unusable()` the others with the reason. Files: data/README.md.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal

import torch

from benchmarks.planner.shapes import Sizes, transformer
from terrazzo.engine import Offload, Plan, Precision
from terrazzo.planner.machine.devices import Cluster, Device, device
from terrazzo.planner.machine.mesh import Mesh
from terrazzo.planner.setup.framework import TERRAZZO, Framework
from terrazzo.planner.setup.setup import Setup
from terrazzo.words import CheckpointMode

__all__ = ["Row", "rows", "unusable"]

DATA = Path(__file__).parent / "data"

DEVICES = {
    "A100": "A100-SXM4-80GB",
    "A100-SXM-40GB": "A100-SXM4-40GB",
    "A100-SXM-80GB": "A100-SXM4-80GB",
    "H100-SXM-80GB": "H100-SXM5-80GB",
    "V100-SXM-32GB": "V100-SXM2-32GB",
    "GB200": "GB200",
}
"""Names in the files, and in the planner's table."""

REASONS = {
    "colossal": "sizes and checkpointing not given, labels suspect",
    "kortmem": "analytic: an exact check",
    "llama1": "layout not published",
    "seed000": "not reproducible: feasibility only",
    "seed001": "analytic: an exact check",
    "zerofig1": "analytic: an exact check",
    "zerooff": "sizes not given: feasibility only",
}
"""Why a family gives no row."""

FSDP = Precision(weight="fp32", compute="bf16", reduce="fp32")  # type: ignore[arg-type]
"""FSDP's mixed precision: fp32 shards, cast when gathered. Composer's DEFAULT reduces in fp32, its PURE in bf16."""
DEEPSPEED = Precision(weight="fp16", compute="fp16", reduce="fp16", accumulate="fp16")  # type: ignore[arg-type]
"""DeepSpeed's fp16 engine: 2 + 2 + 12 bytes per parameter (arXiv 1910.02054, section 3.1). Its ZeRO-3 of 2021 gathered
and reduced every parameter by itself."""
MEGATRON = Precision.named("bf16")
"""Megatron's bf16 with fp32 main gradients: 2 + 4 + 12."""


@dataclass(frozen=True)
class Row:
    """One published measurement.

    Attributes:
        setup: the run as the planner sees it.
        step_s: measured seconds of an optimizer step, None if not published or not for speed.
        memory_bytes: measured peak; `memory_kind` says of what, `stage` of which pipeline stage (None: the fullest).
        steady_bytes: allocated between steps: the states, and little else.
        quality: `A` measured and complete, `B` with an inferred field, `C` partial.
    """

    id: str
    family: str
    setup: Setup
    step_s: float | None
    memory_bytes: float | None
    memory_kind: Literal["allocated", "reserved", "device"]
    stage: int | None
    quality: str
    notes: str
    steady_bytes: float | None = None

    @property
    def tokens_per_s_per_gpu(self) -> float | None:
        """Measured; None where the step time is."""
        if self.step_s is None:
            return None
        return self.setup.global_batch * self.setup.sequence / self.step_s / self.setup.cluster.count


@cache
def rows() -> tuple[Row, ...]:
    """Every usable row of both files."""
    table = [_row(fields) for fields in _read("groundtruth.csv") if not _reason(fields)]
    return (*table, *(_vtrain(fields) for fields in _read("vtrain_single.csv")))


def unusable() -> dict[str, str]:
    """Rows that cannot be planned, by id, with the reason."""
    return {fields["id"]: reason for fields in _read("groundtruth.csv") if (reason := _reason(fields))}


def _read(name: str) -> Iterator[dict[str, str]]:
    with (DATA / name).open(newline="") as file:
        yield from csv.DictReader(file)


def _family(identifier: str) -> str:
    return identifier.rsplit("-", 1)[0]


def _reason(fields: Mapping[str, str]) -> str:
    """Why a row cannot be planned; empty if it can."""
    family = _family(fields["id"])
    if family == "mcore" and not fields["n_gpus"]:
        return "number of devices not given"
    if "uneven_pipeline" in fields["model"]:
        return "stages of unequal depth"
    if "check_grads" in fields["model"]:
        return "peak equals the steady state: taken before a step"
    if family == "jzv100" and not fields["global_batch"]:
        return "batch size not given"
    return REASONS.get(family, "")


def _row(fields: dict[str, str]) -> Row:
    family, notes = _family(fields["id"]), fields["notes"]
    setup = _setup(family, fields)
    memory = float(fields["peak_mem_gb"]) * 1e9 if fields["peak_mem_gb"] else None
    return Row(
        id=fields["id"],
        family=family,
        setup=setup,
        step_s=_step_s(family, fields, setup),
        memory_bytes=memory,
        memory_kind="allocated",
        stage=-1 if "(last) rank" in notes else None,
        quality=notes.removeprefix("quality=")[0],
        notes=notes,
        steady_bytes=float(found[1]) * 1e9 if (found := re.search(r"steady allocated=([\d.]+)GB", notes)) else None,
    )


def _setup(family: str, fields: Mapping[str, str]) -> Setup:
    notes = fields["notes"]
    mesh = Mesh(
        pp=_int(fields["pp"]),
        dp_replicate=_int(fields["dp_replicate"]),
        dp_shard=_int(fields["dp_shard"]),
        cp=_int(fields["cp"]),
        tp=_int(fields["tp"]),
    )
    micro_batch, plan = _micro_batch(family, fields), _plan(fields, mesh)
    megatron = mesh.tp * mesh.pp > 1 or (family == "mcore" and not plan.weight.axes)
    return Setup(
        model=transformer(_sizes(family, fields)),
        cluster=_cluster(fields),
        plan=plan,
        mesh=mesh,
        sequence=_sequence(fields),
        micro_batch=micro_batch,
        micro_batches=_global_batch(family, fields) // (micro_batch * mesh.batch_ranks) or 1,
        precision=_precision(family, fields),
        matmul=_matmul(fields["precision"]),
        checkpointing=_checkpointing(family, fields),
        compile=fields["compile"] == "yes" or family == "tinyllama",
        attention="triton" if family == "mosaic" else "math" if _unfused(family, notes) else "flash",
        loss="full" if family in ("hfds", "jzv100") or "DeepSpeed" in notes else "fused",
        accumulate_locally=family == "llama3",
        sequence_parallel="sequence-parallel=True" in notes or "+SP" in fields["ac"] or family == "llama3",
        tensor_overlap="backward" if megatron else "none",
        context="ring",
        virtual_stages=_virtual_stages(family, fields),
        offload=Offload(step="synchronous"),  # DeepSpeed updates on the spot
        coalesced=_precision(family, fields) != DEEPSPEED,
        framework=Framework("megatron") if megatron else TERRAZZO,
        optimizer_kernel="fused" if megatron else "foreach",
    )


def _sequence(fields: Mapping[str, str]) -> int:
    """AWS's table names none: torchtitan's Llama 3 8B recipe has 8,192."""
    return int(fields["seq"] or 8192)


def _micro_batch(family: str, fields: Mapping[str, str]) -> int:
    """Megatron's papers use 1 where nothing is said; ZeRO-3 in arXiv 2104.04473 has one micro-batch per step."""
    if fields["micro_batch"]:
        return int(fields["micro_batch"])
    if family == "sc21" and fields["zero_stage"] == "3":
        return int(fields["global_batch"]) // int(fields["n_gpus"])
    return 1


def _global_batch(family: str, fields: Mapping[str, str]) -> int:
    """Sequences. Llama 3's table gives 16M tokens per step; a table that gives none has one micro-batch per step: 0."""
    if family == "llama3":
        return 2**24 // _sequence(fields)
    return int(fields["global_batch"] or 0)


def _matmul(precision: str) -> str:
    if "fp8" in precision or "float8" in precision:
        return "fp8"
    return "fp16" if precision == "fp16" else "bf16"


def _sizes(family: str, fields: Mapping[str, str]) -> Sizes:
    """JZ's 52B GPT-2 has 64 layers of 8,192 (bigscience experiments/gpt2.md): 12 * 64 * 8192^2 = 51.5e9."""
    given = {name: int(fields[name]) for name in SIZES if fields[name]}
    size = DEFAULTS.get(family, {}) | given
    layers, hidden, ffn, heads, kv_heads, vocab = (size[name] for name in SIZES)
    if family in ("kort", "sc21", "mtnlg"):  # Megatron pads to multiples of 128 on each rank
        vocab = math.ceil(vocab / (128 * _int(fields["tp"]))) * 128 * _int(fields["tp"])
    sizes = Sizes(fields["model"], layers, hidden, ffn, heads, kv_heads, vocab)
    if family in ("aws", "hfds", "tinyllama", "llama3"):
        return replace(sizes, gated=True, norm="rms", bias=False, tied=False, rotary=True)
    if family == "mosaic":
        return replace(sizes, bias=False, learned=int(fields["seq"]))
    notes = fields["notes"]
    rotary = "position-embedding-type=rope" in notes
    return replace(
        sizes,
        rotary=rotary,
        gated="swiglu=True" in notes,
        bias="disable-bias-linear=True" not in notes,
        tied="untie-embeddings-and-output-weights=True" not in notes,
        learned=0 if rotary else int(fields["seq"]),
        dropout=True,
    )


SIZES = ("layers", "hidden", "ffn", "heads", "kv_heads", "vocab")
DEFAULTS = {"jzv100": dict(zip(SIZES, (64, 8192, 32768, 32, 32, 50304), strict=True))}


def _cluster(fields: Mapping[str, str]) -> Cluster:
    count, nodes = int(fields["n_gpus"]), _int(fields["nodes"])
    return Cluster(_device(DEVICES[fields["gpu"]], count // nodes if nodes > 1 else None), count)


@cache
def _device(name: str, per_node: int | None = None) -> Device:
    found = device(name)
    return replace(found, per_node=per_node) if per_node else found


def _plan(fields: Mapping[str, str], mesh: Mesh) -> Plan:
    if "SHARD_GRAD_OP" in fields["notes"]:
        return Plan.named("shard_grad_op")
    plan = Plan.named(f"zero{fields['zero_stage'] or 0}")
    if re.search(r"\bopt(\+param)? offload", fields["notes"]):
        weight = "D@cpu" if "opt+param" in fields["notes"] else "D"
        return Plan(weight, weight, "D", "D@cpu", name="zero3_offload")
    if mesh.dp_replicate > 1 and mesh.dp_shard > 1 and plan.name == "zero3":
        return Plan.named("hybrid_shard")
    return plan


def _precision(family: str, fields: Mapping[str, str]) -> Precision:
    if "PURE" in fields["precision"]:
        return replace(FSDP, reduce=torch.bfloat16)
    if family in ("mosaic", "aws", "hfds", "tinyllama", "llama3"):
        return FSDP
    if family == "jzv100" or (family == "sc21" and fields["zero_stage"] == "3"):
        return DEEPSPEED
    return Precision.named("fp16") if fields["precision"] == "fp16" else MEGATRON


def _checkpointing(family: str, fields: Mapping[str, str]) -> CheckpointMode:
    """The checkpointing mode: none unless the row says so, but of hfds (eight sequences of 4,096 on four devices fit no
    other way) and aws (torchtitan's recipe).
    """
    if family == "aws":
        return "selective_half"
    if fields["ac"].startswith("selective"):
        return "selective"
    return "full" if fields["ac"] == "full" or family == "hfds" else "none"


def _unfused(family: str, notes: str) -> bool:
    """Megatron keeps the scores before flash attention, and where a row asks for it."""
    old = family in ("kort", "sc21", "mtnlg", "jzv100")
    return old or "attention-backend=unfused" in notes or "transformer-impl=local" in notes


def _virtual_stages(family: str, fields: Mapping[str, str]) -> int:
    """Llama 3 405B: about one of its 126 layers per chunk (arXiv 2407.21783, section 3.3.2): 7 chunks in 16 stages."""
    notes, pp = fields["notes"], _int(fields["pp"])
    if family == "llama3":
        return 7
    if found := re.search(r"interleaving m=(\d+)", notes):
        return int(found[1])
    if found := re.search(r"num-layers-per-virtual-pipeline-stage=(\d+)", notes):
        return max(1, int(fields["layers"]) // pp // int(found[1]))
    return 1


def _step_s(family: str, fields: Mapping[str, str], setup: Setup) -> float | None:
    """Seconds per optimizer step: as published, else from tokens/s, else from TFLOP/s by the source's own formula.

    arXiv 2104.04473 counts 96 B s L h^2 (1 + s / 6h + V / 16Lh) FLOPs with recomputation (section 5.1). Llama 3 counts
    model FLOPs, attention in full as torchtitan does; at 131,072 tokens whether it is halved decides by 40 %, so that
    row has no time. Megatron's regression tests are deterministic and tiny: not for speed.
    """
    if family == "mcore" or fields["id"] == "llama3-003":
        return None
    if found := re.search(r"(?:batch time|step_time|iteration|sec/it)=([\d.]+)", fields["notes"]):
        return float(found[1])
    tokens, count = setup.global_batch * setup.sequence, setup.cluster.count
    if fields["tokens_per_s_per_gpu"]:
        return tokens / float(fields["tokens_per_s_per_gpu"]) / count
    layers, hidden, vocab, rate = (
        setup.model.layers,
        setup.model.hidden,
        setup.model.vocab,
        float(fields["tflops_per_gpu"]),
    )
    flops = 96 * layers * hidden**2 * (1 + setup.sequence / (6 * hidden) + vocab / (16 * layers * hidden))
    if family == "llama3":
        flops = 6 * setup.model.matmul_numel + 12 * layers * hidden * setup.sequence
    return tokens * flops / (rate * 1e12 * count)


def _vtrain(fields: Mapping[str, str]) -> Row:
    """Megatron in fp16 without recomputation: its best rows reach 46 % of the peak without counting any.

    Attention keeps its scores and tensor parallelism does not split sequences (VIA-Research/vTrain src/model).
    """
    hidden, heads, layers, sequence = (int(fields[name]) for name in ("hidden", "heads", "layers", "seq"))
    mesh = Mesh(pp=int(fields["pp"]), dp_replicate=int(fields["dp"]), tp=int(fields["tp"]))
    micro_batch = int(fields["micro_batch"])
    sizes = Sizes("GPT", layers, hidden, 4 * hidden, heads, heads, 51200, learned=sequence, dropout=True)
    setup = Setup(
        model=transformer(sizes),
        cluster=Cluster(_device("A100-SXM4-80GB"), int(fields["n_gpus"])),
        plan=Plan.named("zero0"),
        mesh=mesh,
        sequence=sequence,
        micro_batch=micro_batch,
        micro_batches=int(fields["global_batch"]) // (micro_batch * mesh.batch_ranks),
        precision=Precision.named("fp16"),
        matmul="fp16",
        attention="math",
        loss="fused",
        accumulate_locally=True,
        sequence_parallel=False,
        framework=Framework("megatron"),
        tensor_overlap="backward",
    )
    return Row(fields["id"], "vtrain", setup, float(fields["iteration_ms"]) / 1e3, None, "allocated", None, "A", "")


def _int(text: str) -> int:
    return int(text or 1)
