"""What FSDP2 refuses or takes otherwise than it looks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from terrazzo.dialects.core.dialect import ConfigDocument, Finding, Reading, ReadingContext
from terrazzo.dialects.formats.fsdp2.keys import MESH_ORDER
from terrazzo.dialects.formats.shared.fsdp_policy import narrow_sums

__all__ = ["findings"]


def findings(reading: Reading, context: ReadingContext) -> Iterable[Finding]:
    """What FSDP2 refuses of a document, or takes otherwise than it looks."""
    document = reading.document
    yield from _precision(document)
    if low := narrow_sums(reading.description):
        text = f"a loop that switches it off sums gradients in {low} until they are reduced: left on, it sums in fp32"
        yield Finding.warning("set_requires_gradient_sync", text)
    number = document.get("reshard_after_forward")
    if isinstance(number, int) and not isinstance(number, bool) and document.get("dp_mesh_dims"):
        text = f"fully_shard raises on {number} beside dp_mesh_dims: say true, weights are freed after forward."
        yield Finding.error("reshard_after_forward", text)
    mesh = document.get("mesh")
    if isinstance(mesh, Mapping) and set(mesh) & set(MESH_ORDER) and not document.get("dp_mesh_dims"):
        text = "fully_shard takes every axis of this mesh for a data axis: say which are, in dp_mesh_dims."
        yield Finding.error("mesh", text)
    elif isinstance(mesh, Mapping) and not document.get("dp_mesh_dims") and (text := _misnamed(list(map(str, mesh)))):
        yield Finding.warning("mesh", text)
    if isinstance(mesh, list | tuple) and len(mesh) == 2:
        text = "fully_shard refuses two axes without names: say {dp_replicate: ..., dp_shard: ...}."
        yield Finding.warning("mesh", text)
    if not document.get("module"):
        text = "module is not said: called on the root alone, all weights are gathered at once."
        yield Finding.warning("module", text)


_SPLITS, _COPIES = ("shard", "fsdp"), ("replic", "ddp")
"""Parts of names by which axes are meant to be split over, or to be replicas."""


def _misnamed(names: list[str]) -> str:
    """What `fully_shard` does with axes whose names say another thing than their order; empty where they agree."""
    splits, copies = ([any(part in name for part in parts) for name in names] for parts in (_SPLITS, _COPIES))
    if len(names) == 1 and copies[0]:
        plain = "for plain replicas say {dp_replicate: ..., dp_shard: 1}."
        return f"fully_shard splits over the one axis that there is, {names[0]}, whatever its name: {plain}"
    if len(names) == 2 and ((splits[0] and not splits[1]) or (copies[1] and not copies[0])):
        edit = "Put the replicas first, or say dp_mesh_dims."
        return f"fully_shard goes by order, not by names: {names[0]} is copied over, and {names[1]} split over. {edit}"
    return ""


def _precision(document: ConfigDocument) -> Iterable[Finding]:
    policy = document.get("mp_policy")
    if isinstance(policy, Mapping) and policy.get("param_dtype") and not policy.get("reduce_dtype"):
        text = (
            f"reduce_dtype is not said: gradients travel in {policy['param_dtype']} up to torch 2.14 and in the"
            " parameter's own dtype from 2.15 on. Say which."
        )
        yield Finding.warning("mp_policy.reduce_dtype", text)
