"""The engine's random programs (`tests/engine/programs`) on the device: plain torch in one process is their oracle."""

from __future__ import annotations

import tempfile

import torch

from hostcuda.device import FAULTS, Watching, report
from tests.engine.programs.compare import Verdict, judge
from tests.engine.programs.features import KNOWN_FAILING, without
from tests.engine.programs.grammar import Program, draw
from tests.engine.programs.model import Net
from tests.engine.programs.oracle import Result
from tests.engine.programs.run import as_raised, in_process
from tests.helpers.processes import RankFailed
from tests.hostcuda.ranks import Ranks

__all__ = ["verdict_on"]


def verdict_on(seed: int, ranks: Ranks) -> tuple[Program, Verdict, list[str]]:
    """The program of a seed; what it comes to; what the device has found in it."""
    program, found = without(draw(seed, ranks.world_size), KNOWN_FAILING), []

    def run(program: Program, base: Net) -> list[Result]:
        with tempfile.TemporaryDirectory(prefix="programs-") as folder:
            try:
                answers = ranks.run(_on_device, program, folder)
            except RankFailed as failed:
                raise as_raised(str(failed)) from failed
        found.extend(fault for _, faults in answers for fault in faults)
        return [result for result, _ in answers]

    return program, judge(program, run), found


def _on_device(program: Program, folder: str) -> tuple[Result, list[str]]:
    report.take()
    with Watching(), torch.device("cuda"):
        result = in_process(program, folder)
    result.outputs = {key: value.cpu() for key, value in result.outputs.items()}
    result.weights = {key: value.cpu() for key, value in result.weights.items()}
    return result, [str(finding) for finding in report.take() if finding.kind in FAULTS]
