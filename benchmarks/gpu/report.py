"""What a record of the GPU benchmark says: a table of steps, one of gathers, and what was wanted of both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

STEP_OF_PLAIN = 1.01
STEP_OF_FSDP2, PEAK_OF_FSDP2 = 0.97, 0.95
TARGET_WORLD = 8
MFU, MFU_DEVICE = 0.57, "H200"
LOSS_SPREAD = 0.02


def targets(record: dict[str, Any]) -> list[dict[str, Any]]:
    """What was wanted: `what`, `limit`, the `value` measured or None, and whether it was `met`."""
    return [
        {"what": what, "limit": limit, "least": least, "value": value, "met": _met(value, limit, least)}
        for what, limit, least, value in _wanted(record)
    ]


def _met(value: float | None, limit: float, least: bool) -> bool | None:
    if value is None:
        return None
    return value >= limit if least else value <= limit


def _wanted(record: dict[str, Any]) -> Iterator[tuple[str, float, bool, float | None]]:
    """What, limit, whether the limit is the least allowed, value."""
    mfus = []
    for name, case in record["cases"].items():
        if "terrazzo" not in case["contenders"]:
            continue
        if case["world"] == 1:
            if "plain" in case["contenders"]:
                yield f"{name}: step, Terrazzo / plain PyTorch", STEP_OF_PLAIN, False, step_ratio(case, "plain")
            yield f"{name}: largest difference between losses", LOSS_SPREAD, False, loss_spread(case)
            mfus.append(case["contenders"]["terrazzo"].get("mfu"))
        elif case["world"] == TARGET_WORLD:
            yield f"{name}: step, Terrazzo / FSDP2", STEP_OF_FSDP2, False, step_ratio(case, "fsdp2")
            yield f"{name}: peak memory, Terrazzo / FSDP2", PEAK_OF_FSDP2, False, peak_ratio(case, "fsdp2")
    known = [mfu for mfu in mfus if mfu is not None]
    if mfus:
        value = max(known) if known and MFU_DEVICE in record["device"] else None
        yield f"MFU of Terrazzo alone, on {MFU_DEVICE}", MFU, True, value


def step_ratio(case: dict[str, Any], peer: str, own: str = "terrazzo") -> float | None:
    """The median over the rounds of `own`'s median step over `peer`'s."""
    mine, theirs = (case["contenders"].get(name, {}).get("turns", []) for name in (own, peer))
    ratios = [median(a["step_s"]) / median(b["step_s"]) for a, b in zip(mine, theirs, strict=False)]
    return median(ratios) if ratios else None


def peak_ratio(case: dict[str, Any], peer: str, own: str = "terrazzo") -> float | None:
    """`own`'s peak memory over `peer`'s."""
    mine, theirs = (case["contenders"].get(name, {}).get("peak_bytes") for name in (own, peer))
    return mine / theirs if mine and theirs else None


def loss_spread(case: dict[str, Any]) -> float | None:
    """The largest relative difference between contenders' losses after the same number of steps."""
    trained = [each["turns"] for each in case["contenders"].values() if each["turns"]]
    rounds = [[turn["loss"] for turn in turns] for turns in zip(*trained, strict=False)]
    spreads = [(max(losses) - min(losses)) / abs(median(losses)) for losses in rounds]
    return max(spreads) if spreads and len(trained) > 1 else None


def table(record: dict[str, Any]) -> str:
    """Markdown of a record."""
    if "cases" not in record:
        return f"GPU benchmark: {record['device']}, nothing was measured."
    versions = ", ".join(f"{name} {value}" for name, value in record["versions"].items() if value)
    parts = [f"{record['device']}; {versions}"]
    parts += [_steps(record)] if record["cases"] else []
    parts += [_gathers(record)] if record["copy_out"] else []
    parts += [_verdicts(record)] if record["targets"] else []
    return "\n\n".join(parts)


def _steps(record: dict[str, Any]) -> str:
    lines = ["| case | contender | step ms | × | tokens/s | MFU % | peak GiB | × | host gap ms | fake gathers ms |"]
    lines.append("|---|---|--:|--:|--:|--:|--:|--:|--:|--:|")
    for name, case in record["cases"].items():
        baseline = next(iter(case["contenders"]))
        for contender, found in case["contenders"].items():
            cells = _cells(case, contender, baseline) if found["turns"] else 8 * ["-"]
            why = f" ({found['failed']})" if "failed" in found else ""
            lines.append(f"| {name} | {contender}{why} | " + " | ".join(cells) + " |")
    about = (
        "A case is `alone` or `offload` (world 1; `zero3@cpu`, whose weights stay on the device, as DeepSpeed's do and "
        "FSDP2's do not) or a model, a world of the fake group, and eager mode or compiled blocks. × is of "
        "the case's first row. Host gap: the part of a step in which the GPU ran nothing. Fake gathers: copies that "
        "the fake group makes within a step, beside the computation for FSDP2 and before it for Terrazzo."
    )
    return "\n".join([*lines, "", about])


def _cells(case: dict[str, Any], contender: str, baseline: str) -> list[str]:
    found = case["contenders"][contender]
    return [
        _shown(found["step_s"], lambda s: f"{1e3 * s:.1f}"),
        _shown(step_ratio(case, baseline, contender), lambda ratio: f"{ratio:.3f}"),
        _shown(found["tokens_per_s"], lambda rate: f"{rate:,.0f}"),
        _shown(found["mfu"], lambda mfu: f"{100 * mfu:.1f}"),
        _shown(found["peak_bytes"], lambda size: f"{size / 2**30:.2f}"),
        _shown(peak_ratio(case, baseline, contender), lambda ratio: f"{ratio:.3f}"),
        _shown(found["host_gap_s"], lambda s: f"{1e3 * s:.1f}"),
        _shown(found.get("fake_gather_s"), lambda s: f"{1e3 * s:.1f}"),
    ]


def _shown(value: float | None, show: Callable[[float], str]) -> str:
    return "-" if value is None else show(value)


def _gathers(record: dict[str, Any]) -> str:
    lines = ["| block | M parameters | gather to views ms | gather and copy out ms | × |", "|---|--:|--:|--:|--:|"]
    for block, found in record["copy_out"].items():
        if "failed" in found:
            lines.append(f"| {block} | {found['failed']} | | | |")
            continue
        cells = [f"{1e3 * found[way]:.3f}" for way in ("views", "copies")]
        cells = [f"{found['numel'] / 1e6:.1f}", *cells, f"{found['views'] / found['copies']:.2f}"]
        lines.append(f"| {block} | " + " | ".join(cells) + " |")
    about = "From an fp32 shard to a block's bf16 parameters on the fake group, as Terrazzo and as FSDP2 do it."
    return "\n".join([*lines, "", about])


def _verdicts(record: dict[str, Any]) -> str:
    lines = ["| target | limit | measured | |", "|---|--:|--:|---|"]
    for target in record["targets"]:
        limit = f"{'≥' if target['least'] else '≤'} {target['limit']:.2f}"
        verdict = {True: "met", False: "missed", None: "not measured"}[target["met"]]
        lines.append(f"| {target['what']} | {limit} | {_shown(target['value'], '{:.3f}'.format)} | {verdict} |")
    return "\n".join([*lines, "", "Ratios are medians of the ratios of the rounds' medians; an MFU of 1 is the peak."])
