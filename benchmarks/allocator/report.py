"""What a record of `python -m benchmarks.allocator` says."""

from __future__ import annotations

from typing import Any

from terrazzo.messages import GIB

__all__ = ["report", "shares"]

EQUAL = """8 steps. × is of what tensors held at the peak. Smallest device: on which the run just ends, to 1 %, since
what is free goes back when memory runs out."""
TARGET = 1.05
KINDS = {"fixed": "segments", "expandable": "expandable segments"}


def shares(record: dict[str, Any], kind: str, figure: str = "reserved") -> dict[str, float]:
    """Of each steady job: a figure (`reserved`, or `least`, the smallest device) over what its tensors hold at most."""
    return {_name(row): row[kind][figure] / row[kind]["requested"] for row in record["rows"] if not row["varied"]}


def _name(row: dict[str, Any]) -> str:
    return f"{row['plan']}, 2 axes" if row["axes"] == 2 else str(row["plan"])


def report(record: dict[str, Any]) -> str:
    """Markdown."""
    steady = [row for row in record["rows"] if not row["varied"]]
    varied = [row for row in record["rows"] if row["varied"]]
    about = (
        f"{record['date']}, torch {record['torch']}, `python -m benchmarks.allocator`. The allocations of training on "
        "the simulated CUDA device, replayed with the policy of torch's caching allocator (`hostcuda/caching.py`). One "
        f"of {record['ranks']} ranks; a decoder of 8 blocks, width 2,048, vocabulary 16,000, and 2,048 tokens a step; "
        "bf16, a fused AdamW, and attention that writes its scores down. What was trained is a sixteenth of it in each "
        f"direction, and each size is multiplied by {record['scale']}. Libraries' workspaces are not in it."
    )
    parts = ["# The caching allocator", about, "## Equal steps", _steady(steady), _verdict(steady)]
    parts += ["## Sequences of varied length", _varied(varied)]
    return "\n\n".join(parts) + "\n"


def _steady(rows: list[dict[str, Any]]) -> str:
    lines = ["| | allocated GiB | reserved × | smallest device × | expandable: reserved × | smallest device × |"]
    lines.append("|---|--:|--:|--:|--:|--:|")
    for row in rows:
        cells = [f"{row['fixed']['requested'] / GIB:.2f}"]
        for kind in KINDS:
            cells += [f"{row[kind][figure] / row[kind]['requested']:.3f}" for figure in ("reserved", "least")]
        lines.append(f"| {_name(row)} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", EQUAL])


def _verdict(rows: list[dict[str, Any]]) -> str:
    """Wanted: at most `TARGET` under every plan."""
    lines = [
        "| reserved / allocated, wanted ≤ 1.05 | plans that keep to it | the most, of own plans | |",
        "|---|--:|--:|---|",
    ]
    own = [row for row in rows if row["plan"] != "fsdp2"]
    for kind, name in KINDS.items():
        found = [row[kind]["reserved"] / row[kind]["allocated"] for row in own]
        kept = sum(ratio <= TARGET for ratio in found)
        verdict = "met" if kept == len(found) else "**missed**"
        lines.append(f"| {name} | {kept} of {len(found)} | {max(found):.3f} | {verdict} |")
    return "\n".join(lines)


def _varied(rows: list[dict[str, Any]]) -> str:
    lines = ["| | segments | allocated GiB | after 1 step | 10 | 50 | 200 | reserved × |"]
    lines.append("|---|---|--:|--:|--:|--:|--:|--:|")
    for row in rows:
        for kind in KINDS:
            found = row[kind]
            after = [found["reserved_after"][step] / GIB for step in (1, 10, 50, row["steps"])]
            cells = [f"{size:.2f}" for size in (found["requested"] / GIB, *after)]
            cells.append(f"{found['reserved'] / found['requested']:.3f}")
            lines.append(f"| {row['plan']} | {'fixed' if kind == 'fixed' else kind} | " + " | ".join(cells) + " |")
    about = "200 steps of 512 to 2,048 tokens, drawn anew for each; GiB that are reserved after so many steps."
    return "\n".join([*lines, "", about])
