"""The accuracy of the planner as a Markdown fragment, which docs/planner.md includes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.planner.accuracy import TARGETS

__all__ = ["markdown"]

NAMES = {
    "vtrain": "vTrain: GPT 0.2B to 1.3B, grid of tp × dp × pp, 2 to 8 A100",
    "mosaic": "MosaicML: MPT 125M to 70B, FSDP, 8 to 512 A100 or H100",
    "mcore": "Megatron core: regression tests, 8 A100, H100 or GB200",
    "sc21": "Megatron-LM 2021: 175B and 530B, PTD-P and ZeRO-3, 384 to 2,240 A100",
    "kort": "Megatron-LM 2022: 22B to 1T, recomputation, 8 to 512 A100",
    "jzv100": "BigScience: GPT-2 52B, ZeRO-3 and offload, 64 V100 (varied by 40 %)",
    "aws": "AWS: Llama 3 8B, torchtitan, bf16 and fp8, 32 H100",
    "mtnlg": "MT-NLG 530B, 2,240 to 3,360 A100",
    "llama3": "Llama 3 405B, 8,192 and 16,384 H100",
    "hfds": "Hugging Face: 7B, FSDP and DeepSpeed, 4 A100",
    "tinyllama": "TinyLlama 1.1B, FSDP, 16 A100",
}

HOW = """Errors are relative to the measurement. "Median" and "p90" are of their sizes, "bias" is the median with its
sign: positive where the planner expects more than was measured. Nothing is calibrated to a run: shapes, device and plan
go in."""

BASELINE = """"Constant MFU" takes one utilisation per device, matrix format and checkpointing mode: held out, the
median of all other families; in sample, the median of the very rows it is judged on, which no planner that has not seen
them can have."""

REFITTED = """"Refitted without it" is the median error with the nine constants that were set on published rows moved,
from where they are and over a coarse grid, to where the other families are met best. The formulas stay as they are, and
they were written with all families in view. "With its host" leaves alone the two of them that say how long the host
takes to launch the kernels of a block: a figure of the CPU and the framework, of which other families say nothing."""

VTRAIN = """**vTrain's rows are no measured steps.** All 1,440 are affine in the number of micro-batches to the last
digit, linear in the number of layers, and more data ranks add the same milliseconds whatever else is set: no step on
real devices is like that. They are sums of some forty timings: of one layer by width, tensor ranks and micro-batch, of
the head and of messages, on one host with Megatron-DeepSpeed. Some of these rise where there is less to compute. Where
a layer has little to compute they show what that host takes to launch it, about 3 ms, which is in no other family: this
one number is what vTrain, left out, is off by, as the two columns show. Small collectives and all else add little."""

READINGS = """**Sources that are silent.** Where a source does not say how a run was set up, it was read with the
measurement in view. These readings matter:"""

HONESTY = """**What this shows.** The formulas come from papers and from the engine; the constants that no paper gives
were set by hand on the families above, over many looks at these very errors. The table is how well those runs are
described, not how well an unseen one is predicted; none of these families was held back. The runs of the next table are
not among the rows, but they were known, and constants were moved after looking at some of them."""


def markdown(record: Mapping[str, Any]) -> str:
    """The fragment, of a record."""
    parts = [_head(record), _targets(record), _exact(record["exact"]), _memory(record["memory"])]
    parts += [_feasibility(record["feasibility"]), _step(record["step"], record["refitted"]), VTRAIN]
    parts += [_readings(record["readings"]), _ranking(record["ranking"])]
    parts += [HONESTY, _anchors(record["anchors"])]
    return "\n\n".join(parts) + "\n"


def _head(record: Mapping[str, Any]) -> str:
    left = "; ".join(f"{reason} ({count})" for reason, count in record["rows"]["unusable"].items())
    used = record["rows"]["used"]
    return f"`{record['command']}`: {used:,} published measurements.\n\n{HOW}\n\nRows not used, and why: {left}."


def _targets(record: Mapping[str, Any]) -> str:
    """What is aimed at of runs on which nothing was set, and how far it is met."""
    refitted, memory = record["refitted"].values(), record["memory"]["all"]
    peaks = [anchor for anchor in record["anchors"] if "above_upper" in anchor]
    above = round(memory["above_upper"] * memory["n"]), sum(anchor["above_upper"] for anchor in peaks)
    names = {
        "step_median": [
            ("step time, families left out in turn: median of their medians", median(x["refitted"] for x in refitted)),
            ("the same, each with its host", median(x["own_host"] for x in refitted)),
        ],
        "memory_median": [
            ("peak memory, median of Megatron core's rows", memory["median"]),
            ("peak memory, median of other published runs", median(abs(anchor["error"]) for anchor in peaks)),
        ],
        "above_upper": [
            (
                f"rows above the upper bound: {above[0]} of {memory['n']}, and {above[1]} of {len(peaks)} others",
                sum(above) / (memory["n"] + len(peaks)),
            )
        ],
    }
    rows = [[name, *map(_percent, (TARGETS[key], found))] for key, lines in names.items() for name, found in lines]
    return _table(["", "aim at most", "found"], rows)


def _exact(checks: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        [check["name"], _number(check["expected"]), _number(check["found"]), check["unit"], _verdict(check["holds"])]
        for check in checks
    ]
    held = sum(check["holds"] for check in checks)
    title = f"### Exact\n\n{held} of {len(checks)} hold. Tolerance 0.5 %, or the digits that are published."
    return f"{title}\n\n{_table(['', 'published', 'planner', 'unit', ''], rows)}"


def _memory(memory: Mapping[str, Any]) -> str:
    lines = {NAMES[name]: line for name, line in memory["families"].items()} | {"**all**": memory["all"]}
    rows = [[name, str(line["n"]), *_errors(line), _percent(line["above_upper"])] for name, line in lines.items()]
    return (
        f"### Memory\n\nAims: median {_percent(TARGETS['memory_median'])}, p90 {_percent(TARGETS['memory_p90'])}, "
        f"above the upper bound {_percent(TARGETS['above_upper'])}. The bound is {memory['upper_over_measured']:.2f} "
        f"times the measurement in the median, and {memory['upper_over_large']:.2f} times on runs of more than 20 GB: "
        f"what lies around the tensors is nearly constant. {memory['small']} of the {memory['all']['n']} runs took "
        "less than 5 GB, nearly all of them one model of 12 layers and 512 channels, and constants for memory were set "
        "on the same family: of large models this says little.\n\n"
        + _table(["peak allocated", "rows", "median", "p90", "bias", "above the upper bound"], rows)
    )


def _feasibility(found: Mapping[str, Any]) -> str:
    rows = [[line["name"], line["expected"], line["found"], _verdict(line["holds"])] for line in found["verdicts"]]
    return (
        f"Of {found['ran']:,} runs that took place, the planner says of {_percent(found['said_not_to_fit'], 1)} that "
        f"they do not fit, and refuses {found['refused_as_impossible']} as impossible.\n\n"
        + _table(["does it fit", "known", "planner", ""], rows)
    )


def _step(step: Mapping[str, Any], refitted: Mapping[str, Mapping[str, float]]) -> str:
    rows = []
    for name, line in step["families"].items():
        rivals = [_percent(line["baseline_held_out"]), _percent(line["baseline_in_sample"])]
        own = [_percent(refitted[name][key]) for key in ("refitted", "own_host")] if name in refitted else ["", ""]
        rows.append([NAMES[name], str(line["n"]), *_errors(line), *own, *rivals])
    rows.append(["**all** (qualities A and B)", str(step["all"]["n"]), *_errors(step["all"]), *[""] * 4])
    head = ["step time", "rows", "median", "p90", "bias", "refitted without it", "with its host"]
    head += ["constant MFU, held out", "in sample"]
    return (
        f"### Step time\n\nAims: median {_percent(TARGETS['step_median'])} and better than constant MFU on every "
        f"family. The median of the families' medians is {_percent(step['median_of_families'])}, without BigScience's, "
        f"whose rows are of quality C. {_beaten(step['families'])} "
        f"{BASELINE} {REFITTED}\n\n" + _table(head, rows)
    )


def _beaten(families: Mapping[str, Mapping[str, Any]]) -> str:
    """Which families constant MFU describes better."""
    lost = {
        label: [NAMES[name] for name, line in families.items() if line["median"] >= line[f"baseline_{key}"]]
        for key, label in {"held_out": "held out", "in_sample": "in sample"}.items()
    }
    held_out, in_sample = "; ".join(lost["held out"]) or "no family", len(lost["in sample"])
    return f"Constant MFU is better, held out, on: {held_out}; in sample, on {in_sample} of {len(families)}."


def _readings(readings: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for line in readings:
        words = [NAMES[line["family"]], line["quantity"], line["read"], line["otherwise"]]
        rows.append([*words, _percent(line["median"]), _percent(line["other_median"])])
    return f"{READINGS}\n\n{_table(['', 'of', 'read as', 'or else', 'median', 'or else'], rows)}"


def _ranking(ranking: Mapping[str, Any]) -> str:
    rows = [
        [
            NAMES[name],
            str(line["sweeps"]),
            _percent(line["within"]),
            _percent(line["median"], 1),
            _percent(line["worst"]),
        ]
        for name, line in ranking.items()
    ]
    return (
        "### Ranking\n\nA sweep is a set of published runs of one model on the same devices at the same sequence "
        "length (of vTrain also the same batch). The planner names the best; its measured throughput is compared with "
        f"the best measured. Aim: no more than {_percent(TARGETS['regret'])} below.\n\n"
        + _table(["", "sweeps", "within the aim", "median loss", "worst loss"], rows)
    )


def _anchors(anchors: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for line in anchors:
        low, high = line["published"]
        published = _number(low) if low == high else f"{_number(low)} to {_number(high)}"
        rows.append(
            [line["name"], line["unit"], published, _number(line["predicted"]), _signed(line["error"]), line["source"]]
        )
    head = ["published elsewhere", "unit", "published", "planner", "error", "source"]
    return f"### Other published runs\n\n{_table(head, rows)}"


def _errors(line: Mapping[str, Any]) -> list[str]:
    return [_percent(line["median"]), _percent(line["p90"]), _signed(line["bias"])]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    rule = ["---", *["--:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, rule, *rows])


def _percent(share: float, digits: int = 0) -> str:
    return f"{100 * share:.{digits}f} %"


def _signed(share: float) -> str:
    return f"{100 * share:+.0f} %"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _verdict(holds: bool) -> str:
    return "holds" if holds else "**fails**"
