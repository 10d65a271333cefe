"""Runs programs by seed, prints a line for each and a table of verdicts by feature, and shrinks what fails.

    python -m tests.engine.programs --seeds 0:1000
    python -m tests.engine.programs --only 17

Programs run in child processes, many in each: a child that dies takes one program with it, which is then named. Exits 1
when a program is neither right nor refused by name.
"""

from __future__ import annotations

import argparse
import json
import queue
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator
from typing import Any

from tests.engine.programs.compare import STUCK, Verdict, judge
from tests.engine.programs.features import FEATURES, features_of, without
from tests.engine.programs.grammar import Program, draw
from tests.engine.programs.run import on_processes, on_threads
from tests.engine.programs.shrink import shrink
from tests.helpers.processes import Pool

PER_CHILD = 100
SILENCE_S = 300.0
"""A child that says nothing for so long is ended."""
DIED = "DIED"


def main() -> int:
    options = _options()
    if options.child:
        return _child(options)
    if options.only is not None:
        return _one(options)
    start, _, stop = options.seeds.partition(":")
    reports = []
    began = time.monotonic()
    for report in _reports(options, int(start), int(stop)):
        reports.append(report)
        print(_line(report), flush=True)
    _table(reports)
    bad = [report for report in reports if not report["good"]]
    print(f"{len(reports)} programs in {time.monotonic() - began:.0f} s, {len(bad)} of them neither right nor refused")
    return 1 if bad else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.engine.programs", description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--seeds", default="0:100", help="first:end")
    parser.add_argument("--only", type=int, help="one seed, shrunk if it fails")
    parser.add_argument("--world", type=int, help="this many ranks in every program")
    parser.add_argument("--processes", action="store_true", help="ranks are gloo processes, not threads")
    parser.add_argument("--without", default="", help="features to leave out, with commas between")
    parser.add_argument("--no-shrink", action="store_true", help="print failing programs as they were drawn")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def _program(options: argparse.Namespace, seed: int) -> Program:
    left_out = [name.strip() for name in options.without.split(",") if name.strip()]
    if unknown := set(left_out) - set(FEATURES):
        raise SystemExit(f"--without: no such features: {sorted(unknown)}. Known: {', '.join(FEATURES)}")
    return without(draw(seed, options.world), left_out)


# -- in a child --------------------------------------------------------------------------------------------------


def _child(options: argparse.Namespace) -> int:
    """Print a report for each seed as JSON; end after a program whose ranks are stuck, since their threads live on."""
    start, _, stop = options.seeds.partition(":")
    with _judge(options) as judged:
        for seed in range(int(start), int(stop)):
            program = _program(options, seed)
            began = time.monotonic()
            verdict = judged(program)
            report = {"seed": seed, "kind": verdict.kind, "detail": verdict.detail, "good": verdict.good}
            report |= {"label": verdict.label, "features": features_of(program), "program": repr(program)}
            report |= {"seconds": round(time.monotonic() - began, 2)}
            if not verdict.good and verdict.kind != STUCK and not options.no_shrink:
                smaller, found = shrink(program, judged)
                report |= {"smaller": repr(smaller), "found": found.detail}
            print(json.dumps(report), flush=True)
            if verdict.kind == STUCK:
                break
    return 0


class _judge:
    """A judge on threads, or on processes that live as long as it is entered."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.processes = options.processes
        self.pools: dict[int, Pool] = {}

    def __enter__(self) -> Callable[[Program], Verdict]:
        warnings.simplefilter("ignore")
        return lambda program: judge(program, self._run)

    def __exit__(self, *exception: object) -> None:
        for pool in self.pools.values():
            pool.close()

    def _run(self, program: Program, base: Any) -> Any:
        if not self.processes:
            return on_threads(program, base)
        return on_processes(program, self.pools.setdefault(program.world, Pool(program.world)))


# -- over all children -------------------------------------------------------------------------------------------


def _reports(options: argparse.Namespace, start: int, stop: int) -> Iterator[dict[str, Any]]:
    seed = start
    while seed < stop:
        end, first = min(stop, seed + PER_CHILD), seed
        command = [sys.executable, "-m", "tests.engine.programs", *_passed_on(options), "--child"]
        child = subprocess.Popen([*command, "--seeds", f"{seed}:{end}"], stdout=subprocess.PIPE, text=True)
        for report in _said(child):
            seed = report["seed"] + 1
            yield report
        code = child.wait()
        if seed < end and (code != 0 or seed == first):
            program = _program(options, seed)
            detail = f"its process ended with exit code {code}"
            yield {"seed": seed, "kind": DIED, "detail": detail, "good": False, "label": f"{DIED} {code}"} | {
                "features": features_of(program), "program": repr(program), "seconds": 0.0,
            }  # fmt: skip
            seed += 1


def _said(child: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    """The child's reports as they come; it is ended when none comes for long."""
    lines: queue.Queue[str | None] = queue.Queue()
    assert child.stdout is not None
    stream = child.stdout

    def read() -> None:
        for line in stream:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    while True:
        try:
            line = lines.get(timeout=SILENCE_S)
        except queue.Empty:
            child.kill()
            return
        if line is None:
            return
        if line.startswith("{"):
            yield json.loads(line)


def _passed_on(options: argparse.Namespace) -> list[str]:
    given = ["--world", str(options.world)] if options.world else []
    given += ["--processes"] if options.processes else []
    given += ["--no-shrink"] if options.no_shrink else []
    return [*given, "--without", options.without]


def _line(report: dict[str, Any]) -> str:
    text = f"{report['seed']:>6}  {report['kind']:<22} {report['seconds']:>5.2f} s  {report['detail'][:140]!r}"
    if not report["good"]:
        text += f"\n        {report.get('smaller', report['program'])}"
        text += f"\n        {report['found'][:300]!r}" if "found" in report else ""
    return text


def _table(reports: Collection[dict[str, Any]]) -> None:
    kinds = sorted({report["kind"] for report in reports})
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for report in reports:
        for name in ["(all)", *report["features"]]:
            counts[name][report["kind"]] += 1
    print(f"\n{'feature':<32}" + "".join(f"{kind[:18]:>20}" for kind in kinds))
    for name in ["(all)", *FEATURES]:
        print(f"{name:<32}" + "".join(f"{counts[name][kind]:>20}" for kind in kinds))
    for label, number in Counter(report["label"] for report in reports if not report["good"]).most_common():
        seeds = [report["seed"] for report in reports if report["label"] == label][:8]
        print(f"{number:>5} x {label[:100]}: seeds {seeds}")


def _one(options: argparse.Namespace) -> int:
    with _judge(options) as judged:
        program = _program(options, options.only)
        verdict = judged(program)
        print(f"{program}\n{', '.join(features_of(program))}\n{verdict.kind}: {verdict.detail}")
        if not verdict.good and not options.no_shrink:
            program, verdict = shrink(program, judged, budget_s=120.0)
            print(f"\nshrunk to\n{program}\n{verdict.kind}: {verdict.detail}", flush=True)
    return 0 if verdict.good else 1


if __name__ == "__main__":
    sys.exit(main())
