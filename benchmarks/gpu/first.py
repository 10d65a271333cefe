"""The first half hour on a GPU: everything that could not be tried without one, in order, into one table and one file.

    python -m benchmarks.gpu.first [--only 'train*'] [--out FILE]

A step that fails does not stop those after it. Beside what was measured stands what the planner expects of the device,
which is recognised by its name; `TERRAZZO_GPU=h100` names another. The exit status is 1 if any step failed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from benchmarks.environment import versions
from benchmarks.gpu.expected import expected

__all__ = ["STEPS", "Step", "main", "run_all", "table"]

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "benchmarks" / "out" / "gpu-record.json"
KEPT_LINES = 40
"""Of the output of a step that failed, so many last lines are in the record."""


@dataclass(frozen=True)
class Step:
    """One step of the list.

    Attributes:
        command: arguments of Python; of `{check}` steps a name in `checks.CHECKS`. `{record}` is a file that it writes.
        simulated: other arguments on the simulated device.
        devices: GPUs that it needs.
        variables: of its environment.
        real: further ones, but for the simulated device, of which torch's sanitizer hears nothing.
        limit_s: after so long it has failed.
    """

    name: str
    what: str
    command: tuple[str, ...]
    simulated: tuple[str, ...] = ()
    devices: int = 1
    variables: Mapping[str, str] = field(default_factory=dict)
    real: Mapping[str, str] = field(default_factory=dict)
    limit_s: float = 900.0


CHECK = ("-m", "benchmarks.gpu.checks")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "{devices}")
EXPANDABLE = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
TESTS = ("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider")

STEPS = (
    Step("ranks", "zero0 to zero3, zero3@cpu; one process to a GPU", (*TORCHRUN, *CHECK, "ranks"), devices=2),
    Step("tests", "pytest -m gpu -x", (*TESTS, "-m", "gpu"), (*TESTS, "tests/engine/test_place.py")),
    Step("training", "zero3 beside plain PyTorch; saved, loaded", (*CHECK, "training")),
    Step("collectives", "NCCL on axes of one rank, bf16, int16", (*CHECK, "collectives")),
    Step("offload", "three tiers, three modes, late streams", (*CHECK, "offload")),
    Step("sanitizer", "TORCH_CUDA_SANITIZER=1", (*CHECK, "sanitizer"), real={"TORCH_CUDA_SANITIZER": "1"}),
    Step("clipping", "gradients of 16 bits, as torch's", (*CHECK, "clipping")),
    Step("rate", "a learning rate on the device", (*CHECK, "rate")),
    Step("syncs", "torch.cuda.set_sync_debug_mode", (*CHECK, "syncs")),
    Step(
        "benchmark",
        "python -m benchmarks.gpu",
        ("-m", "benchmarks.gpu", "--out", "{record}"),
        ("-m", "benchmarks.gpu", "--out", "{record}", "--tiny", "--rounds", "1", "--only", "alone-eager"),
        limit_s=3600.0,
    ),
    Step("memory", "reserved and allocated", (*CHECK, "memory"), variables={"PYTORCH_ALLOC_CONF": ""}),
    Step("memory, expandable", "with expandable segments", (*CHECK, "memory"), variables=EXPANDABLE),
    Step("compiled", "units through inductor", (*CHECK, "compiled")),
)
"""In the order in which they tell most: several GPUs first, where there are several."""


def run_all(simulated: bool = False, only: str = "*") -> dict[str, Any]:
    """The record: the device and, for each step, `status` (`pass`, `fail`, `skipped`), `why`, `seconds`, `numbers`."""
    with tempfile.TemporaryDirectory(prefix="terrazzo-gpu-") as folder:
        environment = _environment(simulated, folder)
        device, count, found = _device(environment)
        steps = [_run(step, count, simulated, environment, Path(folder)) for step in STEPS if fnmatch(step.name, only)]
    known = os.environ.get("TERRAZZO_GPU") or device
    for step in steps:
        step["expected"] = expected(step["step"], known, step["numbers"])
    about = {"date": str(date.today()), "device": device, "devices": count, "planned_as": known, "properties": found}
    return about | {"simulated": simulated, "versions": versions("torch", "terrazzo", "deepspeed"), "steps": steps}


def _environment(simulated: bool, folder: str) -> dict[str, str]:
    paths = [str(ROOT / "tests/hostcuda/site")] if simulated else []
    paths += [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "HOSTCUDA_FAULTS": folder}


_ASK = """
import json, torch
count = torch.cuda.device_count() if torch.cuda.is_available() else 0
name = torch.cuda.get_device_name(0) if count else None
memory = torch.cuda.get_device_properties(0).total_memory if count else 0
print(json.dumps([name, count, {"memory_bytes": memory, "cuda": torch.version.cuda}]))
"""


def _device(environment: Mapping[str, str]) -> tuple[str, int, dict[str, Any]]:
    """Asked in a process of its own, so that this one takes none of the device's memory."""
    done = subprocess.run([sys.executable, "-c", _ASK], env=environment, capture_output=True, text=True, check=True)
    name, count, found = json.loads(done.stdout.splitlines()[-1])
    return name or "no CUDA device", count, found


def _run(step: Step, devices: int, simulated: bool, environment: dict[str, str], folder: Path) -> dict[str, Any]:
    outcome: dict[str, Any] = {"step": step.name, "what": step.what, "numbers": {}, "seconds": 0.0}
    if devices < step.devices:
        why = "torch sees no CUDA device" if not devices else f"needs {step.devices} GPUs, and there is {devices}"
        return outcome | {"status": "skipped", "why": why}
    record = folder / f"{step.name}.json"
    arguments = step.simulated if simulated and step.simulated else step.command
    filled = [part.replace("{record}", str(record)).replace("{devices}", str(devices)) for part in arguments]
    print(f"{step.name}: {step.what} ...", file=sys.stderr, flush=True)
    variables = environment | dict(step.variables) | ({} if simulated else dict(step.real))
    begin = time.perf_counter()
    try:
        done = subprocess.run(
            [sys.executable, *filled], env=variables, cwd=ROOT, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=step.limit_s,
        )  # fmt: skip
        code, output = done.returncode, done.stdout
    except subprocess.TimeoutExpired as late:
        code, output = None, (late.stdout or b"").decode(errors="replace")
    outcome["seconds"] = time.perf_counter() - begin
    if code != 0:
        why = f"no end within {step.limit_s:.0f} s" if code is None else _reason(output, code)
        return outcome | {"status": "fail", "why": why, "output": output.splitlines()[-KEPT_LINES:]}
    numbers = _numbers(output, record)
    details = {"record": json.loads(record.read_text())} if record.exists() else {}
    why = "; ".join(_failures(details["record"])) if details else ""
    if not numbers and "pytest" in filled:
        why = "no test was run"
    if why:
        return outcome | {"status": "fail", "why": why, "output": output.splitlines()[-KEPT_LINES:], **details}
    return outcome | {"status": "pass", "why": "", "numbers": numbers, **details}


def _failures(record: Mapping[str, Any]) -> Iterator[str]:
    """Of Terrazzo in the benchmark, but for cases that the device has no room for."""
    for name, case in record["cases"].items():
        why = case["contenders"]["terrazzo"].get("failed", "NoRoom")
        if not why.startswith("NoRoom"):
            yield f"{name}: {why}"


def _reason(output: str, code: int) -> str:
    """The last line that names an error, else the last one."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [
        line for line in lines if re.match(r"(\[rank\d+\]: )?(E +)?[\w.]*(Error|Exception|Misuse|BadInput)\b", line)
    ]
    return (errors or lines or [f"exit status {code}, and no output"])[-1]


def _numbers(output: str, record: Path) -> dict[str, float]:
    """What a step tells: of a check its numbers, of tests how many passed, of the benchmark its own contender's."""
    if record.exists():
        return dict(_of_benchmark(json.loads(record.read_text())))
    for line in reversed(output.splitlines()):
        if line.startswith("RESULT "):
            return dict(json.loads(line.removeprefix("RESULT ")))
        if passed := re.match(r"=* ?(\d+) passed", line):
            return {"tests passed": float(passed[1])}
    return {}


def _of_benchmark(record: Mapping[str, Any]) -> Iterable[tuple[str, float]]:
    for name, case in record["cases"].items():
        found = case["contenders"]["terrazzo"]
        if found["turns"]:
            yield f"{name}: step ms", 1e3 * found["step_s"]
            yield f"{name}: peak GiB", found["peak_bytes"] / 2**30
    yield from (
        (f"missed: {target['what']}", target["value"]) for target in record["targets"] if target["met"] is False
    )


def table(record: Mapping[str, Any]) -> str:
    """Markdown of a record."""
    simulated = ", simulated: speeds and memory say nothing" if record["simulated"] else ""
    lines = [f"{record['devices']} × {record['device']}{simulated}; planned as {record['planned_as']}", ""]
    lines += ["| step | | s | number | measured | planner |", "|---|---|--:|---|--:|--:|"]
    for step in record["steps"]:
        status = step["status"] + (f": {step['why']}" if step["why"] else "")
        rows: Sequence[Any] = list(step["numbers"].items()) or [("", None)]
        for index, (name, value) in enumerate(rows):
            head = [f"{step['step']}: {step['what']}", status, f"{step['seconds']:.0f}"] if index == 0 else ["", "", ""]
            cells = [*head, name, _shown(value), _shown(step["expected"].get(name))]
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def main() -> None:
    """Run the list, print the table, write the record."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.first", description=__doc__)
    parser.add_argument("--simulated", action="store_true", help="on hostcuda's device, to try the list itself")
    parser.add_argument("--only", default="*", help="glob of steps")
    parser.add_argument("--out", type=Path, default=RECORD, help="the record to send back, as JSON")
    options = parser.parse_args()
    record = run_all(options.simulated, options.only)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    print(table(record))
    print(f"\nThe record is in {options.out}.")
    sys.exit(any(step["status"] == "fail" for step in record["steps"]))


if __name__ == "__main__":
    main()
