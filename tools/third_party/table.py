"""What the tool says: how each script ended, as rows of a table in Markdown, and how many ended how."""

from __future__ import annotations

import datetime
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata

from tools.third_party.rank import Ended
from tools.third_party.script import Script

__all__ = ["COLUMNS", "Outcome", "Verdict", "counts", "filled", "heading", "row", "verdict"]

TOLERANCE = 1e-5
"""The largest difference of two losses, as a part of the larger or of one."""

COLUMNS = "| script | original | on Terrazzo | |\n|---|---|---|---|"
LIBRARIES = ("torch", "transformers", "trl", "accelerate", "lightning")
MARKS = r"(<!-- table: make third-party [^\n]* -->\n).*?(<!-- end of table -->)"


class Outcome(StrEnum):
    """How a script ended."""

    SAME = "equal to the bit"
    CLOSE = "equal within rounding"
    REFUSED = "refused"
    ALONE = "not compared"
    FAILED = "FAILED"


@dataclass(frozen=True)
class Verdict:
    """How a script ended, and what is to be said of it."""

    outcome: Outcome
    text: str = ""

    def __str__(self) -> str:
        return f"{self.outcome}: {self.text}" if self.text else str(self.outcome)


def verdict(script: Script, theirs: Sequence[Ended], ours: Sequence[Ended]) -> Verdict:
    """Whether it is as expected, by how each rank of the original and of Terrazzo's copy has ended."""
    if script.refused is not None:
        return _refusal(script.refused, ours)
    for who, ranks in (("original", theirs), ("Terrazzo", ours)):
        for rank, each in enumerate(ranks):
            if each.error is not None:
                return Verdict(Outcome.FAILED, f"{who}, rank {rank}: {_short(each.error)}")
    if script.alone:
        return Verdict(Outcome.ALONE, "the original cannot run here")
    return _compared([each.losses for each in theirs], [each.losses for each in ours])


def _refusal(pattern: str, ours: Sequence[Ended]) -> Verdict:
    for rank, each in enumerate(ours):
        if each.error is None or not re.search(pattern, each.error):
            return Verdict(Outcome.FAILED, f"not refused on rank {rank}: {_short(each.error or 'it ran')}")
    return Verdict(Outcome.REFUSED, _short(ours[0].error or ""))


def _compared(theirs: Sequence[Sequence[float]], ours: Sequence[Sequence[float]]) -> Verdict:
    numbers = [len(losses) for losses in (*theirs, *ours)]
    if len(set(numbers)) > 1 or not numbers[0]:
        return Verdict(Outcome.FAILED, f"different numbers of losses: {numbers}")
    pairs = [pair for losses in zip(theirs, ours, strict=True) for pair in zip(*losses, strict=True)]
    if not all(math.isfinite(loss) for pair in pairs for loss in pair):
        return Verdict(Outcome.FAILED, "a loss is not a number")
    if all(a.hex() == b.hex() for a, b in pairs):
        return Verdict(Outcome.SAME)
    apart = max(abs(a - b) / max(1.0, abs(a), abs(b)) for a, b in pairs)
    outcome = Outcome.CLOSE if apart <= TOLERANCE else Outcome.FAILED
    return Verdict(outcome, f"at most {apart:.1e} apart")


def _short(text: str, limit: int = 150) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else f"{line[:limit]} ..."


def row(name: str, theirs: Sequence[Ended], ours: Sequence[Ended], found: Verdict) -> str:
    """A line below `COLUMNS`."""
    cells = [f"`{name}`", _series(theirs), _series(ours), str(found).replace("|", "\\|")]
    return f"| {' | '.join(cells)} |"


def _series(ranks: Sequence[Ended]) -> str:
    """First and last loss of the first rank, and how many."""
    losses = ranks[0].losses if ranks else []
    return f"{losses[0]:.5f} ... {losses[-1]:.5f} ({len(losses)})" if losses else "-"


def heading(table: Iterable[Script]) -> str:
    """When it is, with which libraries, and of which commits the scripts are."""
    libraries = ", ".join(f"{name} {metadata.version(name)}" for name in LIBRARIES)
    commits = "\n".join(
        f"| `{repository}` | `{commit}` |" for repository, commit in sorted({(s.repository, s.commit) for s in table})
    )
    measured = f"Measured on {datetime.datetime.now(datetime.UTC).date()} with {libraries}."
    return f"{measured}\n\n| repository | commit |\n|---|---|\n{commits}"


def counts(outcomes: Sequence[Outcome]) -> str:
    """How many scripts ended how, as a line."""
    found = Counter(outcomes)
    return f"{len(outcomes)} scripts: {', '.join(f'{found[each]} {each.lower()}' for each in Outcome)}."


def filled(page: str, printed: str) -> str:
    """`page` with `printed` between its marks.

    Raises:
        ValueError: It has no marks.
    """
    new, times = re.subn(MARKS, lambda match: f"{match[1]}\n{printed}\n\n{match[2]}", page, flags=re.DOTALL)
    if times != 1:
        raise ValueError(
            "the page has no '<!-- table: make third-party ... -->' with '<!-- end of table -->' below it."
        )
    return new
