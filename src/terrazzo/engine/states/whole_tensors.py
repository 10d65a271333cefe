"""States of a sharded model put together again, one bucket after the other, so that nobody needs memory for all.

What ranks along `tp` or `ep` share is put together from their parts, one parameter at a time. What one stage of a
pipeline has comes to the ranks of the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from terrazzo.engine.buckets.bucket import Bucket
from terrazzo.engine.buckets.resting.buffer import Resting, view
from terrazzo.engine.buckets.unit import Unit
from terrazzo.engine.comm.collectives import Collectives
from terrazzo.engine.comm.transfer import Transfer
from terrazzo.engine.labels.label import Label
from terrazzo.engine.labels.numbered import Names
from terrazzo.engine.labels.purposes import Purpose
from terrazzo.engine.mesh.axes import Axes
from terrazzo.engine.model.engine import engine_of
from terrazzo.engine.partition.box import Box
from terrazzo.engine.partition.rectangles import Rectangle
from terrazzo.engine.pipeline.stages import stages_of
from terrazzo.engine.plan.layout import Slot
from terrazzo.engine.runtime.device import HOST
from terrazzo.engine.states.buffers_and_extra_state import persistent_buffers
from terrazzo.engine.states.parameter_table import TableRow, parameter_table
from terrazzo.errors import BadInput, RanksApart
from terrazzo.messages import did_you_mean, listed

__all__ = ["collect_buffers", "gathered_state", "whole_parameter", "whole_weights"]


def collect_buffers(model: nn.Module) -> None:
    """Have this rank's persistent buffers be those of the stages that run their modules. Collective.

    Nothing changes without stages, nor of what lies in no module of a pipeline's line: there each rank has its own.
    """
    if (stages := stages_of(model)) is None:
        return
    axes, buffers = engine_of(model).axes, persistent_buffers(model)
    (along,) = (axes.along(axis) for axis in axes.stage_axis)
    here = [along.rank if stages.chunks_of(*buffer.names) else -1 for buffer in buffers]
    holders = axes.maximum(torch.tensor(here, device=HOST), axes.stage_axis).tolist()
    for buffer, holder in zip(buffers, holders, strict=True):
        if holder >= 0 and buffer.tensor.numel():
            values = buffer.tensor.detach().flatten()
            along.broadcast(values, holder)
            buffer.tensor.detach().copy_(values.view_as(buffer.tensor))


def gathered_state(unit: Unit, state: Resting) -> Tensor:
    """Gather all elements of one state of a bucket of `unit`, in the memory of the mesh's device. Collective.

    Of parameters that ranks along `tp` or `ep` share, those of this rank's parts: `whole_parameter` goes on from there.
    """
    full = state.space.empty((), state.dtype)
    Transfer(full.gather(state), Label(Purpose.OUTSIDE, unit.index, names=Names(units=unit.names))).finish()
    return full.data


def whole_parameter(unit: Unit, bucket: Bucket, slot: Slot, data: Tensor) -> Tensor:
    """Return one parameter's elements of a state that has been gathered. Collective where ranks share the parameter.

    Args:
        data: from `gathered_state`.

    Returns:
        A view of `data`; of a parameter that ranks share, a tensor of its own.
    """
    own, axes = view(data, slot), bucket.axes
    shared = axes.cut_along(bucket.family)
    if not shared:
        return own
    (axis,) = shared
    label = Label(Purpose.OUTSIDE, unit.index, names=Names(units=unit.names))
    return _joined(own, bucket.box(slot), axes.along(axis), label)


def _joined(own: Tensor, box: Box, links: Collectives, label: Label) -> Tensor:
    """Join the parts of a parameter that ranks have. Memory: the whole twice."""
    corners = torch.tensor([(each.offsets, each.sizes) for each in box.rectangles], device=own.device)
    boxes = [
        Box(box.shape, tuple(Rectangle(tuple(offsets), tuple(sizes)) for offsets, sizes in rank), box.dim)
        for rank in links.gather_rows(corners).tolist()
    ]
    widest = max(each.local_numel for each in boxes)
    parts = own.new_zeros((links.size, widest))
    parts[links.rank, : own.numel()] = own.reshape(-1)
    Transfer(links.all_gather(parts.view(-1)), label).finish()
    full = own.new_empty(box.shape)
    for part, each in zip(parts, boxes, strict=True):
        each.put(part[: each.local_numel].view(each.local_shape), full)
    return full


def whole_weights(model: nn.Module, names: Iterable[str] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters of a sharded model whole, one after the other; master weights where there are any. Collective.

    Memory: one bucket on the mesh's device, twice a parameter that ranks along `tp` or `ep` share, and one that another
    stage has. A bucket is gathered again only where the order of `names` comes back to it.

    Args:
        names: of parameters, in the same order on every rank; by default each under its own name, stage by stage and
            bucket by bucket.

    Raises:
        BadInput: names that no parameter has, before anything is gathered.
        Misuse: where units have been updated whose `optimizer.step()` is still to come, or never came.
        RanksApart: on every rank, if they have not been given the same names in the same order.

    Yields:
        Name and full tensor, in the dtype that it is kept in: on the device, until the next one is asked for.
    """
    engine = engine_of(model)
    engine.requires.step_taken("Reading whole weights", reads="weights")
    slots = [(unit, bucket, slot) for unit in engine.units for bucket in unit.buckets for slot in bucket.slots]
    held = {slot.name: (unit, bucket, slot) for unit, bucket, slot in slots}
    everywhere = sorted(parameter_table(model), key=lambda each: (each.stage, each.position))
    known = {name: each for each in everywhere for name in each.names}
    wanted = [each.name for each in everywhere] if names is None else list(names)
    if names is not None and engine.axes.differing({"names": wanted}, engine.axes.within_replica):
        raise RanksApart(
            "whole_weights: the ranks were not given the same names in the same order. Each tensor is put together "
            "from the parts of all: give the same list on every rank, such as a sorted one."
        )
    if unknown := [name for name in wanted if name not in known]:
        raise BadInput(
            f"whole_weights: {type(model).__name__} has no parameter {listed([*map(repr, unknown)], 5)}."
            f"{did_you_mean(unknown[0], known)} Give names of model.named_parameters(); buffers are whole in any case."
        )
    engine.settle()
    current, data = None, None
    for name in wanted:
        each, own = known[name], None
        if (of_name := held.get(each.name)) is None:
            current, data = None, None
        else:
            unit, bucket, slot = of_name
            if current is not bucket:
                data = None  # before room is made for the next
                current, data = bucket, gathered_state(unit, bucket.exact if bucket.spec.trainable else bucket.weight)
            assert data is not None
            own = whole_parameter(unit, bucket, slot, data)
        yield name, _everywhere(engine.axes, each, own)


def _everywhere(axes: Axes, parameter: TableRow, own: Tensor | None) -> Tensor:
    """Bring a parameter that one stage has to the ranks of all; `own` is None on those of the others."""
    values = torch.empty(parameter.shape, dtype=parameter.dtype, device=axes.device) if own is None else own
    if values.numel():
        for axis in axes.live(axes.stage_axis):
            axes.along(axis).broadcast(values.view(-1), parameter.stage)
    return values
