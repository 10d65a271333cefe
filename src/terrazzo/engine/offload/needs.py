"""What a model takes beside the device, from shapes, places and dtypes alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from terrazzo.engine.buckets.bucket import Bucket
from terrazzo.engine.buckets.bucket_layout import BucketLayout
from terrazzo.engine.offload.options import Offload
from terrazzo.engine.optim.segments.group_runs import runs
from terrazzo.engine.optim.stock.template import Templates
from terrazzo.engine.plan.bucket_bytes import StateBytes, states_at_rest, weight_bytes
from terrazzo.engine.plan.bucket_spec import BucketSpec
from terrazzo.engine.plan.layout import Range, padded_bytes, round_up

__all__ = [
    "SENDS",
    "Need",
    "disk_bytes",
    "further_moment_bytes",
    "host_bytes",
    "host_sum_bytes",
    "in_cells",
    "load_bytes",
    "moment_names",
    "moment_windows",
    "need_of",
    "send_bytes",
    "staging_bytes",
    "staging_count",
]

SENDS = 2
"""Cells of new weights under way to the device at once: one is cast while the other is copied."""

SEND_NUMEL = 8 << 20
"""Elements of such a cell: what is done once for each must be little beside casting it, on any number of threads."""


@dataclass(frozen=True)
class Need:
    """Bytes that a model takes away from the device.

    Attributes:
        cpu, nvme: bytes of every state there, one entry for each state of a bucket.
        load_bytes: one cell of weights that are read from `nvme`; 0 for none.
        staging_bytes: one cell of all states that are updated on `nvme`; 0 for none.
        send_bytes: one cell of new weights that are cast on their way to the device; 0 for none.
    """

    cpu: tuple[int, ...] = ()
    nvme: tuple[int, ...] = ()
    load_bytes: int = 0
    staging_bytes: int = 0
    send_bytes: int = 0


def host_sum_bytes(spec: BucketSpec) -> int:
    """Host memory for sums of earlier micro-batches, each reduced by itself, where gradients rest beside the device."""
    off_device = spec.trainable and spec.tiers.grad != "device"
    return off_device * padded_bytes(spec.numel(spec.plan.grad.axes) * spec.precision.accumulate.itemsize)


def moment_names(bucket: BucketLayout, templates: Templates) -> list[str]:
    """Names of the states that the optimizer keeps for each element of a bucket."""
    groups = dict.fromkeys(member.group for member in bucket.members if member.group >= 0)
    names = [name for group in groups for name in templates[group].per_element]
    return list(dict.fromkeys(names))


def moment_windows(bucket: BucketLayout, templates: Templates, cell: int) -> dict[str, Range]:
    """Which of this rank's elements of a bucket have each state, by the name that the optimizer keeps it under.

    Members are ordered by their param groups, so what some groups alone keep takes no room for the others. States in 8
    bits have room for all.
    """
    held, parts = bucket.space.range(bucket.spec.optim_axes), dict[str, list[Range]]()
    leading = [start for start, _ in runs(bucket)]  # the first member of each run
    starts = [bucket.slots[member].offset for member in leading]
    for member, start, stop in zip(leading, starts, [*starts[1:], bucket.spec.full_numel], strict=True):
        group = bucket.members[member].group
        for name in templates[group].per_element if group >= 0 else ():
            parts.setdefault(name, []).append(held.intersect(Range(start, stop)))
    if bucket.spec.precision.narrow is not None:
        return dict.fromkeys(parts, held)
    windows = {name: _hull(each) for name, each in parts.items()}
    if bucket.spec.tiers.optim != "nvme":
        return windows
    return {name: in_cells(window, held, cell) for name, window in windows.items()}


def _hull(parts: Sequence[Range]) -> Range:
    """The range from the first element of `parts`, which are in order, to the last."""
    some = [part for part in parts if part.numel] or parts
    return Range(some[0].start, some[-1].stop) if some[0].numel else some[0]


def in_cells(window: Range, held: Range, cell: int) -> Range:
    """The whole cells of `held` that `window` touches."""
    if not window.numel:
        return window
    start, stop = window.from_start_of(held).start // cell * cell, round_up(window.stop - held.start, cell)
    return Range(held.start + start, min(held.start + stop, held.stop))


def further_moment_bytes(buckets: Sequence[Bucket], templates: Templates) -> list[int]:
    """Bytes of states per element away from the device, beyond what earlier optimizers have left room for.

    One entry for each state of a bucket.
    """
    sizes: list[int] = []
    for bucket in (each for each in buckets if each.spec.updated_off_device):
        windows = moment_windows(bucket, templates, cell=1)
        new = [name for name, room in bucket.moments.rooms_left(windows).items() if room is None]
        sizes += [math.ceil(windows[name].numel * bucket.spec.precision.moments.itemsize) for name in new]
    return sizes


def need_of(buckets: Sequence[BucketLayout], templates: Templates, cell: int) -> Need:
    """The `Need` of these buckets; a `BucketLayout` of each is enough.

    Args:
        templates: none without an optimizer.
        cell: elements of states on `nvme` that are handled at once.
    """
    resting: list[StateBytes] = []
    staging = 0
    for bucket in buckets:
        windows = moment_windows(bucket, templates, cell) if templates and bucket.spec.updated_off_device else {}
        itemsize = bucket.spec.precision.moments.itemsize
        resting += states_at_rest(bucket.spec, [each.numel * itemsize for each in windows.values()])
        staging = max(staging, staging_bytes(bucket.spec, [itemsize] * len(windows), cell))
    return Need(
        cpu=tuple(state.nbytes for state in resting if state.tier == "cpu"),
        nvme=tuple(state.nbytes for state in resting if state.tier == "nvme"),
        load_bytes=max((load_bytes(bucket.spec, cell) for bucket in buckets), default=0),
        staging_bytes=staging if templates else 0,
        send_bytes=max((send_bytes(bucket.spec) for bucket in buckets), default=0),
    )


def load_bytes(spec: BucketSpec, cell: int) -> int:
    """One cell of weights that are gathered from `nvme`, to compute with them or to make new ones of master weights."""
    if spec.tiers.weight != "nvme":
        return 0
    cell_bytes = weight_bytes(spec, min(cell, spec.numel(spec.weight_axes)))
    if not (spec.has_own_master and spec.tiers.optim == "nvme" and spec.gathers_apart):
        return cell_bytes
    return max(cell_bytes, min(cell, spec.numel(spec.optim_axes)) * spec.precision.master.itemsize)


def staging_bytes(spec: BucketSpec, moments: Sequence[float], cell: int) -> int:
    """One cell of everything that an update brings from `nvme` and back.

    Args:
        moments: bytes per element of each state that the optimizer keeps for every element.
    """
    if not (spec.trainable and spec.tiers.optim == "nvme"):
        return 0
    precision, numel = spec.precision, min(cell, spec.numel(spec.optim_axes))
    sizes = [precision.master.itemsize, *moments]
    if spec.has_remainder:
        sizes.append(precision.remainder_bytes)
    if spec.has_own_master and spec.tiers.weight == "nvme":
        sizes.append(spec.weight_dtype.itemsize)
    if spec.tiers.grad == "nvme":
        sizes.append(precision.accumulate.itemsize)
    return sum(padded_bytes(round(numel * size)) for size in sizes)


def send_bytes(spec: BucketSpec) -> int:
    """One cell of new weights, cast in host memory before they cross to the device: fewer bytes than the masters."""
    crosses = spec.updated_off_device and spec.tiers.weight == "device" and not spec.on_host
    if not crosses or spec.weight_dtype == spec.precision.master:
        return 0
    return min(SEND_NUMEL, spec.numel(spec.optim_axes)) * spec.weight_dtype.itemsize


def staging_count(settings: Offload) -> int:
    """Cells under way in an update at once: some being read, one stepped on, some written."""
    return max(4, settings.depth)


def host_bytes(need: Need, settings: Offload) -> int:
    """Host memory of a store: states, and buffers for what goes to the device, and comes from and goes to `nvme`."""
    states = sum(padded_bytes(size) for size in need.cpu) + SENDS * padded_bytes(need.send_bytes)
    if not need.nvme:
        return states
    return (
        states
        + settings.depth * padded_bytes(need.load_bytes)
        + staging_count(settings) * padded_bytes(need.staging_bytes)
    )


def disk_bytes(need: Need) -> int:
    """Size of a store's swap files."""
    return sum(padded_bytes(size) for size in need.nvme)
