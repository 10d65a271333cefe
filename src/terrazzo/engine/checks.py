"""What must hold before a model is sharded, checked on every rank from data that all ranks share."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from terrazzo.engine.axes import Axes
from terrazzo.engine.collectives import backend_of
from terrazzo.engine.partition import UnitSpec
from terrazzo.engine.precision import Precision
from terrazzo.engine.store.settings import Offload
from terrazzo.engine.store.store import no_folder
from terrazzo.errors import BadInput, Misuse

__all__ = [
    "check_agreement",
    "check_device",
    "check_mesh",
    "check_model",
    "check_offload",
    "check_precision",
    "model_facts",
    "optimizer_facts",
    "together",
]

T = TypeVar("T")


def check_model(model: nn.Module) -> None:
    """Errors: `Misuse` without a process group or for a sharded model, `BadInput` for what cannot be laid out flat."""
    if not dist.is_initialized():
        raise Misuse(
            "tz.shard needs torch.distributed. Call torch.distributed.init_process_group() first; "
            "'torchrun --nproc-per-node=1' is enough for a single rank."
        )
    if getattr(model, "_terrazzo", None) is not None or any(hasattr(m, "_terrazzo") for m in model.modules()):
        raise Misuse(f"This {type(model).__name__} is already sharded. Build a new model to shard it differently.")
    parameters = dict(model.named_parameters())
    if not parameters:
        raise BadInput(f"{type(model).__name__} has no parameters: there is nothing to shard.")
    exotic = [name for name, parameter in parameters.items() if parameter.is_complex() or parameter.is_sparse]
    if exotic:
        raise BadInput(f"{', '.join(exotic)}: complex and sparse parameters cannot be sharded.")
    scattered = [name for name, parameter in parameters.items() if not parameter.is_contiguous()]
    if scattered:
        raise BadInput(
            f"{', '.join(scattered)}: not contiguous in memory, so it cannot be a view into a flat buffer. Replace "
            "each by nn.Parameter(parameter.detach().contiguous())."
        )


def check_mesh(mesh: DeviceMesh, axes: Axes) -> None:
    """Errors: `BadInput` for a mesh without data axes, with unknown axes, or with a backend that cannot serve it."""
    dims = mesh.mesh_dim_names or ()
    beside = [dim for dim in dims if dim not in axes.names]
    if not axes.names or beside:
        raise BadInput(
            f"The mesh has the axes {', '.join(dims) or 'without names'}; this version knows the data axes "
            'dp_replicate, dp_shard and cp. Name them: mesh_dim_names=("dp_replicate", "dp_shard") of init_device_mesh.'
        )
    backend = backend_of(mesh.get_group(axes.names[0]), axes.device)
    if axes.device.type == "cuda" and backend == "gloo":
        raise BadInput(
            "The mesh is on CUDA, but the process group's backend for CUDA tensors is gloo. Initialise it with "
            'init_process_group("cpu:gloo,cuda:nccl").'
        )
    if axes.device.type == "cpu" and backend == "nccl":
        raise BadInput('The mesh is on the CPU, but the process group is NCCL. Use init_process_group("cpu:gloo").')


def check_device(model: nn.Module, device: torch.device) -> None:
    """Errors: `BadInput` for parameters on an accelerator that is not the mesh's device."""
    for name, parameter in model.named_parameters():
        if parameter.device.type not in ("cpu", "meta") and parameter.device != device:
            raise BadInput(
                f"{name!r} is on {parameter.device}, but the mesh is on {device}. For NCCL, initialise the process "
                'group with "cpu:gloo,cuda:nccl" and call torch.cuda.set_device(local_rank) first; or pass mesh=.'
            )


def check_precision(precision: Precision, device: torch.device) -> None:
    """Errors: `BadInput` where the device cannot compute in the dtype asked for."""
    try:
        probe = torch.ones((2, 2), dtype=precision.compute, device=device)
        torch.nn.functional.linear(probe, probe)
    except RuntimeError as error:
        raise BadInput(
            f"precision: {device} cannot multiply matrices in {precision.compute} ({error}). Choose "
            "precision='bf16' or 'fp32'."
        ) from None


def check_agreement(axes: Axes, facts: Mapping[str, object]) -> None:
    """Compare what each rank was told. Errors: `BadInput` on every rank, naming the facts that differ.

    Args:
        facts: the same keys on every rank; values that JSON can hold or `str` can tell apart.
    """
    texts = {key: json.dumps(value, sort_keys=True, default=str) for key, value in facts.items()}
    digests = [int.from_bytes(hashlib.sha256(text.encode()).digest()[:7]) for text in texts.values()]
    values = torch.tensor(digests, dtype=torch.int64, device=axes.device)
    differing = [key for key, same in zip(texts, axes.equal(values), strict=True) if not same]
    if differing:
        mine = "; ".join(f"{key} = {texts[key][:300]}" for key in differing)
        raise BadInput(
            f"The ranks were told different things about: {', '.join(differing)}. Rank {dist.get_rank()} has {mine}. "
            "Give every rank the same model and arguments."
        )


def check_offload(tiers: Collection[str], precision: Precision, offload: Offload) -> None:
    """Errors: `BadInput` for settings of offload that cannot work with the tiers in use."""
    if "nvme" in tiers and not offload.folders:
        raise no_folder()
    if offload.step == "backward" and precision.loss_scaling:
        raise BadInput(
            "offload: step 'backward' updates units before the gradients of all are known, but fp16 loss scaling "
            "must see them all. Use step='overlapped', or precision='bf16'."
        )


def together(axes: Axes, action: Callable[[], T]) -> T:
    """What `action` returns. Errors: what it raises here, and `BadInput` where it raises on another rank."""
    problem: Exception | None = None
    try:
        result = action()
    except Exception as error:
        problem = error
    failed = axes.maximum(torch.tensor([int(problem is not None)], device=axes.device))
    if problem is not None:
        raise problem
    if failed.item():
        raise BadInput("Another rank cannot do its part of this: its own message says why.")
    return result


def optimizer_facts(optimizer: Optimizer | None) -> list[object]:
    """The class of an optimizer and the hyper-parameters of its groups, for `check_agreement`."""
    if optimizer is None:
        return []
    plain = (bool, int, float, str, type(None), list, tuple)
    groups = [
        {k: v for k, v in g.items() if k not in _NOT_HYPER and isinstance(v, plain)} for g in optimizer.param_groups
    ]
    return [type(optimizer).__name__, *groups]


_NOT_HYPER = ("params", "param_names")


def model_facts(specs: Sequence[UnitSpec]) -> dict[str, list[list[object]]]:
    """Names, shapes, dtypes and groups of every unit's parameters, for `check_agreement`."""
    return {
        spec.name: [
            [m.name, list(m.parameter.shape), str(m.parameter.dtype), m.trainable, m.group] for m in spec.members
        ]
        for spec in specs
    }
