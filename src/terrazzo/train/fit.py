"""Whether the planner lets a run start: known-bad combinations, and memory that is not there.

Cheap, and careful not to refuse what would have fitted: only what is certain counts in full. Nothing is started before.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from terrazzo.errors import BadInput
from terrazzo.planner.estimate import Memory
from terrazzo.planner.formulas import Term
from terrazzo.planner.gate.gate import findings
from terrazzo.planner.gate.stack import Stack
from terrazzo.planner.memory.peak import memory_of
from terrazzo.planner.model.closed_form import closed_form
from terrazzo.planner.setup.setup import Setup
from terrazzo.telemetry import available_host_bytes
from terrazzo.train.config import Config
from terrazzo.train.huggingface import read_config
from terrazzo.train.launch import resolve_device
from terrazzo.train.planning import ranks_here, setup_of

__all__ = ["available_bytes", "check_plan"]

CERTAIN = ("weights", "master", "moments", "gradients", "gathered", "unreduced", "receive")
"""Terms that follow from the plan alone. The others depend on the kernels that torch takes."""

DOUBT = 1.3
"""A run is refused for its activations only where the estimate is so much more than there is. Of published runs, nine
in ten took within 11 % of theirs (docs/planner.md); those are few in kind, so that more is left here."""

GIB = 2**30


def check_plan(config: Config, world_size: int) -> list[str]:
    """Refuse a run that is known to fail, or that cannot fit on the devices that this machine gives its ranks.

    To be called before the model takes memory, which would then be missing from what the machine has free.

    Returns lines for the header of the run: warnings, memory that is close, or why nothing was checked.

    Errors: `BadInput` that names the reason, the largest terms of memory and edits that would help.
    """
    setup = _setup(config, world_size)
    if setup is None:
        return ["plan: the architecture is not one that the planner knows, so its memory was not checked"]
    found = findings(setup, Stack(clip=config.train.clip is not None))
    refusal = next((str(finding) for finding in found if finding.severity != "warn"), None)
    memory, available = memory_of(setup), available_bytes(config, world_size)
    if refusal is None and available is not None and _cannot_fit(memory, available):
        refusal = _too_large(config, setup, memory, available)
    if refusal is not None and not config.launch.ignore_planner:
        raise BadInput(f"{refusal} To start it all the same: launch.ignore_planner=true.")
    notes = [str(finding) for finding in found if finding.severity == "warn"]
    if refusal is not None:
        notes.append(f"started all the same: {refusal}")
    elif available is not None and memory.expected_bytes > available:
        notes.append(
            f"about {_gib(memory.expected_bytes)} expected on a rank, {_gib(available)} are there: it may not fit"
        )
    return [f"plan: {note}" for note in notes]


def _cannot_fit(memory: Memory, available: int) -> bool:
    certain = sum(term.value for term in memory.terms if term.name in CERTAIN)
    return certain > available or memory.expected_bytes > available * DOUBT


def available_bytes(config: Config, world_size: int) -> int | None:
    """Memory of one rank: of its CUDA device in all, or its share of what this machine has free; None if not known."""
    if resolve_device(config.launch) == "cuda":
        return int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
    free = available_host_bytes()
    return None if free is None else free // ranks_here(world_size)


def _setup(config: Config, world_size: int) -> Setup | None:
    """None for a model that the planner does not know, or could only describe by building it, which takes seconds."""
    if config.model.kind == "decoder":
        return setup_of(config, world_size)
    assert config.model.path is not None
    if closed_form(read_config(config.model.path)) is None:
        return None
    try:
        return setup_of(config, world_size)
    except BadInput:  # of its config: all else has been checked by now, and transformers may understand it
        return None


def _too_large(config: Config, setup: Setup, memory: Memory, available: int) -> str:
    device = "CUDA device" if setup.cluster.device.kind == "cuda" else "rank's share of this machine's free memory"
    largest = sorted(memory.terms, key=lambda term: -term.value)[:3]
    return (
        f"This run needs about {_gib(memory.expected_bytes)} on each rank, {memory.limiting_rank}, and a {device} is "
        f"{_gib(available)}. Largest: {_listed(largest)}. {_edits(config, setup, largest[0])}."
    )


def _listed(terms: Sequence[Term]) -> str:
    return ", ".join(f"{term.name} {_gib(term.value)}" for term in terms)


def _edits(config: Config, setup: Setup, largest: Term) -> str:
    """Two edits that shrink the largest term."""
    batch, edits = config.batch, []
    if largest.name in CERTAIN:
        if setup.plan.name not in ("zero3", "full_shard") and setup.mesh.data_ranks > 1:
            edits.append("plan=zero3 to split all states over the ranks")
        if setup.precision.weight == torch.float32 and setup.precision.master == torch.float32:
            edits.append("precision=bf16-pure for 8 bytes per parameter")
        edits.append("more ranks" if config.launch.device != "cpu" else "a smaller model")
        edits.append("a smaller model.dim or model.layers" if config.model.kind == "decoder" else "a smaller model")
    else:
        if setup.checkpointing == "none":
            edits.append("train.activation_checkpointing=full")
        if batch.micro_batch > 1:
            edits.append(f"batch.micro_batch={batch.micro_batch // 2}")
        edits.append(f"batch.sequence_length={batch.sequence_length // 2}")
    return f"Use {' or '.join(dict.fromkeys(edits[:2]))}"


def _gib(count_bytes: float) -> str:
    return f"{count_bytes / GIB:.2f} GiB ({count_bytes / 1e9:.2f} GB)"
