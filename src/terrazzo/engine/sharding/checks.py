"""Checks before a model is sharded, on every rank from data that all ranks share."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from terrazzo.engine.buckets.bucket import Bucket
from terrazzo.engine.buckets.parameters.aliases import check_views
from terrazzo.engine.buckets.parameters.note import note_of
from terrazzo.engine.buckets.unit import Unit
from terrazzo.engine.comm.backends import backend_of
from terrazzo.engine.mesh.axes import Axes
from terrazzo.engine.mesh.family import DATA_AXES, SAME_DATA_AXES, STAGES
from terrazzo.engine.model.engine import is_sharded
from terrazzo.engine.model.torch_wrappers import check_unwrapped
from terrazzo.engine.offload.options import Offload
from terrazzo.engine.plan.diloco import DiLoCo
from terrazzo.engine.plan.layout import PAGE_BYTES
from terrazzo.engine.plan.place import Plan
from terrazzo.engine.plan.precision import MOMENTS_NAMES, Precision
from terrazzo.engine.plan.sharding_spec import ShardingSpec
from terrazzo.engine.runtime import device as devices
from terrazzo.engine.states.model_state import is_dtensor
from terrazzo.errors import BadInput, Misuse, listed, warn
from terrazzo.words import DTYPE_FIELDS

__all__ = [
    "check_device",
    "check_dtypes",
    "check_graphs",
    "check_group",
    "check_kind",
    "check_mesh",
    "check_model",
    "check_offload",
    "check_precision",
    "check_several",
    "warn_of_unused",
    "warn_of_unused_formats",
]


def _check_module(model: object) -> None:
    """Refuse what is no module, such as an optimizer that came first.

    Raises:
        BadInput: there.
    """
    if isinstance(model, Optimizer):
        raise BadInput(
            f"tz.shard was given a {type(model).__name__} in place of a model: the model comes first, as in "
            "tz.shard(model, optimizer, plan=...)."
        )
    if not isinstance(model, nn.Module):
        raise BadInput(f"tz.shard was given a {type(model).__name__} in place of a model; pass a torch.nn.Module.")


def check_group() -> None:
    """Refuse to go on without a process group, through which ranks hear of each other's errors.

    Raises:
        Misuse: there.
    """
    if not dist.is_initialized():
        raise Misuse(
            "tz.shard needs torch.distributed. Call torch.distributed.init_process_group() first, in a script that "
            "'terrazzo run --ranks N script.py' or 'torchrun --nproc-per-node=N script.py' starts; N may be 1."
        )


def check_model(model: nn.Module) -> None:
    """Refuse a sharded model, and what cannot be laid out flat.

    Raises:
        Misuse: for a sharded model.
        BadInput: for what cannot be laid out flat.
    """
    _check_module(model)
    sharded = [name for name, module in model.named_modules() if is_sharded(module)]
    if sharded:
        which = f"Its module {sharded[0]!r}" if sharded[0] else f"This {type(model).__name__}"
        raise Misuse(f"{which} is already sharded. Build a new model to shard it differently.")
    check_unwrapped(model)
    parameters = dict(model.named_parameters())
    taken = [name for name, parameter in parameters.items() if note_of(parameter) is not None]
    if taken:
        raise Misuse(
            f"{listed(taken)}: parameters of a model that is sharded already, and only one may gather and step "
            "them. Shard the module that holds both models, or give each its own copy."
        )
    if not parameters:
        raise BadInput(f"{type(model).__name__} has no parameters to shard: pass the module that holds them.")
    _check_known(parameters)
    exotic = [name for name, parameter in parameters.items() if parameter.is_complex() or parameter.is_sparse]
    if exotic:
        raise BadInput(
            f"{listed(exotic)}: complex and sparse parameters cannot be sharded. Keep a complex one as the real "
            "nn.Parameter(torch.view_as_real(parameter.detach())), and a sparse one dense, by parameter.to_dense()."
        )
    scattered = [name for name, parameter in parameters.items() if not parameter.is_contiguous()]
    if scattered:
        raise BadInput(
            f"{listed(scattered)}: not contiguous in memory, so it cannot be a view into a flat buffer. Replace "
            "each by nn.Parameter(parameter.detach().contiguous())."
        )
    _check_apart(parameters)
    check_views(model)
    _check_sparse(model)


def _check_known(parameters: Mapping[str, nn.Parameter]) -> None:
    """Refuse parameters without a shape yet, and those that torch has divided.

    Raises:
        BadInput: there.
    """
    if lazy := [name for name, parameter in parameters.items() if is_lazy(parameter)]:
        raise BadInput(
            f"{listed(lazy)}: of lazy modules, whose shapes the first forward will tell. Run the model once on one "
            "input, without gradients, before tz.shard and before an optimizer is built."
        )
    if divided := [name for name, parameter in parameters.items() if is_dtensor(parameter)]:
        raise BadInput(
            f"{listed(divided)}: DTensors, as of torch's parallelize_module, whose mesh Terrazzo does not know. Leave "
            "that out, and call tz.parallelize(model, mesh, tensor=...) before tz.shard with the mesh of both."
        )


def _check_apart(parameters: Mapping[str, nn.Parameter]) -> None:
    """Refuse parameters that share memory but are not one object: apart in the engine's memory, they would be untied.

    Raises:
        BadInput: there.
    """
    extents = sorted(
        (str(each.device), each.data_ptr(), each.data_ptr() + each.nbytes, name)
        for name, each in parameters.items()
        if each.nbytes and each.device.type != "meta"
    )
    for (device, _, end, first), (next_device, start, _, second) in itertools.pairwise(extents):
        if device == next_device and start < end:
            raise BadInput(
                f"{first!r} and {second!r} share memory but are two parameters, which sharding would untie. Assign the "
                f"parameter itself, as in 'b.weight = a.weight', or give each its own copy, 'b.data = b.data.clone()'."
            )


def _check_sparse(model: nn.Module) -> None:
    """Refuse embeddings whose gradients would be sparse tensors.

    Raises:
        BadInput: there.
    """
    embeddings = (
        (name, each) for name, each in model.named_modules() if isinstance(each, nn.Embedding | nn.EmbeddingBag)
    )
    names = [name for name, each in embeddings if each.sparse and each.weight.requires_grad]
    if names:
        raise BadInput(
            f"{listed(names)}: gradients of an embedding with sparse=True are sparse tensors, which have "
            "no place in a flat gradient. Build it with sparse=False, or freeze its weight."
        )


def check_dtypes(model: nn.Module, precision: Precision) -> None:
    """Check that a precision can stand for the dtypes that the parameters have.

    16 and 32 bits stand for each other, as when a model that was loaded in bf16 is trained in fp32.

    Warns of trainable parameters in several dtypes, which all become one.

    Raises:
        BadInput: for float64 parameters that the precision would round.
    """
    floating = [(name, each) for name, each in model.named_parameters() if each.is_floating_point()]
    doubles = [name for name, each in floating if each.dtype == torch.float64]
    dtypes = {name: getattr(precision, name) for name in DTYPE_FIELDS}
    if doubles and (narrower := [name for name, dtype in dtypes.items() if dtype != torch.float64]):
        fails = ", and float64 inputs would fail in the first product of matrices" if "compute" in narrower else ""
        raise BadInput(
            f"{listed(doubles)}: float64, which the precision would round without a word: its "
            f"{', '.join(f'{name} is {MOMENTS_NAMES[dtypes[name]]}' for name in narrower)}{fails}. Call model.float() "
            'first, or keep it with precision=tz.Precision(*["fp64"] * 6).'
        )
    trained: dict[torch.dtype, list[str]] = {}
    for name, each in floating:
        if each.requires_grad:
            trained.setdefault(each.dtype, []).append(name)
    if len(trained) > 1 and dist.get_rank() == 0:
        kinds = "; ".join(f"{_short(dtype)}: {listed(names)}" for dtype, names in trained.items())
        warn(
            f"The trainable parameters are in several dtypes ({kinds}). All of them compute in "
            f"{_short(precision.compute)} from now on: a forward that casts its input for one of them fails there. "
            "Convert the model to one dtype first, such as by model.float(), and leave casts to 'precision'."
        )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_kind(kind: str) -> None:
    """Refuse a mesh on devices whose streams and pinned memory this version does not know.

    Raises:
        BadInput: there.
    """
    if kind not in devices.KINDS:
        raise BadInput(
            f"The mesh is on {kind!r}; this version runs on {' and '.join(devices.KINDS)}, AMD's GPUs being cuda to "
            "torch as well. Build the mesh with init_device_mesh('cpu', ...) to try a script there."
        )


def check_mesh(mesh: DeviceMesh, axes: Axes) -> None:
    """Refuse a mesh without data axes, with unknown axes, or with a backend that cannot serve it.

    Raises:
        BadInput: there.
    """
    dims = mesh.mesh_dim_names or ()
    if not axes.summed_over or any(dim not in (*DATA_AXES, *SAME_DATA_AXES, STAGES) for dim in dims):
        raise BadInput(
            f"The mesh has the axes {', '.join(dims) or 'without names'}; this version knows the data axes "
            "dp_replicate, dp_shard and cp, of which it needs one, tp and pp; ep is cut out of these. Make it with "
            "tz.mesh, or name them: "
            'mesh_dim_names=("dp_replicate", "dp_shard") of init_device_mesh.'
        )
    backend = backend_of(mesh.get_group(axes.summed_over[0]), axes.device)
    if axes.device.type == "cuda" and backend == "gloo":
        raise BadInput(
            "The mesh is on CUDA, but the process group's backend for CUDA tensors is gloo. Initialise it with "
            'init_process_group("cpu:gloo,cuda:nccl").'
        )
    if axes.device.type == "cpu" and backend == "nccl":
        raise BadInput('The mesh is on the CPU, but the process group is NCCL. Use init_process_group("cpu:gloo").')


def check_device(model: nn.Module, device: torch.device) -> None:
    """Refuse parameters on an accelerator that is not the mesh's device.

    Raises:
        BadInput: there.
    """
    for name, parameter in model.named_parameters():
        if parameter.device.type not in ("cpu", "meta") and parameter.device != device:
            raise BadInput(
                f"{name!r} is on {parameter.device}, but the mesh is on {device}. For NCCL, initialise the process "
                'group with "cpu:gloo,cuda:nccl" and call torch.cuda.set_device(local_rank) first; or pass mesh=.'
            )


def check_precision(precision: Precision, axes: Axes) -> None:
    """Refuse a dtype in which the device cannot compute, or with which NCCL would lose gradients.

    Raises:
        BadInput: there.
    """
    device = axes.device
    groups = [axes.along(axis).group for axis in axes.live(axes.of_stage)]
    if precision.reduce == torch.float16 and any(backend_of(group, device) == "nccl" for group in groups):
        raise BadInput(
            "precision: reduce='fp16' with NCCL, which sums in the dtype that is sent: a sum over ranks overflows "
            "where none of its terms does. Use reduce='fp32', or 'bf16', which costs the same bytes."
        )
    try:
        probe = torch.ones((2, 2), dtype=precision.compute, device=device)
        torch.nn.functional.linear(probe, probe)
    except RuntimeError as error:
        raise BadInput(
            f"precision: {device} cannot multiply matrices in {precision.compute} ({error}). Choose "
            "precision='bf16' or 'fp32'."
        ) from None


def check_graphs(units: Iterable[Unit], device: torch.device) -> None:
    """Refuse units captured in CUDA graphs whose weights come and go: a graph reads fixed addresses.

    Raises:
        BadInput: there.
    """
    for unit in units:
        if devices.is_cuda(device) and unit.captured and unit.weights.transient:
            raise BadInput(
                f"{unit.title}: compiled into CUDA graphs (mode 'reduce-overhead' or 'max-autotune'), which read "
                "weights at fixed addresses, and this plan frees them between uses. "
                "Compile with mode=None or 'max-autotune-no-cudagraphs', or a plan that keeps weights whole: zero0, "
                "zero1 or zero2 in fp32."
            )


def check_several(count: int, buckets: Sequence[Bucket], precision: Precision, diloco: DiLoCo | None) -> None:
    """Refuse several optimizers where only one can be.

    Raises:
        BadInput: there.
    """
    if count < 2:
        return
    if diloco is not None:
        raise BadInput(
            f"{count} optimizers for one model with diloco: a round counts the steps of one optimizer. Use one "
            "optimizer with several param groups."
        )
    if precision.loss_scaling:
        raise BadInput(
            f"{count} optimizers for one model with fp16: its loss scale follows the steps of one optimizer. Use "
            "precision='bf16', or one optimizer with several param groups."
        )
    if any(tier != "device" for bucket in buckets for tier in (bucket.spec.tiers.grad, bucket.spec.tiers.optim)):
        name = next(b.members[0].name for b in buckets if {b.spec.tiers.grad, b.spec.tiers.optim} != {"device"})
        raise BadInput(
            f"{count} optimizers for one model with gradients or optimizer state away from the device, such as those "
            f"of {name!r}: updates there follow the steps of one optimizer. Leave both on the device (weights may be "
            "elsewhere: tz.Plan.named('zero3').on(weight='cpu')), or use one optimizer with several param groups."
        )


def check_offload(tiers: Collection[str], precision: Precision, offload: Offload) -> None:
    """Refuse settings of offload that cannot work with the tiers in use.

    Raises:
        BadInput: there.
    """
    if "nvme" in tiers and not offload.folders:
        raise BadInput(
            "The plan places states on nvme, but no folder is given for them: pass offload=tz.Offload(path=...), or "
            "offload.path in a configuration."
        )
    narrow = precision.narrow if "nvme" in tiers else None
    if narrow is not None and narrow.blocks.size_bytes(offload.cell_numel) % PAGE_BYTES:
        raise BadInput(
            f"offload: block_mib is {offload.block_mib:g} and moments are in {narrow}, whose pieces in files "
            "are whole pages in multiples of 1 MiB alone: set block_mib to 1, 2 or 4, say."
        )
    if offload.step == "backward" and precision.loss_scaling:
        raise BadInput(
            "offload: step 'backward' updates units before the gradients of all are known, but fp16 loss scaling "
            "must see them all. Use step='overlapped', or precision='bf16'."
        )


def warn_of_unused(plan: Plan, offload: Offload, activations: bool) -> None:
    """Warn of settings of offload that have been given and change nothing; arguments as of `Offload.unused_under`."""
    for (why, tier), names in Offload.unused_under(plan, activations).items():
        _warn_of(offload, names, plan, why, f", or place states there, as plan 'zero3@{tier}' does")


def warn_of_unused_formats(sharding: ShardingSpec, buckets: Iterable[Bucket]) -> None:
    """Warn of what a precision says of messages where none of `buckets` has any; see `Precision.unused_under`."""
    of_buckets = [Precision.unused_under(bucket.sharding.plan, _data_axes(bucket)) for bucket in buckets]
    for why, names in of_buckets[0].items():
        if all(why in unused for unused in of_buckets):
            _warn_of(sharding.precision, names, sharding.mesh_plan, why)


def _data_axes(bucket: Bucket) -> Sequence[str]:
    axes = bucket.sharding.axes
    return [axis for axis in axes.live(axes.summed_over) if axis not in SAME_DATA_AXES]


def _warn_of(settings: Offload | Precision, names: Iterable[str], plan: Plan, why: str, instead: str = "") -> None:
    kind = type(settings)
    changed = [name for name in names if getattr(settings, name) != getattr(kind(), name)]
    if changed and dist.get_rank() == 0:
        change, them = ("changes", "it") if len(changed) == 1 else ("change", "them")
        warn(
            f"tz.{kind.__name__}: {', '.join(changed)} {change} nothing under plan {plan.name}: {why}. Leave {them} "
            f"out{instead}."
        )
