"""Translates a training configuration into the planner's `Setup`."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from terrazzo.config import Config
from terrazzo.errors import BadInput
from terrazzo.launch.machine import ranks_here, resolve_device
from terrazzo.optim import further_moments
from terrazzo.planner import Cluster, Framework, Mesh, ModelShape, Setup, model_shape
from terrazzo.planner.machine.devices import cpu_host, this_machine
from terrazzo.planner.model.closed_form import merged
from terrazzo.planner.model.shapes import BlockShape
from terrazzo.planner.setup.build_setup import of_one_rank
from terrazzo.planner.setup.kernels import attention_of
from terrazzo.planner.setup.optimizers import OPTIMIZERS, OptimizerSpec
from terrazzo.planner.setup.setup import Loss, UpdateKernel
from terrazzo.planner.timing.compute import flops_per_token, repeated_flops_per_token
from terrazzo.train.model.causal_lm import num_flops_per_token
from terrazzo.train.model.head_loss import gives_loss, wants_loss_without_logits
from terrazzo.train.model.lora import with_adapters
from terrazzo.train.model.objectives import objective_of
from terrazzo.train.model.parallel import leaves_logits_apart
from terrazzo.train.model.prepare import ModelOnPaper, decoder_config
from terrazzo.train.settings.optimizer import division_of, optimizer_class, steps_matrices
from terrazzo.train.settings.plan import (
    build_diloco,
    build_offload,
    build_plan,
    build_precision,
    empty_rows,
    mesh_shape,
    micro_batches_per_rank,
    precision_of_run,
)

__all__ = ["executed_share", "matmul_format", "run_flops_per_token", "setup_of"]


def setup_of(
    config: Config, world_size: int, cluster: Cluster | None = None, *, whole: ModelOnPaper | None = None
) -> Setup:
    """The planner's view of a run with `world_size` ranks.

    Args:
        cluster: where it will run, by default the part of this machine that `launch.device` names. A CPU is a whole
            host; its ranks get equal shares of its memory.
        whole: the configuration's model, if the caller has it.

    Raises:
        BadInput: settings do not fit together, or the planner cannot describe the model.
    """
    micro_batches = micro_batches_per_rank(config.batch, world_size, config.plan.mesh)
    precision = precision_of_run(config, world_size)
    mode, every = config.train.checkpointing
    mesh = _mesh(config, world_size)
    machines = machine_of(config) if cluster is None else cluster
    whole = whole or ModelOnPaper(config)
    shape = _shape_of(config, whole)
    return Setup(
        model=shape,
        cluster=replace(machines, device=of_one_rank(machines.device, ranks_here(world_size)), count=world_size),
        plan=build_plan(config),
        mesh=mesh,
        sequence=config.batch.sequence_length,
        micro_batch=config.batch.micro_batch * config.sequences_per_sample,
        micro_batches=micro_batches,
        empty_rows=empty_rows(config.batch, world_size, config.plan.mesh) * config.sequences_per_sample,
        precision=precision,
        matmul=matmul_format(config),
        recipe="rowwise" if config.precision.recipe == "rowwise" else "tensorwise",
        optimizer=optimizer_spec(config),
        optimizer_kernel=_kernel(config.optimizer.options),
        checkpointing=mode,
        every=every,
        compile=config.train.compile,
        attention=attention_of(None, shape, machines.device, as_megatron=False),
        context=config.parallel.context.mode,
        balance=config.parallel.context.balance,
        sequence_parallel=config.parallel.tensor.sequence,
        loss=_loss(config, shape, whole),
        pipeline=config.parallel.pipeline.schedule,
        virtual_stages=config.parallel.pipeline.chunks if mesh.pp > 1 else 1,
        prefetch=config.plan.prefetch,
        framework=Framework(clip=config.train.clip is not None),
        offload=build_offload(config),
        diloco=build_diloco(config),
        offload_activations=config.offload.activations == "cpu",
    )


def _kernel(options: Mapping[str, Any]) -> UpdateKernel | None:
    """The kernel that options of torch.optim choose; None if they set neither `fused` nor `foreach`."""
    chosen: tuple[UpdateKernel, ...] = ("fused", "foreach")
    named = next((name for name in chosen if options.get(name)), None)
    return "loop" if named is None and any(options.get(name) is not None for name in chosen) else named


def _loss(config: Config, shape: ModelShape, whole: ModelOnPaper) -> Loss:
    """How the loss is computed: without logits, on parts of the vocabulary, or on all logits."""
    wants = wants_loss_without_logits(config, shape.logits)
    if wants and (config.model.kind == "decoder" or gives_loss(whole.model)):
        return "chunked"
    return "parts" if leaves_logits_apart(config) else "full"


def run_flops_per_token(config: Config, model: nn.Module) -> int:
    """FLOPs of training on a token as the planner counts them, so that a run's MFU can be put beside its promised one.

    Where the planner does not know what the blocks compute, the model's own estimate; 0 where that is not known either.

    Args:
        model: the run's, whole.
    """
    length = config.batch.sequence_length
    with contextlib.suppress(BadInput):
        if (shape := _model_shape(config)).computes:
            return round(flops_per_token(shape, length))
    return num_flops_per_token(model, length)


def executed_share(config: Config, world_size: int, flops_per_token: float) -> float | None:
    """What a device computes in training, recomputation included, as a multiple of a token's FLOPs.

    Args:
        flops_per_token: of forward and backward, without recomputation.

    Returns:
        1 without activation checkpointing; None for a model that the planner cannot describe.
    """
    if not flops_per_token:
        return None
    if config.train.checkpointing[0] == "none":
        return 1.0
    try:
        setup = setup_of(config, world_size)
    except BadInput:
        return None
    return 1.0 + (repeated_flops_per_token(setup) - _unrepeated_flops(setup)) / flops_per_token


def _unrepeated_flops(setup: Setup) -> float:
    """FLOPs per token that recomputation leaves out: torch stops before a block's last product, which is not needed."""
    if setup.checkpointing != "full":
        return 0.0
    dense = (unit for unit in setup.model.repeated if unit.block and not unit.block.experts and unit.block.norms == 2)
    return (
        sum(2 * unit.count * unit.block.ffn * unit.block.hidden for unit in dense if unit.block)
        * setup.checkpointed_share
    )


def machine_of(config: Config) -> Cluster:
    """This machine as the ranks of `config` use it: a host with GPUs may also run on its CPUs."""
    here = this_machine()
    return here if here.device.kind == resolve_device(config.launch) else cpu_host(here.host_memory_bytes)


def _shape_of(config: Config, whole: ModelOnPaper) -> ModelShape:
    """The model's tensors by the units that the engine finds; `plan.units` is not considered."""
    return _named_matrices(config, _model_shape(config), whole)


def _model_shape(config: Config) -> ModelShape:
    """The same, before the optimizer says which matrices it updates whole."""
    if config.model.kind == "decoder":
        shape = replace(model_shape(decoder_config(config).to_dict()), name="decoder")
    else:
        assert config.model.path is not None
        shape = with_adapters(model_shape(config.model.path), config.lora)
    if config.objective.kind.against_initial:
        shape = replace(shape, units=tuple(replace(one, block=_without_dropout(one.block)) for one in shape.units))
    return objective_of(config).shape(shape)


def _named_matrices(config: Config, shape: ModelShape, whole: ModelOnPaper) -> ModelShape:
    """The shape with those matrices marked that `optimizer.muon` selects, for which the modules have to be built."""
    muon = config.optimizer.muon
    if not steps_matrices(config.optimizer) or (not muon.matrices and muon.others is None):
        return shape
    matrices = {name for name, _ in division_of(config.optimizer, whole.model).matrices}
    units = []
    for unit in shape.units:
        prefix, _, number = unit.name.rpartition(".")
        for index in range(unit.count):
            place = f"{prefix}.{int(number) + index}." if number.isdecimal() else unit.name and f"{unit.name}."
            tensors = tuple(replace(each, whole=f"{place}{each.name}" in matrices) for each in unit.tensors)
            units.append(replace(unit, tensors=tensors, count=1))
    return replace(shape, units=(*units[:1], *merged(units[1:])))


def _without_dropout(block: BlockShape | None) -> BlockShape | None:
    return block if block is None else replace(block, dropout=False, attention_dropout=False)


def matmul_format(config: Config) -> str:
    """The format of matrix products: the compute dtype's, or fp8 for linear layers in 8 bits."""
    if config.precision.recipe is not None:
        return "fp8"
    return {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(build_precision(config).compute, "fp32")


def optimizer_spec(config: Config) -> OptimizerSpec:
    """What the chosen optimizer keeps for each element, from the planner's table.

    Raises:
        BadInput: torch.optim has no such class, or it cannot be sharded; all others are in the table.
    """
    optimizer, options = config.optimizer, config.optimizer.options
    optimizer_class(optimizer)
    plain = [recipe for recipe in OPTIMIZERS.values() if recipe.runs and not (recipe.options or recipe.form)]
    known = {recipe.torch_class: recipe for recipe in plain}
    recipe = known[optimizer.name]
    matrices = recipe.matrices and replace(recipe.matrices, iterations=optimizer.muon.ns_steps)
    return replace(recipe, moments=recipe.moments + further_moments(options), matrices=matrices)


def _mesh(config: Config, world_size: int) -> Mesh:
    return Mesh(**mesh_shape(config.plan.mesh, world_size))
