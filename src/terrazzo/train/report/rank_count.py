"""Whether a run has too many ranks or too few: what half and twice as many would do, as far as is known."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from terrazzo.config import Config, load_config
from terrazzo.errors import BadInput
from terrazzo.messages import counted
from terrazzo.planner import Estimate, Setup, estimate
from terrazzo.planner.timing.calibration import find_calibration
from terrazzo.telemetry import Table, of_newest_start
from terrazzo.train.planning.as_setup import setup_of

__all__ = ["RankCount", "sizing_of"]

TOO_MANY = 0.8
"""A run has too many ranks if half of them would keep this share of the tokens per second."""

TOO_FEW = 1.8
"""It has too few if twice as many would bring this many times the tokens per second."""


class RankCount(NamedTuple):
    """A sentence, and a table with a row for each number of ranks, if there are any."""

    sentence: str
    table: Table | None


class _Size(NamedTuple):
    ranks: int
    tokens_per_s: float
    band: float
    fits: bool | None


def sizing_of(path: Path, lines: Sequence[Mapping[str, Any]], ranks: int) -> RankCount | None:
    """The planner's tokens per second at half and twice the ranks, scaled to what was measured at `ranks`.

    Errors that the planner makes at all three cancel out; the band of the remaining error is given with each.

    Args:
        path: of the run's configuration, whose global batch is kept.
        lines: of the run's `metrics.jsonl`; those since the ranks were last started count.
        ranks: of the run.

    Returns:
        None before the first log step.
    """
    rows = [line for line in of_newest_start(lines, "train") if line.get("tokens_per_s")]
    if not rows:
        return None
    measured = _tokens_per_s(rows)
    try:
        setup = setup_of(load_config(path), ranks)
        record = find_calibration(setup).record
        here = estimate(setup, record)
    except Exception as error:  # anything: a stranger's model, or a configuration of another version
        return RankCount(f"Half or twice the ranks are not judged: {error}", None)
    if here.time is None:
        return RankCount(
            "Half or twice the ranks are not judged: the planner knows no rates of this machine before"
            f" `terrazzo plan {path} --calibrate` has measured them.",
            None,
        )
    sizes, refused = [], []
    for count in [*([ranks // 2] if ranks % 2 == 0 else []), ranks, 2 * ranks]:
        try:
            estimated = here if count == ranks else _estimated(load_config(path), count, record)
        except BadInput as error:
            refused.append(f"{counted(count, 'rank')}: {str(error).splitlines()[0]}")
            continue
        if estimated.time is not None:
            pace = count * estimated.time.tokens_per_s_per_gpu / (ranks * here.time.tokens_per_s_per_gpu)
            sizes.append(
                _Size(count, measured * pace, 0.0 if count == ranks else estimated.time.band, estimated.memory.fits)
            )
    return RankCount(" ".join([_sentence(sizes, ranks), *(f"Not judged: {each}" for each in refused)]), _table(sizes))


def _tokens_per_s(rows: Sequence[Mapping[str, Any]]) -> float:
    """The tokens per second over all rows of the log but the first, which includes what is done only once."""
    if len(rows) == 1:
        return float(rows[0]["tokens_per_s"])
    seconds = [(row["step"] - before["step"]) * row["step_s"] for before, row in pairwise(rows)]
    tokens = sum(each * row["tokens_per_s"] for each, row in zip(seconds, rows[1:], strict=True))
    return float(tokens / sum(seconds))


def _estimated(config: Config, ranks: int, record: Any) -> Estimate:
    setup: Setup = setup_of(config, ranks)
    processors = os.cpu_count() or 1
    if setup.cluster.device.kind == "cpu" and setup.cluster.nodes == 1 and ranks > processors:
        raise BadInput(f"this machine has {counted(processors, 'processor')}, which ranks would have to share.")
    estimated = estimate(setup, record)
    if problems := [one for one in estimated.findings if one.severity == "refuse"]:
        raise BadInput(str(problems[0]))
    return estimated


def _sentence(sizes: Sequence[_Size], ranks: int) -> str:
    by_ranks = {size.ranks: size for size in sizes}
    here, half, double = by_ranks[ranks], by_ranks.get(ranks // 2), by_ranks.get(2 * ranks)
    share = half.tokens_per_s / here.tokens_per_s if half is not None and half.fits is not False else 0.0
    if half is not None and share * (1 - half.band) >= TOO_MANY:
        return f"Too many ranks: {half.ranks} would keep {share:.0%} of the tokens per second."
    if double is not None and double.fits is not False:
        times = double.tokens_per_s / here.tokens_per_s
        if times >= TOO_FEW:
            sure = "" if times * (1 - double.band) >= TOO_FEW else f", which ±{double.band:.0%} does not make sure"
            return f"More ranks would pay: {double.ranks} would bring {times:.2f} times the tokens per second{sure}."
        return f"As many ranks as pay: {double.ranks} would bring {times:.2f} times the tokens per second alone."
    return "Nothing speaks for another number of ranks."


def _table(sizes: Sequence[_Size]) -> Table:
    rows = [
        (
            str(size.ranks),
            f"{size.tokens_per_s:,.0f}",
            f"±{size.band:.0%}" if size.band else "measured",
            f"{size.tokens_per_s / size.ranks:,.0f}",
            {True: "yes", False: "no", None: "not known"}[size.fits],
        )
        for size in sizes
    ]
    return Table("Half and twice the ranks, same global batch", ("ranks", "tok/s", "band", "per rank", "fits"), rows)
