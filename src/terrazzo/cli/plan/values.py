"""Parses values of `terrazzo plan` as people write them, and knows what other tools call its options."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from terrazzo.cli.plan.options import OPTION_ROWS, PlanArguments, PlanOption
from terrazzo.cli.shared.verb import answer_train_option
from terrazzo.errors import BadInput
from terrazzo.messages import did_you_mean, nearest

__all__ = ["answer_plan_option", "by_option", "check_tier", "read_arguments"]

OTHER_NAMES = {
    "--model": "preset name model-name model-path model-id hf hf-model checkpoint",
    "--gpu": "device hardware gpu-type gpu-name accelerator",
    "--gpus": "ranks num-gpus n-gpus ngpus num-devices devices world-size nproc-per-node num-processes",
    "--per-node": "gpus-per-node nproc",
    "--memory-gb": "memory gpu-memory vram mem",
    "--reserve-gb": "reserve reserved headroom",
    "--price": "cost price-per-hour usd-per-hour",
    "--seq": "sequence sequence-length seq-len seq-length context-length max-length max-seq-len block-size",
    "--micro-batch": "batch-size mbs micro-batch-size per-device-train-batch-size",
    "--micro-batches": "accumulation grad-accum gradient-accumulation gradient-accumulation-steps accumulate",
    "--global-batch": "gbs global-batch-size batch train-batch-size",
    "--ac": "checkpointing activation-checkpointing gradient-checkpointing recompute remat",
    "--precision": "dtype mixed-precision bf16 fp16",
    "--optimizer": "optim",
    "--strategy": "plan zero stage zero-stage sharding sharding-strategy fsdp",
    "--tp": "tensor-parallel tensor-parallel-size tensor-model-parallel-size",
    "--pp": "pipeline-parallel pipeline-parallel-size pipeline-model-parallel-size stages",
    "--cp": "context-parallel context-parallel-size sequence-parallel-size",
    "--ep": "expert-parallel expert-parallel-size experts",
    "--rank-by": "rank sort sort-by order-by",
    "--ema": "average moving-average ema-decay",
    "--emit": "output out write o config save",
    "--picture": "plot figure image svg png",
}
"""Other names of an option, from other tools or from habit."""

MESH_NAMES = ("mesh", "device-mesh", "dp-shard", "dp-shard-size", "shard-size", "dp", "data-parallel-size")
"""What other tools call axes that follow from other options here."""

OTHER_TIERS = {
    name: tier for tier, names in {"cpu": "host memory ram dram", "nvme": "disk ssd drive storage"}.items()
    for name in names.split()
}  # fmt: skip
"""Other names of a tier of `--offload`."""

_KNOWN = {
    known.removeprefix("--"): option for option in OPTION_ROWS for name in option.names for known in name.split("/")
}
_OTHERS = {other: _KNOWN[flag.removeprefix("--")] for flag, names in OTHER_NAMES.items() for other in names.split()}
_NUMBER = re.compile(r"[^0-9.+-]*([+-]?[0-9]+(?:[,_][0-9]{3})*(?:\.[0-9]+)?)\s*([a-z/]*)", re.IGNORECASE)
_UNITS = {"GB": " of GB (1e9 bytes)", "W": " of watts", "MS": " of milliseconds"} | {
    unit: f" of {unit}" for unit in ("TFLOP/S", "TB/S", "GB/S")
}
LONGEST = 20
_SIZES = {"": 1, "k": 1024, "ki": 1024, "m": 1024**2, "mi": 1024**2}


def read_arguments(values: Mapping[str, Any], written: Collection[str]) -> PlanArguments:
    """The arguments from typer's values by name, with numbers parsed.

    Args:
        values: of all parameters; numbers as text.
        written: names of the parameters that were given.

    Raises:
        BadInput: a number is expected and the text is none.
    """
    numbers = {option.argument: _read(option, values[option.argument]) for option in OPTION_ROWS if option.is_number}
    overrides = values["overrides"] or []
    return PlanArguments(**{**values, **numbers, "overrides": overrides}, written=frozenset(written))


def by_option(problem: str) -> str:
    """An error about a field of `Request` in terms of the option that sets it: `gpus is ...` as `--gpus is ...`."""
    field, is_word, rest = problem.partition(" is ")
    flag = next((option.flag for option in OPTION_ROWS if option.field == field and option.unit is None), None)
    return problem if flag is None else f"{flag}{is_word}{rest}"


def check_tier(text: str) -> None:
    """Raise `BadInput` for a value of `--offload` that names no tier."""
    from terrazzo.engine import OFFLOADS  # torch, which --help does without

    known, name = [*OFFLOADS, "any"], text.strip().lower().replace("_", "-").partition(":")[0]
    if name in known:
        return
    near = f" Did you mean '{OTHER_TIERS[name]}'?" if name in OTHER_TIERS else did_you_mean(name, known)
    raise BadInput(
        f"--offload is {_short(text)}; it is one of {', '.join(OFFLOADS)}, each also with a share (cpu:0.7), or any."
        f"{near}"
    )


def answer_plan_option(option: str, value: str, words: list[str]) -> str | None:
    """The answer of `terrazzo plan` to an unknown option: the one that it means, by the names that other tools use, or
    the setting, if a configuration is planned.
    """
    name = option.lstrip("-").replace("_", "-").lower()
    meant = _OTHERS.get(name)
    written = name in OTHER_NAMES["--emit"].split()  # a file behind it is no configuration that is planned
    if not written and (setting := answer_train_option(option, value, words)):
        return setting
    if meant is not None:
        return f"write {_usage(meant, value)}: {meant.help}."
    if name in MESH_NAMES:
        return "write --dp-replicate R, --tp T, --pp P and --cp C: dp_shard is what these leave of --gpus."
    near = nearest(name, [*_KNOWN, *_OTHERS])
    if not near:
        return "`terrazzo plan --help` lists them all."
    meant = _KNOWN.get(near) or _OTHERS[near]
    return f"did you mean {_usage(meant, value)}?"


def _usage(option: PlanOption, value: str) -> str:
    return " ".join(filter(None, [option.flag, option.metavar and (value or option.metavar)]))


def _read(option: PlanOption, text: str | None) -> float | None:
    if text is None:
        default: float | None = option.default
        return default
    whole = option.kind is int
    try:
        value: float = int(text) if whole else float(text)
    except ValueError:
        kind = "a whole number" if whole else "a number"
        unit = _UNITS.get(option.metavar or "", "")
        raise BadInput(
            f"{option.flag} is {_short(text)}, expected {kind}{unit}: {option.help}.{_edit(option, text)}"
        ) from None
    from terrazzo.planner.setup.arguments import LEAST  # the planner, which --help does without
    from terrazzo.planner.setup.checks import check_number

    least = LEAST.get(option.field)  # of bytes 1, which is no bound for GB
    least = None if least and option.unit is not None else least
    check_number(option.flag, value, whole=whole, least=least)
    return value


def _edit(option: PlanOption, text: str) -> str:
    """The edit for a text with a number in it: `Write 80.` for `80GB`, `Write 8192.` for `8k`; empty if unclear."""
    match = _NUMBER.fullmatch(text.strip())
    if match is None or len(text) > LONGEST:
        return ""
    unit = match[2].lower()
    scales = _SIZES if option.metavar == "TOKENS" else {"": 1, (option.metavar or "").lower(): 1}
    if unit not in scales:
        return ""
    number = scales[unit] * float(match[1].replace(",", "").replace("_", ""))
    if option.kind is int and number != int(number):
        return f" Write {int(number)} or {int(number) + 1}."
    return f" Write {number:.12g}."


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:40]}...")
