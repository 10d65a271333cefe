"""What a request may hold: the kind and range of every field, whoever filled it in."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, get_args

from terrazzo.engine import Plan
from terrazzo.errors import BadInput
from terrazzo.messages import did_you_mean
from terrazzo.parallel import Mode
from terrazzo.planner.machine.devices import Device
from terrazzo.planner.setup.checks import check_number
from terrazzo.planner.setup.framework import Framework
from terrazzo.planner.setup.setup import AttentionKernel, Loss, PipelineOrder, Ranking, TpOverlap, UpdateKernel

__all__ = ["LEAST", "MOST_DEVICES", "checked", "count_range"]

MOST_DEVICES = 1_000_000
"""The most devices that a request may name."""

COUNTS = (
    "sequence", "micro_batch", "global_batch", "micro_batches", "tp", "pp", "cp", "ep", "dp_replicate", "per_node",
    "virtual_stages", "prefetch", "lora",
)  # fmt: skip
AMOUNTS = (
    "memory_bytes", "reserve_bytes", "host_memory_bytes", "disk_bytes", "disk_bandwidth", "price_per_hour",
    "peak_flops", "memory_bandwidth", "scaleup_bandwidth", "internode_bandwidth", "pcie_bandwidth", "watts", "launch_s",
)  # fmt: skip
LEAST = {"prefetch": 0, "price_per_hour": 0, "launch_s": 0, "memory_bytes": 1, "host_memory_bytes": 1, "disk_bytes": 1}
FLAGS = ("sequence_parallel", "compile", "parallel", "offload", "accumulate_locally", "qlora", "ema")
NAMES = ("strategy", "gpu", "checkpointing", "precision", "optimizer", "framework")
CHOICES: Mapping[str, Any] = {
    "attention": AttentionKernel,
    "loss": Loss,
    "optimizer_kernel": UpdateKernel,
    "pipeline": PipelineOrder,
    "rank_by": Ranking,
    "context": Mode,
    "tensor_overlap": TpOverlap,
}
GLOBS = ("freeze",)
"""Fields by what they hold: whole numbers, numbers, how small these may be if not only above 0, yes or no, names, one
of a few words, and patterns of names."""

KINDS = frozenset({"model", "gpus", *COUNTS, *AMOUNTS, *FLAGS, *NAMES, *CHOICES, *GLOBS})

ALSO_CALLED = {
    "attention": {"sdpa": "flash", "eager": "math", "flash2": "flash", "flash_attention_2": "flash",
                  "flash_attention_3": "flash3", "fa2": "flash", "fa3": "flash3"},
    "pipeline": {"zb": "zero_bubble", "zb-h1": "zero_bubble", "interleaved": "1f1b"},
    "rank_by": {"speed": "throughput", "fastest": "throughput", "cheapest": "cost", "price": "cost", "fewest": "gpus"},
    "loss": {"cross_entropy": "full", "linear_cross_entropy": "chunked", "cce": "chunked", "liger": "chunked"},
    "context": {"all_gather": "gather", "allgather": "gather", "a2a": "ulysses", "p2p": "ring"},
    "tensor_overlap": {"async_tp": "async", "userbuffers": "async", "tp_comm_overlap": "async", "all": "async"},
}  # fmt: skip
"""What else a choice is called by other tools, for the error that names it."""

OTHER_KINDS: Mapping[str, type] = {"strategy": Plan, "gpu": Device, "framework": Framework}
"""What a name may be given as, too."""


def checked(fields: Mapping[str, Any], optional: Collection[str]) -> dict[str, Any]:
    """The fields of a request, with whole numbers made of whole floats and of digits.

    Args:
        optional: those that None leaves open.

    Raises: `BadInput` for a number that is none or out of range, another kind of value, an empty or unknown name, and
    options that exclude each other.
    """
    values = {
        name: None if value is None and name in optional else _checked(name, value) for name, value in fields.items()
    }
    if values["global_batch"] is not None and values["micro_batches"] is not None:
        raise BadInput(
            f"Both a global batch of {values['global_batch']} and {values['micro_batches']} micro-batches were given; "
            "each follows from the other. Give one of them."
        )
    return values


def _checked(name: str, value: Any) -> Any:
    assert name in KINDS, f"what {name} may hold is said nowhere"
    if name == "gpus":
        return _read_gpus(value)
    if name in COUNTS or name in AMOUNTS:
        check_number(name, value, whole=name in COUNTS, least=LEAST.get(name))
        return int(value) if name in COUNTS else float(value)
    if name in FLAGS and not isinstance(value, bool):
        raise BadInput(f"{name} is {value!r}; give True or False.")
    if name in NAMES:
        _check_name(name, value)
    if name in CHOICES:
        _check_choice(name, value, get_args(CHOICES[name]))
    if name in GLOBS and not _is_text(value):
        raise BadInput(f"{name} is {value!r}; give a glob, or a list of globs, such as '*.embed_tokens.*'.")
    return value


def _is_text(value: object) -> bool:
    """Whether it is text, or a row of texts, none of them empty."""
    row = [value] if isinstance(value, str) else value
    return isinstance(row, Sequence) and bool(row) and all(isinstance(each, str) and each.strip() for each in row)


def _check_name(name: str, value: object) -> None:
    if name in OTHER_KINDS and isinstance(value, OTHER_KINDS[name]):
        return
    if not isinstance(value, str):
        kinds = f"a name or a {OTHER_KINDS[name].__name__}" if name in OTHER_KINDS else "a name"
        raise BadInput(f"{name} is {value!r}; give {kinds}.")
    if not value.strip():
        raise BadInput(f"{name} is empty; give a name, or leave it out.")


def _check_choice(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        other = ALSO_CALLED.get(name, {}).get(str(value).lower())
        near = f" Did you mean '{other}'?" if other else did_you_mean(str(value).lower(), known)
        raise BadInput(f"{name} is {value!r}; it is one of {', '.join(known)}.{near}")


def _read_gpus(gpus: Any) -> int | str:
    """A number, also where it is written as text; a range as it is."""
    if gpus == "":
        raise BadInput("gpus is empty; give a number such as 64, or a range such as 8..1024.")
    if isinstance(gpus, str) and not re.fullmatch(r"-?[0-9]{1,18}", gpus):
        count_range(gpus)
        return gpus
    number = int(gpus) if isinstance(gpus, str) else gpus
    check_number("gpus", number, whole=True)
    return int(number)


class CountRange(NamedTuple):
    """The least and the most devices that a request allows."""

    least: int
    most: int


def count_range(text: str) -> CountRange:
    """The range that `8..1024` means, or a number alone. Raises: `BadInput` for what is neither."""
    shown = repr(text if len(text) <= 40 else f"{text[:40]}...")
    first, dots, last = text.partition("..")
    try:
        low, high = int(first), int(last) if dots else int(first)
    except ValueError:
        raise BadInput(f"gpus is {shown}; give a number such as 64, or a range such as 8..1024.") from None
    check_number("gpus", low, whole=True)
    if high < low:
        raise BadInput(f"gpus is {shown}, a range that ends before it begins; write {high}..{low}.")
    if high > MOST_DEVICES:
        raise BadInput(f"gpus is {shown}; at most {MOST_DEVICES:,} can be planned for.")
    return CountRange(low, high)
