"""`tz.parallelize`: reads what each axis does to a model, compares it on all ranks, and then changes the model."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from terrazzo.engine.consensus.joint_checks import all_or_none, check_alike
from terrazzo.engine.labels.label import collective_call, labelled
from terrazzo.engine.mesh.axes import Axes
from terrazzo.engine.mesh.family import STAGE_AXIS
from terrazzo.engine.mesh.meshes import expert_mesh
from terrazzo.engine.sharding.shared_parts_checks import check_uncut
from terrazzo.errors import BadInput
from terrazzo.messages import listed
from terrazzo.parallel.context.chunks import Balance
from terrazzo.parallel.context.context import Context
from terrazzo.parallel.context.mode_rules import Mode, check_names
from terrazzo.parallel.context.share_sequences import share_sequences
from terrazzo.parallel.exchanges import AxisRanks
from terrazzo.parallel.expert.share_experts import check_experts, experts_of, share_experts
from terrazzo.parallel.mesh import axes_of, axis_of
from terrazzo.parallel.pipeline.cut_into_stages import Pipeline, read_stages, take_stages
from terrazzo.parallel.pipeline.pipeline_stages import PipelineStages
from terrazzo.parallel.tensor.activation_exchanges import TensorRanks, tensor_ranks
from terrazzo.parallel.tensor.apply_plan import cut_matrices
from terrazzo.parallel.tensor.model_plans import own_plan
from terrazzo.parallel.tensor.read_plan import TensorPlan, cuts_of, styles_of
from terrazzo.parallel.tensor.styles import SplitSequence, Style
from terrazzo.parallel.tensor.tensor_cuts import TensorCuts

__all__ = ["parallelize"]

M = TypeVar("M", bound=nn.Module)


@labelled(collective_call("tz.parallelize(model, mesh)"))
def parallelize(  # structure: signature fixed by the design
    model: M,
    mesh: DeviceMesh,
    *,
    tensor: TensorPlan | Literal["auto"] | None = "auto",
    sequence: bool = True,
    context: Mode | None = "gather",
    balance: Balance = "head_tail",
    pipeline: Pipeline | None = None,
) -> M:
    """Divide a model among ranks, before an optimizer is built and `tz.shard` is called. Collective.

    - Along `tp` each rank has a part of the matrices, and modules exchange activations. Ranks are given the same
      batches, and compute the same outputs and losses.
    - Along `cp` each rank has a part of every sequence, and ranks exchange in attention. Split batches with
      `tz.parallel.context_of(model).split(...)`.
    - Along `ep` each rank has some of the experts of every module that can share them, and ranks exchange tokens.
    - Along `pp` each rank has some of the layers. Train by `tz.step`, which runs all micro-batches of a step.

    The model is changed in place. Parameters that are cut are replaced by plain parameters with this rank's part.
    Weights that differ between ranks take the values of the first. On the meta device nothing is allocated: `tz.shard`
    draws each parameter whole later, and the rank keeps its part.

    Args:
        model: the whole model, not sharded, on every rank.
        mesh: that of `tz.mesh`; give `tz.shard` the same. Without `tp`, `cp`, `ep` and `pp` the model stays as it is.
        tensor: the plan of tensor parallelism. `"auto"` is the model's own: its `tensor_plan()`, or the
            `base_model_tp_plan` of transformers. Else a dict of globs over names of modules and styles, such as
            `{"layers.*.mlp": "enter", "layers.*.mlp.up": "colwise", "layers.*.mlp.down": "rowwise"}`; or None.
            Styles, most under the names that transformers has for them: `colwise` and `rowwise` for linear layers,
            `colwise_gather_output` for one whose outputs are gathered, `rowwise_split_input` for one whose inputs are
            whole, `embedding_rowwise` for a table by rows, `replicate` for modules that stay whole, `enter` for one
            that holds colwise and rowwise layers, `sequence` for blocks that compute a part of each sequence, and
            `tz.parallel.Colwise` with heads or fused parts.
        sequence: whether blocks of style `sequence` compute a part of each sequence. That sends as much, and keeps
            fewer activations. The length of sequences must divide by tp in training.
        context: how attention over shared sequences is computed: `gather`, `ulysses` or `ring`.
        balance: `head_tail`, where all ranks have the same work under a causal mask; or `none`.
        pipeline: how ranks share the model's layers; needed on a mesh with `pp`.

    Raises:
        BadInput: on every rank, before anything is changed. Ranks were given different models or arguments. Along
            `tp`: the plan is unknown, matches nothing or does not fit the model; tp does not divide the heads; the
            model is cut already; a parameter to be cut has a hook or a gradient. Along `cp`: attention cannot be
            shared, or `context` is None. Along `ep`: there are no experts, or ep does not divide their number. Along
            `pp`: the model cannot be cut into so many stages, or `pipeline` is None. On any mesh: an unknown `context`
            or `balance`, a `sequence` that is no bool; a plan without an axis `tp`, or `pipeline` without `pp`.
    """
    arguments, sizes = _Arguments(tensor, sequence, context, balance, pipeline), _sizes(mesh)
    if all(size == 1 for size in sizes.values()):
        _check_arguments(mesh, sizes, arguments)
        return model
    axes = axes_of(mesh)
    ranks = tensor_ranks(mesh) if sizes["tp"] > 1 else None
    changes, facts = all_or_none(axes, lambda: _read(model, mesh, axes, ranks, arguments))
    check_alike(axes, facts, axes.whole_mesh)
    if changes.context is not None:
        shared = changes.context
        all_or_none(axes, lambda: share_sequences(model, shared))  # which changes nothing where it refuses
    if changes.stages is not None:
        take_stages(model, axes, changes.stages)
    if changes.cuts is not None:
        cut_matrices(changes.cuts)
    if changes.experts:
        share_experts(model, axes, changes.experts)
    return model


@dataclass(frozen=True)
class _Arguments:
    """The arguments of `parallelize` beside the model and the mesh."""

    tensor: TensorPlan | Literal["auto"] | None
    sequence: bool
    context: Mode | None
    balance: Balance
    pipeline: Pipeline | None


@dataclass(frozen=True)
class _Changes:
    """What each axis will change of the model; None or empty where it changes nothing.

    Attributes:
        experts: the number of experts of each module, by name.
    """

    stages: PipelineStages | None
    experts: Mapping[str, int]
    cuts: TensorCuts | None
    context: Context | None


def _sizes(mesh: DeviceMesh) -> dict[str, int]:
    """How many ranks share the model along each axis."""
    dims, experts = mesh.mesh_dim_names or (), expert_mesh(mesh)
    sizes = {axis: mesh[axis].size() if axis in dims else 1 for axis in (STAGE_AXIS, "cp", "tp")}
    return sizes | {"ep": 1 if experts is None else experts["ep"].size()}


def _read(
    model: nn.Module, mesh: DeviceMesh, axes: Axes, ranks: TensorRanks | None, arguments: _Arguments
) -> tuple[_Changes, Mapping[str, object]]:
    """What each axis will change of the model, which stays as it is here, and the facts that all ranks must share.

    Raises:
        BadInput: arguments that do not fit the mesh, or the model.
    """
    sizes = _sizes(mesh)
    _check_arguments(mesh, sizes, arguments)
    stages = None
    if sizes[STAGE_AXIS] > 1 and arguments.pipeline is not None:
        stages = read_stages(model, axes, arguments.pipeline)
    experts = check_experts(model, sizes["ep"]) if axes.has_experts else {}
    plan = None if ranks is None or arguments.tensor is None else _plan_of(model, ranks, arguments.tensor)
    cuts = None
    if plan is not None and ranks is not None:
        styles = styles_of(model, plan)
        _check_split(model, ranks, styles if arguments.sequence else {}, experts)
        cuts = cuts_of(model, ranks, styles, arguments.sequence)
    context = None
    if arguments.context is not None and sizes["cp"] > 1:
        _, along = axis_of(mesh, "cp")
        context = Context(AxisRanks(along), arguments.context, arguments.balance, 1 if cuts is None else sizes["tp"])
    facts: dict[str, object] = {
        "pipeline": None if stages is None else [stages.schedule, stages.line, stages.bounds, stages.tied],
        "experts": experts,
        "tensor": None if plan is None else {glob: str(style) for glob, style in plan.items()},
        "sequence": arguments.sequence,
        "context": None if context is None else context.mode,
        "balance": arguments.balance,
        "parameters": [[name, list(each.shape), str(each.dtype)] for name, each in model.named_parameters()],
    }
    return _Changes(stages, experts, cuts, context), facts


def _check_arguments(mesh: DeviceMesh, sizes: Mapping[str, int], arguments: _Arguments) -> None:
    """Refuse what is wrong for any model, also where the mesh does not need it.

    Raises:
        BadInput: there.
    """
    check_names(arguments.context, arguments.balance)
    if not isinstance(arguments.sequence, bool):
        raise BadInput(f"sequence is {arguments.sequence!r}; give True or False: whether blocks split sequences.")
    if sizes[STAGE_AXIS] > 1 and arguments.pipeline is None:
        raise BadInput(
            f"The mesh has pp {sizes[STAGE_AXIS]}, and nothing says how its ranks share the model: give tz.parallelize "
            "pipeline=tz.Pipeline(), or make the mesh with dp_shard in the place of pp."
        )
    if sizes["cp"] > 1 and arguments.context is None:
        raise BadInput(
            f"The mesh has cp {sizes['cp']}, and context is None: each rank would take its part of a sequence for the "
            "whole. Give context='gather', or make the mesh with dp_shard in the place of cp."
        )
    dims = mesh.mesh_dim_names or ()
    if arguments.tensor is not None and arguments.tensor != "auto" and "tp" not in dims:
        raise BadInput(
            f"tz.parallelize was given a plan of tensor parallelism, but the mesh has the axes {', '.join(dims)}: make "
            "it with tz.mesh(tp=2), or leave 'tensor' out."
        )
    if arguments.pipeline is not None and STAGE_AXIS not in dims:
        raise BadInput(
            f"tz.parallelize was given pipeline={arguments.pipeline!r}, but the mesh has the axes {', '.join(dims)}: "
            "make it with tz.mesh(pp=2), or leave 'pipeline' out."
        )


def _check_split(model: nn.Module, ranks: TensorRanks, styles: Mapping[str, Style], experts: Collection[str]) -> None:
    """Refuse experts that would get the same tokens from each rank along `tp`, and routers' losses of such parts."""
    runs = [f"{name}." for name, style in styles.items() if isinstance(style, SplitSequence)]
    mixtures = [name for name in experts_of(model) if any(name.startswith(run) for run in runs)]
    if mixtures and getattr(getattr(model, "config", None), "output_router_logits", False):
        raise BadInput(
            f"Sequences are split around {listed(mixtures)}, and the model would compute its routers' loss of a part "
            "of each. Set output_router_logits=False in the model's config, or pass sequence=False to tz.parallelize."
        )
    if whole := [name for name in experts if not any(f"{name}.".startswith(run) for run in runs)]:
        raise BadInput(
            f"The ranks along tp {ranks.size} would all have the same tokens for the experts of {listed(whole)}, and "
            "their gradients would count as often. Split sequences around them: leave sequence=True, and give the "
            "blocks that hold them the style 'sequence'; or make the mesh without ep."
        )


def _plan_of(model: nn.Module, ranks: TensorRanks, tensor: TensorPlan | str) -> TensorPlan:
    check_uncut(model)
    if isinstance(tensor, str):
        if tensor != "auto":
            raise BadInput(f"tensor is {tensor!r}; give 'auto', a dict of globs over module names and styles, or None.")
        return own_plan(model, ranks.size)
    return tensor
