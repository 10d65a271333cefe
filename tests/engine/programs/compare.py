"""The verdict on a program: it agrees with one process, is refused by name, or is wrong."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from terrazzo import TerrazzoError
from tests.engine.programs.features import refusable
from tests.engine.programs.grammar import Program
from tests.engine.programs.model import Net, build
from tests.engine.programs.oracle import Oracle, Result
from tests.engine.programs.run import on_threads
from tests.helpers.threads import RanksStuck

AGREES, REFUSED, FAILS = "agrees", "refused", "agrees to fail"
WRONG, NEEDLESS, UNNAMED, RAISED, STUCK = "WRONG", "REFUSED NEEDLESSLY", "REFUSED WITHOUT A NAME", "RAISED", "STUCK"
GOOD = (AGREES, REFUSED, FAILS)

TOLERANCE = {"fp32": 2e-5, "bf16": 2e-2}
_NAME = re.compile(r"\b(tree|embed|head)\b|\(root\)|root unit")
"""What every parameter's and unit's name begins with."""


@dataclass(frozen=True)
class Verdict:
    """`kind` is one of those above; `detail` says what was expected and what came."""

    kind: str
    detail: str = ""

    @property
    def label(self) -> str:
        """Of its class of failure: without numbers and names."""
        start = self.detail.partition(": " if self.kind == RAISED else " ")[0]
        return f"{self.kind} {start}"

    @property
    def good(self) -> bool:
        return self.kind in GOOD


Run = Callable[[Program, Net], list[Result]]


def judge(program: Program, run: Run = on_threads) -> Verdict:
    """Run a program on both sides."""
    base = build(program)
    try:
        wanted = Oracle(program, base).run()
    except RuntimeError as error:
        return _both_fail(program, base, run, f"{type(error).__name__}: {error}")
    try:
        found = run(program, base)
    except TerrazzoError as error:
        return _refused(program, error)
    except RanksStuck as error:
        return Verdict(STUCK, str(error))
    except Exception as error:
        return Verdict(RAISED, _told(error))
    problem = next(differences(program, found, wanted), None)
    return Verdict(AGREES) if problem is None else Verdict(WRONG, problem)


def _both_fail(program: Program, base: Net, run: Run, reason: str) -> Verdict:
    try:
        run(program, base)
    except RanksStuck as error:
        return Verdict(STUCK, f"plain torch raises {reason}; {error}")
    except Exception:
        return Verdict(FAILS, reason)
    return Verdict(WRONG, f"plain torch raises {reason}; nothing was raised")


def _refused(program: Program, error: TerrazzoError) -> Verdict:
    if not refusable(program):
        return Verdict(NEEDLESS, _told(error))
    return Verdict(REFUSED if _NAME.search(str(error)) else UNNAMED, f"{type(error).__name__}: {error}")


def _told(error: BaseException) -> str:
    """The error and where in the engine it was raised."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/terrazzo/" in frame.filename]
    place = f" at {frames[-1].filename.rpartition('/terrazzo/')[2]}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}{place}: {error}"


def differences(program: Program, ranks: list[Result], wanted: Result) -> Iterable[str]:
    """What differs, in the order in which it happened."""
    tolerance = TOLERANCE[program.precision]
    for rank, found in enumerate(ranks):
        for key, loss in found.losses.items():
            if not _close(torch.tensor(loss), torch.tensor(wanted.losses[key]), tolerance):
                yield f"loss of rank {rank} in step {key[1]}, micro-batch {key[2]}: {loss}, not {wanted.losses[key]}"
        for key, output in found.outputs.items():
            if not _close(output, wanted.outputs[key], tolerance):
                yield f"evaluation on rank {rank} before step {key[1]}: {output}, not {wanted.outputs[key]}"
        for step, norm in found.norms.items():
            if not _close(torch.tensor(norm), torch.tensor(wanted.norms[step]), tolerance):
                yield f"norm on rank {rank} in step {step}: {norm}, not {wanted.norms[step]}"
        for name, weight in wanted.weights.items():
            if not _close(found.weights[name], weight, tolerance):
                worst = (found.weights[name].float() - weight.float()).abs().max().item()
                yield f"weight {name} on rank {rank} differs by up to {worst:.2e}"


def _close(found: Tensor, wanted: Tensor, tolerance: float) -> bool:
    """Within `tolerance` of the largest value; and there is something to compare."""
    scale = max(1.0, float(wanted.float().abs().max())) if tolerance > 1e-3 else float(wanted.float().abs().max())
    return torch.allclose(found.float(), wanted.float(), rtol=0, atol=tolerance * scale + 1e-7, equal_nan=True)
