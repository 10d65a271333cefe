"""Published figures of well-known runs that are not in the tables.

They were known while the planner's constants were set, and some constants were moved after looking at them: a check
that they stay met, not evidence about unseen runs. Where a name says `here` or `taken as`, the layout is our reading.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

from terrazzo.messages import GIB
from terrazzo.planner.assemble import estimate
from terrazzo.planner.report.estimates import Estimate
from terrazzo.planner.setup.build_setup import build_setup
from terrazzo.planner.setup.request import Request

__all__ = ["ANCHORS", "Anchor"]


@dataclass(frozen=True)
class Anchor:
    """A published figure, or the range of several, and what the planner says instead.

    Attributes:
        bound: of a peak, what the planner says a device needs at most, in the same unit.
    """

    name: str
    unit: str
    published: tuple[float, float]
    predict: Callable[[], float]
    source: str
    bound: Callable[[], float] | None = None

    def error(self, found: float) -> float:
        """Relative to the nearer end of the range; 0 inside of it."""
        low, high = self.published
        return found / low - 1 if found < low else found / high - 1 if found > high else 0.0


ASYNC_TP = "pytorch/torchtitan/benchmarks/asyncTP_llama3_h100_2025-06; the share that async TP hides follows from these"

TITAN = Request(
    "llama3-8b",
    8,
    gpu="H100-SXM-96GB-HBM2e",
    sequence=8192,
    micro_batch=2,
    checkpointing="selective_half",
    precision="fsdp2",
    compile=True,
    loss="fused",
)
"""torchtitan's Llama 3 8B recipe: FSDP2, per-operator selective checkpointing, two sequences of 8,192."""
TITAN_8 = replace(TITAN, micro_batch=1, gpu="H100-SXM5-80GB")
TITAN_405 = replace(TITAN, model="llama3-405b", gpus=512, tp=8, checkpointing="full")
TITAN_TP = replace(TITAN, gpus=64, tp=8, micro_batch=12, loss="parts")
"""torchtitan's runs with FSDP and tensor parallelism, with async TP and without."""
TITAN_TP_70 = replace(TITAN_TP, model="llama3-70b", gpus=256, micro_batch=16, checkpointing="full")
TITAN_CP = replace(TITAN_8, gpu="H100-SXM-96GB-HBM2e", cp=8, context="ring", sequence=262_144, checkpointing="full")
"""torchtitan's longest sequence on 8 devices; its context parallelism sends keys and values as `ring` does."""
FP8 = "fp8,weight=fp32,reduce=fp32"
AO = replace(TITAN_8, sequence=4096, checkpointing="none", compile=False, loss="full")
IBM = Request("llama2-7b", 128, gpu="A100-SXM4-80GB", sequence=4096, micro_batch=2, precision="fsdp2")
"""IBM's and PyTorch's FSDP run of Llama 2 7B: no checkpointing, two sequences of 4,096."""
GPT_200B: Mapping[str, Any] = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "n_layer": 100,
    "n_embd": 12800,
    "n_head": 80,
    "n_positions": 2048,
    "vocab_size": 250880,
}
"""A GPT of 200B parameters; BigScience's had other depth and width."""


@cache
def _estimate(request: Request) -> Estimate:
    return estimate(build_setup(request))


def _throughput(request: Request) -> float:
    time = _estimate(request).time
    return time.tokens_per_s_per_gpu if time else 0.0


def _mfu(request: Request) -> float:
    time = _estimate(request).time
    return (time.mfu or 0.0) if time else 0.0


def _reserved_gib(request: Request) -> float:
    return _estimate(request).memory.reserved_bytes / GIB


def _upper_gib(request: Request) -> float:
    return _estimate(request).memory.upper_bytes / GIB


def _fp8_gain(gpu: str, recipe: str = "fp8") -> float:
    """Throughput of Llama 3 8B in fp8 over that in bf16, on 8 devices."""
    base = replace(TITAN_8, gpu=gpu)
    return _throughput(replace(base, precision=FP8.replace("fp8", recipe, 1))) / _throughput(base)


def _checkpointing_cost() -> float:
    """Share of the throughput that full checkpointing takes."""
    plain, full = (replace(TITAN, checkpointing=mode, micro_batch=1) for mode in ("none", "full"))
    return 1 - _throughput(full) / _throughput(plain)


def _batch_gain() -> float:
    """Throughput gained by four times the batch in a pipeline of ten stages: fewer bubbles and updates per token."""
    small = Request(
        dict(GPT_200B), 80, gpu="A100-SXM4-80GB", strategy="zero1", sequence=2048, global_batch=512, micro_batch=2,
        checkpointing="full", tp=8, pp=10, framework="megatron",
    )  # fmt: skip
    times = [estimate(build_setup(replace(small, global_batch=batch))).time for batch in (512, 2048)]
    few, many = (time.tokens_per_s_per_gpu if time else 1.0 for time in times)
    return many / few - 1


ANCHORS = (
    Anchor(
        "Llama 3 8B, FSDP2, compiled, 16k tokens per device, 8 × H100 96 GB",
        "tokens/s/GPU",
        (6667, 6667),
        lambda: _throughput(TITAN),
        "pytorch/torchtitan docs/performance.md",
    ),
    Anchor(
        "the same on 128",
        "tokens/s/GPU",
        (6514, 6514),
        lambda: _throughput(replace(TITAN, gpus=128)),
        "pytorch/torchtitan docs/performance.md",
    ),
    Anchor(
        "128 devices over 8",
        "ratio",
        (0.977, 0.977),
        lambda: _throughput(replace(TITAN, gpus=128)) / _throughput(TITAN),
        "pytorch/torchtitan docs/performance.md",
    ),
    Anchor(
        "Llama 3 405B, FSDP2 and tp 8, compiled; here on 512 × H100 96 GB, two sequences, full checkpointing",
        "tokens/s/GPU",
        (109, 109),
        lambda: _throughput(TITAN_405),
        "pytorch/torchtitan docs/performance.md, as corrected; layout assumed",
    ),
    *(
        Anchor(name, "tokens/s/GPU", (published, published), partial(_throughput, request), ASYNC_TP)
        for name, published, request in (
            ("Llama 3 8B, FSDP 8 and tp 8, compiled, 12 sequences", 4378, TITAN_TP),
            ("the same with async TP", 4809.4, replace(TITAN_TP, tensor_overlap="async")),
            ("Llama 3 70B, FSDP 32 and tp 8, compiled, full checkpointing, 16 sequences", 597.3, TITAN_TP_70),
            ("the same with async TP", 652.4, replace(TITAN_TP_70, tensor_overlap="async")),
        )
    ),
    Anchor(
        "Llama 3 8B, cp 8, compiled, fp8, full checkpointing, one sequence of 262,144; ring assumed",
        "tokens/s/GPU",
        (548, 548),
        lambda: _throughput(replace(TITAN_CP, precision=FP8)),
        "pytorch/torchtitan/benchmarks/llama3_h100_202412",
    ),
    *(
        Anchor(
            f"Llama 3 8B, {name}: one sequence of 8,192, compiled",
            "tokens/s/GPU",
            (published, published),
            partial(_throughput, replace(TITAN_8, gpu=gpu)),
            "pytorch/ao docs, workflows/training",
        )
        for name, gpu, published in (
            ("8 × B200, their power limited by an unknown cap", "B200", 8307.5),
            ("8 × MI300X", "MI300X", 5376.5),
        )
    ),
    *(
        Anchor(
            f"Llama 3 8B, 8 × {gpu}: {recipe} over bf16",
            "ratio",
            (published, published),
            partial(_fp8_gain, gpu, recipe),
            "pytorch/ao docs, workflows/training; the shares of recipes follow from these",
        )
        for gpu, recipe, published in (
            ("H100", "fp8", 1.25),
            ("H100", "fp8-rowwise", 1.101),
            ("B200", "fp8", 1.254),
            ("B200", "fp8-rowwise", 1.04),
            ("B200", "mxfp8", 1.2),
            ("MI300X", "fp8", 1.147),
            ("MI300X", "fp8-rowwise", 1.096),
        )
    ),
    Anchor(
        "Llama 3 8B, 8 × H100, one sequence of 8,192, selective, compiled: reserved, in two releases",
        "GiB",
        (30.89, 47.65),
        lambda: _reserved_gib(TITAN_8),
        "pytorch/torchtitan#929; pytorch/ao torchao/float8",
        lambda: _upper_gib(TITAN_8),
    ),
    Anchor(
        "Llama 3 8B, 8 × H100, eager, no checkpointing; taken as 4,096 tokens per device, and as reserved",
        "GiB",
        (53.12, 53.12),
        lambda: _reserved_gib(AO),
        "pytorch/ao docs",
        lambda: _upper_gib(AO),
    ),
    Anchor(
        "the same, every second block",
        "GiB",
        (40.60, 40.60),
        lambda: _reserved_gib(replace(AO, checkpointing="every_2")),
        "pytorch/ao docs",
        lambda: _upper_gib(replace(AO, checkpointing="every_2")),
    ),
    Anchor(
        "the same, every block",
        "GiB",
        (28.07, 28.07),
        lambda: _reserved_gib(replace(AO, checkpointing="full")),
        "pytorch/ao docs",
        lambda: _upper_gib(replace(AO, checkpointing="full")),
    ),
    Anchor(
        "Llama 2 7B, FSDP, 128 × A100, no checkpointing, eager",
        "tokens/s/GPU",
        (3700, 3700),
        lambda: _throughput(IBM),
        "PyTorch and IBM, pytorch.org/blog, 2024",
    ),
    Anchor("the same", "MFU", (0.57, 0.57), lambda: _mfu(IBM), "the same; PaLM's convention"),
    Anchor(
        "the same compiled",
        "MFU",
        (0.68, 0.68),
        lambda: _mfu(replace(IBM, compile=True, loss="fused")),
        "PyTorch and IBM, pytorch.org/blog/maximizing-training-throughput",
    ),
    Anchor(
        "MFU of FSDP on A100 without checkpointing, middle half of what is published",
        "MFU",
        (0.49, 0.58),
        lambda: _mfu(replace(IBM, gpus=64)),
        "MosaicML, IBM, PyTorch, Hugging Face; here Llama 2 7B on 64",
    ),
    Anchor(
        "the same with full checkpointing",
        "MFU",
        (0.46, 0.52),
        lambda: _mfu(replace(IBM, gpus=64, checkpointing="full", micro_batch=8)),
        "as above, eight sequences",
    ),
    Anchor(
        "MFU of FSDP on H100 in bf16",
        "MFU",
        (0.38, 0.44),
        lambda: _mfu(replace(TITAN_8, gpus=64, micro_batch=2)),
        "MosaicML, torchtitan; here Llama 3 8B on 64",
    ),
    Anchor(
        "MFU on H100 in fp8, of the peak in fp8",
        "MFU",
        (0.21, 0.31),
        lambda: _mfu(replace(TITAN_8, gpus=64, micro_batch=2, precision="fp8")),
        "MosaicML, torchtitan, NeMo; here Llama 3 8B on 64",
    ),
    Anchor(
        "full checkpointing, Llama 3 8B",
        "share of throughput",
        (0.20, 0.25),
        _checkpointing_cost,
        "stas00/ml-engineering training/performance",
    ),
    Anchor(
        "GPT 200B, tp 8, pp 10, full checkpointing: throughput gained with batch 2,048 over 512",
        "share",
        (0.026, 0.067),
        _batch_gain,
        "bigscience-workshop/bigscience: 84.6 to 90.3 TFLOP/s; the bubble alone is worth 2.6 %",
    ),
)
"""Two are rough: memory of the same run moved by a third between releases, and BigScience's shape is not given."""
