"""From outcomes to tables and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.cpu.cases import CASES
from benchmarks.cpu.compare import Effort
from benchmarks.cpu.outcome import LOSS_TOLERANCE, Outcome, of_contender, ratio

NAMES = {
    "alone": "no communication",
    "ddp": "DDP",
    "zero-redundancy": "ZeroRedundancyOptimizer",
    "fsdp1": "FSDP1",
    "fsdp2": "FSDP2",
    "fsdp2-keep": "FSDP2, kept after forward",
    "fsdp2-tensor": "FSDP2 with DTensor tensor parallelism",
    "torch-stages": "torch's 1F1B",
    "fsdp2-stages": "FSDP2 in torch's 1F1B",
    **{
        f"terrazzo-{plan}-stages": f"Terrazzo `{plan}`, pp"
        for plan in ("zero0", "zero1", "zero2", "zero3", "shard_grad_op")
    },
    "deepspeed-0-stages": "DeepSpeed's pipeline",
    "deepspeed-1-stages": "DeepSpeed's pipeline, stage 1",
    "terrazzo-zero0-zero_bubble": "Terrazzo `zero0`, pp, zero_bubble",
    "deepspeed-3-ulysses": "DeepSpeed, stage 3, Ulysses",
    "fsdp2-experts": "transformers' FSDP2 with ep",
    "terrazzo-zero3-experts": "Terrazzo `zero3`, ep",
    "terrazzo-zero3-tensor": "Terrazzo `zero3`, tp",
    **{f"terrazzo-zero3-{mode}": f"Terrazzo `zero3`, cp {mode}" for mode in ("gather", "ulysses", "ring")},
}

HOW = """Every contender has processes of its own. Those of a group are alive at once and take turns in random order;
groups follow each other. A step lasts from a barrier to the end of the slowest rank's update. Times are medians,
spreads are of the turns, ratios are medians of the ratios within each turn of a group. "Overall" is the resident
memory of one rank at its peak, above the same process before it built its model: building, training, and what malloc
keeps of freed memory. "Peak" is that of later steps in which malloc is told to give large blocks back at once, so it is
what is in use; Terrazzo's own setting of malloc, with which it is timed, does not hold in them. "Sent" is what one rank
hands to others in a step: for Terrazzo its own count, whatever way the bytes take, for the others what went through the
loopback interface, acknowledgements and barriers included. "Start" is importing the library in a fresh interpreter,
without what all contenders import, and then from the plain model to the end of the first step. Losses of all contenders
agree within 1e-5 in fp32 and 2e-2 in bf16; a case in which they do not is not reported. `host` and `update` compare
no losses."""


def label(contender: str) -> str:
    """As a table shows it."""
    if contender in NAMES:
        return NAMES[contender]
    if contender.startswith("terrazzo-"):
        return f"Terrazzo `{contender.removeprefix('terrazzo-')}`"
    if contender.startswith("deepspeed-"):
        return f"DeepSpeed, stage {contender.removeprefix('deepspeed-')}"
    raise KeyError(contender)


def table(outcomes: Sequence[Outcome], baselines: Sequence[str]) -> str:
    """Markdown, one row per contender."""
    bases = [base for base in baselines if of_contender(base, outcomes)]
    head = ["", *[f"× {label(base)}" for base in bases], "step ms", "min to max", "CPU ms", "peak MB", "overall MB"]
    rows = [[*head, "sent MB", "start s"], ["---", *["--:"] * (len(head) + 1)]]
    for name in dict.fromkeys(outcome.contender for outcome in outcomes):
        own = of_contender(name, outcomes)
        times_ms = [1e3 * seconds for outcome in own for seconds in outcome.round_s()]
        ratios = [_cell(ratio(name, base, outcomes)) for base in bases]
        spread = f"{min(times_ms):.0f} to {max(times_ms):.0f}"
        cpu_ms = 1e3 * median(outcome.cpu_s() for outcome in own)
        peaks = [median(o.training_peak_bytes for o in own), median(o.overall_peak_bytes for o in own)]
        sent, start = median(o.sent_bytes for o in own), median(o.startup_s for o in own)
        times = [f"{median(times_ms):.0f}", spread, f"{cpu_ms:.0f}"]
        memory = [f"{peak / 1e6:.0f}" for peak in peaks]
        rows.append([label(name), *ratios, *times, *memory, f"{sent / 1e6:.0f}", f"{start:.2f}"])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def section(case: str, effort: Effort, outcomes: Sequence[Outcome], baselines: Sequence[str]) -> str:
    """One case with what a reader needs to judge it."""
    head = f"### {case}, {effort.ranks} ranks\n\n{CASES[case].describe()}. {effort.rounds} turns of each contender."
    return f"{head}\n\n{table(outcomes, baselines)}\n"


def conditions(record: dict[str, Any]) -> str:
    """Where and with what a record was made."""
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    return (
        f"{record['date']}, {record['processor']}, gloo ranks on one machine with one thread each, fused AdamW; "
        f"{versions}. `{record['command']}`, {record['minutes']:.0f} minutes."
    )


def plot(cases: dict[str, list[Outcome]], path: Path) -> None:
    """Step time of every contender, a panel per case; PNG."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    columns = min(3, len(cases))
    rows = -(-len(cases) // columns)
    figure, panels = plt.subplots(rows, columns, figsize=(5 * columns, 3.2 * rows), squeeze=False)
    for panel in panels.flat[len(cases) :]:
        panel.set_visible(False)
    for panel, (case, outcomes) in zip(panels.flat, cases.items(), strict=False):
        names = list(dict.fromkeys(outcome.contender for outcome in outcomes))
        times = [[1e3 * s for o in of_contender(name, outcomes) for s in o.round_s()] for name in names]
        colours = ["#c2562d" if name.startswith("terrazzo") else "#8a8f98" for name in names]
        medians = [median(values) for values in times]
        spread = [[m - min(v) for m, v in zip(medians, times, strict=True)]]
        spread.append([max(v) - m for m, v in zip(medians, times, strict=True)])
        labels = [label(name).replace("`", "") for name in names]
        panel.barh(labels, medians, xerr=spread, color=colours, error_kw={"lw": 0.8, "ecolor": "#333"})
        panel.invert_yaxis()
        panel.set_title(case, fontsize=10, loc="left")
        panel.set_xlabel("ms per step", fontsize=8)
        panel.tick_params(labelsize=8)
        for side in ("top", "right"):
            panel.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def tolerance(case: str) -> float:
    """By how much losses of a case may differ, relative to each other."""
    return LOSS_TOLERANCE[CASES[case].precision]


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
