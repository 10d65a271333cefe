"""Checks that a model was divided for the mesh: parts of parameters and sequences that ranks share, and stages."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from terrazzo.engine.consensus.joint_checks import all_or_none
from terrazzo.engine.mesh.axes import Axes
from terrazzo.engine.mesh.family import STAGE_AXIS, Family
from terrazzo.engine.mesh.meshes import expert_mesh
from terrazzo.engine.model.engine import is_sharded
from terrazzo.engine.partition.box import record_of
from terrazzo.engine.partition.unit_members import Member
from terrazzo.engine.pipeline.stages import stages_of
from terrazzo.engine.runtime.compiled import compilation_of
from terrazzo.errors import BadInput, Misuse
from terrazzo.marks import SHARES_EXPERTS, SHARES_SEQUENCES, waits_for_root
from terrazzo.messages import listed

__all__ = [
    "check_experts_shared",
    "check_parts",
    "check_sequences",
    "check_stages",
    "check_uncompiled",
    "check_uncut",
]


def check_sequences(model: nn.Module, mesh: DeviceMesh) -> None:
    """Refuse a model of whole sequences on a mesh along which ranks share them.

    Raises:
        BadInput: there.
    """
    dims = mesh.mesh_dim_names or ()
    size = mesh.size(dims.index("cp")) if "cp" in dims else 1
    if size > 1 and next(SHARES_SEQUENCES.all_in(model), None) is None:
        raise BadInput(
            f"The mesh has cp {size}, along which ranks share sequences, but tz.parallelize was not given this model: "
            "its attention would take this rank's part of a sequence for the whole. Call tz.parallelize(model, mesh) "
            "before tz.shard; or make the mesh with dp_shard in the place of cp."
        )


def check_stages(model: nn.Module, mesh: DeviceMesh) -> None:
    """Refuse a whole model on a mesh along which ranks have stages, and stages on another mesh than theirs.

    Raises:
        BadInput: there.
    """
    dims = mesh.mesh_dim_names or ()
    size = mesh.size(dims.index(STAGE_AXIS)) if STAGE_AXIS in dims else 1
    stages = stages_of(model)
    if stages is not None:
        check_uncompiled(model)
    if size == (1 if stages is None else stages.ranks):
        return
    if stages is None:
        raise BadInput(
            f"The mesh has pp {size}, along which ranks have stages of a model, but this model is whole. Call "
            "tz.parallelize(model, mesh, pipeline=tz.Pipeline()) before tz.shard; or make the mesh with dp_shard in "
            "the place of pp."
        )
    raise BadInput(
        f"The model was cut into stages for pp {stages.ranks}, and the mesh has pp {size}. Pass tz.shard the mesh that "
        "tz.parallelize was given."
    )


def check_experts_shared(model: nn.Module, mesh: DeviceMesh) -> None:
    """Refuse a model of whole experts on a mesh along which ranks share them.

    Raises:
        BadInput: there.
    """
    experts = expert_mesh(mesh)
    if experts is None or next(SHARES_EXPERTS.all_in(model), None) is not None:
        return
    holders = ((module, name) for module in model.modules() for name, _ in module.named_parameters(recurse=False))
    records = (record_of(module, name) for module, name in holders)
    if all(record is None or record.family is not Family.EXPERT for record in records):
        raise BadInput(
            f"The mesh has ep {experts['ep'].size()}, along which ranks share experts, but tz.parallelize has cut none "
            "of this model. Call tz.parallelize(model, mesh) before tz.shard; or leave ep out of the mesh."
        )


def check_uncompiled(model: nn.Module) -> None:
    """Refuse to cut into stages what is compiled.

    Raises:
        BadInput: there.
    """
    for name, module in model.named_modules():
        if compilation_of(module) is not None:
            raise BadInput(
                f"{name or type(model).__name__!r} is compiled, and a model in stages is not supported so yet: leave "
                "compile out, or make the mesh with dp_shard in the place of pp."
            )


def check_parts(members: Sequence[Member], axes: Axes) -> None:
    """Refuse a model that has been cut for another mesh, or not at all. Collective.

    Raises:
        BadInput: on every rank.
    """
    all_or_none(axes, functools.partial(_check_known_to_mesh, members, axes))
    wrong = []
    for family in (Family.DENSE, Family.EXPERT):
        cut = [member for member in members if member.family is family]
        if (along := axes.cut_along(family)) and cut:
            numels = axes.total(torch.tensor([m.parameter.numel() for m in cut], device=axes.device), along).tolist()
            halves = zip(cut, numels, strict=True)
            wrong += [member.name for member, numel in halves if numel != torch.Size(member.shape).numel()]
    if axes.anywhere(bool(wrong), axes.whole_mesh):
        raise BadInput(
            f"{listed(wrong) or 'Parameters of other ranks'}: the ranks along which they are cut do not have the whole "
            "of it between them. Pass tz.shard the mesh that tz.parallelize was given, and leave parameters "
            "as it left them."
        )


def _check_known_to_mesh(members: Sequence[Member], axes: Axes) -> None:
    """Refuse parameters that were cut along axes which the mesh has not, or not cut along those that it has.

    Raises:
        BadInput: there.
    """
    shared, has_experts = axes.live(axes.same_data), axes.has_experts
    has_axes = {Family.DENSE: bool(shared), Family.SHARED: bool(shared), Family.EXPERT: has_experts}
    recorded = [member.name for member in members if member.record is not None and not has_axes[member.family]]
    whole = [member.name for member in members if member.record is None]
    if recorded:
        raise BadInput(
            f"The model was cut by tz.parallelize ({listed(recorded)}), but the mesh has the axes "
            f"{', '.join(axes.data)}. Pass tz.shard the mesh that tz.parallelize was given."
        )
    if frozen := [member.name for member in members if member.family is Family.EXPERT and not member.trainable]:
        raise BadInput(
            f"{listed(frozen)}: experts that ranks along ep share and that are frozen, as under adapters, which has "
            "not been tried. Train them too, by requires_grad_(True) before tz.shard; or leave ep out of the mesh."
        )
    if shared and whole:
        raise BadInput(
            f"The mesh has the axis {', '.join(shared)}, along which ranks share matrices, but tz.parallelize does not "
            f"know {listed(whole)}. Call tz.parallelize(model, mesh, tensor=...) with the whole model before tz.shard, "
            "and what adds parameters before that; or leave the axis out of the mesh."
        )


def check_uncut(model: nn.Module) -> None:
    """Refuse a model of which `tz.parallelize` or `tz.shard` has parts already.

    Raises:
        Misuse: there.
    """
    for name, module in model.named_modules():
        if waits_for_root(module):
            raise Misuse(
                f"tz.parallelize was given a model that fully_shard was called on (at {name or 'its root'!r}): call "
                "tz.parallelize before, and tz.shard in place of fully_shard."
            )
        attributes = (attribute for attribute, _ in module.named_parameters(recurse=False))
        if is_sharded(module) or any(record_of(module, attribute) is not None for attribute in attributes):
            raise Misuse(
                f"tz.parallelize was given a model that has been cut or sharded already (at {name or 'its root'!r}). "
                "Call it once, before tz.shard, on a model that is whole."
            )
