"""How setups, meshes and amounts are called in every report."""

from __future__ import annotations

from dataclasses import dataclass

from terrazzo.messages import GIB, counted
from terrazzo.planner.figures import MemoryFigures, Room
from terrazzo.planner.machine.mesh import Mesh
from terrazzo.planner.memory.overheads import MOVING_UPPER, RESTING_RESERVE
from terrazzo.planner.memory.states import STATE_OF
from terrazzo.planner.model.shapes import ModelShape
from terrazzo.planner.setup.choice_names import MatmulPrecision, precision_text
from terrazzo.planner.setup.setup import Setup

__all__ = [
    "AT_MOST",
    "GB",
    "HOSTS",
    "LABELS",
    "ByteUnit",
    "axes_text",
    "blocker",
    "bytes_text",
    "checkpointing_text",
    "count_text",
    "fits_text",
    "mesh_sizes",
    "mesh_text",
    "parameters_text",
    "precision_name",
    "room_text",
    "seconds_text",
    "setup_text",
    "units",
    "verdict",
]

LABELS = {
    "master": "master weights",
    "moments": "optimizer moments",
    "outer": "outer weights and momentum",
    "average": "average of the weights",
    "residuals": "residuals of error feedback",
    "gathered": "gathered weights",
    "unreduced": "unreduced gradients",
    "receive": "receive buffers",
    "transient": "gathered weights and buffers",
    "working": "working memory of a block",
    "buffers": "copies of the model's buffers",
    "logits": "logits and loss",
    "process": "process of the rank",
}
"""Terms of memory, where their own name is too short for a reader."""

HOSTS = {"host": "memory", "disk": "disks"}
"""What of a host its ranks share, by the name of a `Room`."""


AT_MOST = (
    f"At most: the worst that was measured of allocators and libraries, as states x {1 + RESTING_RESERVE:g} and all "
    f"else x {1 + MOVING_UPPER:g} (`--explain upper`)."
)
"""What a column of that heading holds, and what it rests on."""

GB = 1e9


@dataclass(frozen=True)
class ByteUnit:
    """A unit of bytes."""

    name: str
    size: float

    def of(self, value: float, digits: int = 2) -> str:
        return f"{value / self.size:,.{digits}f}"


def units(total: float) -> tuple[ByteUnit, ByteUnit]:
    """A binary and a decimal unit that suit amounts of up to `total` bytes."""
    if total < GIB:
        return ByteUnit("MiB", 2.0**20), ByteUnit("MB", 1e6)
    return ByteUnit("GiB", GIB), ByteUnit("GB", GB)


def bytes_text(value: float) -> str:
    """`61.2 GiB`, or MiB below one."""
    unit, _ = units(value)
    return f"{unit.of(value, 1)} {unit.name}"


AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")


def mesh_sizes(mesh: Mesh) -> dict[str, int]:
    """Ranks by axis, outermost first."""
    return {axis: getattr(mesh, axis) for axis in AXES}


def mesh_text(mesh: Mesh) -> str:
    """Axes of more than one rank, outermost first: `dp_shard 8 · tp 4`."""
    return " · ".join(f"{axis} {size}" for axis, size in mesh_sizes(mesh).items() if size > 1) or "one rank"


def axes_text(setup: Setup) -> str:
    """The text of `mesh_text`, with how ranks along cp compute attention together, and in which order stages run."""
    text, mesh = mesh_text(setup.mesh), setup.mesh
    if mesh.pp > 1 and (setup.pipeline != "1f1b" or setup.virtual_stages > 1):
        order = setup.pipeline if setup.virtual_stages == 1 else f"of {setup.virtual_stages} stages each"
        text = text.replace(f"pp {mesh.pp}", f"pp {mesh.pp} {order}", 1)
    return text.replace(f"cp {mesh.cp}", f"cp {mesh.cp} {setup.context}") if mesh.cp > 1 else text


def precision_name(setup: Setup) -> str:
    """The name that `--precision` knows it by: `bf16`, `bf16,moments=int8`."""
    return precision_text(MatmulPrecision(setup.precision, setup.matmul, setup.recipe))


def checkpointing_text(setup: Setup) -> str:
    """`full`, or `full, 1 in 2`."""
    return setup.checkpointing if setup.every == 1 else f"{setup.checkpointing}, 1 in {setup.every}"


def count_text(value: float) -> str:
    """Three digits and a unit: `70.6 B`."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:g}"


def parameters_text(model: ModelShape) -> str:
    """`8.03 B parameters`; of a mixture of experts also what each token meets: `30.5 B parameters, 3.34 B active`."""
    active = "" if model.active_numel == model.numel else f", {count_text(model.active_numel)} active"
    return f"{count_text(model.numel)} parameters{active}"


def seconds_text(value: float) -> str:
    """`75.2 h`, `1.23 s`, `45.6 ms`, `789 µs`."""
    if value >= 7200:
        return f"{value / 3600:,.0f} h" if value >= 3.6e6 else f"{value / 3600:.3g} h"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if value >= size:
            return f"{value / size:,.3g} {unit}" if value < 1000 * size else f"{value / size:,.0f} {unit}"
    return f"{value * 1e6:.3g} µs"


def setup_text(setup: Setup) -> str:
    """All that was chosen, in two lines."""
    device, count = setup.cluster.device, setup.cluster.count
    batch = f"{setup.micro_batch} × {setup.micro_batches} sequences of {setup.sequence:,} tokens on each data rank"
    empty = f" and {counted(setup.empty_rows, 'empty row')}" if setup.empty_rows else ""
    options = [precision_name(setup), setup.optimizer.name, f"checkpointing {checkpointing_text(setup)}"]
    options += ["compiled"] if setup.compile else []
    options += ["an average of the weights (tz.EMA)"] if setup.ema else []
    options += [f"attention {setup.attention}"] if setup.attention != "flash" else []
    options += [f"{setup.loss} loss"] if setup.loss != "full" else []
    options += (
        [f"tensor overlap {setup.tensor_overlap}"] if setup.mesh.tp > 1 and setup.tensor_overlap != "none" else []
    )
    return (
        f"{setup.model.name}, {parameters_text(setup.model)}, {count} × {device.name}, "
        f"{setup.plan.name} on {axes_text(setup)}\n"
        f"{batch}, {setup.global_batch:,} in a step{empty}; {', '.join(options)}"
    )


def verdict(memory: MemoryFigures) -> str:
    """Whether it fits, in one line, with the numbers that say so."""
    device = memory.rooms[0]
    most = f"at most {bytes_text(device.upper)}"
    full = memory.overfull
    if device.capacity is None:
        expected = f"{bytes_text(device.expected)} expected ({most})"
        numbers = f"{expected}; how much a device has is not known (--memory-gb)"
        return f"does not fit: {_too_much(full)}; {numbers}" if full else numbers
    numbers = f"{bytes_text(device.expected)} of {bytes_text(device.capacity)} expected ({most})"
    if full:
        return f"does not fit: {numbers}, {_too_much(full)}"
    if memory.uncounted:
        return f"states fit, activations come on top: {numbers}"
    return f"fits: {numbers}" if memory.fits_surely else f"fits, but not surely: {numbers}"


def fits_text(memory: MemoryFigures) -> str:
    """Whether it fits, in one word: `surely`, `expected`, `no`, or `?` where a capacity is not known."""
    return "surely" if memory.fits_surely else {True: "expected", False: "no", None: "?"}[memory.fits]


def blocker(memory: MemoryFigures) -> str:
    """Which state or buffer on which place is in the way of a setup, in one sentence; empty where it fits."""
    if not memory.overfull:
        return ""
    room = memory.overfull[0]
    ranks = 1 if room.name == "device" else memory.ranks_per_host
    largest = max(room.terms, key=lambda term: term.value)
    others = max(0.0, room.expected - ranks * largest.value)
    label, amount = LABELS.get(largest.name, largest.name), bytes_text(ranks * largest.value)
    states = {name: sum(term.value for term in room.terms if term.name == name) for name in STATE_OF}
    if room.name == "device" and (total := sum(states.values())) > (room.capacity or 0):
        named = [f"{bytes_text(value)} {LABELS.get(name, name)}" for name, value in states.items() if value]
        return (
            f"in the way: model states alone, {bytes_text(total)} on the device, which has "
            f"{bytes_text(room.capacity or 0)}: {', '.join(named)}"
        )
    where = f"each host's {HOSTS[room.name]}" if room.name in HOSTS else "the device"
    kind = "offloaded to this same memory" if room.name == "device" and largest in memory.host else f"on {where}"
    ranks_text = f" of its {ranks} ranks" if ranks > 1 else ""
    return (
        f"in the way: {label}{ranks_text}, {amount} {kind}, which has {bytes_text(room.capacity or 0)}; all else there "
        f"takes {bytes_text(others)}"
    )


def room_text(room: Room) -> str:
    """`154.2 GiB of 10.0 GiB`, or without a capacity the bytes alone."""
    of = "" if room.capacity is None else f" of {bytes_text(room.capacity)}"
    return f"{bytes_text(room.expected)}{of}"


def _too_much(rooms: tuple[Room, ...]) -> str:
    """How much too much each place is to hold."""
    excess = [(room.name, bytes_text(room.expected - (room.capacity or 0))) for room in rooms]
    return ", ".join(
        f"{amount} too much" + (f" for the {HOSTS[name]} of a host" if name in HOSTS else "") for name, amount in excess
    )
