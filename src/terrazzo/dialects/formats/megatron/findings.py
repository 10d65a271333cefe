"""What Megatron-LM stops at, or passes over."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from terrazzo.dialects.core.description import Description
from terrazzo.dialects.core.dialect import Finding, Reading, ReadingContext
from terrazzo.dialects.core.keys import BOOLEAN, MISSING, integer, number
from terrazzo.dialects.core.mesh import ranks_left
from terrazzo.dialects.formats.megatron.keys import canonical

__all__ = ["findings"]


def findings(reading: Reading, context: ReadingContext) -> Iterable[Finding]:
    """What Megatron-LM refuses of a document, or takes otherwise than it looks."""
    arguments = {canonical(str(key)): value for key, value in reading.document.items()}
    on = {key for key, value in arguments.items() if BOOLEAN.parse(value) is True}
    for key, together, text in _TOGETHER:
        if key in on and together & on:
            yield Finding.error(key, text)
    for key, needed, text in _ALONE:
        if key in on and not needed & on:
            yield Finding.error(key, text)
    yield from _stages(arguments, reading.description)
    yield from _groups(arguments, on, reading.description, context)
    yield from _run(arguments, on, reading.description)


_TOGETHER: tuple[tuple[str, set[str], str], ...] = (
    ("bf16", {"fp16"}, "bf16 and fp16 are both on: keep one of them"),
    ("use-torch-fsdp2", {"use-distributed-optimizer"}, "torch's FSDP2 splits the optimizer itself: remove the other"),
    ("use-torch-fsdp2", {"use-megatron-fsdp"}, "there are two kinds of FSDP: keep one of them"),
    ("use-torch-fsdp2", {"fp16"}, "torch's FSDP2 is not run in fp16 there: take bf16"),
)
"""Switches that do not go with one of others."""
_ALONE: tuple[tuple[str, set[str], str], ...] = (
    (
        "overlap-param-gather",
        {"use-distributed-optimizer", "use-megatron-fsdp"},
        "it gathers what is split: say what is",
    ),
    ("overlap-param-gather", {"overlap-grad-reduce"}, "it goes with --overlap-grad-reduce"),
    ("optimizer-cpu-offload", {"use-precision-aware-optimizer"}, "it goes with --use-precision-aware-optimizer"),
    ("use-precision-aware-optimizer", {"use-distributed-optimizer", "use-megatron-fsdp"}, "it needs a split optimizer"),
    ("use-torch-fsdp2", {"untie-embeddings-and-output-weights"}, "it goes with --untie-embeddings-and-output-weights"),
    ("use-torch-fsdp2", {"no-gradient-accumulation-fusion"}, "it goes with --no-gradient-accumulation-fusion"),
)
"""Switches that need one of others."""


def _stages(arguments: Mapping[str, Any], description: Description) -> Iterable[Finding]:
    stages, chunks = description.value("mesh.pp"), description.value("parallel.chunks")
    layers, each = (
        integer(1).parse(arguments.get(key)) for key in ("num-layers", "num-layers-per-virtual-pipeline-stage")
    )
    if chunks is not None and chunks > 1 and stages == 1:
        yield Finding.error(description["parallel.chunks"].key, "several stages of a rank need a pipeline of ranks")
    uneven = {"decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers", "pipeline-model-parallel-layout"}
    uneven |= {"account-for-embedding-in-pipeline-split", "account-for-loss-in-pipeline-split", "hybrid-layer-pattern"}
    present = {key for key, value in arguments.items() if value is not None and BOOLEAN.parse(value) is not False}
    if layers is not MISSING and stages and layers % stages and not uneven & present:
        text = f"{layers} layers are not divisible by {stages} pipeline stages"
        yield Finding.error("num-layers", text)
    divides = layers is not MISSING and each is not MISSING and stages and layers % stages == 0
    if divides and layers // stages % each:
        text = f"the {layers // stages} layers of a pipeline stage are not divisible by {each}"
        yield Finding.error("num-layers-per-virtual-pipeline-stage", text)
    if "use-torch-fsdp2" in present:
        for path, axis in (("mesh.pp", "pipeline"), ("mesh.ep", "expert")):
            if (description.value(path) or 1) > 1:
                yield Finding.error(description[path].key, f"--use-torch-fsdp2 does not go with {axis} parallelism")


_FSDPS = ("use-megatron-fsdp", "use-torch-fsdp2")
_FORMATS = {"fsdp_dtensor": "use-megatron-fsdp", "torch_dcp": "use-torch-fsdp2"}
"""Switch that a format of checkpoints goes with."""


def _groups(
    arguments: Mapping[str, Any], on: set[str], description: Description, context: ReadingContext
) -> Iterable[Finding]:
    """What is split over data ranks, beside the optimizer, the groups of ranks, and the format of checkpoints."""
    optimizer, kind = (
        str(arguments.get(name) or usual) for name, usual in (("optimizer", "adam"), ("ckpt-format", ""))
    )
    groups = integer(1).parse(arguments.get(key := "num-distributed-optimizer-instances"))
    for switch in _FSDPS:
        if optimizer not in ("adam", "sgd") and switch in on:
            text = f"{optimizer} does not go with --{switch}: split its state alone, by --use-distributed-optimizer"
            yield Finding.error(switch, text)
    if kind in _FORMATS and _FORMATS[kind] not in on:
        yield Finding.error("ckpt-format", f"{kind} goes with --{_FORMATS[kind]}")
    if kind == "torch" and "use-torch-fsdp2" in on:
        yield Finding.error("ckpt-format", "--use-torch-fsdp2 goes with torch_dist or torch_dcp")
    if groups in (MISSING, 1) or "use-torch-fsdp2" in on:
        return
    if not on & {"use-distributed-optimizer", "use-megatron-fsdp"}:
        yield Finding.error(key, "it goes with --use-distributed-optimizer")
    elif optimizer not in ("adam", "sgd"):
        yield Finding.error(key, f"the state of {optimizer} is split over all data ranks: leave it out")
    ranks = ranks_left(description, context.world, ("tp", "pp"))
    if ranks is not None and ranks % groups:
        yield Finding.error(key, f"{ranks} ranks, data and context parallel ones, do not make {groups} groups")


def _run(arguments: Mapping[str, Any], on: set[str], description: Description) -> Iterable[Finding]:
    tensor, context = description.value("mesh.tp") or 1, (description.value("mesh.cp") or 1)
    context *= description.value("mesh.sp") or 1
    if "sequence-parallel" in on and tensor == 1:
        yield Finding.warning("sequence-parallel", "without tensor parallelism it is turned off")
    if arguments.get("num-experts") and tensor > 1 and "sequence-parallel" not in on:
        yield Finding.error("num-experts", "experts and tensor parallelism together need --sequence-parallel")
    length = description.value("batch.sequence_length")
    if length and context > 1 and length % (2 * context):
        yield Finding.error("seq-length", f"{length} tokens are no multiple of 2 × {context} context parallel ranks")
    if "use-megatron-fsdp" in on and arguments.get("ckpt-format") != "fsdp_dtensor":
        yield Finding.error("use-megatron-fsdp", "it goes with --ckpt-format fsdp_dtensor")
    if arguments.get("save") and not arguments.get("save-interval"):
        yield Finding.error("save", "it needs --save-interval")
    if arguments.get("train-iters") and arguments.get("train-samples"):
        yield Finding.error("train-samples", "train-iters says the length as well: keep one of them")
    yield from _schedule(arguments, description)
    if arguments.get("recompute-granularity") == "full" and not arguments.get("recompute-method"):
        yield Finding.error("recompute-granularity", "full needs --recompute-method uniform or block")
    if arguments.get("recompute-granularity") == "selective" and arguments.get("recompute-method"):
        yield Finding.error("recompute-method", "it does not go with selective: remove it")


def _schedule(arguments: Mapping[str, Any], description: Description) -> Iterable[Finding]:
    """One unit for the whole schedule, one word for the warm-up, and a decay that is longer."""
    asked = {key for key in arguments if number().parse(arguments[key]) not in (MISSING, 0, None)}
    for unit, other in (("iters", "samples"), ("samples", "iters")):
        if f"train-{unit}" in asked:
            for key in (f"lr-decay-{other}", f"lr-warmup-{other}"):
                if key in asked:
                    yield Finding.error(key, f"the run is counted in train-{unit}: say it in {unit}")
    for unit in ("iters", "samples"):
        if {"lr-warmup-fraction", f"lr-warmup-{unit}"} <= asked:
            text = f"lr-warmup-{unit} says the warm-up as well: keep one of them"
            yield Finding.error("lr-warmup-fraction", text)
    unit = "samples" if "train-samples" in asked and "train-iters" not in asked else "iters"
    if description.value("schedule.name") == "wsd" and f"lr-wsd-decay-{unit}" not in asked:
        yield Finding.error("lr-decay-style", f"WSD needs --lr-wsd-decay-{unit}")
    warmup, decay = description["schedule.warmup_steps"], integer(1).parse(arguments.get("lr-decay-iters"))
    decay = description.value("schedule.total_steps") if decay is MISSING else decay
    if warmup.value and decay and warmup.value >= decay:
        text = f"{warmup.value} steps of warm-up are not fewer than the {decay} in which the rate decays"
        yield Finding.error(warmup.key or "lr-warmup-iters", text)
