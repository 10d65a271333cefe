"""What a checkpoint, or a folder of them, holds: as plain JSON values, and as text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.filesize import decimal

from terrazzo.checkpoint.compare import Difference
from terrazzo.checkpoint.manifest import name_of
from terrazzo.checkpoint.native import Checkpoint
from terrazzo.checkpoint.read import open_source, own_folder
from terrazzo.checkpoint.source import BUFFER, WEIGHT, OptimizerInfo, Source
from terrazzo.checkpoint.stores import open_store, store_and_name
from terrazzo.errors import BadInput

__all__ = [
    "columns",
    "describe",
    "differences_text",
    "expand",
    "inspect_text",
    "listing",
    "listing_text",
    "lost",
    "tensors",
    "tensors_text",
    "total_bytes",
]

_LARGEST = 5


def describe(source: Source) -> dict[str, Any]:
    """Everything about a checkpoint but its tensors one by one; sizes are in bytes."""
    optimizer = source.optimizer
    return {
        "path": source.where,
        "format": source.format,
        "step": source.step,
        **source.about(),
        "size_bytes": total_bytes(source),
        "tensors": len(source.tensors),
        "parameters": sum(info.numel for info in source.tensors.values() if WEIGHT in info.states),
        "aliases": source.aliases,
        "states": _totals(source),
        "largest": sorted(tensors(source), key=lambda tensor: -tensor["size_bytes"])[:_LARGEST],
        "optimizer": None if optimizer is None else _optimizer(source, optimizer),
        "extra": source.extra,
        "notes": source.notes,
    }


def tensors(source: Source) -> list[dict[str, Any]]:
    """Every tensor: its name, shape and size, and of each of its states dtype and number of elements."""
    return [
        {
            "name": name,
            "shape": list(info.shape),
            "size_bytes": sum(state.numel * state.dtype.itemsize for state in info.states.values()),
            "states": {
                kind: {"dtype": name_of(state.dtype), "numel": state.numel} for kind, state in info.states.items()
            },
        }
        for name, info in source.tensors.items()
    ]


def total_bytes(source: Source, kind: str | None = None) -> int:
    """Of all states, or those of a kind; weights and buffers are one kind here."""
    kinds = {WEIGHT, BUFFER} if kind in (WEIGHT, BUFFER) else {kind}
    wanted = [total for total in _totals(source) if kind is None or total["kind"] in kinds]
    return sum(total["size_bytes"] for total in wanted)


def expand(path: str) -> list[str]:
    """`path`, or where that is a folder of checkpoints the paths of all of them, damaged ones too, by step.

    Raises:
        BadInput: there is nothing.
    """
    if own_folder(path) is not None:
        return [path]
    if found := sorted(open_store(path).candidates(), key=lambda name: (len(name), name)):
        return [f"{path.rstrip('/')}/{each}" for each in found]
    store, name = store_and_name(path)
    if not store.occupied(name):
        raise BadInput(f"There is no checkpoint '{path}'.")
    return [path]


def listing(folder: str, paths: Sequence[str]) -> dict[str, Any]:
    """An entry for each of a folder's checkpoints; `problem` says why one cannot be used. Digests are not checked."""
    entries = [_entry(path) for path in paths]
    return {"path": folder, "checkpoints": entries, "unfinished": open_store(folder).unfinished()}


def lost(source: Source, to: str) -> list[str]:
    """What a conversion to `terrazzo`, `hf` or `dcp` leaves behind, a line each."""
    lines = list(source.notes)
    if to == "hf" and source.optimizer is not None:
        lines.append("the optimizer's state")
    if to != "terrazzo" and source.extra:
        lines.append(f"extra: {', '.join(source.extra)}")
    if source.about() and (to != "terrazzo" or len(source.ranks) > 1):
        lines.append("the states of the ranks' random generators")
    return lines


def _entry(path: str) -> dict[str, Any]:
    entry: dict[str, Any] = {"path": path, "problem": None}
    try:
        folder = own_folder(path)
        source = open_source(path) if folder is None else Checkpoint(folder)
    except BadInput as error:
        return entry | {"problem": str(error)}
    entry |= {"format": source.format, "step": source.step, "metric": source.extra.get("metric")}
    if about := source.about():
        size = sum(file["size_bytes"] for file in about["files"])
        return entry | {key: about[key] for key in ("run", "written", "topology")} | {"size_bytes": size}
    return entry | {"size_bytes": total_bytes(source)}


def _totals(source: Source) -> list[dict[str, Any]]:
    """By kind of state and dtype how many tensors have it, and their elements and bytes."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for info in source.tensors.values():
        for kind, state in info.states.items():
            empty = {"kind": kind, "dtype": name_of(state.dtype), "tensors": 0, "numel": 0, "size_bytes": 0}
            total = found.setdefault((kind, name_of(state.dtype)), empty)
            total["tensors"] += 1
            total["numel"] += state.numel
            total["size_bytes"] += state.numel * state.dtype.itemsize
    return sorted(found.values(), key=lambda total: total["kind"] != WEIGHT)


def _optimizer(source: Source, optimizer: OptimizerInfo) -> dict[str, Any]:
    groups = []
    for group in optimizer.groups:
        names = group.get("params", [])
        numel = sum(source.tensors[name].numel for name in names if name in source.tensors)
        settings = {key: value for key, value in group.items() if key != "params"}
        groups.append({"tensors": len(names), "numel": numel, "settings": settings})
    return {"name": optimizer.name, "groups": groups, "scaler": optimizer.scaler}


# -- as text -------------------------------------------------------------------------------------------------------


def inspect_text(description: Mapping[str, Any]) -> str:
    """What `describe` gives, for people."""
    rows = [*_head_rows(description), *_optimizer_rows(description["optimizer"]), *_extra_rows(description["extra"])]
    parts = [columns(rows, "<<"), _states_text(description["states"])]
    parts.append(columns([["largest tensors", "shape", "size"], *map(_tensor_row, description["largest"])], "<<>"))
    parts += [f"not taken over: {plain(note)}" for note in description["notes"]]
    return "\n\n".join(parts)


def tensors_text(listed: Sequence[Mapping[str, Any]]) -> str:
    """What `tensors` gives, a line each; nothing for none."""
    rows = [["all tensors", "shape", "size", "states"]]
    for tensor in listed:
        by_dtype: dict[str, list[str]] = {}
        for kind, state in tensor["states"].items():
            by_dtype.setdefault(state["dtype"], []).append(kind)
        states = "; ".join(f"{dtype} {', '.join(kinds)}" for dtype, kinds in by_dtype.items())
        rows.append([*_tensor_row(tensor), states])
    return f"\n{columns(rows, '<<><')}" if listed else ""


def differences_text(found: Sequence[Difference], show_all: bool) -> str:
    """A row for each tensor, in it the largest absolute difference of each kind of state; at the end those of all."""
    different = {each.name for each in found if not each.equal}
    kinds = list(dict.fromkeys(each.kind for each in found))
    rows: dict[str, dict[str, str]] = {}
    for each in found:
        if show_all or each.name in different:
            rows.setdefault(each.name, dict.fromkeys(kinds, ""))[each.kind] = _distance_text(each)
    table = columns(
        [["largest |A - B|", *kinds], *([name, *row.values()] for name, row in rows.items())], "<" + ">" * len(kinds)
    )
    worst = [_worst(kind, found) for kind in kinds if any(each.differing for each in found if each.kind == kind)]
    count = sum(not each.equal for each in found)
    ending = f"different: {count:,} of {len(found):,} states" if count else f"equal: {len(found):,} states"
    totals = f"\n{columns(worst, '<><')}" if worst else ""
    return f"{table}\n\n{ending}{totals}" if rows else ending


def _distance_text(each: Difference) -> str:
    if each.note and not each.numel:
        return each.note
    return f"{each.max_abs:.3g}{f' ({each.note})' if each.note else ''}"


def _worst(kind: str, found: Sequence[Difference]) -> list[str]:
    of_kind = [each for each in found if each.kind == kind and each.differing]
    worst = max(of_kind, key=lambda each: math.inf if math.isnan(each.max_abs) else each.max_abs)
    return [f"  {kind}, at most", f"{worst.max_abs:.3g}", worst.name]


def listing_text(listing: Mapping[str, Any]) -> str:
    """Checkpoints of a folder, a line each."""
    rows = [["name", "step", "run", "ranks", "plan", "size", "metric", "state"]]
    rows += map(_listing_row, listing["checkpoints"])
    unfinished = [f"not finished: {plain(name)}" for name in listing["unfinished"]]
    return "\n".join([columns(rows, "<><><>><"), *unfinished])


def columns(rows: Sequence[Sequence[str]], align: str) -> str:
    """Rows of cells as aligned lines; `align` has `<` or `>` for each column."""
    cells = [[plain(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ("  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, align, widths, strict=True))
             for row in cells)  # fmt: skip
    return "\n".join(line.rstrip() for line in lines)


def plain(text: object) -> str:
    """`printable`, and in letters of which no two look alike."""
    shown = str(text)
    return shown if shown.isascii() and shown.isprintable() else ascii(shown)[1:-1]


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
    """Names with their values, without those that are off."""
    return ", ".join(f"{key} {value}" for key, value in values.items() if value is not None and value is not False)
