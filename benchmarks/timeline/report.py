"""From outcomes to targets, tables and a picture."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.timeline import above
from benchmarks.timeline.machines import LAYOUTS
from benchmarks.timeline.model import DEPTH, SCALE, WIDTH
from benchmarks.timeline.outcome import PEERS, Outcome, ratios

__all__ = ["above_table", "conditions", "markdown", "outcomes_of", "plot", "targets", "targets_table"]

NAMES = {
    "replicate": "replicate",
    "fsdp2": "FSDP2",
    "fsdp2-keep": "FSDP2, kept after forward",
    "fsdp2-offload": "FSDP2, CPU offload",
}

HOW = f"""Nothing here was run on a GPU. A model of {DEPTH} blocks with 10 × {WIDTH}² parameters each, a transformer's
without attention's own arithmetic, trains in bf16 with fp32 gradients and masters on [a CUDA device made of host
memory](../../../docs/concepts/cuda-without-a-gpu.md): torch, FSDP2 and Terrazzo run unmodified, and virtual time is
added up. Products of matrices take their FLOPs, other kernels the bytes that they read and write, copies their bytes
over PCIe, collectives what a ring takes. Streams run side by side and wait for each other as the programs ask. Width
and tokens are 1 / {SCALE} of those in the tables, the device's FLOP/s by the third power of that and its B/s by the
second, so that times and peaks are those of the full size. Figures of GPUs and links are the planner's, from its
catalogue and with the shares that it says are reached. Not simulated: launches and Python, kernels slowed by
collectives and by kernels of other streams beside them, ranks that are late, the host's AdamW, more than four ranks.

"Exposed" is the time in which the stream that computes has nothing to do. The floor is, for forward and for backward,
the longer of what a contender computes and of what its busiest link carries, with the first gather before and the last
gradient's way after, and the optimizer's step. Who computes or sends more has a higher floor. It may be too high by a
percent, since casts and divisions of other units beside those two count twice. A plan's peer is what torch has in its
place; on two axes FSDP2 is what torch calls HSDP. `replicate` is torch's data parallelism by what FSDP2 is made of; DDP
itself does not run on the device. "Moved / computed" is the busiest link's time over the computing stream's."""


def label(contender: str) -> str:
    """As a table shows it."""
    return NAMES.get(contender, f"`{contender}`")


def outcomes_of(record: dict[str, Any]) -> list[Outcome]:
    """Of a record."""
    return [Outcome(**outcome) for outcome in record["outcomes"]]


def conditions(record: dict[str, Any]) -> str:
    """With what a record was made."""
    made = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    return f"{record['date']}; {made}. `{record['command']}`, {record['minutes']:.0f} minutes."


def targets(outcomes: Sequence[Outcome]) -> Iterator[tuple[str, float, float, str]]:
    """(name, limit, the worst of all cells, where) of each target for which there are cells."""
    to_peer = ratios(outcomes)
    for plan, peer in PEERS.items():
        found = {cell: value for (name, cell), value in to_peer.items() if name == plan}
        yield from _worst(f"`{plan}` / {NAMES[peer]}", 1.00, found)
    for plan in PEERS:
        found = {o.cell: o.step_s / o.floor_s for o in outcomes if o.contender == plan}
        yield from _worst(f"`{plan}` / its floor", 1.03, found)
    theirs = {o.cell: o.step_s / o.floor_s for o in outcomes if o.contender == "fsdp2" and o.layout == "hybrid"}
    slow = {
        o.cell: o.step_s / o.floor_s
        for o in outcomes
        if o.contender == "hybrid_shard" and theirs.get(o.cell, 0.0) >= 1.05
    }
    yield from _worst("`hybrid_shard` / its floor where FSDP2 is at 1.05 or more", 1.02, slow)
    errors = [abs(o.planned_s / o.step_s - 1) for o in outcomes if o.planned_s is not None]
    if errors:
        yield "the planner's step time, median error", 0.05, median(errors), f"{len(errors)} cells"


def _worst(name: str, limit: float, found: dict[Any, float]) -> Iterator[tuple[str, float, float, str]]:
    if found:
        cell = max(found, key=lambda at: found[at])
        yield name, limit, found[cell], f"{cell.layout}, {cell.gpu}, {cell.tokens} tokens"


def markdown(record: dict[str, Any]) -> str:
    """The whole report."""
    outcomes = outcomes_of(record)
    parts = [
        "# Suite `timeline`\n",
        f"{conditions(record)}\n",
        HOW,
        "\n## Targets\n",
        targets_table(outcomes),
        "\n## Above the floor\n",
        above_table(outcomes),
        "\n![Step times over their floors](step-times.png)\n",
        "## Plans and peers\n",
        _summary(outcomes),
        "\n## The planner\n",
        _planner(outcomes),
    ]
    for layout in dict.fromkeys(outcome.layout for outcome in outcomes):
        parts += [f"\n## {layout}: {LAYOUTS[layout].about}\n", _cells([o for o in outcomes if o.layout == layout])]
    return "\n".join(parts) + "\n"


def targets_table(outcomes: Sequence[Outcome]) -> str:
    """Markdown: target, limit, the worst of all cells, whether it is met, and where that is."""
    rows = [
        [name, f"{limit:.2f}", f"{value:.3f}", "met" if round(value, 3) <= limit else "**missed**", where]
        for name, limit, value, where in targets(outcomes)
    ]
    return _table(["target, in every cell", "limit", "worst", "", "where"], rows)


def above_table(outcomes: Sequence[Outcome]) -> str:
    """Markdown: in each plan's worst cell, what lies between its step and its floor."""
    return (
        "What computation waits for in each plan's worst cell, in percent of the plan's floor, which has a part of it "
        "already; and the peer's step over the same floor.\n\n" + _table(above.HEAD, above.rows(outcomes))
    )


def _summary(outcomes: Sequence[Outcome]) -> str:
    """By layout and contender: the middle and the worst of all cells."""
    to_peer, rows = ratios(outcomes), []
    for layout, contender in dict.fromkeys((o.layout, o.contender) for o in outcomes):
        own = [o for o in outcomes if (o.layout, o.contender) == (layout, contender)]
        peer = [to_peer[contender, o.cell] for o in own if (contender, o.cell) in to_peer]
        shown = [f"{median(peer):.3f}", f"{max(peer):.3f}"] if peer else ["", ""]
        floor = [o.step_s / o.floor_s for o in own]
        peaks = [o.peak_bytes / 1e9 for o in own]
        peak = f"{min(peaks):.1f} to {max(peaks):.1f}"
        rows.append([layout, label(contender), *shown, f"{median(floor):.3f}", f"{max(floor):.3f}", peak])
    return _table(["layout", "", "× peer, median", "worst", "× floor, median", "worst", "peak GB"], rows)


def _planner(outcomes: Sequence[Outcome]) -> str:
    """By layout and plan: by how much its step times are longer than those simulated."""
    rows = []
    for layout, plan in dict.fromkeys((o.layout, o.contender) for o in outcomes if o.planned_s is not None):
        found = [_error(o) for o in outcomes if (o.layout, o.contender) == (layout, plan)]
        size = median(map(abs, found))
        rows.append(
            [layout, label(plan), f"{size:.1%}", f"{median(found):+.1%}", f"{min(found):+.1%} to {max(found):+.1%}"]
        )
    return (
        "Its estimate of the same model, machine and plan, without its terms for launches, for contention and for the "
        "host's AdamW, over the step simulated.\n\n"
        + _table(["layout", "plan", "median size of the error", "median", "range"], rows)
    )


def _error(outcome: Outcome) -> float:
    assert outcome.planned_s is not None
    return outcome.planned_s / outcome.step_s - 1


def _cells(outcomes: Sequence[Outcome]) -> str:
    to_peer = ratios(outcomes)
    rows = []
    for o in sorted(outcomes, key=lambda o: (-o.tokens, list(dict.fromkeys(p.gpu for p in outcomes)).index(o.gpu))):
        peer = to_peer.get((o.contender, o.cell))
        rows.append(
            [
                o.gpu,
                str(o.tokens),
                label(o.contender),
                f"{o.moving_s / o.computing_s:.2f}",
                f"{1e3 * o.step_s:.2f}",
                f"{1e3 * o.exposed_s:.2f}",
                f"{o.peak_bytes / 1e9:.2f}",
                f"{1e3 * o.floor_s:.2f}",
                "" if peer is None else f"{peer:.3f}",
                f"{o.step_s / o.floor_s:.3f}",
                "" if o.planned_s is None else f"{_error(o):+.1%}",
            ]
        )
    head = ["GPU", "tokens", "", "moved / computed", "step ms", "exposed ms", "peak GB", "floor ms"]
    return _table([*head, "× peer", "× floor", "planner"], rows)


WORDS = ("", "target, in every cell", "layout", "GPU", "plan", "where")
"""Heads of columns that hold no numbers."""


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [list(head), ["---" if name in WORDS else "--:" for name in head], *map(list, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def plot(outcomes: Sequence[Outcome], path: Path) -> None:
    """Step over floor against moved over computed, a panel per layout, a line per contender; PNG."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    layouts = list(dict.fromkeys(outcome.layout for outcome in outcomes))
    figure, panels = plt.subplots(-(-len(layouts) // 2), 2, figsize=(10, 7), squeeze=False)
    for panel in panels.flat[len(layouts) :]:
        panel.set_visible(False)
    for panel, layout in zip(panels.flat, layouts, strict=False):
        here = [o for o in outcomes if o.layout == layout]
        for contender in dict.fromkeys(o.contender for o in here):
            points = sorted(
                (o.moving_s / o.computing_s, o.step_s / o.floor_s) for o in here if o.contender == contender
            )
            style = {"color": "#8a8f98", "ls": "--"} if contender in NAMES else {}
            marker = "o^sv"[list(NAMES).index(contender)] if contender in NAMES else "."
            panel.plot(
                *zip(*points, strict=True), marker=marker, lw=1, ms=4, label=label(contender).strip("`"), **style
            )
        panel.axhline(1.0, color="#23262b", lw=0.8)
        panel.set_title(layout, fontsize=10, loc="left")
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        panel.set_xlabel("moved / computed", fontsize=8)
        panel.set_ylabel("step / floor", fontsize=8)
        panel.tick_params(labelsize=8)
        panel.legend(fontsize=7, frameon=False)
        for side in ("top", "right"):
            panel.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
