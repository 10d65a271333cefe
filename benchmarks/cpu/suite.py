"""Runs a suite of cases and keeps the record; `terrazzo bench` calls it."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks import host, network, update
from benchmarks.cpu import targets
from benchmarks.cpu.compare import Effort, progress, take_turns
from benchmarks.cpu.contenders import installed
from benchmarks.cpu.outcome import Outcome, disagreements
from benchmarks.cpu.report import HOW, conditions, plot, section, tolerance
from benchmarks.environment import processor, versions

PACKAGES = ("torch", "deepspeed", "transformers", "numpy")


@dataclass(frozen=True)
class Run:
    """One case: groups of contenders that take turns, and whose times others are divided by."""

    case: str
    groups: Sequence[Sequence[str]]
    baselines: Sequence[str]
    effort: Effort = field(default_factory=Effort)

    @property
    def name(self) -> str:
        """Of the case, with the number of ranks where it is not two."""
        return self.case if self.effort.ranks == 2 else f"{self.case}-{self.effort.ranks}"


ZERO3 = ("fsdp2", "terrazzo-zero3")
TENSOR = ("fsdp2-tensor", "terrazzo-zero3-tensor")
CONTEXT = ("deepspeed-3-ulysses", "terrazzo-zero3-gather", "terrazzo-zero3-ulysses", "terrazzo-zero3-ring")
EXPERTS = ("fsdp2-experts", "terrazzo-zero3-experts")
STAGES = [
    ["ddp", "deepspeed-0", "terrazzo-zero0"],
    ["zero-redundancy", "deepspeed-1", "terrazzo-zero1"],
    ["zero-redundancy", "deepspeed-2", "terrazzo-zero2"],
    ["fsdp1", "fsdp2", "deepspeed-3", "terrazzo-zero3"],
]
SUITES: dict[str, list[Run]] = {
    "cpu": [
        Run(
            "traffic",
            [*STAGES, ["alone", "fsdp2-keep", "terrazzo-shard_grad_op", "terrazzo-zero3"]],
            ["ddp", "zero-redundancy", "fsdp2"],
        ),
        Run("traffic", [ZERO3], ["fsdp2"], Effort(rounds=4, ranks=4)),
        Run("balanced", [["alone", "ddp", "terrazzo-zero0"], ZERO3], ["ddp", "fsdp2"]),
        Run("compute", STAGES, ["ddp", "zero-redundancy", "fsdp2"], Effort(rounds=7)),
        Run("bf16", [["fsdp2", "deepspeed-3", "terrazzo-zero3"]], ["fsdp2"]),
        Run("accumulate", [["deepspeed-2", "terrazzo-zero2"]], ["deepspeed-2"], Effort(rounds=4)),
        Run("checkpointing", [ZERO3], ["fsdp2"]),
        Run("experts", [ZERO3], ["fsdp2"]),
        Run("lora", [ZERO3], ["fsdp2"]),
        Run("small", [ZERO3], ["fsdp2"], Effort(rounds=9)),
    ],
    "axes": [
        Run("matrices-small", [TENSOR], ["fsdp2-tensor"], Effort(rounds=9, ranks=4)),
        Run("matrices-large", [TENSOR], ["fsdp2-tensor"], Effort(rounds=5, ranks=4)),
        Run("sequences", [CONTEXT], ["deepspeed-3-ulysses"], Effort(rounds=7)),
        Run("sequences-wide", [CONTEXT], ["deepspeed-3-ulysses"], Effort(rounds=7)),
    ],
    "stages": [
        Run(
            "stages",
            [["torch-stages", "deepspeed-0-stages", "terrazzo-zero0-stages", "terrazzo-zero0-zero_bubble"]],
            ["torch-stages"],
            Effort(rounds=9),
        ),
        Run(
            "stages",
            [
                ["fsdp2-stages", "terrazzo-zero3-stages", "terrazzo-zero2-stages", "terrazzo-shard_grad_op-stages"],
                ["deepspeed-1-stages", "terrazzo-zero1-stages"],
            ],
            ["fsdp2-stages"],
            Effort(rounds=7, ranks=4),
        ),
    ],
    "mixture": [
        Run("mixture-small", [EXPERTS], ["fsdp2-experts"], Effort(rounds=15)),
        Run("mixture", [EXPERTS], ["fsdp2-experts"], Effort(rounds=7)),
        Run("mixture", [EXPERTS], ["fsdp2-experts"], Effort(rounds=5, ranks=4)),
    ],
    "tiny": [Run("tiny", [["alone", "ddp", "terrazzo-zero3"]], ["ddp"], Effort(rounds=2))],
}
FURTHER: dict[str, Any] = {"host": host, "update": update, "network": network}
"""What suite `cpu` measures beside its cases: modules with `measure`, `table` and `targets`."""


def cases(suite: str) -> list[str]:
    """Names of its runs."""
    return [run.name for run in SUITES[suite]]


def run_suite(suite: str, chosen: Sequence[str], command: str) -> dict[str, Any]:
    """Everything measured, for JSON. Raises `SystemExit` where contenders have not trained the same.

    Args:
        chosen: names of runs; what a suite measures beside them is left out if this is only a part.
    """
    begun = time.perf_counter()
    runs = []
    wanted = [run for run in SUITES[suite] if run.name in chosen]
    for run in wanted:
        groups = [installed(group) for group in run.groups]
        outcomes = [o for n, group in enumerate(groups) for o in take_turns(run.case, group, run.effort, n)]
        if problems := disagreements(outcomes, tolerance(run.case)):
            raise SystemExit(f"{run.name} is not reported, because not all trained the same:\n" + "\n".join(problems))
        runs.append({**asdict(run), "name": run.name, "outcomes": [asdict(outcome) for outcome in outcomes]})
    further = {}
    for name, module in FURTHER.items() if wanted == SUITES["cpu"] else ():
        progress(f"{name}: measuring")
        further[name] = module.measure()
    return {
        "suite": suite,
        "command": command,
        "date": str(date.today()),
        "minutes": (time.perf_counter() - begun) / 60,
        "processor": processor(),
        "versions": versions(*PACKAGES),
        "threads_per_rank": 1,
        "runs": runs,
        "further": further,
    }


def cases_of(record: dict[str, Any]) -> dict[str, list[Outcome]]:
    """The outcomes of a record by the name of their run."""
    return {run["name"]: [Outcome.of_record(outcome) for outcome in run["outcomes"]] for run in record["runs"]}


def targets_table(record: dict[str, Any]) -> str:
    """Every target beside what the record holds."""
    further = [row for name, found in record["further"].items() for row in FURTHER[name].targets(found)]
    return targets.table(cases_of(record), further, targets.OF_SUITE.get(record["suite"], targets.TARGETS))


def markdown(record: dict[str, Any]) -> str:
    """The whole report."""
    cases = cases_of(record)
    parts = [f"# Suite `{record['suite']}`\n", conditions(record), "", HOW, "", "## Targets\n", targets_table(record)]
    parts += ["\n![Step times](step-times.png)\n", "## Cases\n"]
    for run in record["runs"]:
        parts.append(section(run["case"], Effort(**run["effort"]), cases[run["name"]], run["baselines"]))
    for name, found in record["further"].items():
        parts += [f"## {name}\n", FURTHER[name].table(found), ""]
    return "\n".join(parts)


def write(record: dict[str, Any], folder: Path) -> None:
    """`record.json`, `report.md` and `step-times.png` in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "record.json").write_text(json.dumps(record) + "\n")
    (folder / "report.md").write_text(markdown(record))
    plot(cases_of(record), folder / "step-times.png")
