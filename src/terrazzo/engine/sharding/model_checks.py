"""Checks of what a model is made of: modules, parameters, their dtypes and where they are."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from terrazzo.engine.buckets.parameters.note import note_of
from terrazzo.engine.interception.torch_wrappers import check_unwrapped
from terrazzo.engine.mesh.axes import Axes
from terrazzo.engine.model.engine import is_sharded
from terrazzo.engine.partition.unit_members import UnitSpec
from terrazzo.engine.partition.unit_sizes import most_in_one
from terrazzo.engine.plan.precision import MOMENTS_NAMES, Precision
from terrazzo.engine.runtime.dtensors import is_dtensor
from terrazzo.errors import BadInput, Misuse
from terrazzo.marks import waits_for_root
from terrazzo.messages import counted, listed, warn
from terrazzo.words import DTYPE_FIELDS

__all__ = [
    "check_device",
    "check_dtypes",
    "check_max_norm",
    "check_model",
    "warn_of_layers_in_root",
    "warn_of_left_without",
    "warn_of_most_in_one",
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
    if any(waits_for_root(module) for module in model.modules()):
        raise Misuse(
            f"fully_shard was called on modules of this {type(model).__name__}, and shards it when it first runs: call "
            "either that, on the model last, or tz.shard."
        )
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
    _check_views(model)
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
    """Refuse parameters that share memory but are not one object: each would get a place of its own, untied.

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


def check_max_norm(model: nn.Module, axes: Axes) -> None:
    """Refuse embeddings that scale rows of their weights in each forward: those of a rank's own batch.

    Raises:
        BadInput: there, where ranks have batches of their own.
    """
    embeddings = (
        (name, each) for name, each in model.named_modules() if isinstance(each, nn.Embedding | nn.EmbeddingBag)
    )
    names = [name for name, each in embeddings if each.max_norm is not None]
    if names and axes.size(axes.data) > 1:
        raise BadInput(
            f"{listed(names)}: an embedding with max_norm changes the rows of its weight that a forward reads, and "
            "each rank reads others: the ranks' weights would come apart. Build it with max_norm=None, and scale in "
            "forward what it returns; or scale its weight after steps, inside 'with tz.gathered(model, write=True):'."
        )


def _check_views(model: nn.Module) -> None:
    """Refuse tensors that share memory with parameters and are kept on modules: sharding would not take them along.

    What a hook of its module computes anew before each forward, as those of weight and spectral norms do, may stay.

    Raises:
        BadInput: there.
    """
    parameters = {id(parameter) for parameter in model.parameters()}
    extents = sorted((_start(each), each.nbytes, name) for name, each in model.named_parameters() if _start(each))
    starts, views = [start for start, _, _ in extents], []
    for name, module in model.named_modules():
        computed = {_computed_by(hook) for hook in module._forward_pre_hooks.values()}
        for attribute, tensor in _kept_on(module) if extents else ():
            start, nbytes, whole = extents[max(bisect.bisect_right(starts, _start(tensor)) - 1, 0)]
            if start <= _start(tensor) < start + nbytes and id(tensor) not in parameters and attribute not in computed:
                views.append((f"{name}.{attribute}".removeprefix("."), whole))
    if views:
        which = listed([f"{view!r} of {whole!r}" for view, whole in views])
        raise BadInput(
            f"Views of parameters are kept on modules: {which}. They would keep the values of now, while the "
            "parameters move into the engine's memory. Make the view in forward, or keep a copy: 'x.detach().clone()'."
        )


def _computed_by(hook: Any) -> str | None:
    """The attribute that one of torch's own hooks sets before each forward."""
    name = getattr(hook, "name", None) or getattr(hook, "_tensor_name", None)
    return name if isinstance(name, str) else None


def _kept_on(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for attribute, value in [*vars(module).items(), *module._buffers.items()]:
        inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else [value]
        yield from ((attribute, each) for each in inside if isinstance(each, Tensor))


def _start(tensor: Tensor) -> int:
    """Address at which a tensor's memory begins; 0 for none."""
    return tensor.data_ptr() if tensor.layout is torch.strided and not tensor.is_meta else 0


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


def warn_of_left_without(units: Sequence[str]) -> None:
    """Say which units own no parameter, as modules outside of them have theirs too."""
    if units and dist.get_rank() == 0:
        warn(
            f"{len(units)} units own no parameter, because modules outside of them have the same ones: "
            f"{listed([*map(repr, units)], 5)}. These are gathered with the unit around all that have them; the root "
            "stays gathered all step. Give units= modules that enclose them, or one module in the place of tied ones."
        )


def warn_of_layers_in_root(layers: Sequence[str], why_units: str) -> None:
    """Say which layers, heavier together than the largest unit, are in none of those that were found."""
    if layers and dist.get_rank() == 0:
        warn(
            f"In no unit, and heavier than the largest one: {counted(len(layers), 'layer')}, "
            f"{listed([*map(repr, layers)], 5)}. Units are {why_units}; what is in none stays gathered all step. Name "
            "these layers, too, in units=."
        )


def warn_of_most_in_one(units: Sequence[UnitSpec], why_units: str) -> None:
    """Say which of the units that were found is most of the model, whose weights are split in vain."""
    sizes = [[member.parameter.numel() for member in unit.members] for unit in units]
    most = most_in_one(sizes)
    if most is not None and dist.get_rank() == 0:
        unit, share = units[most], sum(sizes[most]) / sum(map(sum, sizes))
        which = f"Unit {unit.name!r}, a {type(unit.module).__name__}," if unit.name else "The root"
        warn(
            f"{which} holds {share:.0%} of the model's parameters, which are gathered at once: a plan that splits "
            f"weights saves little memory so. Units are {why_units}. Name the blocks inside it in units=, by their "
            "class or by names such as 'layers.*'."
        )
