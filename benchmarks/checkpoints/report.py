"""What `benchmarks.checkpoints` measured, as Markdown, with every target beside it."""

from __future__ import annotations

from statistics import median
from typing import Any

MIB = 1 << 20
HOW = """All contenders hold the same trained decoder in the same processes and take turns in random order. Files go to
one disk, which is drained before each turn; loads find them in the page cache."""


def ratio(own: list[float], other: list[float]) -> float:
    """Median over the turns of one over the other."""
    return median(a / b for a, b in zip(own, other, strict=True))


def targets(record: dict[str, Any]) -> list[tuple[str, float, float]]:
    """(name, limit, measured); a limit is the most that may be measured."""
    turns, state = record["turns"], max(record["state_bytes"])
    save, blocked, load = turns["save"], turns["blocked"], turns["load"]
    return [
        ("blocked by a save in the background / one copy of the state", 1.2, ratio(blocked["terrazzo"],
         blocked["memory copy"])),
        ("blocked by a save in the background / DCP async_save", 0.3, ratio(blocked["terrazzo"], blocked["dcp"])),
        ("save / dd with fsync of as many bytes", 1 / 0.85, ratio(save["terrazzo"], save["dd"])),
        ("load / DCP load", 1.0, ratio(load["terrazzo"], load["dcp"])),
        ("load on 3 ranks under zero1 / on the 2 that saved, zero3", 1.5,
         median(turns["reshard"]["terrazzo"]) / median(load["terrazzo"])),
        ("seconds to verify 1.5 GB on one core", 1.0, 1.5e9 * record["verify_s"] / record["total_bytes"]),
        ("memory at the peak of a save / shard + 256 MiB", 1.0, record["peak_bytes"]["save"] / (state + 256 * MIB)),
    ]  # fmt: skip


def report(record: dict[str, Any]) -> str:
    """The record as Markdown."""
    found = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    state = max(record["state_bytes"]) / MIB
    lines = [
        "# Checkpoints\n",
        f"{record['date']}, {record['processor']}; {found}. `python -m benchmarks.checkpoints`.\n",
        f"{record['about']}. Two gloo ranks, {state:.0f} MiB of state each. {HOW}\n",
        "| target | limit | measured | |",
        "|---|--:|--:|---|",
        *(f"| {name} | {limit:.2f} | {value:.2f} | {'met' if value <= limit else '**missed**'} |"
          for name, limit, value in targets(record)),
        "",
        "| | | seconds | min to max | MiB/s per rank |",
        "|---|---|--:|--:|--:|",
    ]  # fmt: skip
    for kind, contenders in record["turns"].items():
        for name, turns in contenders.items():
            middle = median(turns)
            lines.append(
                f"| {kind} | {name} | {middle:.3f} | {min(turns):.3f} to {max(turns):.3f} | {state / middle:,.0f} |"
            )
    peaks = ", ".join(f"{kind} {count / MIB:.0f} MiB" for kind, count in record["peak_bytes"].items())
    closing = (
        f"A save in the background was complete after {median(record['background_s']):.2f} s. Verifying took"
        f" {record['verify_s']:.2f} s for {record['total_bytes'] / MIB:.0f} MiB on one core. Memory at the peak, above"
        f" what was there: {peaks}. dd and torch.save write as many bytes, with an fsync; dd copies zeros. DeepSpeed"
        " does not wait for the disk. Three ranks under zero1 read 1.6 times as many bytes as two under zero3, on two"
        " cores."
    )
    return "\n".join([*lines, "", closing]) + "\n"
