"""Lines and tables that the verbs of `terrazzo checkpoint` print."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.filesize import decimal

from terrazzo.checkpoint.operations.compare import StateDifference
from terrazzo.cli.shared.terminal import columns, unmistakable

__all__ = ["differences_text", "inspect_text", "listing_text", "tensors_text"]


def inspect_text(description: Mapping[str, Any]) -> str:
    """The text of what `describe` returns."""
    rows = [*_head_rows(description), *_optimizer_rows(description["optimizer"]), *_extra_rows(description["extra"])]
    parts = [columns(rows, "<<"), _states_text(description["states"])]
    parts.append(columns([["largest tensors", "shape", "size"], *map(_tensor_row, description["largest"])], "<<>"))
    parts += [f"not taken over: {unmistakable(note)}" for note in description["notes"]]
    return "\n\n".join(parts)


def tensors_text(tensors: Sequence[Mapping[str, Any]]) -> str:
    """A table of what `tensors` returns, to be printed below `inspect_text`."""
    rows = [["all tensors", "shape", "size", "states"]]
    for tensor in tensors:
        by_dtype: dict[str, list[str]] = {}
        for kind, state in tensor["states"].items():
            by_dtype.setdefault(state["dtype"], []).append(kind)
        states = "; ".join(f"{dtype} {', '.join(kinds)}" for dtype, kinds in by_dtype.items())
        rows.append([*_tensor_row(tensor), states])
    return f"\n{columns(rows, '<<><')}"


def differences_text(differences: Sequence[StateDifference], show_all: bool) -> str:
    """A row per tensor with the largest absolute difference of each kind of state; below it the totals."""
    different = {each.name for each in differences if not each.equal}
    kinds = list(dict.fromkeys(each.kind for each in differences))
    rows: dict[str, dict[str, str]] = {}
    for each in differences:
        if show_all or each.name in different:
            rows.setdefault(each.name, dict.fromkeys(kinds, ""))[each.kind] = _distance_text(each)
    table = columns(
        [["largest |A - B|", *kinds], *([name, *row.values()] for name, row in rows.items())], "<" + ">" * len(kinds)
    )
    unlike = {each.kind for each in differences if each.differing}
    worst = [_worst(kind, differences) for kind in kinds if kind in unlike]
    count = sum(not each.equal for each in differences)
    ending = f"different: {count:,} of {len(differences):,} states" if count else f"equal: {len(differences):,} states"
    totals = f"\n{columns(worst, '<><')}" if worst else ""
    return f"{table}\n\n{ending}{totals}" if rows else ending


def _distance_text(each: StateDifference) -> str:
    if each.note and not each.numel:
        return each.note
    return f"{each.max_abs:.3g}{f' ({each.note})' if each.note else ''}"


def _worst(kind: str, differences: Sequence[StateDifference]) -> list[str]:
    of_kind = [each for each in differences if each.kind == kind and each.differing]
    worst = max(of_kind, key=lambda each: math.inf if math.isnan(each.max_abs) else each.max_abs)
    return [f"  {kind}, at most", f"{worst.max_abs:.3g}", worst.name]


def listing_text(listing: Mapping[str, Any]) -> str:
    """A table of the checkpoints of a folder."""
    rows = [["name", "step", "run", "ranks", "plan", "size", "metric", "state"]]
    rows += map(_listing_row, listing["checkpoints"])
    unfinished = [f"not finished: {unmistakable(name)}" for name in listing["unfinished"]]
    return "\n".join([columns(rows, "<><><>><"), *unfinished])


def _listing_row(entry: Mapping[str, Any]) -> list[str]:
    name, topology = entry["path"].rpartition("/")[2], entry.get("topology")
    if entry["problem"] is not None:
        return [name, "", "", "", "", "", "", entry["problem"]]
    metric = entry["metric"]
    return [
        name,
        str(entry["step"]),
        entry.get("run", ""),
        str(topology["world_size"]) if topology else "",
        topology["plan"].get("name", "") if topology else "",
        decimal(entry["size_bytes"]),
        f"{metric:.4g}" if isinstance(metric, int | float) else "",
        "complete" if topology else entry["format"],
    ]


def _head_rows(description: Mapping[str, Any]) -> Iterator[list[str]]:
    version = f", version {description['version']}" if "version" in description else ""
    yield ["format", f"{description['format']}{version}"]
    yield ["step", f"{description['step']}"]
    if "run" in description:
        yield ["run", description["run"] or "not named"]
        yield ["written", f"{description['written']} by {_pairs(description['software'])}"]
        yield from _topology_rows(description["topology"])
    tied = f", {len(description['aliases'])} more names of tied ones" if description["aliases"] else ""
    yield ["parameters", f"{description['parameters']:,} in {description['tensors']:,} tensors{tied}"]
    files = f" in {len(description['files'])} files" if len(description.get("files", ())) > 1 else ""
    yield ["size", f"{decimal(description['size_bytes'])}{files}"]


def _topology_rows(topology: Mapping[str, Any]) -> Iterator[list[str]]:
    mesh = f", mesh {_pairs(topology['mesh'])}" if topology["mesh"] else ""
    yield ["ranks", f"{topology['world_size']}{mesh}"]
    if plan := dict(topology["plan"]):
        yield ["plan", f"{plan.pop('name', '')}: {_pairs(plan)}"]
    if precision := topology["precision"]:
        dtypes = set(precision.values())
        yield ["precision", f"{dtypes.pop()} throughout" if len(dtypes) == 1 else _pairs(precision)]


def _optimizer_rows(optimizer: Mapping[str, Any] | None) -> Iterator[list[str]]:
    if optimizer is None:
        yield ["optimizer", "no state"]
        return
    settings = [group["settings"] for group in optimizer["groups"]] or [{}]
    shared = {key for key in settings[0] if all(key in own and own[key] == settings[0][key] for own in settings)}
    common = _pairs({key: settings[0][key] for key in settings[0] if key in shared})
    yield ["optimizer", f"{optimizer['name'] or 'not named'}: {common}"]
    for index, group in enumerate(optimizer["groups"]):
        own = _pairs({key: value for key, value in group["settings"].items() if key not in shared})
        yield [f"  group {index}", f"{group['numel']:,} elements in {group['tensors']:,} tensors{own and f', {own}'}"]
    if optimizer["scaler"]:
        yield ["loss scaler", _pairs(optimizer["scaler"])]


def _extra_rows(extra: Mapping[str, Any]) -> Iterator[list[str]]:
    if extra:
        short = {key: value for key, value in extra.items() if len(str(value)) <= 40 and not isinstance(value, dict)}
        longer = [key for key in extra if key not in short]
        yield ["extra", ", ".join([*([_pairs(short)] if short else []), *longer])]


def _states_text(states: Sequence[Mapping[str, Any]]) -> str:
    rows = [["state", "dtype", "tensors", "elements", "size"]]
    for total in states:
        counts = [f"{total['tensors']:,}", f"{total['numel']:,}", decimal(total["size_bytes"])]
        rows.append([total["kind"], total["dtype"], *counts])
    return columns(rows, "<<>>>")


def _tensor_row(tensor: Mapping[str, Any]) -> list[str]:
    return [tensor["name"], str(tensor["shape"]), decimal(tensor["size_bytes"])]


def _pairs(values: Mapping[str, Any]) -> str:
    """Names with their values, without those that are None or False."""
    return ", ".join(f"{key} {value}" for key, value in values.items() if value is not None and value is not False)
