"""What may bound a step: a table with the words of verdicts and advice, and the colors of pictures."""

from __future__ import annotations

from typing import Literal, NamedTuple

__all__ = ["BOUNDS", "BoundRow"]


class BoundRow(NamedTuple):
    """One bound: a cause in step records, or what a verdict says where records tell no causes apart.

    Attributes:
        kind: how records measure it: as one number within a step (`part`) or between two (`between`), by axis
            (`exchange`), by rank (`late`), or as what is left of the step (`rest`).
        title: its name in a verdict; `{rank}` stands for the rank that others wait for.
        evidence: what was measured, in words that follow the seconds.
        edit: what would help, if no setting does; `{axis}` stands for the axis of the exchange.
        script_edit: the same for a script that `terrazzo profile` has measured, if what the script uses suggests
            nothing better; empty where something always does.
        color: of its part in a picture; empty for bounds that are not causes in records.
    """

    kind: Literal["rest", "exchange", "late", "part", "between"]
    title: str
    evidence: str
    edit: str
    script_edit: str = ""
    color: str = ""


_COMMUNICATION, _FASTER = "exposed communication", "More ranks, or faster ones,"

BOUNDS: dict[str, BoundRow] = {
    "compute": BoundRow(
        "rest",
        "compute",
        "is arithmetic, the engine and the loop",
        f"{_FASTER} would shorten it",
        _FASTER,
        color="#3b7dd8",
    ),
    "device": BoundRow(
        "rest",
        "the device's queue",
        "is neither input nor evaluation nor saving; compute and exchanges are not told apart on CUDA",
        f"{_FASTER} would shorten it",
        _FASTER,
    ),
    "host": BoundRow(
        "rest",
        "the host",
        "goes by while the device mostly has nothing to do, because the script queues work too slowly",
        f"{_FASTER} would shorten it",
    ),
    "gather": BoundRow(
        "exchange",
        _COMMUNICATION,
        "is waiting for weights, all ranks being there",
        "A plan that gathers less, such as zero2 in place of zero3, or larger micro-batches would help",
        color="#d9730d",
    ),
    "reduce": BoundRow(
        "exchange",
        _COMMUNICATION,
        "is waiting for sums of gradients, all ranks being there",
        "Larger micro-batches, or a plan that reduces once a step, such as zero1, would help",
        color="#c9a227",
    ),
    "exchange": BoundRow(
        "exchange",
        _COMMUNICATION,
        "is waiting for activations, all ranks being there",
        "A shorter {axis} axis, or one that stays inside a machine, would help",
        "A smaller group, or one that stays inside a machine,",
        "#8f5fbf",
    ),
    "stages": BoundRow(
        "exchange",
        "the pipeline",
        "is waiting for what other stages compute, and for it to arrive",
        "More micro-batches in a step, stages that take equally long, or a shorter {axis} axis would help",
        "More micro-batches in a step, and stages that take equally long,",
    ),
    "late_peer": BoundRow(
        "late",
        "waiting for late ranks",
        "is waiting while not all are there",
        "Cores of its own for each rank, and batches of equal length, would help",
        "Batches of equal length, and cores of its own for each rank (OMP_NUM_THREADS, numactl),",
        "#cf3f3f",
    ),
    "late_rank": BoundRow(
        "late",
        "rank {rank}",
        "is what the others wait for it",
        "A look at its machine (what else runs there, its clock, its drives) would help",
        "A look at its machine (what else runs there, its clock, its drives), and at what the script does on this rank"
        " alone,",
    ),
    "tier": BoundRow(
        "part",
        "offload",
        "is waiting for updates away from the device",
        "States on the device, as far as they fit, would help",
        color="#5f9ea0",
    ),
    "update": BoundRow(
        "part",
        "the optimizer",
        "is its update, which every rank makes of all weights",
        "A plan that divides the optimizer's state, such as zero1, would help",
        "fused=True for the optimizer",
        "#4fa36b",
    ),
    "input": BoundRow(
        "part",
        "data",
        "is waiting for the next batch",
        "Batches read in the background, from a local drive, would help",
        color="#b35c8f",
    ),
    "evaluate": BoundRow(
        "between",
        "evaluation",
        "goes to it and to samples",
        "Evaluating less often would help",
        "Evaluating less often, or on fewer batches,",
        "#8b8f94",
    ),
    "save": BoundRow(
        "between",
        "saving",
        "goes to checkpoints",
        "Saving in the background, or less often, would help",
        "torch.distributed.checkpoint.async_save in the place of torch.save",
        "#5d6b7a",
    ),
    "local_save": BoundRow(
        "between",
        "saving on each machine",
        "goes to local checkpoints",
        "Saving on the machine less often would help",
        color="#a3adb8",
    ),
}
"""The bounds by name. Pictures stack their parts of a step in this order."""
