"""Whether the planner lets a run start: combinations that are known to fail, and memory that is not there.

It takes little time, and is careful not to refuse what would have fitted: only what is certain counts in full.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from terrazzo.checkpoint.hub_folder import read_model_config
from terrazzo.config import Config
from terrazzo.engine.runtime import device as devices
from terrazzo.errors import BadInput
from terrazzo.launch.machine import ranks_here, resolve_device
from terrazzo.messages import gib_text
from terrazzo.planner import MemoryFigures, Setup, findings
from terrazzo.planner.figures import Term
from terrazzo.planner.memory.peak import memory_of
from terrazzo.planner.memory.states import STATE_OF
from terrazzo.planner.model.closed_form import closed_form
from terrazzo.telemetry import allowed_bytes, available_host_bytes
from terrazzo.train.model.prepare import ModelOnPaper
from terrazzo.train.planning.as_setup import setup_of
from terrazzo.train.preflight.local_room import local_room
from terrazzo.train.preflight.offload_room import host_lacks_room, offload_notes

__all__ = ["AvailableMemory", "available", "check_plan"]

CERTAIN = (*STATE_OF, "gathered", "unreduced", "receive", "buffers", "sums", "disk buffers")
"""Terms that follow from the plan alone. The others depend on the kernels that torch takes."""

DOUBT = 1.3
"""A run is refused for its activations only if the estimate is this many times what there is. Nine in ten published
runs took within 11 % of their estimates (docs/planner.md); these are few in kind, so the margin here is larger."""

SAID_ELSEWHERE = ("states on consumer disks", "empty rows", "model in one unit")
"""Rules of the planner's gate about which `offload_notes`, `filling_note` and `tz.shard` say more."""


def check_plan(config: Config, world_size: int, whole: ModelOnPaper | None = None) -> list[str]:
    """Refuse a run that is known to fail, or that cannot fit on the devices that its ranks have here.

    To be called before the model takes memory, which would then be missing from what the machine has free.

    Args:
        whole: the configuration's model, if the caller has it.

    Returns:
        Lines for the header of the run: warnings, memory that is close, or why nothing was checked.

    Raises:
        BadInput: it names the reason, the largest terms of memory, and edits that would help.
    """
    setup = _setup(config, world_size, whole)
    if setup is None:
        return ["plan: the architecture is not one that the planner knows, so its memory was not checked"]
    problems = findings(setup)
    refusal = next((str(finding) for finding in problems if finding.severity != "warn"), None)
    memory, there = memory_of(setup), available(config, world_size)
    refusal = refusal or _lacks_room(config, setup, memory, there)
    if refusal is not None and not config.launch.ignore_planner:
        raise BadInput(f"{refusal} To start it all the same: launch.ignore_planner=true.")
    notes = [str(each) for each in problems if each.severity == "warn" and each.rule not in SAID_ELSEWHERE]
    notes += [*offload_notes(config, memory, world_size), *local_room(config, setup, world_size)]
    if config.cuts_attention and config.plan.mesh.cp == 1 and not config.model.attention.is_set:
        mask_bytes = config.batch.micro_batch * config.batch.sequence_length**2
        notes.append(f"the mask of data.attention 'document', {_both(mask_bytes)}, is not in the estimate of memory")
    expected = memory.expected_bytes
    if refusal is not None:
        notes.append(f"started all the same: {refusal}")
    elif there is not None and expected > there.bytes:
        notes.append(f"about {_both(expected)} expected on a rank, {_both(there.bytes)} are there: it may not fit")
    return [f"plan: {note}" for note in notes]


def _lacks_room(config: Config, setup: Setup, memory: MemoryFigures, there: AvailableMemory | None) -> str | None:
    """Why the device, its host or the host's disks are too small; None if they are not, or that is not known."""
    if there is not None:
        certain = sum(term.value for term in memory.near_terms if term.name in CERTAIN)
        if certain > there.bytes or memory.near_bytes > there.bytes * DOUBT:
            return _too_large(config, setup, memory, there)
    return host_lacks_room(config, memory, setup.mesh.world_size)


class AvailableMemory(NamedTuple):
    """The memory of one rank in bytes, and what it is in words."""

    bytes: int
    what: str


def available(config: Config, world_size: int) -> AvailableMemory | None:
    """The memory of a rank: all of its CUDA device's, or its share of this machine's free memory; None if not known.

    On a CPU no more than the limits of its process leave it (RLIMIT_DATA, RLIMIT_AS).
    """
    if resolve_device(config.launch) == "cuda":
        return AvailableMemory(int(devices.properties().total_memory), "a CUDA device")
    free = available_host_bytes()
    rooms = [
        AvailableMemory(left, "what the limits of a process (ulimit -d, -v) leave a rank") for left in allowed_bytes()
    ]
    if free is not None:
        no_gpu = ", where torch sees no CUDA device," if config.launch.device == "auto" else ""
        what = f"a rank's share of this machine's free memory{no_gpu}"
        rooms.append(AvailableMemory(free // ranks_here(world_size), what))
    return min(rooms, default=None)


def _setup(config: Config, world_size: int, whole: ModelOnPaper | None) -> Setup | None:
    """The planner's view of the run; None if it does not know the model, or would have to build it, which is slow."""
    if config.model.kind == "decoder":
        return setup_of(config, world_size, whole=whole)
    assert config.model.path is not None
    if closed_form(read_model_config(config.model.path)) is None:
        return None
    try:
        return setup_of(config, world_size, whole=whole)
    except BadInput:  # of its config: all else has been checked by now, and transformers may understand it
        return None


def _too_large(config: Config, setup: Setup, memory: MemoryFigures, there: AvailableMemory) -> str:
    largest = sorted(memory.near_terms, key=lambda term: -term.value)[:3]
    return (
        f"This run needs about {_both(memory.near_bytes)} on each rank, {memory.limiting_rank}, and {there.what} is "
        f"{_both(there.bytes)}. Largest: {_listed(largest)}. {_edits(config, setup, largest[0])}."
    )


def _listed(terms: Sequence[Term]) -> str:
    return ", ".join(f"{term.name} {_both(term.value)}" for term in terms)


def _edits(config: Config, setup: Setup, largest: Term) -> str:
    """Two edits that shrink the largest term."""
    batch, on_cpu, edits = config.batch, setup.cluster.device.kind == "cpu", []
    smaller = "a smaller model.dim or model.layers" if config.model.kind == "decoder" else "a smaller model"
    if largest.name == "residuals":
        edits += ["precision.error_feedback=false to keep nothing of what codes lose", smaller]
    elif largest.name in CERTAIN:
        if setup.plan.base not in ("zero3", "full_shard") and setup.mesh.data_ranks > 1:
            edits.append("plan=zero3 to split all states over the ranks")
        state = STATE_OF.get(largest.name)
        if on_cpu and state and "nvme" not in setup.plan.places()[state.place].shares:
            edits.append(f"offload.{state.place}=nvme with an offload.path to keep the {largest.name} on a disk")
        if not on_cpu and not setup.plan.optim.offloaded:
            edits.append("offload.optim=cpu to keep optimizer state in host memory")
        if setup.precision.weight == torch.float32 and setup.precision.master == torch.float32:
            edits.append("precision=bf16-pure for 8 bytes per parameter")
        if not on_cpu:  # where ranks share one memory
            edits.append("more ranks")
        edits.append(smaller)
    else:
        if setup.checkpointing == "none":
            edits.append("train.activation_checkpointing=full")
        if batch.micro_batch > 1:
            edits.append(f"batch.micro_batch={batch.micro_batch // 2}")
        edits.append(f"batch.sequence_length={batch.sequence_length // 2}")
    return f"Use {' or '.join(edits[:2])}"


def _both(count_bytes: float) -> str:
    """A number of bytes in GiB and in GB: GPUs are sold in one and report the other."""
    return f"{gib_text(count_bytes)} ({count_bytes / 1e9:.2f} GB)"
