"""What cannot be, whatever the hardware: refused with the arithmetic, before anything is estimated."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, get_args

from terrazzo.engine import Plan
from terrazzo.errors import BadInput
from terrazzo.given_numbers import is_number
from terrazzo.messages import counted
from terrazzo.parallel import Balance, Chunks, Mode
from terrazzo.parallel.pipeline.schedules import rounds_of
from terrazzo.parallel.sharing_rules import (
    computes_windows,
    shares_experts,
    shares_heads,
    shares_key_heads,
    splits_tokens,
    tokens_step,
)
from terrazzo.planner.caching import once_per_setup
from terrazzo.planner.machine.checks_of_figures import check_word
from terrazzo.planner.machine.devices import FORMATS
from terrazzo.planner.machine.mesh import Mesh
from terrazzo.planner.model.shapes import BlockShape, ModelShape
from terrazzo.planner.setup.setup import (
    AttentionKernel,
    Fp8Recipe,
    Loss,
    PipelineOrder,
    Setup,
    TpOverlap,
    UpdateKernel,
)
from terrazzo.words import CheckpointMode

__all__ = ["check", "check_number", "shares_all_heads"]

WORDS: Mapping[str, Any] = {
    "attention": AttentionKernel,
    "loss": Loss,
    "pipeline": PipelineOrder,
    "tensor_overlap": TpOverlap,
    "context": Mode,
    "balance": Balance,
    "recipe": Fp8Recipe,
    "checkpointing": CheckpointMode,
}
"""Fields that are one of a few words."""

LARGEST_NUMBER = 10**18
"""The largest number that can stand anywhere, far above all that there is."""


def check_number(name: str, value: float, *, whole: bool = False, least: float | None = None) -> None:
    """Refuse a value that cannot be a size.

    Raises:
        BadInput: no finite number, not above 0 (or below `least`), above `LARGEST_NUMBER`, or not `whole`.
    """
    if isinstance(value, int) and abs(value) > LARGEST_NUMBER:
        raise BadInput(f"{name} is a number of {value.bit_length()} bits; give one of at most {LARGEST_NUMBER:.0e}.")
    if not is_number(value) or not math.isfinite(value):
        raise BadInput(f"{name} is {value!r}; give a finite number.")
    if value > LARGEST_NUMBER:
        raise BadInput(f"{name} is {value:g}; give one of at most {LARGEST_NUMBER:.0e}.")
    if value < least if least is not None else value <= 0:
        bound = f"{least:g} or more" if least is not None else "a number above 0"
        raise BadInput(f"{name} is {value}; give {bound}.")
    if whole and value != int(value):
        raise BadInput(f"{name} is {value}; give a whole number.")


@once_per_setup
def check(setup: Setup) -> None:
    """Raises: `BadInput` for a setup that cannot be, with the numbers and the edit that fixes it."""
    _check_words(setup)
    _check_sizes(setup)
    _check_world(setup)
    _check_plan(setup)
    _check_formats(setup)
    _check_fragments(setup)
    if setup.model.layers:
        _check_sequence(setup)
        _check_blocks(setup)
        _check_parts(setup)
        _check_pipeline(setup)
        _check_experts(setup)


def _check_words(setup: Setup) -> None:
    for name, words in WORDS.items():
        check_word(setup, name, get_args(words))
    check_word(setup, "matmul", FORMATS)
    if setup.optimizer_kernel is not None:
        check_word(setup, "optimizer_kernel", get_args(UpdateKernel))


def _check_sizes(setup: Setup) -> None:
    for axis in fields(Mesh):
        check_number(axis.name, getattr(setup.mesh, axis.name), whole=True)
    check_number("params", setup.model.numel)
    check_number("gpus", setup.cluster.count, whole=True)
    for name in ("micro_batch", "micro_batches", "every", "virtual_stages"):
        check_number(name, getattr(setup, name), whole=True)
    for name in ("prefetch", "empty_rows"):
        check_number(name, getattr(setup, name), whole=True, least=0)
    if setup.empty_rows >= setup.rows:
        raise BadInput(f"empty_rows is {setup.empty_rows}, of {counted(setup.rows, 'row')} in a step; give fewer.")


def _check_world(setup: Setup) -> None:
    mesh, count = setup.mesh, setup.cluster.count
    if mesh.world_size != count:
        raise BadInput(
            f"pp {mesh.pp} × dp_replicate {mesh.dp_replicate} × dp_shard {mesh.dp_shard} × cp {mesh.cp} × tp {mesh.tp} "
            f"= {mesh.world_size} ranks, but there are {count} GPUs. Their product must be the number of GPUs."
        )


def _check_plan(setup: Setup) -> None:
    plan, mesh = setup.plan, setup.mesh
    if plan.groups and mesh.dp_replicate == 1:
        raise BadInput(
            f"{plan.name} needs two or more shard groups, but {mesh.data_ranks} data ranks form one (dp_replicate). "
            "Use zero3, which is the same with one group, or more GPUs, or another dp_replicate."
        )
    between = replace(plan.between, tier="device")  # other frameworks keep it where the weight is
    axes = ["dp_shard"] if mesh.dp_replicate == 1 else ["dp_shard", "dp_replicate"]
    Plan(plan.weight, between, plan.grad, plan.optim, plan.name).resolve(axes)


def _check_formats(setup: Setup) -> None:
    precision = setup.precision
    if setup.ema and precision.exact_master.itemsize < 4:
        raise BadInput(
            "ema: an average of 16-bit master weights would stand still, as tz.EMA says too. Use precision bf16, whose "
            "master weights are fp32, or rounding=remainder, or leave ema out."
        )
    named = [name for name in ("frozen", "gather", "quantized_reduce") if getattr(precision, name) is not None]
    if setup.model.bare and named:
        raise BadInput(
            f"precision: {' and '.join(named)}: of matrices, which a number of parameters has not. Name a model, or "
            "leave it out."
        )


def _check_fragments(setup: Setup) -> None:
    units = sum(unit.count for unit in setup.model.units if any(tensor.trainable for tensor in unit.tensors))
    if setup.diloco is not None and setup.diloco.fragments > max(1, units):
        raise BadInput(
            f"fragments is {setup.diloco.fragments}; they are sets of units, and {units} units of {setup.model.name} "
            f"are trained. Use {units} or fewer."
        )


def _check_sequence(setup: Setup) -> None:
    sequence, positions, cp = setup.sequence, setup.model.positions, setup.mesh.cp
    check_number("sequence", sequence, whole=True)
    if positions is not None and sequence > positions and _learned_positions(setup.model):
        raise BadInput(
            f"A sequence of {sequence} tokens is longer than the {counted(positions, 'position')} that "
            f"{setup.model.name} has vectors for. Use a sequence of at most {positions}."
        )
    parts = _chunks(setup)
    if sequence % parts:
        cut = f"2 × cp {cp} = {parts} equal parts, two for each rank, which balances causal attention"
        cut = cut if parts > cp else f"cp {cp} equal parts"
        raise BadInput(
            f"A sequence of {counted(sequence, 'token')} does not divide into {cut}. Use "
            f"{sequence // parts * parts or parts} tokens."
        )


def _chunks(setup: Setup) -> int:
    """Equal parts that a sequence is cut into for the ranks along cp."""
    return Chunks(setup.mesh.cp, setup.balance).count


def _check_parts(setup: Setup) -> None:
    """Between matrices ranks along tp have parts of each sequence, in the engine all as many tokens."""
    mesh, own = setup.mesh, setup.sequence // setup.mesh.cp
    if setup.sequence_parallel and not setup.as_megatron and not splits_tokens(setup.sequence, mesh.cp, mesh.tp):
        step = tokens_step(Chunks(mesh.cp, setup.balance), mesh.tp)
        raise BadInput(
            f"A sequence of {setup.sequence} tokens gives each of cp {mesh.cp} ranks {own}, which do not divide by tp "
            f"{mesh.tp}: between matrices each has a part of them. Use {setup.sequence // step * step or step} tokens, "
            "or no sequence parallelism (--no-sequence-parallel)."
        )


def _learned_positions(model: ModelShape) -> bool:
    """Whether positions are a table of vectors; rotary ones go on beyond those that a config names."""
    shapes = [tensor.shape for tensor in model.root.tensors if tensor.role not in ("embedding", "head")]
    return any(len(shape) == 2 and shape[0] >= (model.positions or 0) and shape[1] == model.hidden for shape in shapes)


def _check_blocks(setup: Setup) -> None:
    """Tensor parallelism gives each rank whole heads; in Megatron-core also an equal part of the inner width.

    Of fewer key-value heads than ranks every rank holds all, and computes the one that its query heads share. Under
    `ulysses` ranks along cp share out the heads of each.
    """
    model, tp = setup.model, setup.mesh.tp
    for block in model.blocks:
        sizes = {"heads": block.heads, "kv_heads": block.kv_heads}
        sizes |= {"ffn": block.ffn} if setup.as_megatron else {}
        for name, size in sizes.items():
            if not (shares_key_heads if name == "kv_heads" else shares_heads)(size, tp):
                raise BadInput(_indivisible(model.name, name, size, tp))
        _check_context(setup, block)


def _check_context(setup: Setup, block: BlockShape) -> None:
    mesh, name = setup.mesh, setup.model.name
    if mesh.cp > 1 and setup.context == "ulysses" and not shares_heads(block.heads, mesh.cp, mesh.tp):
        raise BadInput(
            f"heads {block.heads} of {name} do not divide by cp {mesh.cp} × tp {mesh.tp} = {mesh.cp * mesh.tp}, and "
            "context mode ulysses gives each of these ranks as many. Use context mode gather, or axes whose product "
            f"divides {block.heads}."
        )
    if mesh.cp > 1 and block.window is not None and not computes_windows(setup.context):
        raise BadInput(
            f"{name} attends within a sliding window of {block.window} tokens, and context mode ring computes causal "
            "and document masks alone. Use context mode gather or ulysses."
        )


def _indivisible(model: str, name: str, size: int, tp: int) -> str:
    fits = [divisor for divisor in range(1, min(tp, size + 1)) if size % divisor == 0]
    return (
        f"{name} {size} of {model} do not divide by tp {tp}: {size} / {tp} = {size / tp:.4g}. "
        f"Use a tp that divides {size}, such as {fits[-1] if fits else 1}."
    )


def _check_pipeline(setup: Setup) -> None:
    model, mesh, virtual = setup.model, setup.mesh, setup.virtual_stages
    parts = model.line_length if setup.staged else model.layers
    if mesh.pp > parts:
        beside = f", and {parts - model.layers} parts in front of and behind them" if parts > model.layers else ""
        raise BadInput(
            f"{model.name} has {counted(model.layers, 'layer')}{beside}, too few for pp {mesh.pp} stages: each needs "
            f"one at least. Use a pp of at most {parts}."
        )
    if virtual == 1:
        return
    if mesh.pp == 1:
        raise BadInput(f"virtual_stages {virtual} interleave the chunks of a pipeline, but pp is 1. Leave it out.")
    if setup.pipeline != "1f1b":
        raise BadInput(
            f"virtual_stages {virtual} interleave 1f1b, not {setup.pipeline}: take pipeline 1f1b, or leave it out."
        )
    if mesh.pp * virtual > parts:
        raise BadInput(
            f"{counted(model.layers, 'layer')}: too few for pp {mesh.pp} × virtual_stages {virtual} = "
            f"{mesh.pp * virtual} chunks. Use a virtual_stages of at most {parts // mesh.pp}."
        )
    if setup.micro_batches < mesh.pp:
        raise BadInput(
            f"{setup.micro_batches} micro-batches are too few for the interleaved schedule of pp {mesh.pp}, which runs "
            f"{mesh.pp} through one chunk after the other (arXiv 2104.04473). Use {mesh.pp} or more."
        )
    if setup.staged:
        rounds_of(mesh.pp, setup.micro_batches)


def _check_experts(setup: Setup) -> None:
    """The engine's ranks that share experts are any of one group of dp_replicate; in Megatron-core they may be in
    different ones, and those along tp are not among them.
    """
    model, mesh = setup.model, setup.mesh
    if mesh.ep == 1:
        return
    ranks = mesh.data_ranks if setup.as_megatron else mesh.shard_ranks * mesh.tp
    if not model.experts:
        raise BadInput(f"ep {mesh.ep} spreads routed experts, but {model.name} has none. Leave ep out.")
    if not shares_experts(model.experts, mesh.ep):
        raise BadInput(
            f"{model.experts} experts of {model.name} do not divide by ep {mesh.ep}: {model.experts / mesh.ep:.4g} on "
            f"each rank. Use an ep that divides {model.experts}."
        )
    if ranks % mesh.ep:
        groups, beside = (f"dp_replicate {mesh.dp_replicate} × ", "") if setup.as_megatron else ("", f" × tp {mesh.tp}")
        raise BadInput(
            f"ep {mesh.ep} takes its ranks from other axes and does not divide theirs: {groups}dp_shard "
            f"{mesh.dp_shard} × cp {mesh.cp}{beside} = {ranks}. Use an ep that divides {ranks}."
        )


def shares_all_heads(model: ModelShape, tp: int) -> bool:
    """Whether ranks along `tp` can share the query and the key heads of each block."""
    return all(shares_heads(block.heads, tp) and shares_key_heads(block.kv_heads, tp) for block in model.blocks)
